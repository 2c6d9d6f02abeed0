"""What the benchmarks store: where a script is told to write it, and how it is written and read."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results")
"""What the documents' tables are made from."""


def make_parser(documentation: str | None) -> argparse.ArgumentParser:
    """A parser that shows a script's docstring as it stands, with the option `--output`."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=documentation, formatter_class=formatter)
    parser.add_argument("--output", type=Path, metavar="JSON", help="file for the results")
    return parser


def store(path: Path | None, result: Mapping[str, Any]) -> None:
    """Writes a file as a whole, so that a run that is cut off leaves the one before; None: nothing."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def load(path: Path) -> Any:
    """What `store` wrote."""
    return json.loads(path.read_text(encoding="utf-8"))


def one_line(error: Exception) -> str:
    """The kind of an error and the first line of its message: how a failure is stored."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
