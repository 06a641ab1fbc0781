"""A headless Chromium, where there is one: opens a page, uses it, and says what it saw."""

import json
import os
import re
import shutil
import subprocess
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
LISTEN = """
<script>
window.seenErrors = [];
addEventListener("error", (event) => seenErrors.push(String(event.message)));
addEventListener("securitypolicyviolation", (event) => seenErrors.push(event.violatedDirective));
</script>
"""


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
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    match = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.S)
    assert match is not None, done.stderr[-2000:]
    seen: dict[str, Any] = json.loads(unescape(match[1]))
    return seen
