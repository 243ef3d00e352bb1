"""Pages opened in a real browser without a window, where one is installed; what it sees of them."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MEASURE = (Path(__file__).parent / "browser_measure.js").read_text(encoding="utf-8")
NOTHING_BUT_ITSELF = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def browser():
    """Return the browser's path; skip the test that asks where there is none."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"no browser is installed: none of {', '.join(BROWSERS)}")
    return found


def look_at(pages, widths, is_dark, folder):
    """Open each page at each width in the light or the dark scheme; return what is to be seen.

    Keys are "name at width". The pages are frames of one page that allows nothing to be loaded; a
    request, and an error of any page, is a line in ``"console"``.
    """
    frames = "".join(
        f'<iframe data-name="{html.escape(name)} at {width}" style="width:{width}px" '
        f'srcdoc="{html.escape(page)}"></iframe>'
        for name, page in pages.items()
        for width in widths
    )
    around = folder / "around.html"
    around.write_text(
        f'<!doctype html><html><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{NOTHING_BUT_ITSELF}">'
        "<style>:root{color-scheme:light dark}iframe{height:9000px;border:0}</style></head>"
        f'<body>{frames}<pre id="found"></pre><script>{MEASURE}</script></body></html>',
        encoding="utf-8",
    )
    told = subprocess.run(
        [
            *(browser(), "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"),
            *("--no-first-run", "--disable-extensions", f"--user-data-dir={folder / 'profile'}"),
            f"--blink-settings=preferredColorScheme={0 if is_dark else 1}",
            *(f"--window-size={max(widths)},9000", "--dump-dom", around.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    seen = re.search(r'<pre id="found">(.*?)</pre>', told.stdout, re.DOTALL)
    assert seen is not None and seen[1], told.stderr[-2000:]
    found = json.loads(html.unescape(seen[1]))
    found["console"] = [line for line in told.stderr.splitlines() if "CONSOLE" in line]
    return found
