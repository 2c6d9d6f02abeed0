"""Faults at this end leave no process behind, and nobody who waits for one."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from fxsplit_encoder.connector.interfaces import MediaItem, PreparedItem
from fxsplit_encoder.connector.processes import (
    EncoderProgram,
    ProcessEncoder,
    ProcessOptions,
    process_encoder,
)
from fxsplit_encoder.connector.processes.process_encoder import launch
from fxsplit_encoder.connector.processes.wire import Channel
from fxsplit_encoder.errors import EncoderLostError, InputError, MediaError
from fxsplit_encoder.models.connectors import checkpoint_encoder, checkpoint_process, weightless_tower
from fxsplit_encoder.models.media import media_processor
from tests.connector.resources import nothing_left
from tests.models.checkpoints import save
from tests.waiting import wait_until

from .conftest import DOUBLING, ROWS, fork, make_item, quiet_fork
from .encoders import LIES, lie

Make = Callable[..., ProcessEncoder]


def assert_doubled(features: list[torch.Tensor], items: list[PreparedItem]) -> None:
    assert len(features) == len(items)
    for feature, item in zip(features, items, strict=True):
        assert torch.equal(feature, 2 * item.inputs["pixel_values"])


def test_items_are_encoded_in_order_and_owned_by_the_caller(make_encoder: Make) -> None:
    encoder = make_encoder()
    encoder.start()  # which does nothing more
    items = [make_item(rows) for rows in (5, 0, 1, 9)]
    features = encoder.encode(items)
    assert_doubled(features, items)
    encoder.encode([make_item(9) for _ in range(4)])
    encoder.close()
    assert_doubled(features, items)
    features[0].zero_()
    encoder.start()
    assert_doubled(encoder.encode(items), items)


def test_row_bytes_are_declared(make_encoder: Make) -> None:
    encoder = make_encoder(start=False)
    assert [encoder.row_bytes(kind) for kind in ("image", "video", "audio")] == [32, 32, None]
    assert encoder.predict_cost(make_item(7)) == 7.0
    wrong = ProcessEncoder(DOUBLING, {"image": 64}, encoder.options)
    with pytest.raises(InputError, match="row_bytes: expected"):
        wrong.start()
    assert not wrong.is_alive


@pytest.mark.parametrize(
    ("do", "kind", "words"),
    [
        ("media", MediaError, "item 3: not an image"),
        ("memory", torch.OutOfMemoryError, "Tried to allocate"),
        ("value", ValueError, "shape"),
    ],
)
def test_an_error_keeps_its_class_and_the_process_goes_on(
    make_encoder: Make, do: str, kind: type[Exception], words: str
) -> None:
    encoder = make_encoder()
    pid = encoder.pid
    with pytest.raises(kind, match=words) as caught:
        encoder.encode([make_item(), make_item(do=do)])
    assert type(caught.value) is kind
    assert "in misbehave" in "".join(caught.value.__notes__)
    items = [make_item()]
    assert_doubled(encoder.encode(items), items)
    assert encoder.pid == pid


def test_features_that_are_no_tensors_or_too_few_are_an_error(make_encoder: Make) -> None:
    encoder = make_encoder()
    with pytest.raises(InputError, match=r"1 features of 2 items"):
        encoder.encode([make_item(do="few"), make_item()])
    with pytest.raises(InputError, match="feature: expected a tensor"):
        encoder.encode([make_item(), make_item(do="text")])
    items = [make_item()]
    assert_doubled(encoder.encode(items), items)


@pytest.mark.parametrize(
    ("factory", "kind", "words"),
    [
        ("tests.connector.processes.encoders:failing", InputError, "no such checkpoint"),
        ("tests.connector.processes.encoders:nothing", InputError, "no FeatureEncoder"),
    ],
)
def test_a_program_that_is_wrong_is_an_error_of_start(
    make_encoder: Make, factory: str, kind: type[Exception], words: str
) -> None:
    arguments = {"message": "no such checkpoint"} if factory.endswith("failing") else {}
    encoder = make_encoder(start=False, of=EncoderProgram(factory, arguments))
    with pytest.raises(kind, match=words):
        encoder.start()
    assert not encoder.is_alive
    with pytest.raises(EncoderLostError, match="call start"):
        encoder.encode([make_item()])


def test_an_encoder_that_is_not_ready_in_time_is_ended(make_encoder: Make) -> None:
    slow = EncoderProgram(DOUBLING.factory, {"start_seconds": 600.0})
    encoder = make_encoder(start=False, of=slow, start_timeout=0.5)
    with pytest.raises(EncoderLostError, match=r"did not answer within 0\.5 s"):
        encoder.start()


def test_inputs_that_never_fit_are_refused(make_encoder: Make) -> None:
    encoder = make_encoder(max_bytes=1 << 16)
    pid = encoder.pid
    with pytest.raises(InputError, match="at most max_bytes=65536"):
        encoder.encode([make_item(), make_item(rows=1 << 12)])
    items = [make_item()]
    assert_doubled(encoder.encode(items), items)
    assert encoder.pid == pid


def test_features_that_do_not_fit_at_once_are_refused(make_encoder: Make) -> None:
    encoder = make_encoder(max_bytes=1 << 16)
    items = [make_item(300, do="repeat") for _ in range(6)]
    with pytest.raises(InputError, match="at most max_bytes=65536"):
        encoder.encode(items)
    for item in items:
        (feature,) = encoder.encode([item])
        assert torch.equal(feature[300:600], item.inputs["pixel_values"])


# --- ends


def test_a_killed_process_fails_what_waits_at_once_and_can_be_restarted(make_encoder: Make) -> None:
    encoder = make_encoder()
    first = encoder.pid
    timer = threading.Timer(0.1, os.kill, [first, signal.SIGKILL])
    timer.start()
    with pytest.raises(EncoderLostError, match=f"{first} was ended by SIGKILL") as error:
        encoder.encode([make_item(do="sleep", seconds=600)])
    assert error.value.retryable
    timer.join()
    assert not encoder.is_alive
    with pytest.raises(EncoderLostError, match="SIGKILL"):
        encoder.encode([make_item()])
    encoder.start()
    items = [make_item()]
    assert_doubled(encoder.encode(items), items)
    assert encoder.pid is not None and encoder.pid != first
    os.kill(encoder.pid, signal.SIGKILL)
    wait_until(lambda: not encoder.is_alive)
    with pytest.raises(EncoderLostError, match=f"{encoder.pid} was ended by SIGKILL"):
        encoder.encode([make_item()])


def test_a_hung_process_is_killed(make_encoder: Make) -> None:
    encoder = make_encoder(encode_timeout=0.2)
    with pytest.raises(EncoderLostError, match=r"did not answer within 0\.2 s"):
        encoder.encode([make_item(do="sleep", seconds=600)])
    assert not encoder.is_alive


def test_a_device_that_is_gone_ends_its_process(make_encoder: Make) -> None:
    encoder = make_encoder()
    with pytest.raises(torch.AcceleratorError, match="device-side assert"):
        encoder.encode([make_item(do="fatal")])
    wait_until(lambda: not encoder.is_alive)


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> Callable[[ProcessEncoder, list[PreparedItem]], None]:
    """Asks an encoder, and is interrupted while it waits for the answer."""

    def ask(encoder: ProcessEncoder, items: list[PreparedItem]) -> None:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Channel, "receive", mock.Mock(side_effect=KeyboardInterrupt))
            encoder.encode(items)

    return ask


def test_an_interrupted_caller_leaves_nothing_behind(make_encoder: Make, interrupted: Any) -> None:
    encoder = make_encoder(max_bytes=1 << 16)
    pid = encoder.pid
    for _ in range(2):
        interrupted(encoder, [make_item(1000, do="value")])
        items = [make_item(1900)]
        assert_doubled(encoder.encode(items), items)
    assert encoder.pid == pid


def test_a_process_that_is_at_work_is_ended(make_encoder: Make, interrupted: Any) -> None:
    encoder = make_encoder(close_timeout=0.1)
    interrupted(encoder, [make_item(do="sleep", seconds=600)])
    for _ in range(2):
        encoder.close()
        assert not encoder.is_alive
    with pytest.raises(EncoderLostError, match="call start"):
        encoder.encode([make_item()])


@pytest.mark.parametrize("name", LIES)
def test_a_process_that_breaks_the_protocol_is_ended(
    make_encoder: Make, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(process_encoder, "launch", partial(fork, main=partial(lie, answer=LIES[name])))
    encoder = make_encoder()
    with pytest.raises(EncoderLostError, match=r"(not asked|an invalid message)"):
        encoder.encode([make_item(1)])
    assert not encoder.is_alive


def test_a_process_that_cannot_be_watched_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[Any] = []
    monkeypatch.setattr(process_encoder, "launch", lambda *of: launched.append(launch(*of)) or launched[-1])
    monkeypatch.setattr(os, "pidfd_open", mock.Mock(side_effect=OSError("too many open files")))
    with nothing_left():
        with pytest.raises(OSError, match="too many"):
            ProcessEncoder(DOUBLING, ROWS, ProcessOptions(max_bytes=4096)).start()
        assert launched[0].poll() == -signal.SIGKILL


def idle(encoder: ProcessEncoder, tell: Callable[[], None]) -> None:
    encoder.start()
    encoder.encode([make_item()])
    tell()
    signal.pause()


def encoding(encoder: ProcessEncoder, tell: Callable[[], None]) -> None:
    encoder.start()
    tell()
    encoder.encode([make_item(do="sleep", seconds=600)])


@contextmanager
def a_family(do: Callable[[ProcessEncoder, Callable[[], None]], None]) -> Iterator[tuple[int, int]]:
    """A parent that does something with an encoder process of its own; both are forks of this one. The
    first by its number, the second by a descriptor.
    """
    reading, writing = os.pipe()
    parent = quiet_fork()
    if parent == 0:
        try:
            process_encoder.launch = fork  # type: ignore[assignment]
            encoder = ProcessEncoder(DOUBLING, ROWS, ProcessOptions(max_bytes=1 << 20))
            do(encoder, lambda: os.write(writing, str(encoder.pid).encode()) and None)
        finally:
            os._exit(1)
    os.close(writing)
    pidfd = os.pidfd_open(int(os.read(reading, 20)))
    yield parent, pidfd
    os.close(reading)
    os.close(pidfd)


def is_over(pidfd: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


@pytest.mark.parametrize("do", [idle, encoding])
def test_a_process_ends_with_its_parent(do: Callable[[ProcessEncoder, Callable[[], None]], None]) -> None:
    with nothing_left(), a_family(do) as (parent, child):
        assert not is_over(child, 0.1)
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
        assert is_over(child, 60)


ROOT = Path(__file__).parents[3]
PHOTOGRAPHS = sorted((ROOT / "examples" / "images").glob("*.jpg"))[:2]


@pytest.mark.exhaustive
def test_a_tower_in_a_process_of_its_own(tmp_path: Path) -> None:
    _, checkpoint = save(tmp_path / "checkpoint", "qwen2_5_vl")
    processor = media_processor(weightless_tower(checkpoint), checkpoint)
    size = {"max_pixels": 64 * 28 * 28}
    prepared = [processor.prepare(MediaItem("image", path, size)) for path in PHOTOGRAPHS]
    here = checkpoint_encoder(checkpoint)
    expected = here.encode(prepared)
    options = ProcessOptions(max_bytes=1 << 22, environment={"FXSPLIT_TEST": "1"})
    with nothing_left():
        encoder = checkpoint_process(checkpoint, options=options)
        assert encoder.row_bytes("image") == here.row_bytes("image")
        encoder.start()
        pid = encoder.pid
        assert pid is not None
        assert b"FXSPLIT_TEST=1" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        os.kill(pid, signal.SIGINT)  # which a terminal sends to both
        for feature, other, item in zip(encoder.encode(prepared), expected, prepared, strict=True):
            assert feature.shape[0] == item.num_tokens
            torch.testing.assert_close(feature, other)
        encoder.close()


# --- programs and their processes


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
