"""Settings of Sphinx: `make docs` builds the pages and the API reference into build/docs."""

from __future__ import annotations

from typing import Any

import fxsplit_encoder

project = "fxsplit_encoder"
author = "the fxsplit_encoder developers"
release = fxsplit_encoder.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
default_role = "code"  # a single backtick in a docstring
html_theme = "furo"
html_title = f"{project} {release}"

myst_heading_anchors = 3  # links to sections, as GitHub names them
suppress_warnings = ["myst.xref_missing"]  # of files that are no pages; tests/documents checks every link

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_preserve_defaults = True
autoclass_content = "both"

# Napoleon takes what stands before a colon in an attribute's docstring for a type; ours are prose.
_attributes: dict[str, list[str]] = {}


def _keep_prose(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    if what == "attribute":
        _attributes[name] = list(lines)


def _restore_prose(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    if what == "attribute":
        lines[:] = _attributes[name]


def setup(app: Any) -> None:
    """Put our handlers around napoleon's."""
    app.connect("autodoc-process-docstring", _keep_prose, priority=100)
    app.connect("autodoc-process-docstring", _restore_prose, priority=900)
