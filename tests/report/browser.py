"""A headless Chromium, where there is one: opens a page, uses it, and says what it saw."""

import base64
import json
import os
import re
import shutil
import subprocess
import time
from html import unescape
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome", "chrome-headless-shell")
FOUND = os.environ.get("CHROME_BIN") or next(filter(None, map(shutil.which, NAMES)), None)
needs_browser = pytest.mark.skipif(
    FOUND is None, reason=f"no browser here: none of {', '.join(NAMES)}, and no CHROME_BIN"
)
# Runs in the page after its own script: tries the slider, then writes down what there is.
PROBE = """
<script>
window.addEventListener("load", () => {
  const sliders = [...document.querySelectorAll(".slider")].map((slider) => {
    const input = slider.querySelector("input"), over = slider.querySelector(".over");
    const before = getComputedStyle(over).clipPath;
    input.focus();
    const focused = document.activeElement === input;
    input.value = 20;
    input.dispatchEvent(new Event("input"));
    return {focused, before, after: getComputedStyle(over).clipPath,
            shown: !slider.hidden, pixels: over.naturalWidth, width: over.clientWidth};
  });
  const seen = {
    errors: window.seenErrors, sliders,
    pictures: [...document.querySelectorAll("img[alt]:not([alt=''])")].map((i) => i.naturalWidth),
    requests: performance.getEntriesByType("resource").map((e) => e.name)
      .filter((name) => !name.startsWith("data:")),
    sideways: document.documentElement.scrollWidth > innerWidth,
    background: getComputedStyle(document.body).backgroundColor,
    bars: [...document.querySelectorAll(".bar")].map((bar) => bar.clientWidth),
  };
  const out = document.createElement("pre");
  out.id = "seen";
  out.textContent = JSON.stringify(seen);
  document.body.append(out);
});
</script>
"""
LISTENER = """
window.seenErrors = [];
addEventListener("error", (event) => seenErrors.push(String(event.message)));
addEventListener("securitypolicyviolation", (event) => seenErrors.push(event.violatedDirective));
"""
LISTEN = f"<script>{LISTENER}</script>"
KEY_CODES = {"Enter": 13, "Escape": 27, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39}
KEY_CODES |= {"ArrowDown": 40, "Tab": 9}


def seen_in(page: str, folder: Path, *flags: str) -> dict[str, Any]:
    """What a browser makes of a page: errors, requests, sizes, and how its sliders move."""
    assert FOUND is not None
    path = folder / "opened.html"
    text = page.replace("<style>", LISTEN + "<style>", 1).replace("</body>", PROBE + "</body>", 1)
    path.write_text(text, encoding="utf-8")
    command = [
        FOUND,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--window-size=1000,900",
        f"--user-data-dir={folder / 'profile'}",
        "--virtual-time-budget=4000",
        *flags,
        "--dump-dom",
        path.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    match = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.S)
    assert match is not None, done.stderr[-2000:]
    seen: dict[str, Any] = json.loads(unescape(match[1]))
    return seen


class Tab:
    """A page in a headless Chromium that is clicked, typed into and looked at as by a person.

    Spoken to by its debugging pipe: JSON messages, each ended by a zero byte.
    """

    def __init__(self, folder: Path) -> None:
        assert FOUND is not None
        (into, self._to), (self._from, out_of) = os.pipe(), os.pipe()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        flags += ["--autoplay-policy=no-user-gesture-required", "--remote-debugging-pipe"]
        command = [FOUND, *flags, f"--user-data-dir={folder / 'profile'}", "about:blank"]
        # It reads from descriptor 3 and writes to 4.
        shell = f'exec "$0" "$@" 3<&{into} 4>&{out_of}'
        self._process = subprocess.Popen(
            ["/bin/bash", "-c", shell, *command], pass_fds=(into, out_of), stderr=subprocess.DEVNULL
        )
        for end in (into, out_of):
            os.close(end)
        self._said, self._count, self._session = b"", 0, ""
        targets = self._ask("Target.getTargets")["targetInfos"]
        page = next(one["targetId"] for one in targets if one["type"] == "page")
        self._session = self._ask("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        self._ask("Page.enable")
        self._ask("Performance.enable", timeDomain="threadTicks")
        self._ask("Page.addScriptToEvaluateOnNewDocument", source=LISTENER)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for end in (self._to, self._from):
            os.close(end)

    def open(
        self, page: Path | str, *, width: int = 1400, height: int = 900, scheme: str = "light"
    ) -> None:
        """Load a file or an address in a window of this size; on return its own script has run."""
        self._ask(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._ask("Emulation.setDeviceMetricsOverride", **size)
        self._ask("Page.navigate", url="about:blank")
        self._ask("Page.navigate", url=page if isinstance(page, str) else page.as_uri())
        self.wait("document.readyState === 'complete'")

    @property
    def worked_s(self) -> float:
        """Processor time of the page's main thread, from its start: what other programs take does
        not count.
        """
        metrics = self._ask("Performance.getMetrics")["metrics"]
        return next(float(one["value"]) for one in metrics if one["name"] == "TaskDuration")

    def value(self, expression: str) -> Any:
        """What an expression is in the page."""
        told = self._ask("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    def wait(self, expression: str, seconds: float = 120) -> None:
        """Until it is true in the page."""
        end = time.monotonic() + seconds
        while not self.value(f"Boolean({expression})"):
            assert time.monotonic() < end, f"never true: {expression}"
            time.sleep(0.02)

    def click(self, selector: str) -> None:
        """Press the mouse in the middle of an element, scrolled into view."""
        find = f"document.querySelector({json.dumps(selector)})"
        self.value(f"{find}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        x, y = self.value(
            f"(({{left, top, width, height}}) => [left + width / 2, top + height / 2])"
            f"({find}.getBoundingClientRect())"
        )
        self.press(x, y)

    def press(self, x: float, y: float) -> None:
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            button = {"button": "left", "clickCount": 1} if kind != "mouseMoved" else {}
            self._ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, **button)

    def key(self, *names: str) -> None:
        """Press keys one after another: `ArrowLeft`, `Enter`, or a letter."""
        for name in names:
            text = {"Enter": "\r"}.get(name, name if len(name) == 1 else "")
            number = KEY_CODES.get(name) or ord(name.upper())
            code = {"windowsVirtualKeyCode": number, "key": name}
            kind = "keyDown" if text else "rawKeyDown"
            self._ask("Input.dispatchKeyEvent", type=kind, text=text, **code)
            self._ask("Input.dispatchKeyEvent", type="keyUp", **code)

    def type(self, text: str) -> None:
        self._ask("Input.insertText", text=text)

    def picture(self, path: Path) -> None:
        """Save what the window shows as a PNG."""
        path.write_bytes(base64.b64decode(self._ask("Page.captureScreenshot")["data"]))

    def _ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            told = self._next()
            if told.get("id") == self._count:
                assert "error" not in told, f"{method}: {told['error']}"
                answer: dict[str, Any] = told["result"]
                return answer

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._said:
            piece = os.read(self._from, 1 << 20)
            assert piece, "the browser ended"
            self._said += piece
        message, _, self._said = self._said.partition(b"\0")
        told: dict[str, Any] = json.loads(message)
        return told
