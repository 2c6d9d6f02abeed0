"""Branches, with streams that only take notes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from fxsplit_encoder._torch.device import Branch

GPU = torch.device("cuda", 0)


class FakeStreams:
    """Stands for `torch.cuda`: a stream's handle is its number, and who waited for whom is noted."""

    def __init__(self) -> None:
        self.current = FakeStream(self, 0, priority=-1)
        self.made: list[FakeStream] = []
        self.waits: list[tuple[int, int]] = []
        self.handles = [0, 7, 8, 9]
        """Of the streams that are made, in turn: the first is the main stream's own."""

    def make(self, device: torch.device, priority: int) -> FakeStream:
        stream = FakeStream(self, self.handles[len(self.made) % len(self.handles)], priority)
        self.made.append(stream)
        return stream

    @contextmanager
    def entered(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


class FakeStream:
    def __init__(self, streams: FakeStreams, handle: int, priority: int) -> None:
        self._streams, self.cuda_stream, self.priority = streams, handle, priority

    def wait_stream(self, other: FakeStream) -> None:
        self._streams.waits.append((self.cuda_stream, other.cuda_stream))


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> FakeStreams:
    fakes = FakeStreams()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: fakes.current)
    monkeypatch.setattr(torch.cuda, "Stream", fakes.make)
    monkeypatch.setattr(torch.cuda, "stream", fakes.entered)
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


def test_a_branch_is_left_where_work_on_it_fails(
    streams: FakeStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Entered:
        def __enter__(self) -> None:
            pass

        def __exit__(self, kind: Any, *rest: Any) -> None:
            left.append(kind)

    left: list[Any] = []
    branch = Branch(GPU, "fails")
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: Entered())
    with pytest.raises(RuntimeError), branch:
        raise RuntimeError
    assert left == [RuntimeError]


def test_each_stream_has_one_sibling_a_purpose_as_urgent_as_itself(streams: FakeStreams) -> None:
    for purpose in ("attention", "attention", "steps"):
        Branch(GPU, purpose).fork()
    # The first that was made was the main stream itself, and was not taken.
    assert [stream.cuda_stream for stream in streams.made] == [0, 7, 8]
    assert streams.waits == [(7, 0), (7, 0), (8, 0)]
    assert {stream.priority for stream in streams.made} == {-1}
    streams.current = FakeStream(streams, 3, priority=0)
    Branch(GPU, "attention").fork()
    assert streams.waits[3:] == [(9, 3)]
    assert streams.made[-1].priority == 0


def test_on_a_cpu_there_is_nothing_to_fork() -> None:
    branch = Branch(torch.device("cpu"), "test")
    branch.fork()
    with branch:
        pass
    branch.join()
