"""Branches, with streams that only take notes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from fxsplit_encoder._torch import streams as streams_module
from fxsplit_encoder._torch.streams import Branch

GPU = torch.device("cuda", 0)


class FakeStreams:
    """Stands for `torch.cuda` and a GPU's streams: who waited for whom is noted."""

    def __init__(self) -> None:
        self.current = FakeStream(self, 0, priority=-1)
        self.waits: list[tuple[int, int]] = []

    def sibling(self, main: FakeStream, purpose: str) -> FakeStream:
        return FakeStream(self, 7, main.priority)

    @contextmanager
    def entered(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


class FakeStream:
    def __init__(self, streams: FakeStreams, handle: int, priority: int) -> None:
        self._streams, self.cuda_stream, self.priority, self.device = streams, handle, priority, GPU

    def wait_stream(self, other: FakeStream) -> None:
        self._streams.waits.append((self.cuda_stream, other.cuda_stream))


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> FakeStreams:
    fakes = FakeStreams()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: fakes.current)
    monkeypatch.setattr(torch.cuda, "stream", fakes.entered)
    monkeypatch.setattr(streams_module, "capture_streams", lambda device: fakes)
    return fakes


def test_a_branch_waits_at_its_fork_and_is_waited_for_at_its_join(streams: FakeStreams) -> None:
    branch = Branch(GPU, "waits")
    assert streams.waits == []
    branch.fork()
    assert streams.waits == [(7, 0)]
    with branch:
        assert streams.current.cuda_stream == 7
    assert streams.current.cuda_stream == 0
    branch.join()
    assert streams.waits == [(7, 0), (0, 7)]


def test_on_a_cpu_there_is_nothing_to_fork() -> None:
    branch = Branch(torch.device("cpu"), "test")
    branch.fork()
    with branch:
        pass
    branch.join()
