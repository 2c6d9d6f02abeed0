"""Attention over known segments: whatever kernel takes them, each segment attends to itself alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fxsplit_encoder.kernels.attention import KernelChooser, KnownSegments, builtin, op
from fxsplit_encoder.kernels.attention.chooser import Measurements, choosing
from fxsplit_encoder.kernels.attention.op import attend
from fxsplit_encoder.kernels.choice import measuring

from .fakes import FakeKernel, FakeMeter, cumulative, fused_qkv, reference

Call = tuple[int, int]


def known(lengths: Sequence[int]) -> KnownSegments:
    cu_seqlens = cumulative(lengths)
    return KnownSegments(cu_seqlens, cu_seqlens.tolist())


class Device:
    """Where a dense kernel, which must plan, takes half of the packed one's time."""

    def __init__(self) -> None:
        self.packed = FakeKernel("packed")
        self.dense = FakeKernel("dense", dense=True, plans=True)
        meter = FakeMeter({"packed": lambda shape: 10.0, "dense": lambda shape: 5.0})
        self.measurements = Measurements([self.packed, self.dense], meter)
        self.chooser = KernelChooser(measurements=self.measurements)

    def run(
        self, lengths: Sequence[int], layers: int = 1, padding: int = 0, out: Tensor | None = None
    ) -> Tensor:
        values = fused_qkv(sum(lengths) + padding, seed=sum(lengths))
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
    monkeypatch.setattr(op, "_shapes", op.Shapes())
    yield


@settings(max_examples=60)
@given(
    st.one_of(
        st.lists(st.sampled_from([0, 1, 5, 6]), max_size=5), st.integers(1, 4).map(lambda count: [3] * count)
    ),
    st.sampled_from([0, 2]),
    st.booleans(),
)
def test_each_segment_attends_to_itself_and_rows_outside_stay(
    lengths: list[int], padding: int, has_come_before: bool
) -> None:
    device, rows = Device(), sum(lengths)
    expected = reference(*fused_qkv(rows + padding, seed=rows), lengths, 0.5).float()[:rows]
    if has_come_before:
        device.run(lengths, padding=padding)
    torch.testing.assert_close(device.run(lengths, padding=padding)[:rows], expected)
    out = torch.full((rows + padding + 2, *expected.shape[1:]), 7.0)
    assert device.run(lengths, padding=padding, out=out) is out
    torch.testing.assert_close(out[:rows], expected)
    assert out[rows:].eq(7).all()


def test_segments_of_one_length_are_one_dense_batch_from_the_second_time_on() -> None:
    device = Device()
    device.run([6, 6, 6])
    assert device.calls() == ([(3, 6)], [])
    device.run([6, 6, 6], layers=2)
    assert device.calls() == ([], [(3, 6)] * 2)
    device.run([6])
    assert device.calls() == ([(1, 6)], [])  # a batch of one is another shape, and new
    for _ in range(2):
        device.run([6, 6, 5])
    assert device.calls() == ([(3, 6)] * 2, [])


def test_only_so_many_shapes_are_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "_MOST_SHAPES", 1)
    device = Device()
    for _ in range(2):
        for length in (6, 7):
            device.run([length])
    assert device.calls() == ([(1, 6), (1, 7), (1, 7)], [(1, 6)])


def test_a_pinned_kernel_is_taken_where_it_works() -> None:
    device = Device()
    device.chooser = KernelChooser("dense", device.measurements)
    for lengths in ([3, 3], [2, 3, 3], [3, 3]):
        device.run(lengths)
    assert device.calls() == ([(2, 3), (3, 3)], [(2, 3)])
    device.chooser = KernelChooser("packed", device.measurements)
    device.run([3, 3])
    assert device.calls() == ([(2, 3)], [])


@pytest.mark.parametrize("lengths", [[6, 6, 2], [7, 7], [14], [0, 14, 0]])
def test_on_a_cpu_all_segments_are_one_run(lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    values, batch = fused_qkv(14), known(lengths)
    expected = attend(*values, cumulative(lengths), max(lengths), 0.5)
    runs, by_segment = list[int](), builtin.attend_by_segment
    monkeypatch.setattr(
        builtin, "attend_by_segment", lambda q, *rest: runs.append(len(q)) or by_segment(q, *rest)
    )
    torch.testing.assert_close(batch.attend(*values, 0.5), expected, rtol=0, atol=0)
    assert runs == [14]
