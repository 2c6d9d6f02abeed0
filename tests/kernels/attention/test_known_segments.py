"""Attention over known segments: whatever kernels share them, each segment attends to itself alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fxsplit_encoder.kernels.attention import AttentionShape, KernelChooser, KnownSegments
from fxsplit_encoder.kernels.attention import known_segments as segments
from fxsplit_encoder.kernels.attention.chooser import Measurements, example_lengths, pairs
from fxsplit_encoder.kernels.choice import Pin, choosing, measuring

from .fakes import FakeKernel, FakeMeter, cumulative, fused_qkv, reference

Call = tuple[int, int]


def known(lengths: Sequence[int]) -> KnownSegments:
    cu_seqlens = cumulative(lengths)
    return KnownSegments(cu_seqlens, cu_seqlens.tolist())


def work(shape: AttentionShape) -> int:
    return pairs(example_lengths(shape)[0])


class Device:
    """Where a dense kernel takes half of the packed one's time for segments of 5 and more, and must plan."""

    def __init__(self, dense_us: float = 500.0, packed_us: float = 1000.0) -> None:
        self.packed = FakeKernel("packed")
        self.dense = FakeKernel("dense", dense=True, plans=True)
        meter = FakeMeter(
            {
                "packed": lambda shape: packed_us * work(shape),
                "dense": lambda shape: (dense_us if shape.longest >= 5 else 2 * packed_us) * work(shape),
            }
        )
        self.chooser = KernelChooser(measurements=Measurements([self.packed, self.dense], meter))

    def run(self, lengths: Sequence[int], layers: int = 1, out: Tensor | None = None) -> Tensor:
        values = fused_qkv(sum(lengths), seed=sum(lengths))
        batch = known(lengths)
        with choosing(self.chooser), measuring():
            for _ in range(layers):
                result = batch.attend(*values, 0.5) if out is None else batch.attend_out(*values, 0.5, out)
        return result

    def calls(self) -> tuple[list[Call], list[Call]]:
        """Those of the packed and of the dense kernel since the last time."""
        made = self.packed.calls[:], self.dense.calls[:]
        self.packed.calls.clear()
        self.dense.calls.clear()
        return made


@pytest.fixture(autouse=True)
def no_shape_has_come(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(segments, "_shapes", segments.Shapes())
    yield


@settings(max_examples=60)
@given(st.lists(st.sampled_from([0, 1, 3, 5, 6, 9]), max_size=8), st.booleans())
def test_kernels_that_share_the_segments_equal_one(lengths: list[int], has_come_before: bool) -> None:
    device, rows = Device(), sum(lengths)
    expected = reference(*fused_qkv(rows, seed=rows), lengths, 0.5).float()
    if has_come_before:
        device.run(lengths)
    torch.testing.assert_close(device.run(lengths), expected)
    out = torch.full((rows + 2, *expected.shape[1:]), 7.0)
    assert device.run(lengths, out=out) is out
    torch.testing.assert_close(out[:-2], expected)
    assert out[-2:].eq(7).all()


def test_neighbors_of_one_length_are_one_dense_batch_from_the_second_time_on() -> None:
    device, lengths = Device(), [2, 6, 6, 6, 3, 3, 9]
    device.run(lengths)
    assert device.calls() == ([(7, 9)], [])
    device.run(lengths, layers=2)
    assert device.calls() == ([(1, 2), (2, 3)] * 2, [(3, 6), (1, 9)] * 2)
    device.run([6])
    assert device.calls() == ([(1, 6)], [])  # a batch of one is another shape, and new


@pytest.mark.parametrize(("microseconds", "are_shared"), [(0.2, False), (1000.0, True)])
def test_kernels_share_the_segments_unless_their_calls_cost_the_host_more_than_they_gain(
    microseconds: float, are_shared: bool
) -> None:
    device, lengths = Device(dense_us=0.5 * microseconds, packed_us=microseconds), [6, 6, 2, 7, 7, 2, 9]
    device.run(lengths)
    device.calls()
    device.run(lengths)
    assert bool(device.calls()[1]) == are_shared


def test_only_so_many_shapes_are_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "_MOST_SHAPES", 1)
    device = Device()
    for _ in range(2):
        for length in (6, 7):
            device.run([length])
    assert device.calls() == ([(1, 6), (1, 7), (1, 7)], [(1, 6)])


def test_a_pinned_kernel_needs_no_prediction() -> None:
    device = Device()
    device.chooser.pins = (Pin((), "dense"),)
    batch, values = known([2, 3, 3]), fused_qkv(8)
    for each in (batch, known([2, 3, 3])):
        with choosing(device.chooser):
            each.attend(*values, 0.5)
    assert device.calls() == ([(3, 3)], [(1, 2), (2, 3)])
    device.chooser.pins = (Pin((), "packed"),)
    for _ in range(2):
        device.run([6, 6, 2])
    assert device.calls() == ([(3, 6)] * 2, [])
