"""The built site in a real browser, and its links: `make test-site`.

Every page is opened wide and narrow, light and dark, from a server that allows nothing from
elsewhere. Pages of source files have one layout; a few stand for all.
"""

import threading
from functools import cache
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from browser import MEASURE, browser
from devtools import open_browser

SITE = Path(__file__).parents[2] / "build" / "site"
ALL = sorted(path.relative_to(SITE).as_posix() for path in SITE.rglob("*.html"))
SOURCES = [page for page in ALL if page.startswith("source/")]
PAGES = [page for page in ALL if page not in ("index.html", *SOURCES)] + SOURCES[::40]
KINDS = (
    *("docs/index.html", "docs/how-to/checkpoints.html", "labs/shardwise_labs/lab03/page.html"),
    *("docs/api.html", "docs/account.html", "docs/bound.html", "docs/mesh.html"),
    *("docs/owner.html", "docs/step.html", "search.html"),
    "docs/decisions/0052-the-site.html",
)
NOTHING_FROM_ELSEWHERE = (
    "default-src 'none'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; connect-src 'self'"
)
# The page's height, so that nothing has to be scrolled to.
HEIGHT = "document.documentElement.scrollHeight"
LOOK = (
    f"(() => {{ {MEASURE}; return look({{contentDocument: document, contentWindow: window}}) }})()"
)
# Words that end beyond the window and cannot be scrolled to: the theme cuts wide boxes.
CUT = """[...document.querySelectorAll("article *")].filter(e => {
  for (let box = e; box.tagName != "ARTICLE"; box = box.parentElement)
    if (["auto", "scroll"].includes(getComputedStyle(box).overflowX)) return false;
  return e.getBoundingClientRect().right > innerWidth + 1;
}).map(e => e.outerHTML.slice(0, 80))"""
# Links and fields that are in sight, and the one that has the keyboard.
CONTROLS = """[...document.querySelectorAll("a[href], button, input, summary")].filter(e =>
  e.checkVisibility({visibilityProperty: true}) && e.type != "hidden" && e.tabIndex >= 0)"""
FOCUSED = "[...document.querySelectorAll('*')].indexOf(document.activeElement)"
FOUND = "document.querySelectorAll('#search-results li a').length"


class _Files(SimpleHTTPRequestHandler):
    """Serves the site, and tells the browser to load nothing else."""

    def __init__(self, *arguments):
        super().__init__(*arguments, directory=str(SITE))

    def end_headers(self):
        self.send_header("Content-Security-Policy", NOTHING_FROM_ELSEWHERE)
        super().end_headers()

    def log_message(self, *arguments):
        pass


@pytest.fixture(scope="module")
def address():
    with ThreadingHTTPServer(("127.0.0.1", 0), _Files) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    with open_browser(browser(), tmp_path_factory.mktemp("profile")) as opened:
        yield opened


class _Page(HTMLParser):
    """The anchors of a page, and the addresses that it links to or loads."""

    def __init__(self):
        super().__init__()
        self.anchors, self.targets, self.loaded = {""}, [], []

    def handle_starttag(self, tag, attrs):
        of = {name: value or "" for name, value in attrs}
        self.anchors |= {of.get("id", ""), of.get("name", "")}
        if "href" in of:
            (self.targets if tag in ("a", "use") else self.loaded).append(of["href"])
        if "src" in of:
            self.loaded.append(of["src"])


@cache
def page_at(path):
    page = _Page()
    page.feed(path.read_text(encoding="utf-8"))
    return page


@pytest.mark.parametrize("name", ALL)
def test_no_link_is_dead(name):
    page, path = page_at(SITE / name), SITE / name
    assert not [each for each in page.loaded if urlsplit(each).netloc]
    dead = []
    for target in (*page.targets, *page.loaded):
        parts = urlsplit(target)
        if parts.scheme in ("http", "https", "data"):
            continue
        there = (path.parent / unquote(parts.path)).resolve() if parts.path else path
        is_page = there.suffix == ".html" and there.is_file()
        if not there.is_file() or (
            is_page and unquote(parts.fragment) not in page_at(there).anchors
        ):
            dead.append(target)
    assert not dead


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_readable_and_loads_nothing_from_elsewhere(name, width, scheme, tab, address):
    tab.console.clear()
    tab.requests.clear()
    tab.prefer(scheme)
    tab.resize(width, 900)
    tab.open(address + name)
    tab.resize(width, tab.run(HEIGHT))
    seen = tab.run(LOOK)
    assert seen["isDark"] is (scheme == "dark")
    assert tab.console == []
    assert not [url for url in tab.requests if not url.startswith((address, "data:"))]
    assert seen["scroll"] <= 0 and tab.run(CUT) == []
    assert seen["faint"] == []


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("name", KINDS)
def test_everything_in_sight_is_reached_by_the_keyboard(name, width, tab, address):
    tab.resize(width, 900)
    tab.open(address + name)
    wanted = tab.run(f"{CONTROLS}.map(e => [...document.querySelectorAll('*')].indexOf(e))")
    reached = []
    num_boxes = tab.run("document.querySelectorAll('pre, .table-wrapper, aside').length")
    for _ in range(len(wanted) + num_boxes + 4):  # boxes with a scroll bar stop the key too
        tab.press_tab()
        reached.append(tab.run(FOCUSED))
    assert set(wanted) <= set(reached)
    unseen = """(e => { const b = e.getBoundingClientRect(); return e.id ? false :
      b.right <= 0 || b.left >= innerWidth })(document.querySelectorAll('*')[%d])"""
    assert not [each for each in set(reached) if each >= 0 and tab.run(unseen % each)]


def test_a_picture_changes_by_keyboard(tab, address):
    tab.resize(390, 900)
    tab.open(address + "docs/account.html")
    while tab.run("document.activeElement.type") != "range":
        tab.press_tab()
    shown = "document.querySelector('.picture strong').parentNode.textContent"
    assert tab.run(shown) == "device: 14 GB = 13.04 GiB"
    tab.press("ArrowRight", "ArrowRight", 39)
    assert tab.run(shown) == "device: 20 GB = 18.63 GiB"
    for name, link, wanted in (
        ("bound", "ethernet-25", "3.125 GB/s: at least 357,149 tokens per rank."),
        ("owner", "0", "Every rank"),
        ("mesh", "4", "dp_shard is 1. "),
    ):
        tab.open(f"{address}docs/{name}.html")
        tab.run(f"""(e => {{ e.value = "{link}"; e.dispatchEvent(new Event("input")) }})
          (document.querySelector(".picture select"))""")
        assert tab.run("document.querySelector('.picture strong').textContent") == wanted
    tab.open(address + "docs/step.html")
    while tab.run("document.activeElement.tagName") != "SELECT":
        tab.press_tab()
    held = "[...document.querySelectorAll('.picture tr:last-child td')].map(e => e.textContent)[1]"
    at_stage_3 = tab.run(held)
    tab.press("ArrowUp", "ArrowUp", 38)
    assert float(tab.run(held)) > float(at_stage_3)


@pytest.mark.parametrize("name", ["__navigation", "__toc"])
def test_drawers_open_by_keyboard_on_a_narrow_screen(name, tab, address):
    tab.resize(390, 900)
    tab.open(address + "docs/how-to/checkpoints.html")
    drawer = ".sidebar-drawer" if name == "__navigation" else ".toc-drawer"
    is_shown = f"getComputedStyle(document.querySelector('{drawer}')).visibility"
    assert tab.run(is_shown) == "hidden"
    while tab.run("document.activeElement.id") != name:
        tab.press_tab()
    tab.press(" ", "Space", 32)
    assert tab.run(is_shown) == "visible"


@pytest.mark.parametrize("how", ["served", "from files"])
def test_search_finds_pages_without_another_host(how, tab, address):
    start = address if how == "served" else f"{SITE.as_uri()}/"
    tab.open("about:blank")  # a search before this one may still load pages
    tab.requests.clear()
    tab.resize(1280, 900)
    tab.open(f"{start}search.html?q=checkpoint")
    found = tab.run(
        "new Promise(done => { const look = () => "
        f"{FOUND} > 5 ? done({FOUND}) : setTimeout(look, 50); look() }})"
    )
    assert found > 5
    assert not [url for url in tab.requests if not url.startswith((start, "data:"))]


def test_what_a_reader_would_not_like_is_seen(tab, address):
    tab.resize(390, 900)
    tab.open(address + KINDS[0])
    tab.console.clear()
    tab.run(
        """document.querySelector("article").insertAdjacentHTML("beforeend",
        "<p style='color:#eee;background:#fff'>faint</p><div style='width:2000px'>wide</div>"
        + "<img src='https://example.com/a.png'>")"""
    )
    tab.resize(390, tab.run(HEIGHT))
    assert tab.run(LOOK)["faint"][0][0] == "faint"
    assert len(tab.run(CUT)) == 1
    assert any("example.com" in line for line in tab.console)
