"""Every kernel that is available here against float64, eagerly and captured; and the choice between them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fxsplit_encoder.cli.inspection import class_rows, kernel_rows
from fxsplit_encoder.kernels.attention import (
    KERNELS,
    AttentionKernel,
    AttentionShape,
    KernelChooser,
    KnownSegments,
    dense_attention,
)
from fxsplit_encoder.kernels.attention.builtin import TritonVarlen
from fxsplit_encoder.kernels.attention.chooser import Measurements, choosing, shape_of
from fxsplit_encoder.kernels.attention.flash_attn import WholeWaves, rows_of_whole_waves
from fxsplit_encoder.kernels.attention.op import attend
from fxsplit_encoder.kernels.choice import kept, measuring
from fxsplit_encoder.kernels.kernel import processors, works

from ..kernels.attention.fakes import reference as exact
from .support import captured

pytestmark = pytest.mark.gpu

HEADS = 16
HEAD_DIMS = (64, 72, 80, 88, 128)
RAGGED = [300, 1, 64, 129, 700, 17]
LAYOUTS = {
    "one": [784],
    "equal": [441] * 4,
    "ragged": RAGGED,
    "empty segments": [0, 300, 0, 129, 0, 0],
    "windows": [64] * 30,
    "long": [3136],
}
every_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)


def projection(rows: int, head_dim: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Slices of one projection, laid out as a linear layer leaves it: (tokens, 3 x heads x head_dim)."""
    generator = torch.Generator("cuda").manual_seed(seed)
    fused = torch.randn(rows, 3 * HEADS * head_dim, device="cuda", dtype=torch.bfloat16, generator=generator)
    query, key, value = (part.view(rows, HEADS, head_dim) for part in fused.chunk(3, dim=1))
    return query, key, value


def cumulative(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cuda")


def error(out: Tensor, reference: Tensor) -> float:
    """Root mean square of the difference, relative; not a number if a row was not written."""
    return float((out[: len(reference)].double() - reference).norm() / reference.norm())


def skip_unless_it_works(
    kernel: AttentionKernel, query: Tensor, lengths: Sequence[int], *, host_lengths: bool
) -> None:
    equal = host_lengths and len(set(lengths)) == 1
    shape = shape_of(query, max(lengths), len(lengths), host_lengths=host_lengths, equal=equal)
    skip_unless_it_computes(kernel, shape)


def skip_unless_it_computes(kernel: AttentionKernel, shape: AttentionShape) -> None:
    reason = kernel.unavailable_reason(shape.device)
    if reason is not None or not works(kernel, shape):
        pytest.skip(reason or f"does not compute {shape}")


def fill_memory(rows: int, head_dim: int) -> None:
    """Leaves NaN in the memory that the kernel's output is likely to get."""
    torch.full((rows, HEADS, head_dim), float("nan"), device="cuda", dtype=torch.bfloat16)


@every_kernel
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("layout", LAYOUTS)
@torch.no_grad()
def test_errors_are_those_of_sixteen_bits(kernel: AttentionKernel, head_dim: int, layout: str) -> None:
    lengths = LAYOUTS[layout]
    rows, scale = sum(lengths), head_dim**-0.5
    values = projection(rows, head_dim)
    skip_unless_it_works(kernel, values[0], lengths, host_lengths=True)
    reference = exact(*values, lengths, scale)
    fill_memory(rows, head_dim)
    result = kernel(*values, cumulative(lengths), max(lengths), scale)
    assert result.is_contiguous()
    assert result.dtype == torch.bfloat16
    assert error(result, reference) < 0.005
    out = torch.full((rows + 5, HEADS, head_dim), 7.0, device="cuda", dtype=torch.bfloat16)
    out[:rows] = float("nan")
    assert kernel(*values, cumulative(lengths), max(lengths), scale, out) is out
    assert error(out, reference) < 0.005
    assert out[rows:].eq(7).all()


@every_kernel
@torch.no_grad()
def test_results_are_contiguous_whatever_the_strides_of_the_query(kernel: AttentionKernel) -> None:
    values = [torch.randn(HEADS, 784, 72, device="cuda").bfloat16().transpose(0, 1) for _ in range(3)]
    skip_unless_it_works(kernel, values[0], [784], host_lengths=True)
    result = kernel(*values, cumulative([784]), 784, 0.1)
    assert result.is_contiguous()
    assert error(result, exact(*values, [784], 0.1)) < 0.005


@pytest.mark.parametrize("kernel", [k for k in KERNELS if isinstance(k, TritonVarlen)], ids=lambda k: k.name)
@torch.no_grad()
def test_a_triton_kernel_takes_values_of_any_alignment_in_turn(kernel: TritonVarlen) -> None:
    rows, head_dim = sum(RAGGED), 72
    values = projection(rows, head_dim)
    skip_unless_it_works(kernel, values[0], RAGGED, host_lengths=True)
    reference = exact(*values, RAGGED, 0.1)
    memory = torch.empty(3, rows * HEADS * head_dim + 8, device="cuda", dtype=torch.bfloat16)
    for offset in (0, 1, 8, 0, 1):
        parts = memory[:, offset : offset + rows * HEADS * head_dim].view(3, rows, HEADS, head_dim)
        moved = [part.copy_(value) for part, value in zip(parts, values, strict=True)]
        assert error(kernel(*moved, cumulative(RAGGED), max(RAGGED), 0.1), reference) < 0.005


@every_kernel
@pytest.mark.parametrize("head_dim", [72, 128])
@torch.no_grad()
def test_loose_bounds_and_finite_rows_behind_the_segments_change_nothing(
    kernel: AttentionKernel, head_dim: int
) -> None:
    rows, scale = sum(RAGGED) + 200, 0.1
    values = projection(rows, head_dim)
    padded = [*RAGGED, 0, 0, 0]
    skip_unless_it_works(kernel, values[0], padded, host_lengths=False)
    reference = exact(*values, RAGGED, scale)
    for bound in (max(RAGGED), rows):
        fill_memory(rows, head_dim)
        assert error(kernel(*values, cumulative(padded), bound, scale), reference) < 0.005
    for x in values:
        x[sum(RAGGED) :] *= 100.0
    assert error(kernel(*values, cumulative(padded), rows, scale), reference) < 0.005


@every_kernel
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@torch.no_grad()
def test_a_captured_kernel_reads_the_segments_of_the_replay(kernel: AttentionKernel, head_dim: int) -> None:
    rows, room, scale = 1536, 8, head_dim**-0.5
    static = projection(rows, head_dim)
    skip_unless_it_works(kernel, static[0], [rows] + [0] * (room - 1), host_lengths=False)
    cu_seqlens = cumulative([rows] + [0] * (room - 1))
    graph, out = captured(lambda: kernel(*static, cu_seqlens, rows, scale))
    for seed, lengths in enumerate(([1536], [700, 0, 836], [100] * 8, [1, 1000, 3], [0, 9], [192] * 8)):
        values = projection(rows, head_dim, seed)
        for mine, new in zip(static, values, strict=True):
            mine.copy_(new)
        cu_seqlens.copy_(cumulative([*lengths, *[0] * (room - len(lengths))]))
        out.fill_(float("nan"))
        graph.replay()
        assert error(out, exact(*values, lengths, scale)) < 0.005


@every_kernel
@pytest.mark.parametrize(("tokens", "head_dim"), [(1025, 64), (729, 72), (257, 80)])
@torch.no_grad()
def test_a_batch_in_a_graph(kernel: AttentionKernel, tokens: int, head_dim: int) -> None:
    """Of InternVL, SigLIP and CLIP; the lengths of a larger batch are made after the capture."""
    batch, scale = 3, head_dim**-0.5
    static = projection(batch * tokens, head_dim)
    skip_unless_it_computes(kernel, shape_of(static[0], tokens, batch, equal=True))
    entries = [x.unflatten(0, (batch, tokens)).transpose(1, 2) for x in static]
    graph = torch.cuda.CUDAGraph()
    with choosing(KernelChooser(kernel.name)):
        dense_attention(*entries, scale)
        with torch.cuda.graph(graph):
            out = dense_attention(*entries, scale)
        dense_attention(*(x.repeat(5, 1, 1, 1) for x in entries), scale)
    for seed in range(2):
        values = projection(batch * tokens, head_dim, seed)
        for mine, new in zip(static, values, strict=True):
            mine.copy_(new)
        out.fill_(float("nan"))
        graph.replay()
        attended = out.transpose(1, 2).flatten(0, 1)
        assert error(attended, exact(*values, [tokens] * batch, scale)) < 0.005


@pytest.mark.parametrize("kernel", [k for k in KERNELS if isinstance(k, WholeWaves)], ids=lambda k: k.name)
@pytest.mark.parametrize(
    ("capacity", "head_dim"), [(1764, 72), (3136, 72), (3136, 80), (3200, 64), (3136, 128)]
)
@torch.no_grad()
def test_queries_cut_at_whole_waves(kernel: WholeWaves, capacity: int, head_dim: int) -> None:
    """Lengths around the cut, in turn, in one capture whose memory other work takes as soon as it may."""
    static, scale = projection(capacity, head_dim), head_dim**-0.5
    skip_unless_it_computes(kernel, shape_of(static[0], capacity, 1))
    tile_rows = 128 if head_dim > 96 else 192
    cut = rows_of_whole_waves(capacity, HEADS, tile_rows, processors(static[0].device))
    cu_seqlens = cumulative([capacity])

    def work() -> Tensor:
        kept = kernel(*static, cu_seqlens, capacity, scale).clone()
        for _ in range(3):  # what attention no longer uses
            fill_memory(capacity, head_dim)
            (static[0].float() * float("nan")).bfloat16()
        return kept

    graph, out = captured(work)
    lengths = [capacity, cut, cut - 1, cut + 1, 1, tile_rows, capacity - 1, 1000, capacity]
    for seed, length in enumerate(lengths):
        values = projection(capacity, head_dim, seed)
        for mine, new in zip(static, values, strict=True):
            mine.copy_(new)
        cu_seqlens.copy_(cumulative([length]))
        out.fill_(float("nan"))
        graph.replay()
        assert error(out, exact(*values, [length], scale)) < 0.005, length
    # Outside of a graph, as a warm-up calls it, with the rows behind as they were.
    target = torch.full((capacity + 3, HEADS, head_dim), 7.0, device="cuda", dtype=torch.bfloat16)
    assert kernel(*static, cu_seqlens, capacity, scale, target) is target
    assert error(target, exact(*values, [lengths[-1]], scale)) < 0.005
    assert target[capacity:].eq(7).all()


@pytest.fixture
def measurements(tmp_path: Path) -> Iterator[Measurements]:
    yield Measurements(store=partial(kept, directory=tmp_path))


@pytest.mark.alone
def test_measuring_chooses_per_class_and_says_what_it_found(
    measurements: Measurements, tmp_path: Path
) -> None:
    chooser = KernelChooser(measurements=measurements)
    device = torch.device("cuda", torch.cuda.current_device())
    query = projection(4096, 72)[0]
    with measuring():
        chosen = chooser.of(query, cumulative([4096]), 4096)
        chooser.ranking(shape_of(query, 4096, 1, host_lengths=True, equal=True))
    assert chosen.name in {row["kernel"] for row in kernel_rows(device, chooser) if row["state"] == "works"}
    equal = [row for row in class_rows(device, chooser) if row["shape"].endswith("equal")]
    assert len(equal) == 3
    for each in equal:
        times = each["microseconds"]
        assert {"torch_flash", "batched_dense"} <= times.keys(), each
        assert all(0.5 < microseconds < 1e5 for microseconds in times.values())
        assert times[each["chosen"]] <= min(times.values()) / 0.95
    other = Measurements(store=partial(kept, directory=tmp_path))
    assert other.table(device) == {k: v for k, v in measurements.table(device).items() if v.microseconds}


@pytest.mark.alone
def test_cuts_at_whole_waves_are_measured_for_the_size_itself(measurements: Measurements) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    waves = [kernel for kernel in KERNELS if isinstance(kernel, WholeWaves)]
    if reason := waves[0].unavailable_reason(device):
        pytest.skip(reason)
    chooser = KernelChooser(measurements=measurements)
    query = projection(3136, 80)[0]
    if not works(waves[0], shape_of(query, 3136, 1)):
        pytest.skip("this device has other waves")
    with measuring():
        chooser.of(query, cumulative([3136]), 3136)
    (found,) = class_rows(device, chooser)
    assert "tokens 3136" in found["shape"]
    assert {kernel.name for kernel in waves} <= found["microseconds"].keys(), found


@torch.no_grad()
def test_known_segments_equal_the_packed_kernel(measurements: Measurements) -> None:
    for lengths in ([100, 2048, 2048, 64, 3136, 3000], [2048] * 2):
        boundaries = [0, *itertools.accumulate(lengths)]
        values = projection(boundaries[-1], 72)
        cu_seqlens = cumulative(lengths)
        reference = attend(*values, cu_seqlens, max(lengths), 0.1)
        with choosing(KernelChooser(measurements=measurements)), measuring():
            for _ in range(3):
                known = KnownSegments(cu_seqlens, boundaries)
                torch.testing.assert_close(known.attend(*values, 0.1), reference, rtol=0.02, atol=0.01)


@torch.no_grad()
def test_a_kernel_that_cannot_be_captured_is_rejected_and_leaves_the_device_usable() -> None:
    class Waits(type(KERNELS[0])):  # type: ignore[misc]
        name = "waits"

        def __call__(self, *arguments: Any) -> Tensor:
            torch.cuda.synchronize()
            return super().__call__(*arguments)

    chooser = KernelChooser(measurements=Measurements([KERNELS[0], Waits()]))
    query = projection(512, 64)[0]
    with measuring():
        assert chooser.of(query, cumulative([512]), 512) is KERNELS[0]
    (found,) = chooser.measurements.table(query.device).values()
    assert list(found.rejected) == ["waits"]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        doubled = torch.rand_like(query) * 0 + 2
    graph.replay()
    assert doubled.eq(2).all()
