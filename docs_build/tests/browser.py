"""A page in Chromium, which Playwright controls, with short names for the actions of the tests."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Page

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
CHOOSE = """(element, value) => {
    element.value = value;
    for (const kind of ['input', 'change']) element.dispatchEvent(new Event(kind, { bubbles: true }));
}"""


def find_chromium() -> str | None:
    """The browser's command, or ``None`` if there is none."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Tab:
    """One page of the browser. ``page`` has all other actions."""

    def __init__(self, page: Page) -> None:
        self.page = page
        page.set_default_timeout(60_000)
        self.click, self.focus, self.look, self.type = page.click, page.focus, page.evaluate, page.keyboard.insert_text
        self.text: Any = page.text_content

    def open(self, address: str) -> None:
        """Opens a page. A browser does not reload a page if only the anchor changes."""
        self.page.goto("about:blank")
        self.page.goto(address)

    def resize(self, width: int, height: int) -> None:
        """Sets the size of the window, in pixels."""
        self.page.set_viewport_size({"width": width, "height": height})

    def each(self, selector: str, what: str = "e.textContent") -> list[Any]:
        """A JavaScript expression for each visible element ``e`` that matches."""
        shown = f"all => all.filter(e => e.getClientRects().length).map(e => {what})"
        return list(self.page.eval_on_selector_all(selector, shown))

    def wait_for(self, expression: str, seconds: float = 60) -> None:
        """Waits until a JavaScript expression is true."""
        self.page.wait_for_function(expression, timeout=1000 * seconds)

    def value(self, name: str) -> str:
        """The value of a field or slider, by its ID."""
        return self.page.input_value(f"#{name}")

    def move(self, name: str, by: int) -> None:
        """Moves a slider by keys."""
        self.focus(f"#{name}")
        self.press(*abs(by) * ["ArrowRight" if by > 0 else "ArrowLeft"])

    def press(self, *keys: str) -> None:
        """Presses and releases each of these keys."""
        for key in keys:
            self.page.keyboard.press(key)

    def choose(self, selector: str, value: str) -> None:
        """Selects an option of a list, or replaces the text of a field, with the events of a user."""
        self.page.eval_on_selector(selector, CHOOSE, value)

    def problems(self) -> list[str]:
        """Errors on the console and exceptions."""
        said = [message.text for message in self.page.console_messages() if message.type in ("error", "warning")]
        return said + [str(error) for error in self.page.page_errors()]
