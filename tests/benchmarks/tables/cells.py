"""Tables read back."""

from __future__ import annotations


def cells(text: str) -> list[list[str]]:
    """The header and the rows of the Markdown table in a text."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    header, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return [header, *rows]
