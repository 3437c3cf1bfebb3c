/* Contrast of the texts on a page with their backgrounds, by the formula of WCAG: a function of a selector.

   A canvas converts every notation of a colour into numbers. An SVG has no background, only shapes drawn earlier. */
((selector) => {
    // A link changes its colour slowly; what counts is what it becomes.
    document.head.insertAdjacentHTML('beforeend', '<style>* { transition: none !important; }</style>');
    const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
    const numbers = (colour, opacity) => {
        canvas.clearRect(0, 0, 1, 1);
        canvas.fillStyle = colour;
        canvas.fillRect(0, 0, 1, 1);
        const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
        return [r, g, b, a / 255 * opacity];
    };
    const over = (top, below) => [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3])).concat(1);
    const opacity = (e) => e ? getComputedStyle(e).opacity * opacity(e.parentElement) : 1;
    const own = (e) => numbers(getComputedStyle(e).backgroundColor, opacity(e));
    const ground = (e) => e ? over(own(e), ground(e.parentElement)) : [255, 255, 255, 1];
    const fill = (e) => {
        const { fill, fillOpacity } = getComputedStyle(e);
        return fill === 'none' ? [0, 0, 0, 0] : numbers(fill, fillOpacity * opacity(e));
    };
    const drawn = (e) => {
        const { left, right, top, bottom } = e.getBoundingClientRect();
        const [x, y] = [(left + right) / 2, (top + bottom) / 2];
        const under = [...e.ownerSVGElement.querySelectorAll('rect')].filter((one) => {
            const box = one.getBoundingClientRect();
            const before = one.compareDocumentPosition(e) & Node.DOCUMENT_POSITION_FOLLOWING;
            return before && box.left <= x && x <= box.right && box.top <= y && y <= box.bottom;
        });
        return under.reduce((below, one) => over(fill(one), below), ground(e.ownerSVGElement));
    };
    const linear = (x) => x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4;
    const light = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
    const contrast = (a, b) => (Math.max(light(a), light(b)) + 0.05) / (Math.min(light(a), light(b)) + 0.05);
    const says = (e) => [...e.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    const isText = (e) => e.matches('svg text, svg tspan');
    // What comes only with the mouse, or with the keyboard, has no opacity yet.
    const isShown = (e) => says(e) && (isText(e) ? e.getClientRects().length : e.offsetParent) && opacity(e) > 0.05;
    return [...document.querySelectorAll(selector)].filter(isShown).map((e) => {
        const behind = isText(e) ? drawn(e) : ground(e);
        const ink = isText(e) ? fill(e) : numbers(getComputedStyle(e).color, opacity(e));
        const name = e.getAttribute('class') || e.parentElement.getAttribute('class') || e.tagName;
        return [contrast(over(ink, behind), behind), `${isText(e) ? 'svg ' : ''}${name}`];
    }).sort((a, b) => a[0] - b[0]);
})
