from __future__ import annotations

from pathlib import Path

import pytest
from environment import in_words
from storage import load, make_parser, one_line, store

from .conftest import ENVIRONMENT


def test_a_file_is_written_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "result.json"
    store(path, {"rows": [1.5]})
    with pytest.raises(TypeError):
        store(path, {"rows": object()})
    assert load(path) == {"rows": [1.5]}
    store(None, {"rows": object()})  # nothing is to be written


def test_a_parser_shows_the_docstring_and_takes_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    parser = make_parser("Times.\n\n    python a.py\n")
    assert parser.parse_args(["--output", "a.json"]).output.name == "a.json"
    with pytest.raises(SystemExit):
        parser.parse_args(["--help"])
    assert "Times.\n\n    python a.py\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "line"),
    [(RuntimeError("no memory\nand more"), "RuntimeError: no memory"), (ValueError(), "ValueError")],
)
def test_a_failure_is_one_line(error: Exception, line: str) -> None:
    assert one_line(error) == line


def test_where_figures_are_from_in_words() -> None:
    versions = "torch 2.11, transformers 5.17, Python 3.12, commit abc"
    assert in_words(ENVIRONMENT, "bf16") == f"NVIDIA H200, driver 580, bf16, {versions}"
    unknown = in_words({**ENVIRONMENT, "gpu": None, "driver": None, "commit": None})
    assert unknown.startswith("CPU, torch 2.11")
    assert unknown.endswith("commit unknown")
