"""Controls a headless Chromium through pipes. Needs no driver, no package and no port.

Chromium reads commands of the DevTools protocol from file descriptor 3 and answers on 4, as JSON with a zero byte.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["Browser", "Tab", "chromium", "find_chromium"]

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = "--headless=new --no-sandbox --disable-gpu --remote-debugging-pipe --no-first-run --disable-sync"
QUIET = "--disable-background-networking --disable-component-update about:blank"
KEYS = {" ": "Space", "0": "Digit0", "1": "Digit1"}
CODES = {" ": 32, "ArrowLeft": 37, "ArrowRight": 39, "ArrowDown": 40, "Home": 36, "End": 35, "Tab": 9, "Enter": 13}
TEXTS = {" ": " ", "Enter": "\r"}


def find_chromium() -> str | None:
    """The browser's command, or ``None`` if there is none."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """A running Chromium process."""

    def __init__(self, command: str, profile: str) -> None:
        to_child, self._write = os.pipe()
        self._read, from_child = os.pipe()

        def place_pipes() -> None:
            # Move both ends to other descriptors first: either of them could be 3 or 4 itself.
            high_in, high_out = os.dup(to_child), os.dup(from_child)
            os.dup2(high_in, 3)
            os.dup2(high_out, 4)

        self.process = subprocess.Popen(
            [command, f"--user-data-dir={profile}", *FLAGS.split(), *QUIET.split()],
            preexec_fn=place_pipes,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_child)
        os.close(from_child)
        self._number, self._buffer = 0, b""
        self.events: list[dict[str, Any]] = []

    def send(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Sends a command and returns its result. Keeps events that arrive in the meantime."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + 60
        mine: dict[str, Any] | None = None
        while mine is None:
            if time.monotonic() > end:
                raise TimeoutError(f"the browser did not answer {method}")
            # Read all messages that arrived together: an event can follow the answer.
            for answer in self._messages(1.0):
                if answer.get("id") == self._number:
                    mine = answer
                else:
                    self.events.append(answer)
        if "error" in mine:
            raise RuntimeError(f"{method}: {mine['error']}")
        return dict(mine["result"])

    def wait(self, seconds: float) -> None:
        """Collects events for the given number of seconds."""
        self.events += self._messages(seconds)

    def _messages(self, seconds: float) -> list[dict[str, Any]]:
        ready, _, _ = select.select([self._read], [], [], seconds)
        if not ready:
            return []
        self._buffer += os.read(self._read, 1 << 20)
        *whole, self._buffer = self._buffer.split(b"\0")
        return [json.loads(one) for one in whole]

    def close(self) -> None:
        """Ends the process."""
        os.close(self._write)
        os.close(self._read)
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Tab:
    """One page of the browser, with the errors that it reported and the requests that it made."""

    def __init__(self, browser: Browser) -> None:
        self.browser = browser
        target = browser.send("Target.createTarget", url="about:blank")["targetId"]
        self.session = browser.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")
        self.resize()

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        return self.browser.send(method, self.session, **params)

    def resize(self, width: int = 1280, height: int = 900) -> None:
        """Sets the size of the window, in pixels."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def open(self, address: str) -> None:
        """Opens a page and waits until it is loaded. A browser does not reload a page if only the anchor changes."""
        for one in ("about:blank", address):
            self.browser.events.clear()
            self.send("Page.navigate", url=one)
            end = time.monotonic() + 60
            while not self._of("Page.loadEventFired"):
                assert time.monotonic() < end, f"{one} was not loaded"
                self.browser.wait(0.2)

    def _of(self, method: str) -> list[dict[str, Any]]:
        """The facts of all events of a kind since the page was opened."""
        return [event["params"] for event in self.browser.events if event.get("method") == method]

    def look(self, expression: str) -> Any:
        """Evaluates a JavaScript expression on the page and returns its value."""
        result = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def each(self, selector: str, what: str = "e.textContent") -> list[Any]:
        """A JavaScript expression for each visible element ``e`` that matches."""
        found = f"[...document.querySelectorAll({json.dumps(selector)})].filter(e => e.getClientRects().length)"
        return list(self.look(f"{found}.map(e => {what})"))

    def text(self, selector: str) -> str:
        """The text of the first element that matches."""
        return str(self.look(f"document.querySelector({json.dumps(selector)}).textContent"))

    def wait_for(self, expression: str, seconds: float = 20) -> Any:
        """Waits until a JavaScript expression is true."""
        end = time.monotonic() + seconds
        while not (value := self.look(expression)):
            assert time.monotonic() < end, f"never true: {expression}"
            self.browser.wait(0.05)
        return value

    def value(self, name: str) -> str:
        """The value of a field or slider, by its ID."""
        return str(self.look(f"document.getElementById({json.dumps(name)}).value"))

    def focus(self, selector: str) -> None:
        self.look(f"document.querySelector({json.dumps(selector)}).focus()")

    def move(self, name: str, by: int) -> None:
        """Moves a slider by keys."""
        self.focus(f"#{name}")
        self.press(*abs(by) * ["ArrowRight" if by > 0 else "ArrowLeft"])

    def press(self, *keys: str) -> None:
        """Presses and releases each of these keys."""
        for key in keys:
            facts = {"key": key, "code": KEYS.get(key, key), "windowsVirtualKeyCode": CODES.get(key, 0)}
            text = {"text": TEXTS[key]} if key in TEXTS else {}
            self.send("Input.dispatchKeyEvent", type="keyDown", **facts, **text)
            self.send("Input.dispatchKeyEvent", type="keyUp", **facts)

    def type(self, text: str) -> None:
        """Inserts text into the focused element."""
        self.send("Input.insertText", text=text)

    def click(self, selector: str) -> None:
        """Clicks the left mouse button in the middle of an element."""
        box = self.look(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            " e.scrollIntoView({block: 'center'});"
            " const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def choose(self, selector: str, value: str) -> None:
        """Selects an option of a list as a user does, with input and change events."""
        self.look(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.value = {json.dumps(value)};"
            " for (const kind of ['input', 'change']) e.dispatchEvent(new Event(kind, {bubbles: true})); })()"
        )

    def problems(self) -> list[str]:
        """Errors on the console and exceptions since the page was opened."""
        found = [str(one["exceptionDetails"]) for one in self._of("Runtime.exceptionThrown")]
        found += [
            str(one["args"]) for one in self._of("Runtime.consoleAPICalled") if one["type"] in ("error", "warning")
        ]
        return found + [str(one["entry"]) for one in self._of("Log.entryAdded") if one["entry"]["level"] == "error"]

    def requests(self) -> list[str]:
        """Addresses that were requested since the page was opened."""
        return [one["request"]["url"] for one in self._of("Network.requestWillBeSent")]


@contextmanager
def chromium(command: str, profile: str) -> Iterator[Tab]:
    """Context manager: starts a browser with one page, and closes it at the end."""
    browser = Browser(command, profile)
    try:
        yield Tab(browser)
    finally:
        browser.close()
