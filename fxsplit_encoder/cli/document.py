"""Print a command's facts and tables as they come, or one JSON document at the end."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tabulate import tabulate

# Numbers, sizes such as 16x448x256, sums such as 64+128, and what is left out.
_NUMERIC = re.compile(r"-?|[\d.x+]+(e-?\d+)?")


def shown(value: object) -> str:
    """A cell for people: nothing for what is not there."""
    return "" if value is None else str(value)


class Column(NamedTuple):
    """A column of a table."""

    key: str
    """Its name in JSON."""
    header: str
    show: Callable[[Any], str] = shown
    """A value for people."""


def columns(**headers: str) -> list[Column]:
    """Columns by their keys, whose cells are shown as they are."""
    return [Column(key, header) for key, header in headers.items()]


class Document:
    """The facts and tables of one command.

    Args:
        as_json: whether they are printed as JSON, by `finish`, in place of text.
        file: where the JSON goes too.
    """

    def __init__(self, as_json: bool = False, file: Path | None = None) -> None:
        self.content: dict[str, Any] = {}
        """What is said so far, as JSON has it."""
        self.as_json = as_json
        self._file = file

    def say(self, text: str = "") -> None:
        """A line for people alone."""
        if not self.as_json:
            print(text)

    def facts(self, facts: Mapping[str, str], within: Sequence[str] = ()) -> None:
        """Short labeled lines, aligned."""
        self._inside(within).update(facts)
        for label, text in facts.items():
            self.say(f"{label:<8} {text}")

    def notes(self, notes: Sequence[str]) -> None:
        """Adds lines about settings that could not be followed."""
        self.content["notes"] = [*self.content.get("notes", ()), *notes]
        for note in notes:
            self.say(f"{'note':<8} {note}")

    def put(self, key: str, value: Any, text: str) -> None:
        """A value of JSON that people see as `text`."""
        self.content[key] = value
        self.say(text)

    def table(
        self,
        key: str,
        columns: Sequence[Column],
        rows: Sequence[Sequence[Any]],
        within: Sequence[str] = (),
    ) -> None:
        """Rows with a cell for each column; `within` as for `facts`."""
        keys = [column.key for column in columns]
        self._inside(within)[key] = [dict(zip(keys, row, strict=True)) for row in rows]
        cells = [[c.show(cell) for c, cell in zip(columns, row, strict=True)] for row in rows]
        self.say(_as_text([column.header for column in columns], cells))

    def _inside(self, within: Sequence[str]) -> dict[str, Any]:
        found = self.content
        for name in within:
            found = found.setdefault(name, {})
        return found

    def finish(self) -> None:
        """Prints and writes the JSON, if requested."""
        text = json.dumps(self.content, indent=2, default=str)
        if self.as_json:
            print(text)
        if self._file is not None:
            self._file.write_text(f"{text}\n", encoding="utf-8")
            self.say(f"\nwrote {self._file}")


def _as_text(headers: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """Numbers to the right and words to the left, no wider than what is in it."""
    columns = list(zip(headers, *cells, strict=True))
    rulers = ["-" * max(map(len, column)) for column in columns]
    alignments = ["right" if all(map(_NUMERIC.fullmatch, column[1:])) else "left" for column in columns]
    # As a header the first row would be padded by two more columns each.
    lines = [list(headers), rulers, *cells]
    return tabulate(lines, tablefmt="plain", disable_numparse=True, colalign=alignments)
