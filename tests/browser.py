"""A headless Chromium that measures a page: what is cut off, and what lies on other text."""

import base64
import html
import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--hide-scrollbars", "--run-all-compositor-stages-before-draw"),
)
_MEASURE = """
for (const d of document.querySelectorAll("details")) d.open = true;
const texts = [], cut = [], overlaps = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const node = walker.currentNode;
  if (!node.data.trim() || ["STYLE", "SCRIPT"].includes(node.parentElement.tagName)) continue;
  const range = document.createRange();
  range.selectNodeContents(node);
  for (const r of range.getClientRects())
    if (r.width > 0 && r.height > 0) texts.push([node, r]);
}
for (const [node, r] of texts) {
  if (r.left < -0.5 || r.right > innerWidth + 0.5) cut.push(node.data.trim().slice(0, 60));
  for (let e = node.parentElement; e; e = e.parentElement) {
    if (getComputedStyle(e).overflow === "visible" && !e.style.width) continue;
    const b = e.getBoundingClientRect();
    if (Math.max(b.left - r.left, r.right - b.right, b.top - r.top, r.bottom - b.bottom) > 1)
      cut.push(node.data.trim().slice(0, 60));
  }
}
texts.sort((a, b) => a[1].top - b[1].top);
for (let i = 0; i < texts.length; i++)
  for (let j = i + 1; j < texts.length && texts[j][1].top < texts[i][1].bottom - 3; j++) {
    const [a, b] = [texts[i][1], texts[j][1]];
    if (Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1.5)
      overlaps.push([texts[i][0].data.trim().slice(0, 60), texts[j][0].data.trim().slice(0, 60)]);
  }
const out = {width: innerWidth, page: document.documentElement.scrollWidth, texts: texts.length,
  text: document.body.innerText, alerts: window.alerted || 0, cut, overlaps};
window.measured = "@@" + btoa(unescape(encodeURIComponent(JSON.stringify(out)))) + "@@";
"""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A page as it is drawn.

    `cut` has texts that reach out of the page or of what clips them, `overlaps` pairs of texts.
    """

    width: int
    page: int
    texts: int
    text: str
    alerts: int
    cut: list[str]
    overlaps: list[list[str]]


def measure(page: str, *, width: int, folder: Path) -> Measured:
    """Draw a page in a frame of a width, as windows have a least width, and measure it."""
    page = re.sub(r"<meta http-equiv=[^>]*>", "", page)  # it allows no script, and so no measuring
    watch = "<!doctype html><script>window.alerted = 0; window.alert = () => alerted++</script>"
    page = f"{watch}{page.removeprefix('<!doctype html>')}<script>{_MEASURE}</script>"
    file = folder / "frame.html"
    file.write_text(
        f'<!doctype html><meta charset="utf-8"><iframe id="frame" width="{width}" height="900" '
        f'style="border: 0" srcdoc="{html.escape(page)}"></iframe>'
        '<script>addEventListener("load", () => '
        "document.body.append(frame.contentWindow.measured))</script>",
        encoding="utf-8",
    )
    command = [
        *(str(CHROMIUM), *_FLAGS, f"--user-data-dir={folder / 'profile'}"),
        *("--window-size=1400,1000", "--dump-dom", file.as_uri()),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    found = re.search(r"@@([A-Za-z0-9+/=]+)@@", done.stdout)
    assert found, done.stdout[-2000:] + done.stderr[-2000:]
    return Measured(**json.loads(base64.b64decode(found[1])))
