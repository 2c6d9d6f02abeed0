"""The documents' tables are those of the stored results."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import documents
import pytest
from records import Records
from storage import RESULTS

DOCUMENTS = documents.documents()
OF_ENCODER = re.compile(r"<!-- (encoder\.py: \w+ qwen3-vl-8b) -->\n(.*?)<!-- end -->", re.S)


@pytest.mark.parametrize("document", DOCUMENTS, ids=[document.stem for document in DOCUMENTS])
def test_the_tables_of_a_document_are_what_is_stored(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    assert documents.written_anew(document) == text, "run `python benchmarks/documents.py`"


def test_every_kind_of_page_has_its_tables() -> None:
    marks = {path.name: re.findall(r"<!-- (\w+\.py): ", path.read_text("utf-8")) for path in DOCUMENTS}
    assert {name: sorted({*scripts}) for name, scripts in marks.items() if scripts} == {
        "README.md": ["encoder.py"],
        "attention.md": ["attention.py"],
        "data_parallel.md": ["data_parallel.py"],
        "modes.md": ["encoder.py"],
        "passes.md": ["biased_attention.py", "passes.py"],
        "performance.md": [
            "encoder.py",
            "host_time.py",
            "kernel_times.py",
            "mixed_requests.py",
            "startup.py",
        ],
        "towers.md": ["towers.py"],
    }


def test_a_new_result_of_the_benchmark_replaces_the_tables(
    records: Records, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results, pages = tmp_path / "results", tmp_path / "pages"
    shutil.copytree(RESULTS, results)
    pages.mkdir()
    copies = [Path(shutil.copy(document, pages)) for document in DOCUMENTS]
    records.save(results / "encoder_h200.json")
    monkeypatch.setattr(documents, "RESULTS", results)
    monkeypatch.setattr(documents, "ROOT", tmp_path)
    monkeypatch.setattr(documents, "documents", lambda: copies)
    monkeypatch.setattr("sys.argv", ["documents.py"])
    documents.main()
    tables = dict(OF_ENCODER.findall("".join(copy.read_text("utf-8") for copy in copies)))
    assert list(tables) == [f"encoder.py: {name} qwen3-vl-8b" for name in ("images", "modes", "summary")]
    for table in tables.values():
        assert re.search(r"\| 1x224 +\| +196 \|", table)
