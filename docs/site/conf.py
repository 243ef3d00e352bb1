"""Settings of the site that `make docs` builds from the Markdown pages of the repository.

Navigation is read from docs/index.md: each heading with links is a group. A linked README.md of a
folder adds the pages that it links to. A link to a file of another kind leads to a page with that
file's text.
"""

import re
import sys
from collections.abc import Iterator
from html import escape
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any

from docutils import nodes
from sphinx.addnodes import download_reference
from sphinx.application import Sphinx

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s#:]+)\)")
HEADING = re.compile(r"^## (.+)\n", re.MULTILINE)
CAPTION = re.compile(r'<p class="caption"[^>]*><span[^>]*>(.*?)</span></p>\s*(<ul.*?\n</ul>)', re.S)
PICTURE = re.compile(r'data-picture="(\w+)"')
LANGUAGES = {".py": "python", ".yaml": "yaml", ".json": "json", ".toml": "toml"}

project = "Shardwise"
extensions = ["myst_parser"]
root_doc = "docs/index"
include_patterns = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "docs/**.md",
    "labs/README.md",
    "labs/**/page.md",
]
suppress_warnings = ["misc.highlighting_failure"]
myst_heading_anchors = 4

html_theme = "furo"
html_title = project
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_additional_pages = {"index": "to_docs.html"}
templates_path = ["templates"]
html_favicon = "static/icon.svg"
html_copy_source = html_show_sourcelink = html_use_index = False
pygments_style, pygments_dark_style = "a11y-light", "a11y-dark"

sys.path.insert(0, str(ROOT / "docs"))
from palette import colours  # noqa: E402

_light, _dark = colours()
html_theme_options = {
    "top_of_page_buttons": [],
    "light_css_variables": _light,
    "dark_css_variables": _dark,
}


def setup(app: Sphinx) -> None:
    """Register what Sphinx calls while it builds."""
    app.connect("source-read", _add_navigation)
    # Before Sphinx copies the files of such links under names made of digits.
    app.connect("doctree-read", _link_to_files, priority=400)
    app.connect("html-collect-pages", _pages_of_files)
    app.connect("html-page-context", _fold_navigation, priority=900)  # after Furo has made it
    app.connect("html-page-context", _add_data_of_picture)


def _add_navigation(app: Sphinx, docname: str, source: list[str]) -> None:
    """Append the navigation to the entry page, as tables of contents that it does not show."""
    if docname != root_doc:
        return
    _, *sections = HEADING.split(source[0])
    for caption, section in zip(sections[::2], sections[1::2], strict=True):
        entries = "\n".join(_entries(root_doc, section))
        source[0] += f"\n\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{entries}\n```\n"


def _entries(docname: str, text: str) -> Iterator[str]:
    """Yield the pages that a text links to, each once; those of the entry page with its words."""
    seen = set()
    for words, target in LINK.findall(text):
        name = _resolved(docname, target)
        if name.suffix != ".md" or name in seen:
            continue
        seen.add(name)
        page = f"/{name.with_suffix('')}"
        yield f"{words.replace('`', '')} <{page}>" if docname == root_doc else page
        if docname == root_doc and name.match("*/README.md"):
            yield from _entries(page[1:], (ROOT / name).read_text(encoding="utf-8"))


def _resolved(docname: str, target: str) -> PurePosixPath:
    """Return the path below the repository's root that a page's relative link leads to."""
    path = (ROOT / docname).parent.joinpath(target).resolve()
    return PurePosixPath(path.relative_to(ROOT).as_posix())


def _link_to_files(app: Sphinx, doctree: nodes.document) -> None:
    """Let links to source files lead to pages with their text."""
    docname = app.env.docname
    up = "../" * docname.count("/")
    for link in list(doctree.findall(download_reference)):
        path = _resolved(docname, link["reftarget"])
        # Sphinx keeps what stands here with the page, and drops it when the page is read again.
        app.env.metadata[docname].setdefault("linked files", set()).add(path.as_posix())
        uri = f"{up}source/{path}.html"
        link.replace_self(nodes.reference("", "", *link.children, internal=True, refuri=uri))


def _pages_of_files(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield a page for each file that a page links to."""
    kept = (facts.get("linked files", ()) for facts in app.env.metadata.values())
    for path in sorted(set(chain.from_iterable(kept))):
        text = (ROOT / path).read_text(encoding="utf-8")
        language = LANGUAGES.get(PurePosixPath(path).suffix, "text")
        code = app.builder.highlighter.highlight_block(text, language)
        body = f"<h1><code>{escape(path)}</code></h1>{code}"
        yield f"source/{path}", {"title": path, "body": body, "furo_hide_toc": True}, "page.html"


def _fold_navigation(
    app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: object
) -> None:
    """Fold the groups of the navigation but the current one; on the entry page but the first."""
    if "furo_navigation_tree" not in context:
        return
    groups = CAPTION.findall(context["furo_navigation_tree"])
    opened = next((n for n, (_, pages) in enumerate(groups) if "current-page" in pages), 0)
    context["furo_navigation_tree"] = "".join(
        f"<details{' open' * (number == opened)}><summary>{caption}</summary>{pages}</details>"
        for number, (caption, pages) in enumerate(groups)
    )


def _add_data_of_picture(
    app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: object
) -> None:
    """Put the numbers of a page's picture into the page, so that it works from files as well."""
    if found := PICTURE.search(context.get("body", "")):
        data = (ROOT / "docs" / "site" / "data" / f"{found[1]}.json").read_text(encoding="utf-8")
        context["body"] += f'<script type="application/json" id="picture-data">{data}</script>'
        app.add_js_file("pictures.js", loading_method="defer")
