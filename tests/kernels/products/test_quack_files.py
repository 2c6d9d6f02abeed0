from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fxsplit_encoder.kernels import compile_jobs_process, compiled, store
from fxsplit_encoder.kernels.compile_jobs import QUACK_DIRECTORY as DIRECTORY
from fxsplit_encoder.kernels.compile_jobs import name_quack_directory, package_store
from fxsplit_encoder.kernels.compile_jobs_process import compiling_alone
from fxsplit_encoder.kernels.compiled import compiled_kernels, restore_kernels

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory that the package is given."""
    monkeypatch.setattr(store, "cache_directory", lambda: tmp_path)
    monkeypatch.setattr(compiled, "find_spec", lambda name: SimpleNamespace())
    monkeypatch.delitem(sys.modules, "quack.cache", raising=False)
    monkeypatch.setenv(DIRECTORY, "")  # so that it is put back
    monkeypatch.delenv(DIRECTORY)
    return package_store("quack").directory


def test_the_package_gets_a_directory_of_its_own(own: Path) -> None:
    name_quack_directory()
    assert os.environ[DIRECTORY] == str(own)
    assert own.stat().st_mode & 0o777 == 0o700


def test_what_the_user_named_or_the_package_has_taken_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "quack.cache", SimpleNamespace())
    name_quack_directory()
    assert DIRECTORY not in os.environ
    monkeypatch.delitem(sys.modules, "quack.cache")
    monkeypatch.setenv(DIRECTORY, "elsewhere")
    name_quack_directory()
    assert os.environ[DIRECTORY] == "elsewhere"


def test_files_come_back_where_the_package_looks(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"quack/abc/one.o": b"one", "quack/abc/two.o": b"two"}
    restore_kernels(files, CPU)
    (own / "abc" / "one.lock").write_bytes(b"")
    assert compiled_kernels(CPU) == {}  # the package is not there
    cache = SimpleNamespace(CACHE_ENABLED=True, CACHE_DIR=str(own))
    monkeypatch.setitem(sys.modules, "quack.cache", cache)
    assert compiled_kernels(CPU) == files
    (own / "abc" / "one.o").write_bytes(b"newer")
    restore_kernels(files, CPU)
    assert compiled_kernels(CPU) == files | {"quack/abc/one.o": b"newer"}
    cache.CACHE_DIR = "of the user"
    assert compiled_kernels(CPU) == {}


def test_a_directory_of_the_user_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DIRECTORY, str(tmp_path / "user"))
    restore_kernels({"quack/abc/one.o": b"one"}, CPU)
    assert not (tmp_path / "user").exists()


@pytest.mark.parametrize("name", ["quack/../one.o", "quack//one.o", "/one.o", "other/one.o"])
def test_other_files_are_refused_before_any_is_written(name: str, own: Path) -> None:
    with pytest.raises(ValueError, match="no compiled kernel"):
        restore_kernels({"quack/abc/one.o": b"one", name: b"two"}, CPU)
    assert not own.exists()


def test_a_call_ends_when_it_asks_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    host = SimpleNamespace(get_max_active_clusters=lambda size: 132)
    asked = host.get_max_active_clusters
    monkeypatch.setattr(compile_jobs_process, "import_module", lambda name: host)
    with compiling_alone():
        host.get_max_active_clusters(2)
        raise AssertionError("it went on")
    with pytest.raises(RuntimeError, match="did not ask"), compiling_alone():
        pass
    with pytest.raises(ValueError, match="no tile"), compiling_alone():
        raise ValueError("no tile")
    assert host.get_max_active_clusters is asked
