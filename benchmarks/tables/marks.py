"""What stands between marks in a document, written from stored results.

A mark is `<!-- SCRIPT.py: TABLE ARGUMENT... -->` on a line of its own, for example
`<!-- encoder.py: summary qwen3-vl-8b -->`; what it marks ends at `<!-- end -->`. Nothing else is touched.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from storage import load

_BEGIN = r"<!-- (?P<script>\w+\.py): (?P<table>\w+)(?P<arguments>(?: [\w.-]+)*) -->\n"
# No other comment may stand in between, so a mark without an end does not swallow the next table.
_MARKED = re.compile(rf"(?P<begin>{_BEGIN})(?:(?!<!--).)*(?P<end><!-- end -->)", re.S)


class Source(NamedTuple):
    """Where the figures of a table are from."""

    file: str
    """In the folder of results."""
    text: Callable[..., str | None]
    """Markdown from what the file holds and the arguments of the mark; None if it holds nothing of those."""


def fill(document: str, tables: Mapping[str, Source], results: Path) -> str:
    """The document with its marked tables written anew.

    Args:
        document: its text.
        tables: by "SCRIPT.py: TABLE".
        results: the folder of stored results. A table of which it has no figures says that.

    Raises:
        ValueError: a mark names a table that there is not, or has no end.
    """
    if len(re.findall(_BEGIN, document)) != len(_MARKED.findall(document)):
        raise ValueError("a mark has no end: expected <!-- SCRIPT.py: TABLE --> ... <!-- end -->")

    def written(match: re.Match[str]) -> str:
        name = f"{match['script']}: {match['table']}"
        if name not in tables:
            raise ValueError(f"{name}: no such table; there are {', '.join(tables)}")
        text = _text(tables[name], match["arguments"].split(), results)
        text = text or f"Not measured yet; `benchmarks/{match['script']}` measures it."
        return f"{match['begin']}\n{text}\n\n{match['end']}"

    return _MARKED.sub(written, document)


def _text(source: Source, arguments: Sequence[str], results: Path) -> str | None:
    path = results / source.file
    return source.text(load(path), *arguments) if path.exists() else None
