from __future__ import annotations

from pathlib import Path

import pytest
from plots import plot
from records import Records
from tables.encoder import all_rows, hardware, images, marked, modes, starts, summary

from .cells import cells

TOWER = "qwen3-vl-8b"


def test_the_summary_puts_contenders_side_by_side(records: Records) -> None:
    table = summary(records, TOWER, "pipe")
    header, small, large = cells(table)
    row = dict(zip(header, small, strict=True))
    assert row["floor"] == "0.300"
    assert row["vLLM 0.33"] == "2.44"
    assert (row["ours"], row["ours / floor"], row["eager / ours"]) == ("1.50", "5.00", "10.0")
    assert large[header.index("graph-exact / ours")] == "-"
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


def test_modes_that_were_not_measured_have_their_columns(records: Records) -> None:
    header, small, _ = cells(modes(records, TOWER, "pipe"))
    assert header[2:] == ["eager", "`auto`", "`full`", "`piecewise`", "`breakable`", "`exact`", "`none`"]
    assert small[2:] == ["15.0", "1.50", *["-"] * 5]
    records.add(TOWER, "ours-exact", {"event": "row", "workload": "1x224", "p50": 1.25})
    assert cells(modes(records, TOWER, "pipe"))[1][header.index("`exact`")] == "1.25"


def test_the_first_page_shows_single_images(records: Records) -> None:
    shape = {"series": False, "patches": [980], "items": [2], "flops": [10**12]}
    records.add(TOWER, "floor", {"event": "workload", "workload": "mixed8", **shape})
    header, small, large = cells(images(records, TOWER, "pipe"))
    assert large[0] == "1x448", "and no other"
    assert small == ["1x224", "196", "15.0", "3.00", "2.44", "1.50", "10.0"]
    assert "vLLM 0.33" in header and not any("reduce-overhead" in name for name in header)
    records.environment["gpu"] = "NVIDIA L4"
    assert "vLLM" not in images(records, TOWER, "pipe")


def test_below_a_marked_table_stands_the_hardware(records: Records) -> None:
    text = marked(modes, "Medians.")(records.as_dict(), TOWER)
    versions = "torch 2.11, transformers 5.17, Python 3.12, commit abc."
    assert text is not None
    table, caption = text.split("\n\n")
    assert table == modes(records, TOWER, "pipe")
    assert caption == f"Medians. NVIDIA H200, driver 580, bfloat16, random weights, {versions}"
    records.settings["blocks"] = 2
    assert "random weights, at most 2 blocks" in hardware(records)
    assert marked(modes)(records.as_dict(), "internvl3-8b") is None


def test_plots_show_every_contender(records: Records, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    files = plot(records, tmp_path / "plots")
    assert [file.suffix for file in files] == [".png", ".svg"]
    assert files[0].read_bytes().startswith(b"\x89PNG")
    assert files[1].read_text().count(">ours, mode: auto</text>") == 1  # its line in the legend
