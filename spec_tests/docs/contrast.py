"""How well texts of a page can be read: the contrast of each with what lies behind it, as WCAG counts it."""

from __future__ import annotations

import json

from spec_tests.docs.browser import Tab

__all__ = ["contrasts"]

# A canvas turns every notation of a colour into numbers.
_CODE = """((selector) => {
    // A link changes its colour slowly; what counts is what it becomes.
    document.getAnimations().filter((one) => one instanceof CSSTransition).forEach((one) => one.finish());
    const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
    const numbers = (colour) => {
        canvas.clearRect(0, 0, 1, 1);
        canvas.fillStyle = colour;
        canvas.fillRect(0, 0, 1, 1);
        const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
        return [r, g, b, a / 255];
    };
    const over = (top, below) => [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3])).concat(1);
    const own = (e) => numbers(getComputedStyle(e).backgroundColor);
    const ground = (e) => e ? over(own(e), ground(e.parentElement)) : [255, 255, 255, 1];
    const linear = (x) => x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4;
    const light = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
    const contrast = (a, b) => (Math.max(light(a), light(b)) + 0.05) / (Math.min(light(a), light(b)) + 0.05);
    const says = (e) => [...e.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    return [...document.querySelectorAll(selector)].filter((e) => says(e) && e.offsetParent).map((e) => {
        const behind = ground(e);
        return [contrast(over(numbers(getComputedStyle(e).color), behind), behind), e.className || e.tagName];
    }).sort((a, b) => a[0] - b[0]);
})"""


def contrasts(tab: Tab, selector: str) -> list[tuple[float, str]]:
    """Of all elements that have a text of their own and are shown: contrast and class, the smallest contrast first."""
    return [(ratio, name) for ratio, name in tab.look(f"{_CODE}({json.dumps(selector)})")]
