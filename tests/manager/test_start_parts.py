from __future__ import annotations

import contextlib
import hashlib
import io
import os
import zipfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxsplit_encoder.errors import InputError, StartFileError
from fxsplit_encoder.manager.start import FORMAT, read_parts, write_parts

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


@pytest.mark.parametrize("mode", [0o664, 0o646])
def test_a_file_that_others_can_write_is_not_read(written: Path, mode: int) -> None:
    written.chmod(mode)
    with pytest.raises(StartFileError, match="others can write there"):
        read_parts(written)


def test_a_directory_in_which_others_can_put_files_is_not_read_from(written: Path) -> None:
    written.parent.chmod(0o777)
    with pytest.raises(StartFileError, match="others can write there"):
        read_parts(written)
    written.parent.chmod(0o1777)  # they can, and cannot replace this one
    assert read_parts(written) == PARTS


def forge(path: Path, body: bytes) -> None:
    """A file whose digest is right."""
    digest = hashlib.sha256(body).hexdigest().encode()
    path.write_bytes(b"fxsplit_encoder start %d %d %s\n" % (FORMAT, len(body), digest) + body)


@settings(max_examples=60)
@given(data=st.data())
def test_a_forged_archive_is_a_named_error_or_what_it_says(data: st.DataObject, written: Path) -> None:
    body = bytearray(written.read_bytes().partition(b"\n")[2])
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(body) - 1))
        body[position] ^= data.draw(st.integers(1, 255))
    forged = written.with_suffix(".forged")
    forge(forged, bytes(body[: data.draw(st.integers(0, len(body)))]))
    with contextlib.suppress(StartFileError):
        dict(read_parts(forged))


def test_an_archive_of_too_many_bytes_or_the_same_name_twice_is_refused(
    written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fxsplit_encoder.manager.start._MOST_BYTES", 1000)
    with pytest.raises(StartFileError, match="at most 1000 bytes; got 2 parts of 10242"):
        read_parts(written)
    stream = io.BytesIO()
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("a", b"")
        archive.writestr("a", b"")
    forge(written, stream.getvalue())
    with pytest.raises(StartFileError, match="different names"):
        read_parts(written)


def test_parts_are_unpacked_when_they_are_asked_for(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unpacked: list[str] = []
    read = zipfile.ZipFile.read

    def noting(archive: zipfile.ZipFile, name: str) -> bytes:
        unpacked.append(name)
        return read(archive, name)

    monkeypatch.setattr(zipfile.ZipFile, "read", noting)
    parts = read_parts(written)
    assert "tower.json" in parts and unpacked == []
    assert parts["tower.json"] == b"[]"
    assert unpacked == ["tower.json"]


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
