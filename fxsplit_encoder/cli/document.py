"""Print a command's facts and tables as they come, or one JSON document at the end; and find its files."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tabulate import tabulate

from fxsplit_encoder.config import EncoderConfig
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.messages import nearest

# Numbers, sizes such as 16x448x256, sums such as 64+128, and what is left out.
_NUMERIC = re.compile(r"-?|[\d.,x+]+(e-?\d+)?%?")


class Document:
    """The facts and tables of one command, printed as text or, `as_json`, at the end of a `with` block. The
    JSON is written to `file`, too. InputError: it cannot be written.
    """

    def __init__(self, as_json: bool = False, file: Path | None = None) -> None:
        check_output(file)
        self.content: dict[str, Any] = {}
        """What is said so far, as JSON has it."""
        self.as_json = as_json
        self._file = file

    def __enter__(self) -> Document:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            return
        text = json.dumps(self.content, indent=2, default=str)
        if self.as_json:
            print(text)
        if self._file is not None:
            self._file.write_text(f"{text}\n", encoding="utf-8")
            self.say(f"\nwrote {self._file}")

    def say(self, text: str = "") -> None:
        """A line for people alone."""
        if not self.as_json:
            print(text)

    def facts(self, facts: Mapping[str, str], within: Sequence[str] = ()) -> None:
        """Short labeled lines, aligned; in JSON inside objects of these names."""
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
        rows: Sequence[Mapping[str, Any]],
        headers: Mapping[str, str] = MappingProxyType({}),
        formats: Mapping[str, Callable[[Any], str]] = MappingProxyType({}),
        within: Sequence[str] = (),
    ) -> None:
        """Rows by the names of their cells, in the order in which these first come; `within` as for `facts`.
        People see `headers` above columns in place of names, and cells by `formats` where not as strings.
        """
        self._inside(within)[key] = rows
        names = list(dict.fromkeys(name for row in rows for name in row))
        cells = [
            ["" if row.get(name) is None else formats.get(name, str)(row[name]) for name in names]
            for row in rows
        ]
        self.say(_as_text([headers.get(name, name) for name in names], cells))

    def _inside(self, within: Sequence[str]) -> dict[str, Any]:
        found = self.content
        for name in within:
            found = found.setdefault(name, {})
        return found


def _as_text(headers: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """Numbers to the right and words to the left, no wider than what is in it."""
    columns = list(zip(headers, *cells, strict=True))
    widths = [max(len(line) for cell in column for line in cell.splitlines() or [""]) for column in columns]
    alignments = ["right" if all(map(_NUMERIC.fullmatch, column[1:])) else "left" for column in columns]
    # As a header the first row would be padded by two more columns each.
    lines = [list(headers), ["-" * width for width in widths], *cells]
    return tabulate(lines, tablefmt="plain", disable_numparse=True, colalign=alignments)


def mebibytes(num_bytes: int) -> str:
    """A size for people, whose column says the unit."""
    return f"{num_bytes / 2**20:.1f}"


# --- files that a command takes, those that come with the package, and those that it writes

_PACKAGE = Path(__file__).resolve().parents[1]

ROOTS = (_PACKAGE / "data", _PACKAGE.parent)
"""Where `examples` and `configs` are: a wheel has them inside the package, a checkout beside it."""


def shipped(relative: str) -> Path:
    """A file or directory that comes with the package; raises InputError where it is not there."""
    for root in ROOTS:
        if (path := root / relative).exists():
            return path
    raise InputError(f"{relative}: not found, though it comes with every wheel and checkout; install it anew")


def read_config(given: Path | None) -> EncoderConfig | None:
    """The settings in a file, or of a name in `configs`; None: none are given. InputError: there is no such
    file and no such name. ConfigError: it holds bad settings.
    """
    if given is None:
        return None
    if given.exists():
        return EncoderConfig.from_yaml(given)
    names = sorted(path.stem for path in shipped("configs").glob("*.yaml"))
    if given.name in names and given.parent == Path():
        return EncoderConfig.from_yaml(shipped(f"configs/{given}.yaml"))
    asked = nearest(given.stem, names)
    raise InputError(f"--config {given}: no such file; {asked}expected one, or one of {', '.join(names)}")


def check_output(path: Path | None, *endings: str) -> None:
    """Raises InputError before any work is done for a file that cannot be written: a directory, one whose
    directory does not exist or takes no files, or whose name has none of the `endings`, if any are given.
    """
    if path is None:
        return
    if path.is_dir():
        raise InputError(f"--output {path}: a directory; expected the file to write")
    if not path.parent.is_dir():
        raise InputError(f"--output {path}: no such directory: {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise InputError(f"--output {path}: cannot be written")
    if endings and path.suffix not in endings:
        raise InputError(f"--output {path}: expected a name that ends in {' or '.join(endings)}")
