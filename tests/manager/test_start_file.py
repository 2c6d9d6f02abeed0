"""What a saved start is made of: named parts, measurements as JSON, and the environment's key."""

from __future__ import annotations

import contextlib
import json
import math
import os
import zlib
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxsplit_encoder.capture.ladder import KnownBudget, MeasuredCosts
from fxsplit_encoder.errors import InputError, StartFileError
from fxsplit_encoder.kernels import store
from fxsplit_encoder.kernels.attention.chooser import MEASUREMENTS
from fxsplit_encoder.manager.start import (
    KnownTower,
    differences,
    environment_key,
    plain,
    read_parts,
    tower_from_json,
    write_parts,
)
from fxsplit_encoder.runtime.measure import KnownCosts, MeasuredForward

PARTS = {"tower.json": b"[]", "kernels/triton/a/b.cubin": bytes(range(256)) * 40}


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "a.start"
    assert write_parts(path, PARTS) == path.stat().st_size
    return path


@settings(max_examples=80)
@given(data=st.data(), is_cut=st.booleans())
def test_a_changed_byte_anywhere_or_a_missing_end_is_noticed(
    data: st.DataObject, is_cut: bool, written: Path
) -> None:
    content = bytearray(written.read_bytes())
    position = data.draw(st.integers(0, len(content) - 1))
    if is_cut:
        del content[position:]
    else:
        content[position] ^= data.draw(st.integers(1, 255))
    damaged = written.with_suffix(".damaged")
    damaged.write_bytes(content)
    with pytest.raises(StartFileError, match=r"^file: expected one that save_start wrote, undamaged; got "):
        read_parts(damaged)


@pytest.mark.parametrize("mode", [0o664, 0o646, 0o777])
def test_a_file_that_others_can_write_or_replace_is_not_read(written: Path, mode: int) -> None:
    where = written.parent if mode == 0o777 else written
    where.chmod(mode)
    with pytest.raises(StartFileError, match="others can write there"):
        read_parts(written)
    where.chmod(0o600 if where is written else 0o1777)  # they can put files there, but not replace this one
    assert read_parts(written) == PARTS and list(read_parts(written)) == list(PARTS)


@settings(max_examples=60)
@given(data=st.data())
def test_a_forged_file_is_a_named_error_or_what_it_says(data: st.DataObject, written: Path) -> None:
    body = bytearray(written.read_bytes().partition(b"\n")[2])
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, min(99, len(body) - 1)))
        body[position] ^= data.draw(st.integers(1, 255))
    forged = written.with_suffix(".forged")
    forged.write_bytes(store.sealed(bytes(body[: data.draw(st.integers(0, len(body)))])))
    with contextlib.suppress(StartFileError):
        assert all(isinstance(part, bytes) for part in read_parts(forged).values())


_ONE = zlib.compress(b"-")


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"[]\n", id="no names"),
        pytest.param(b'{"a": null}\n' + _ONE, id="no number"),
        pytest.param(b'{"a": 0.5, "b": 0.5}\n' + _ONE, id="no whole number"),
        pytest.param(b'{"a": -1, "b": 2}\n' + _ONE, id="less than nothing"),
        pytest.param(b'{"a": 2}\n' + _ONE, id="too little"),
        pytest.param(b'{"a": 1}\n' + zlib.compress(bytes(10**8)), id="far more than it says"),
        pytest.param(b'{"a": 9999999999}\n' + _ONE, id="too large"),
        pytest.param(b"[" * 10**5, id="too deep"),
    ],
)
def test_an_index_of_something_else_is_a_named_error(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.start"
    path.write_bytes(store.sealed(content))
    with pytest.raises(StartFileError, match=r"^file: expected named parts; got "):
        read_parts(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartFileError, match="file: expected a saved start; got FileNotFoundError"):
        read_parts(tmp_path / "none.start")


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


# --- measurements


KNOWN = KnownTower(
    {"tower": "T", "items": 4, "settings.mode": None},
    {
        "path default": KnownCosts(
            MeasuredForward(((4, 1.5), (16, math.inf)), 0.5, 3.0, 0.5, 0.25, 99, 2.0),
            {
                4: KnownBudget(MeasuredCosts({"full": math.inf}, 2.0, 0.5, 0.1, 0.7), "full"),
                16: KnownBudget(MeasuredCosts({}, math.inf, math.inf, 0.0, None), None),
            },
            7.0,
        ),
        "path nothing": KnownCosts(MeasuredForward(), {}, 1.0),
    },
)


@pytest.mark.parametrize(
    "change",
    [
        lambda content: b"{",
        lambda content: b"{}",
        lambda content: content.replace(b"capture_ms", b"capture_us"),
        lambda content: content.replace(b'"rows_per_token": 3.0', b'"rows_per_token": "many"'),
    ],
)
def test_what_was_measured_of_a_tower_comes_back_and_anything_else_is_refused(change: object) -> None:
    content = json.dumps(asdict(KNOWN)).encode()
    assert tower_from_json(content) == KNOWN
    with pytest.raises(ValueError):
        tower_from_json(change(content))  # type: ignore[operator]


# --- the environment


def test_the_environment_names_what_compiles_and_measures() -> None:
    key = environment_key(torch.device("cpu"))
    assert json.loads(json.dumps(key)) == key == environment_key(torch.device("cpu"))
    assert key["torch"] == torch.__version__
    assert key["gpu"] is None and key["cpu"]
    assert {
        "fxsplit_encoder",
        "fxsplit_encoder.code",
        "triton",
        "cuda",
        "python",
        "transformers",
    } <= key.keys()


def test_of_a_gpu_its_name_capability_and_kernels_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(
        store, "package_version", lambda package: "4.0" if package == "flash-attn-4" else None
    )
    key = environment_key(torch.device("cuda", 0), [MEASUREMENTS])
    assert (key["gpu"], key["gpu.capability"]) == ("NVIDIA H200", "9.0")
    assert key["measured_with.packages.flash-attn-4"] == "4.0"
    assert "torch_flash" in key["attention.kernels"]


def test_every_difference_is_named_with_both_values() -> None:
    expected = plain({"gpu": "H200", "settings": {"mode": "auto", "compile": True}, "budgets": (4, 16)})
    got = plain({"gpu": "H100", "settings": {"mode": "auto"}, "budgets": (4, 16), "more": None})
    assert differences(expected, got) == [
        'gpu: expected "H200"; got "H100"',
        "settings.compile: expected true; got nothing",
        "more: expected nothing; got null",
    ]
    assert differences(expected, expected) == []
