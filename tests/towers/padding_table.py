"""The table of padding_table.md, beside this file: which towers are proved.

`python -m tests.towers.padding_table` prints it anew.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tabulate import tabulate

import fxsplit_encoder as fx

DOCUMENT = Path(__file__).with_suffix(".md")
HEADERS = ("class", "path", "padding", "nodes")
Row = tuple[str, str, str, int]


def rows_of(name: str, manager: fx.EncoderCudaGraphManager) -> list[Row]:
    """A row for each path of a compiled tower."""
    rows = []
    for path, program in manager.programs.items():
        assert program is not None, manager.reports
        padding = program.program.padding
        rows.append((name, path, str(padding), padding.num_nodes))
    return rows


def documented() -> dict[tuple[str, str], tuple[str, int]]:
    """What the document says: (class, path) to (padding, nodes)."""
    lines = DOCUMENT.read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines]
    return {(row[0], row[1]): (row[2], int(row[3])) for row in rows if len(row) == 4 and row[3].isdigit()}


def main() -> None:
    """Prints the table."""
    from .conformance import make_case

    with torch.no_grad():
        cases = [(name, make_case(name)) for name in fx.supported_towers()]
    rows = [(f"`{row[0]}`", *row[1:]) for name, case in cases for row in rows_of(name, case.manager)]
    print(tabulate(rows, headers=HEADERS, tablefmt="pipe"))


if __name__ == "__main__":
    main()
