"""Whether FlashAttention 4 keeps what it compiles, and where: by default, and as its user says."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fxsplit_encoder.kernels import compile_jobs, store
from fxsplit_encoder.kernels.attention.flash_attn import FlashAttention4, ignore_warning
from fxsplit_encoder.kernels.compile_jobs import FLASH_CACHE, keep_flash_attention, package_store
from fxsplit_encoder.kernels.compile_jobs import FLASH_DIRECTORY as DIRECTORY
from fxsplit_encoder.kernels.compile_jobs import FLASH_SWITCH as SWITCH


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is installed, not imported, and its user set nothing."""
    for name in (SWITCH, DIRECTORY):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    monkeypatch.delitem(sys.modules, FLASH_CACHE, raising=False)
    monkeypatch.setattr(compile_jobs, "find_spec", lambda name: object())
    monkeypatch.setattr(store, "cache_directory", lambda: tmp_path / "cache")


def test_a_warning_of_the_compiler_for_every_variant_is_not_shown(recwarn: pytest.WarningsRecorder) -> None:
    def warn(message: str) -> None:
        where = {"filename": "dsl.py", "lineno": 1, "module": "cutlass.base_dsl.dsl"}
        warnings.warn_explicit(message, UserWarning, **where)

    ignore_warning.cache_clear()  # pytest forgets filters after each test
    FlashAttention4().package_problem(torch.device("cpu"))
    warn("Argument aux_data (position 17) cannot be converted to a JitArgument for function 'f'")
    assert recwarn.list == []
    warn("Argument tile (position 17) cannot be converted to a JitArgument for function 'f'")
    assert len(recwarn.list) == 1


def test_it_is_on_by_default_in_a_directory_that_nobody_else_can_write() -> None:
    assert keep_flash_attention()
    assert os.environ[SWITCH] == "1"
    assert os.environ[DIRECTORY] == str(package_store("flash_attn_4").directory)
    assert package_store("flash_attn_4").directory.stat().st_mode & 0o777 == 0o700
    assert keep_flash_attention()


@pytest.mark.parametrize("value", ["0", ""])
def test_without_the_package_nothing_is_set_and_the_user_keeps_it_off(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as missing:
        missing.setattr(compile_jobs, "find_spec", lambda name: None)
        assert not keep_flash_attention()
        assert SWITCH not in os.environ
    monkeypatch.setenv(SWITCH, value)
    assert not keep_flash_attention()
    assert os.environ[SWITCH] == value and DIRECTORY not in os.environ


def test_directories_of_the_user_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DIRECTORY, str(tmp_path / "own"))
    assert keep_flash_attention()
    assert (os.environ[SWITCH], os.environ[DIRECTORY]) == ("1", str(tmp_path / "own"))
    monkeypatch.delenv(DIRECTORY)
    assert keep_flash_attention()
    assert DIRECTORY not in os.environ  # who switched it on chose the package's own


def test_what_was_imported_before_is_as_it_was_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, FLASH_CACHE, SimpleNamespace(CUTE_DSL_CACHE_ENABLED=False))
    assert not keep_flash_attention()
    assert SWITCH not in os.environ
    monkeypatch.setitem(sys.modules, FLASH_CACHE, SimpleNamespace(CUTE_DSL_CACHE_ENABLED=True))
    assert keep_flash_attention()


def test_directories_that_others_can_write_or_nobody_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package_store("flash_attn_4").directory.mkdir(parents=True)
    package_store("flash_attn_4").directory.chmod(0o777)
    assert not keep_flash_attention()
    monkeypatch.setattr(store, "cache_directory", lambda: tmp_path / "file")
    (tmp_path / "file").write_text("")
    assert not keep_flash_attention()
    assert SWITCH not in os.environ and DIRECTORY not in os.environ
