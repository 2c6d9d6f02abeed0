from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from fxsplit_encoder.connector.processes.process_encoder import ProcessOptions, launch
from fxsplit_encoder.connector.processes.wire import EncoderProgram
from fxsplit_encoder.errors import InputError


@pytest.mark.parametrize("factory", ["", "os", "os:", ":join", "os:nothing", "no_such.module:x", "os:sep"])
def test_a_name_that_leads_nowhere_is_an_error(factory: str) -> None:
    with pytest.raises(InputError, match="factory"):
        EncoderProgram(factory).resolve()


def test_what_a_module_lacks_itself_is_its_own_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needing.py").write_text("import something_absent", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="something_absent"):
        EncoderProgram("needing:make").resolve()


def test_a_process_gets_our_path_its_variables_and_two_descriptors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = tmp_path / "seen"
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\necho "$@ $PYTHONPATH $EXTRA" > {seen}\nls /proc/self/fd >> {seen}\n', "utf-8"
    )
    python.chmod(0o755)
    with open("/dev/null", "rb") as one, open("/dev/zero", "rb") as other:
        monkeypatch.setattr(sys, "executable", str(python))
        monkeypatch.setattr(sys, "path", ["", "/somewhere"])
        given = one.fileno(), other.fileno()
        launch(*given, ProcessOptions(max_bytes=5, environment={"EXTRA": "1"})).wait()
        words, *descriptors = seen.read_text("utf-8").split("\n")
        assert words.split()[:3] == ["-P", "-m", "fxsplit_encoder.connector.processes.child"]
        assert words.split()[3:7] == [*map(str, given), str(os.getpid()), "5"]
        assert words.endswith(f"{Path.cwd()}:/somewhere 1")
        assert {*map(str, given)} <= {*descriptors}


def test_a_python_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(InputError, match="cannot be started"):
        launch(0, 1, ProcessOptions())
