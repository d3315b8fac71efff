"""A page opened in headless Chromium: its console, its charts and its width."""

import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

_PROBE = """<script>
window.problems = [];
for (const level of ["error", "warn"])
  console[level] = (...words) => window.problems.push(level + ": " + words.join(" "));
addEventListener("error", event => window.problems.push("error: " + event.message));
addEventListener("unhandledrejection", event => window.problems.push("rejection: " + event.reason));
window.alert = () => window.problems.push("error: alert was called");
</script>"""
_FRAME = """<!DOCTYPE html><meta charset="utf-8"><meta name="color-scheme" content="light dark"><body style="margin:0">
<iframe id="page" src="%s" style="border:0" width="%d" height="900"></iframe><pre id="found"></pre><script>
setTimeout(() => {
  const frame = document.getElementById("page"), view = frame.contentWindow, inside = frame.contentDocument;
  const size = chart => {
    const drawn = chart.querySelector("svg");
    return drawn === null ? [0, 0] : [drawn.getBoundingClientRect().width, drawn.getBoundingClientRect().height];
  };
  const corners = text => {  // of the box of a label, which may be slanted, in pixels of the page
    const box = text.getBBox(), m = text.getScreenCTM();
    const at = (x, y) => [m.a * x + m.c * y + m.e, m.b * x + m.d * y + m.f];
    const [right, below] = [box.x + box.width, box.y + box.height];
    return [at(box.x, box.y), at(right, box.y), at(right, below), at(box.x, below)];
  };
  const apart = (one, other) => [one, other].some(box => [0, 1].some(side => {  // by a line along a side of a box
    const along = [box[side + 1][0] - box[side][0], box[side + 1][1] - box[side][1]];
    const [a, b] = [one, other].map(each => each.map(([x, y]) => x * along[0] + y * along[1]));
    return Math.max(...a) <= Math.min(...b) || Math.max(...b) <= Math.min(...a);
  }));
  const overlapping = axis => {
    const texts = [...axis.querySelectorAll("text")].filter(text => text.getAttribute("opacity") !== "0");
    const shown = texts.filter(text => text.textContent).map(text => [text.textContent, corners(text)]);
    return shown.flatMap(([name, box], i) => shown.slice(i + 1).filter(other => !apart(box, other[1])).map(
      other => name + " over " + other[0]));
  };
  document.getElementById("found").textContent = JSON.stringify({
    problems: view.problems,
    charts: [...inside.querySelectorAll(".chart")].map(size),
    marks: inside.querySelectorAll(".chart svg .mark-symbol path, .chart svg .mark-rect path").length,
    overlaps: [...inside.querySelectorAll("g.role-axis-label")].flatMap(overlapping),
    width: inside.documentElement.clientWidth,
    overflow: inside.documentElement.scrollWidth - inside.documentElement.clientWidth,
    dark: view.matchMedia("(prefers-color-scheme: dark)").matches,
    ground: view.getComputedStyle(inside.body).backgroundColor,
    text: inside.body.innerText,
  });
}, 4000);
</script>"""


@dataclass(frozen=True)
class Opened:
    """What a browser made of a page."""

    problems: list[str]
    """Errors and warnings of the console."""
    charts: list[list[float]]
    """Width and height of each chart, 0 for one that was not drawn."""
    marks: int
    """Dots and bars in all charts."""
    overlaps: list[str]
    """Pairs of labels of one axis that lie over each other."""
    width: int
    overflow: int
    """Pixels by which the page is wider than its window."""
    dark: bool
    ground: str
    text: str


def opened(page: Path, folder: Path, *, width: int, dark: bool, served_at: str | None = None) -> Opened:
    """Open a page, without a network, in a frame of this width: a window cannot be narrower than 500 pixels.

    A copy of the page lies in the folder, which is read from disk or from a server of this machine.
    """
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("Chromium is not installed; `apt-get install chromium` brings it")
    probed, frame = folder / "probed.html", folder / "frame.html"
    probed.write_text(page.read_text().replace("<head>", f"<head>{_PROBE}", 1))
    frame.write_text(_FRAME % (probed.name, width))
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--dump-dom"]
    command += ["--allow-file-access-from-files", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
    command += ["--virtual-time-budget=8000", f"--blink-settings=preferredColorScheme={int(not dark)}"]
    command += [
        f"--user-data-dir={folder / 'profile'}",
        f"--window-size={max(500, width)},900",
        f"{served_at or folder.as_uri()}/{frame.name}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r'<pre id="found">(.+)</pre>', done.stdout, re.DOTALL)
    assert found is not None, done.stdout[-2000:] + done.stderr[-2000:]
    text = (
        found[1].replace("&lt;", "<").replace("&gt;", ">").replace("&nbsp;", "\N{NO-BREAK SPACE}").replace("&amp;", "&")
    )
    return Opened(**json.loads(text))
