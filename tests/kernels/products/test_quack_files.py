from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from fxsplit_encoder.kernels import flash_cache, quack_files
from fxsplit_encoder.kernels.quack_files import (
    DIRECTORY,
    compiled_files,
    compiling_alone,
    name_directory,
    restore_files,
)


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory that the package is given."""
    monkeypatch.setattr(flash_cache, "cache_directory", lambda: tmp_path)
    monkeypatch.setattr(quack_files, "find_spec", lambda name: SimpleNamespace())
    monkeypatch.delitem(sys.modules, "quack.cache", raising=False)
    monkeypatch.setenv(DIRECTORY, "")  # so that it is put back
    monkeypatch.delenv(DIRECTORY)
    return flash_cache.own_directory("quack")


def test_the_package_gets_a_directory_of_its_own(own: Path) -> None:
    name_directory()
    assert os.environ[DIRECTORY] == str(own)
    assert own.stat().st_mode & 0o777 == 0o700


def test_what_the_user_named_or_the_package_has_taken_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "quack.cache", SimpleNamespace())
    name_directory()
    assert DIRECTORY not in os.environ
    monkeypatch.delitem(sys.modules, "quack.cache")
    monkeypatch.setenv(DIRECTORY, "elsewhere")
    name_directory()
    assert os.environ[DIRECTORY] == "elsewhere"


def test_files_come_back_where_the_package_looks(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"abc/one.o": b"one", "abc/two.o": b"two"}
    restore_files(files)
    (own / "abc" / "one.lock").write_bytes(b"")
    assert compiled_files() == {}  # the package is not there
    cache = SimpleNamespace(CACHE_ENABLED=True, CACHE_DIR=str(own))
    monkeypatch.setitem(sys.modules, "quack.cache", cache)
    assert compiled_files() == files
    (own / "abc" / "one.o").write_bytes(b"newer")
    restore_files(files)
    assert compiled_files() == files | {"abc/one.o": b"newer"}
    cache.CACHE_DIR = "of the user"
    assert compiled_files() == {}


def test_a_directory_of_the_user_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DIRECTORY, str(tmp_path / "user"))
    restore_files({"abc/one.o": b"one"})
    assert not (tmp_path / "user").exists()


@pytest.mark.parametrize("name", ["../one.o", "/one.o", "abc/one.py"])
def test_other_files_are_refused_before_any_is_written(name: str, own: Path) -> None:
    with pytest.raises(ValueError, match="no compiled kernel of QuACK"):
        restore_files({"abc/one.o": b"one", name: b"two"})
    assert not own.exists()


def test_a_call_ends_when_it_asks_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    host = SimpleNamespace(get_max_active_clusters=lambda size: 132)
    asked = host.get_max_active_clusters
    monkeypatch.setattr(quack_files, "import_module", lambda name: host)
    with compiling_alone():
        host.get_max_active_clusters(2)
        raise AssertionError("it went on")
    with pytest.raises(RuntimeError, match="did not ask"), compiling_alone():
        pass
    with pytest.raises(ValueError, match="no tile"), compiling_alone():
        raise ValueError("no tile")
    assert host.get_max_active_clusters is asked
