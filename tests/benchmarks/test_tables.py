from __future__ import annotations

from pathlib import Path

import pytest
from plots import plot
from records import Records
from tables import all_rows, fill_marked, starts, summary

TOWER = "qwen3-vl-8b"
DOCUMENT = """# Title
<!-- encoder.py: hardware -->
<!-- end -->
text
<!-- encoder.py: summary qwen3-vl-8b -->
| stale |
<!-- end -->
<!-- encoder.py: all internvl3-8b -->
kept
<!-- end -->
"""


def cells(table: str, first: str) -> list[str]:
    (line,) = [line for line in table.splitlines() if line.startswith(f"| {first}")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_summary_puts_contenders_side_by_side(records: Records) -> None:
    table = summary(records, TOWER, "github")
    header = cells(table, "workload")
    row = dict(zip(header, cells(table, "1x224"), strict=True))
    assert row["floor"] == "0.300"
    assert row["vLLM 0.33"] == "2.44"
    assert (row["ours"], row["ours / floor"], row["eager / ours"]) == ("1.50", "5.00", "10.0")
    assert cells(table, "1x448")[header.index("graph-exact / ours")] == "-"
    assert not any("reduce-overhead" in name for name in header)


@pytest.mark.parametrize("change", [{"gpu": None}, {"gpu": "NVIDIA L4"}])
def test_figures_of_another_gpu_stay_out(change: dict[str, None], records: Records) -> None:
    records.environment.update(change)
    assert "vLLM" not in summary(records, TOWER)


def test_every_row_is_listed_with_its_reason(records: Records) -> None:
    records.skip(TOWER, "eager-flash", "flash-attn is not installed")
    lines = all_rows(records, TOWER).splitlines()
    assert len(lines) == 2 + 6
    assert "lost" in next(line for line in lines if "graph-exact" in line and "1x448" in line)
    table = starts(records, TOWER)
    assert "flash-attn is not installed" in table
    assert "6.00" in table  # the first requests of eager: twice 3 s


def test_marked_tables_are_written_anew_and_nothing_else(records: Records) -> None:
    filled = fill_marked(DOCUMENT, records)
    assert "stale" not in filled
    assert summary(records, TOWER, "github") in filled
    assert "NVIDIA H200, driver 580, bfloat16" in filled
    assert "kept" in filled  # that tower was not measured
    assert filled.startswith("# Title\n")
    assert "\ntext\n" in filled
    assert fill_marked(filled, records) == filled


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no marks here", "no marks"),
        ("<!-- encoder.py: sumary qwen3-vl-8b -->\n<!-- end -->", "sumary"),
    ],
)
def test_marks_that_cannot_be_filled_are_errors(text: str, message: str, records: Records) -> None:
    with pytest.raises(ValueError, match=message):
        fill_marked(text, records)


def test_plots_show_every_contender(records: Records, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    files = plot(records, tmp_path / "plots")
    assert [file.suffix for file in files] == [".png", ".svg"]
    assert files[0].read_bytes().startswith(b"\x89PNG")
    assert files[1].read_text().count("<!-- ours, mode: auto -->") == 1  # its line in the legend
