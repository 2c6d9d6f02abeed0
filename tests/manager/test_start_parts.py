from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxsplit_encoder.errors import InputError, StartFileError
from fxsplit_encoder.manager.start import read_parts, write_parts

PARTS = {"tower.json": b"[]", "kernels/triton/a/b.cubin": bytes(range(256)) * 40}


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "a.start"
    assert write_parts(path, PARTS) == path.stat().st_size
    return path


def test_parts_come_back_and_any_zip_tool_lists_them(written: Path) -> None:
    assert read_parts(written) == PARTS
    with zipfile.ZipFile(written) as archive:
        assert archive.namelist() == list(PARTS)


def test_other_white_space_is_noticed(written: Path) -> None:
    content = written.read_bytes()
    for blank in (b"\t", b"\v", b"\r"):
        written.write_bytes(content.replace(b"start ", b"start" + blank, 1))
        with pytest.raises(StartFileError, match="expected one that save_start wrote"):
            read_parts(written)


@settings(max_examples=60)
@given(data=st.data())
def test_a_changed_byte_anywhere_is_noticed(data: st.DataObject, written: Path) -> None:
    content = bytearray(written.read_bytes())
    position = data.draw(st.integers(0, len(content) - 1))
    content[position] ^= data.draw(st.integers(1, 255))
    damaged = written.with_suffix(".damaged")
    damaged.write_bytes(content)
    with pytest.raises(StartFileError, match=r"^(file|format|length|digest): expected .*; got "):
        read_parts(damaged)


@settings(max_examples=30)
@given(data=st.data())
def test_a_file_cut_short_is_noticed(data: st.DataObject, written: Path) -> None:
    content = written.read_bytes()
    cut = written.with_suffix(".cut")
    cut.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    with pytest.raises(StartFileError, match=r"^(file|length): expected"):
        read_parts(cut)


def test_no_file_and_another_format_are_named(written: Path, tmp_path: Path) -> None:
    with pytest.raises(StartFileError, match="file: expected a saved start; got FileNotFoundError"):
        read_parts(tmp_path / "none.start")
    newer = written.read_bytes().replace(b"start 3 ", b"start 4 ", 1)
    written.write_bytes(newer)
    with pytest.raises(StartFileError, match="format: expected 3; got 4"):
        read_parts(written)


def test_a_failed_write_leaves_the_old_file_and_no_other(
    written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(InputError, match="cannot be written: the disk is full"):
        write_parts(written, {"other": b""})
    assert read_parts(written) == PARTS
    assert os.listdir(written.parent) == [written.name]
    with pytest.raises(InputError, match="cannot be written"):
        write_parts(written / "below" / "x.start", PARTS)
