"""The documents' tables are those of the stored results."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import tables
from bench import parse
from features import read_features
from storage import RESULTS, Result, described, load, merge, store

from .conftest import TOWER

DOCUMENTS = tables.documents()
IDS = [document.stem for document in DOCUMENTS]
MARK = re.compile(r"<!-- table: (\w+)")


def cells(table: str) -> list[list[str]]:
    """The cells of the lines of a table, its header first."""
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "--" not in line]


@pytest.mark.parametrize("document", DOCUMENTS, ids=IDS)
def test_the_tables_of_a_document_are_what_is_stored(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    assert tables.rewritten(document) == text, "run `python benchmarks/bench.py tables`"


def test_every_table_is_in_a_document_and_every_result_in_a_table() -> None:
    marked = {name for document in DOCUMENTS for name in MARK.findall(document.read_text("utf-8"))}
    assert marked - {"features"} == set(tables.TABLES)
    files = {f"{name}.json" for name in tables.TABLES}
    files |= {feature.result["file"] for feature in read_features()}
    assert {path.name for path in RESULTS.glob("*.json")} == files


def test_stored_results_say_what_was_measured_where() -> None:
    for path in RESULTS.glob("*.json"):
        stored = load(path)
        assert stored["gpu"].startswith("NVIDIA "), path.name
        assert stored["rows"], path.name
        assert all(stored[name] for name in ("torch", "transformers", "driver", "commit")), path.name
        size = len(path.read_bytes())
        assert size < 8_000 + 400 * len(stored["rows"]), "store medians and a spread, not every sample"


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """The documents by name, in a folder of their own beside the results."""
    shutil.copytree(RESULTS, tmp_path / "results")
    copies = {document.name: Path(shutil.copy(document, tmp_path)) for document in DOCUMENTS}
    monkeypatch.setattr(tables, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "documents", lambda: list(copies.values()))
    monkeypatch.setattr(tables.rewritten, "__defaults__", (tmp_path / "results",))
    return copies


def take_in(*files: Path) -> None:
    arguments = parse(["tables", *map(str, files)])
    assert arguments.run(arguments) == 0


def test_a_new_result_replaces_the_table_and_the_claim(
    result: Result, tmp_path: Path, copied: dict[str, Path]
) -> None:
    store(tmp_path / "out" / "readme.json", result)
    take_in(tmp_path / "out" / "readme.json")
    text = copied["README.md"].read_text("utf-8")
    assert "on an H100 an image of 224 x 224 passes Qwen3-VL-8B's tower 2.00 times as fast" in text
    header, first, second = cells(text[text.index("| images ") :].split("<!-- end -->")[0])
    named = dict(zip(header, first, strict=True))
    assert (named["Hugging Face eager (sdpa)"], named["ours"], named["eager / ours"]) == (
        "15.0",
        "1.50",
        "10.0",
    )
    assert dict(zip(header, second, strict=True))["eager model in one CUDA graph"] == "-"  # it failed
    assert not any("vLLM" in name for name in header)  # not measured
    assert "Milliseconds, medians. NVIDIA H100" in tables.readme(result)
    settled = [{**row, "settled s": 4.0} for row in result["rows"]]
    assert "medians, ours after 4 s of the same requests" in tables.readme({**result, "rows": settled})
    started = [{**row, "starts": [1.4, 1.5, 1.7]} if row["workload"] == "1x224" else row for row in settled]
    header, *lines = cells(tables.readme({**result, "rows": started}))
    assert [line[header.index("ours, all starts")] for line in lines[:2]] == ["1.40-1.70", "-"]
    own = {"tower": "qwen3-vl-8b", "workload": "1x224", "patches": 196}
    rows = [{**own, "variant": "vllm-eager", "p50": 9.25}, {**own, "variant": "vllm", "p50": 2.25}]
    together = {**result, "vllm": "0.33.0", "rows": [*result["rows"], *rows]}
    header, line, *_ = cells(tables.readme(together))
    assert line[header.index("vLLM 0.33.0*")] == "2.25"  # the better run
    assert tables.readme(together).endswith("its encoder manager.")


def test_vllm_is_compared_where_ours_was_run(result: Result) -> None:
    times = {"eager": 3.0, "vllm": 2.0, "ours": 1.0, "ours-compiled": 0.5}
    rows = [
        {"tower": TOWER, "workload": "1x224", "variant": name, "p50": p50, "error": 0.001}
        for name, p50 in times.items()
    ]
    rows += [{"tower": TOWER, "workload": "1x224", "variant": "start", "seconds": 1.0}]
    measured = {**result, "vllm": "0.33.0", "settings": {"dtype": "bfloat16"}, "rows": rows}
    header, line = cells(tables.vllm(measured))
    named = dict(zip(header, line, strict=True))
    assert (named["vLLM's best / ours"], named["/ compiled"]) == ("2.00", "4.00")
    assert "difference from eager: up to 1.0e-03." in tables.vllm(measured)
    served = {"variant": "ours", "requests": "1 images", "rate": 10.0, "p50": 20.0, "p99": 30.0, "same": 1.0}
    started = {"variant": "ours", "requests": "start", "seconds": 90.0}
    header, line = cells(tables.vllm_serving({**measured, "rows": [started, served]}))
    assert line[header.index("p50")] == "20.0"
    assert not {"encoder host", "requests / s"} & {*header}
    header, line = cells(tables.vllm_serving({**measured, "rows": [{**served, "encoder host": 2.0}]}))
    assert (line[header.index("encoder host")], "encoder device" in header) == ("2.00", False)


def test_what_was_not_measured_says_so(copied: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "results" / "host.json").unlink()
    document = tmp_path / "page.md"
    document.write_text("<!-- table: host -->\n<!-- end -->\n", encoding="utf-8")
    assert "Not measured on a GPU yet." in tables.rewritten(document)


def test_only_figures_of_a_gpu_with_a_table_are_taken_in(result: Result, tmp_path: Path) -> None:
    store(tmp_path / "mine.json", result)
    with pytest.raises(SystemExit, match="no table is made of it"):
        tables.take_in([tmp_path / "mine.json"])
    store(tmp_path / "readme.json", {**result, "gpu": None})
    with pytest.raises(SystemExit, match="without a GPU"):
        tables.take_in([tmp_path / "readme.json"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- table: size -->\n<!-- end -->", "no table size; there are readme"),
        ("<!-- table: host -->\n| 1 |\n", "has no end"),
        ("<!-- table: host -->\n<!-- table: start -->\n<!-- end -->", "has no end"),
    ],
)
def test_marks_that_cannot_be_filled_are_errors(text: str, message: str, tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    document.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        tables.rewritten(document)


def test_ratios_are_of_the_medians(result: Result) -> None:
    header, first, second = cells(tables.summary(result, TOWER))
    named = dict(zip(header, first, strict=True))
    assert (named["floor"], named["ours"], named["ours / floor"]) == ("0.300", "1.50", "5.00")
    assert named["graph-exact / ours"] == "2.00"
    assert dict(zip(header, second, strict=True))["graph-exact / ours"] == "-"  # it failed


# --- files


def test_a_file_is_written_as_a_whole(result: Result, tmp_path: Path) -> None:
    path = tmp_path / "new" / "encoder.json"
    store(path, result)
    with pytest.raises(TypeError):
        store(path, {**result, "rows": [{"p50": object()}]})
    assert load(path) == result
    assert json.loads(path.read_text("utf-8")) == result
    store(None, {"rows": object()})  # nothing is to be written


def test_what_is_compared_stays_of_one_run(result: Result) -> None:
    both = [{"model": "a", "batch": 1, "way": way, "p50": 1.0} for way in ("eager", "encoder_cg")]
    whole = {**result, "case": "backend", "rows": both}
    part = {**whole, "rows": [{**both[0], "p50": 2.0}]}
    assert merge([whole, part])["rows"] == merge([part, whole])["rows"] == both
    again = {**whole, "rows": [{**row, "p50": 3.0} for row in both]}
    assert [row["p50"] for row in merge([whole, again])["rows"]] == [3.0, 3.0]
    packages: Result = {"attention packages": {"flash-attn-4": "1.0"}}
    other = {**whole, **packages, "rows": [{**row, "batch": 8} for row in both]}
    merged = merge([other, whole])
    assert merged["rows"] == [{**row, **packages} for row in other["rows"]] + [
        {**row, "attention packages": {}} for row in both
    ]
    assert "flash-attn-4 1.0 and torch's attention" in described(merged, rows=merged["rows"])


def test_parts_of_a_run_are_merged_and_keep_their_commits(result: Result) -> None:
    later = {**result, "commit": "def", "rows": [{**result["rows"][-1], "p50": 7.0}]}
    merged = merge([result, later])
    assert len(merged["rows"]) == len(result["rows"])
    assert merged["rows"][-1] == {**later["rows"][0], "commit": "def"}
    assert {row["commit"] for row in merged["rows"][:-1]} == {"abc"}
    assert "commit abc and def" in tables.summary(merged, TOWER)
    same = merge([result, result])
    assert same == result
    with pytest.raises(ValueError, match="they differ in driver"):
        merge([result, {**result, "driver": "590"}])
    with pytest.raises(ValueError, match="of one run"):
        merge([{**result, "case": "host"}] * 2)
