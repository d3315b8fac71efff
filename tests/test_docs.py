"""The documentation builds as a site without a warning, has every page, and asks no other server for anything."""

import functools
import re
import shutil
import subprocess
import sys
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from headless import opened
from nightly import nightly

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.slow


class Quiet(SimpleHTTPRequestHandler):
    """Serves files, and prints nothing."""

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_page_is_in_the_navigation(site: Path) -> None:
    pages = {page.relative_to(ROOT / "docs").with_suffix(".html") for page in (ROOT / "docs").rglob("*.md")}
    assert {page.relative_to(site) for page in site.rglob("*.html")} - {Path("404.html")} == pages
    front = (site / "index.html").read_text()
    assert all(f'href="{page}"' in front for page in pages)


def test_pages_ask_no_other_server(site: Path) -> None:
    for page in site.rglob("*.html"):
        loads = re.findall(r"<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=\"?([^\"\s>]+)", page.read_text())
        assert not [url for url in loads if re.match(r"(https?:)?//", url)], page


@pytest.mark.parametrize(
    ("page", "width"), [("index", 400), nightly("index", 1400), nightly("reference", 400), ("reference", 1400)]
)
def test_pages_open_in_a_browser(site: Path, tmp_path: Path, page: str, width: int) -> None:
    """Wide and narrow, nothing is cut off and the console has no error."""
    copy = shutil.copytree(site, tmp_path / "site")
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(copy))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        at = f"http://127.0.0.1:{server.server_port}"
        try:
            found = opened(copy / f"{page}.html", copy, width=width, dark=False, served_at=at)
        finally:  # also where there is no browser: the thread would go on with the sockets of later servers
            server.shutdown()
    assert not found.problems
    assert found.overflow == 0
