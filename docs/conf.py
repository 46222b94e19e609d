"""How Sphinx makes a site of these pages: `make docs`."""

import re
from pathlib import Path
from typing import Any

project = "Samerun"
author = "The Samerun authors"
copyright = author  # noqa: A001 - Sphinx's name
extensions = ["myst_parser"]
exclude_patterns = ["_build"]
smartquotes = False  # it makes one dash of the two of an option
html_theme = "furo"
html_title = "Samerun"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
myst_heading_anchors = 4  # as GitHub makes them, so that a link into a page works there and here

_DOCS = Path(__file__).parent


def setup(app: Any) -> None:
    """Sphinx calls it."""
    app.connect("source-read", _name_files_elsewhere)


def _name_files_elsewhere(_app: Any, page: str, source: list[str]) -> None:
    """Make of links to files of the repository outside docs/ their names: the site does not have them."""
    folder = (_DOCS / page).parent

    def named(link: re.Match[str]) -> str:
        text, target = link.groups()
        path = (folder / target.partition("#")[0]).resolve()
        if path.is_relative_to(_DOCS) or not path.exists():
            return link.group()
        return f"{text} (`{path.relative_to(_DOCS.parent)}`)"

    source[0] = re.sub(r"\[([^\]]+)\]\((\.\./[^)]+)\)", named, source[0])
