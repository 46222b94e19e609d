"""How Sphinx makes a site of these pages: `make docs`."""

import re
import tomllib
from pathlib import Path
from typing import Any

from docutils import nodes

project = "Samerun"
author = "The Samerun authors"
copyright = author  # noqa: A001 - Sphinx's name
extensions = ["myst_parser"]
exclude_patterns = ["_build"]
highlight_language = "text"  # of output
smartquotes = False  # it makes one dash of the two of an option
html_theme = "furo"
html_title = "Samerun"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
myst_heading_anchors = 4  # as GitHub makes them, so that a link into a page works there and here

_DOCS = Path(__file__).parent
_PROJECT = tomllib.loads((_DOCS.parent / "pyproject.toml").read_text())["project"]
REPOSITORY_URL = _PROJECT["urls"]["Repository"]
"""Where links to files of the repository outside docs/ lead."""
html_theme_options = {"source_repository": REPOSITORY_URL, "source_branch": "main", "source_directory": "docs/"}


def setup(app: Any) -> None:
    """Sphinx calls it."""
    app.connect("source-read", _link_to_repository)
    app.connect("doctree-resolved", _mark_printed_tables)
    app.connect("html-page-context", _break_code_well)


def _mark_printed_tables(_app: Any, page: nodes.document, _name: str) -> None:
    """Give blocks with a wide table that a command prints a class, so that their lines do not wrap (site.css)."""
    for block in page.findall(nodes.literal_block):
        if any(len(line) > 40 and re.search("[│┃─█]", line) for line in block.astext().splitlines()):
            block["classes"].append("printed-table")


def _break_code_well(_app: Any, _page: str, _template: str, context: dict[str, Any], _doctree: object) -> None:
    """Let long names break after a dot or an underscore, and not an option after its hyphens (site.css)."""

    def broken(block: re.Match[str]) -> str:
        code = re.sub(r"(?<=[\s>])--?\w[\w-]*", r'<span class="option">\g<0></span>', block.group())
        if code.startswith("<pre>"):
            return code
        return re.sub(r"(?<=>)[^\s<>]{14,}(?=<)", lambda name: re.sub(r"(?<=\w[._=/(])", "<wbr>", name.group()), code)

    context["body"] = re.sub(r"<pre>.*?</pre>|<code .*?</code>", broken, context.get("body", ""), flags=re.DOTALL)


def _link_to_repository(_app: Any, page: str, source: list[str]) -> None:
    """Make links to files of the repository outside docs/, which the site does not have, links to the repository."""
    folder = (_DOCS / page).parent

    def linked(link: re.Match[str]) -> str:
        text, target = link.groups()
        file, hash_sign, anchor = target.partition("#")
        path = (folder / file).resolve()
        if path.is_relative_to(_DOCS) or not path.exists():
            return link.group()
        kind = "tree" if path.is_dir() else "blob"
        return f"[{text}]({REPOSITORY_URL}/{kind}/main/{path.relative_to(_DOCS.parent)}{hash_sign}{anchor})"

    source[0] = re.sub(r"\[([^\]]+)\]\((\.\./[^)]+)\)", linked, source[0])
