from __future__ import annotations

from typing import Any

import pytest
import torch

from fxsplit_encoder.capture.breakable import BreakableCUDAGraphCapture, LiveSegments, SegmentedCapture
from fxsplit_encoder.capture.forward import CapturedForward
from fxsplit_encoder.capture.pool import GraphPool
from fxsplit_encoder.compile.program import Ref
from fxsplit_encoder.errors import CaptureError
from fxsplit_encoder.kernels.attention import KnownSegments, varlen_attention

from .bodies import FakeCuda, FakeStream, body_of, piece, request_of, split


@pytest.fixture
def pool() -> GraphPool:
    return GraphPool(torch.device("cpu"))


def test_a_capture_records_once(pool: GraphPool) -> None:
    with SegmentedCapture(pool) as capture:
        capture.captured(torch.ones, 1)
    with pytest.raises(CaptureError, match="recorded already"), capture:
        pass
    with pytest.raises(ZeroDivisionError), SegmentedCapture(pool) as failed:
        failed.captured(torch.ones, 1)
        raise ZeroDivisionError
    assert failed.segments == []
    with pool.replaying():  # neither is the pool left locked
        pass


@pytest.mark.parametrize(("mode", "graphs", "eager"), [("full", 1, 0), ("piecewise", 2, 1)])
def test_modes_differ_in_where_they_break(pool: GraphPool, mode: str, graphs: int, eager: int) -> None:
    x = torch.randn(6, 2, 4)
    lengths = torch.tensor([0, 6], dtype=torch.int32)
    steps = [
        piece(lambda: (x * 2,), outputs=(0,)),
        split(varlen_attention, [Ref(0), Ref(0), Ref(0), lengths, 6, 0.5], 1),
        piece(lambda t: (t + 1,), [Ref(1)], (2,)),
    ]
    captured = CapturedForward(request_of(body_of(steps, [2]), 6), mode, pool)
    captured.record()
    assert (captured.capture.num_graphs, captured.capture.num_eager_breaks) == (graphs, eager)
    for _ in range(2):
        x.normal_()
        expected = varlen_attention(x * 2, x * 2, x * 2, lengths, 6, 0.5) + 1
        torch.testing.assert_close(captured.replay(debug=True)[0], expected)
    captured.release()
    assert (captured.outputs, captured.capture.segments) == ([], [])


def test_another_splitting_op_keeps_its_results_in_place(pool: GraphPool) -> None:
    x = torch.ones(2)
    steps = [
        split(torch.neg, [x], 0),
        split(torch.frexp, [x], 2),  # its first result
        piece(lambda a, b: (a + b,), [Ref(0), Ref(2)], (3,)),
    ]
    captured = CapturedForward(request_of(body_of(steps, [0, 2, 3]), 2), "piecewise", pool)
    captured.record()
    one, mantissa, last = captured.outputs
    assert captured.capture.num_eager_breaks == 2
    address = one.data_ptr()
    x.copy_(torch.tensor([3.0, 5.0]))
    captured.replay()
    assert one.data_ptr() == address
    assert one.tolist() == [-3.0, -5.0]
    assert mantissa.tolist() == [0.75, 0.625]
    assert last.tolist() == [-2.25, -4.375]


def test_without_a_capture_attention_takes_the_segments_that_the_host_knows() -> None:
    q, lengths = torch.randn(4, 1, 8), torch.tensor([0, 3, 4], dtype=torch.int32)
    unknown = torch.tensor([0, 4], dtype=torch.int32)
    steps = [
        split(varlen_attention, [q, q, q, lengths, 0, 0.5], 0),  # a bound that holds for no segment
        split(varlen_attention, [q, q, q, unknown, 4, 0.5], 1),
        split(torch.neg, [torch.ones(1)], 2),
    ]
    known, whole, negated = body_of(steps, [0, 1, 2])([KnownSegments(lengths, [0, 3, 4])])
    torch.testing.assert_close(known, varlen_attention(q, q, q, lengths, 4, 0.5))
    torch.testing.assert_close(whole, varlen_attention(q, q, q, unknown, 4, 0.5))
    assert negated.item() == -1


def test_live_segments_are_those_of_one_batch() -> None:
    live, captured = LiveSegments(), torch.zeros(5, dtype=torch.int32)
    assert live.of(captured) is None
    known = KnownSegments(captured[:2], [0, 3])
    live.set(4, [known])
    assert live.of(captured) is known
    live.set(None, ())
    assert (live.of(captured), live.rows) == (None, None)


def a_break_there(capture: SegmentedCapture, cuda: FakeCuda) -> None:
    with cuda.entered(FakeStream(cuda, "other")):
        capture.eager(lambda: None)


def a_break_that_leaves_it_current(capture: SegmentedCapture, cuda: FakeCuda) -> None:
    def leave() -> None:
        cuda.current = FakeStream(cuda, "other")

    capture.eager(leave)
    capture.captured(torch.neg, torch.ones(2))


def an_end_there(capture: SegmentedCapture, cuda: FakeCuda) -> None:
    cuda.current = FakeStream(cuda, "other")


@pytest.mark.parametrize("captured", [SegmentedCapture, BreakableCUDAGraphCapture])
@pytest.mark.parametrize("wrong", [a_break_there, a_break_that_leaves_it_current, an_end_there])
def test_another_stream_is_refused_and_the_graph_ends_on_its_own(
    captured: type[SegmentedCapture], wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = FakeCuda(monkeypatch)
    capture = captured(cuda.pool(FakeStream(cuda, "own")))
    with pytest.raises(CaptureError, match="another stream"), capture:
        capture.captured(torch.neg, torch.ones(2))
        wrong(capture, cuda)
    assert cuda.capturing == []
    assert capture.segments == []
