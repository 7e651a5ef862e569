"""A real browser: Chromium without a window, spoken to through a pipe, as its developer tools do."""

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

CHROMIUM = next((p for p in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if p), None)
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--no-first-run",
    "--hide-scrollbars",
]


def needed() -> str:
    """The path of Chromium. Without one a test is skipped, but fails where everything has to be tested."""
    if CHROMIUM is None:
        why = "no Chromium here: apt-get install chromium"
        if os.environ.get("CI") == "true":
            pytest.fail(why)
        pytest.skip(why)
    return CHROMIUM


class Browser:
    """One window. What pages log as errors, and what they ask the network for, is kept in `errors` and `requests`."""

    def __init__(self) -> None:
        there, mine = os.pipe()
        ours, theirs = os.pipe()
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        command = [needed(), *FLAGS, f"--user-data-dir={self.folder.name}", "--remote-debugging-pipe", "about:blank"]
        shell = f'exec "$0" "$@" 3<&{there} 4>&{theirs}'  # Chromium listens on 3 and answers on 4
        self.process = subprocess.Popen(
            ["bash", "-c", shell, *command], pass_fds=(there, theirs), stderr=subprocess.DEVNULL
        )
        os.close(there)
        os.close(theirs)
        self.mine, self.ours, self.buffer, self.number, self.session = mine, ours, b"", 0, None
        self.errors, self.requests, self.loaded = [], [], False
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method, **params):
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session is not None:
            message["sessionId"] = self.session
        os.write(self.mine, json.dumps(message).encode() + b"\0")
        number = self.number
        while (answer := self._next()).get("id") != number:
            self._event(answer)
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def _next(self, seconds=60):
        end = time.monotonic() + seconds
        while b"\0" not in self.buffer:
            ready = select.select([self.ours], [], [], max(0, end - time.monotonic()))[0]
            assert ready, "Chromium does not answer"
            part = os.read(self.ours, 1 << 20)
            assert part, "Chromium has ended"
            self.buffer += part
        message, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(message)

    def _event(self, event):
        method, params = event.get("method"), event.get("params", {})
        if method == "Page.loadEventFired":
            self.loaded = True
        elif method == "Runtime.exceptionThrown":
            self.errors.append(params["exceptionDetails"].get("exception", {}).get("description", params))
        elif (method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert")) or (
            method == "Log.entryAdded" and params["entry"]["level"] == "error"
        ):
            self.errors.append(params)
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def open(self, where, width=1280, height=900, dark=False):
        """Load a file, and wait until all of it is there."""
        self.errors, self.requests, self.loaded = [], [], False
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        look = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=look)
        self.call("Page.navigate", url=Path(where).absolute().as_uri())
        self.wait_for_load()

    def wait_for_load(self):
        """Until a page that is being opened, or opens itself again, is all there."""
        while not self.loaded:
            self._event(self._next())
        self.loaded = False
        self.js("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def js(self, expression):
        """The value of an expression, waited for if it is a promise."""
        found = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, condition):
        """Until an expression is true, looked at with every frame; pytest's timeout ends what never comes."""
        self.js(
            f"new Promise((done) => (function look() {{ ({condition}) ? done() : requestAnimationFrame(look); }})())"
        )

    def move(self, x, y):
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, selector):
        """In the middle of an element, which is scrolled to."""
        box = self.box(selector)
        at = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2, "button": "left", "clickCount": 1}
        self.call("Input.dispatchMouseEvent", type="mousePressed", **at)
        self.call("Input.dispatchMouseEvent", type="mouseReleased", **at)

    def box(self, selector):
        quoted = json.dumps(selector)
        self.js(f"document.querySelector({quoted}).scrollIntoView({{block: 'center'}})")
        return self.js(f"document.querySelector({quoted}).getBoundingClientRect().toJSON()")

    def press(self, *keys):
        codes = {"Tab": 9, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "End": 35, "Home": 36}
        for key in keys:
            told = {"key": key, "windowsVirtualKeyCode": codes.get(key, ord(key[0]))}
            text = {"text": key} if len(key) == 1 else {}
            self.call("Input.dispatchKeyEvent", type="keyDown", **told, **text)
            self.call("Input.dispatchKeyEvent", type="keyUp", **told)

    def text(self, selector):
        return self.js(f"document.querySelector({json.dumps(selector)}).textContent")

    def screenshot(self, path, whole=True):
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        Path(path).write_bytes(base64.b64decode(shot["data"]))

    def assert_alone(self):
        """No error on the console, and no request: the page itself is all there is."""
        assert self.errors == []
        assert [asked for asked in self.requests if not asked.startswith("file:")] == []
        assert len(self.requests) <= 1

    def assert_fits(self):
        """Nothing is wider than the window, but what scrolls by itself."""
        assert self.js("document.documentElement.scrollWidth <= window.innerWidth")

    def assert_report(self, page, width):
        """The report of a study or of the demo: charts are drawn, a routed text is coloured, tables can be scrolled."""
        self.open(page, width, dark=width == 390)
        self.assert_fits()
        self.assert_alone()
        assert self.js("document.querySelectorAll('pre .token, pre .skipped').length") > 50
        drawn = (
            "(async (e) => { while (!e.querySelector('canvas')) await new Promise(requestAnimationFrame); return 1 })"
        )
        self.js("document.querySelector('.chart').scrollIntoView()")
        assert self.js(f"{drawn}(document.querySelector('.chart'))")
        assert self.js("document.images.length") == 0
        assert self.js("[...document.querySelectorAll('.wide, .long')].every((e) => e.tabIndex === 0)")

    def close(self):
        self.process.terminate()
        self.process.wait(10)
        for end in (self.mine, self.ours):
            os.close(end)
        self.folder.cleanup()
