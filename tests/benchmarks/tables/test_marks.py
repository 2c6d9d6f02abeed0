from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from storage import store
from tables.marks import Source, fill

DOCUMENT = """# Title
<!-- bench.py: sizes small -->
| stale |
<!-- end -->
text <!-- a comment -->
<!-- bench.py: hardware -->
<!-- end -->
"""


def sizes(stored: dict[str, Any], name: str) -> str | None:
    return stored["sizes"].get(name)


TABLES = {
    "bench.py: sizes": Source("new.json", sizes),
    "bench.py: hardware": Source("new.json", lambda stored: stored["gpu"]),
}


def test_what_is_not_stored_says_so(tmp_path: Path) -> None:
    filled = fill(DOCUMENT, TABLES, tmp_path)
    assert filled.count("Not measured yet; `benchmarks/bench.py` measures it.") == 2
    assert "stale" not in filled
    store(tmp_path / "new.json", {"gpu": "H200", "sizes": {"large": "| 9 |"}})
    filled = fill(filled, TABLES, tmp_path)
    assert filled.count("Not measured yet") == 1
    assert "\n\nH200\n\n" in filled


def test_only_what_is_marked_is_written_anew(tmp_path: Path) -> None:
    store(tmp_path / "new.json", {"gpu": "H200", "sizes": {"small": "| 1 |"}})
    filled = fill(DOCUMENT, TABLES, tmp_path)
    assert filled == (
        "# Title\n<!-- bench.py: sizes small -->\n\n| 1 |\n\n<!-- end -->\ntext <!-- a comment -->\n"
        "<!-- bench.py: hardware -->\n\nH200\n\n<!-- end -->\n"
    )
    assert fill(filled, TABLES, tmp_path) == filled


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("<!-- bench.py: size small -->\n<!-- end -->", r"bench\.py: size: no such table; there are bench"),
        ("<!-- bench.py: sizes small -->\n| 1 |\n", "has no end"),
        ("<!-- bench.py: sizes small -->\n<!-- bench.py: hardware -->\n<!-- end -->", "has no end"),
    ],
)
def test_marks_that_cannot_be_filled_are_errors(document: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        fill(document, TABLES, tmp_path)
