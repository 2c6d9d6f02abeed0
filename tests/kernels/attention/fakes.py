"""Kernels and a meter that need no device, so that choices are tested for shapes of any device."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

from fxsplit_encoder.kernels.attention import AttentionKernel, AttentionShape
from fxsplit_encoder.kernels.attention.builtin import PerSegment
from fxsplit_encoder.kernels.attention.chooser import AttentionMeter
from fxsplit_encoder.kernels.meter import Measured

CUDA = torch.device("meta")  # any device but the CPU, and none that the tests would touch


def shape(
    tokens: int = 1024,
    longest: int | None = None,
    segments: int = 1,
    *,
    host_lengths: bool = False,
    equal: bool = False,
) -> AttentionShape:
    longest = tokens if longest is None else longest
    return AttentionShape(CUDA, torch.bfloat16, 16, 72, tokens, longest, segments, host_lengths, equal)


shapes = st.builds(
    lambda tokens, longest, segments, host_lengths, equal: (
        shape(longest * segments, longest, segments, host_lengths=True, equal=True)
        if equal
        else shape(tokens, min(tokens, longest), segments, host_lengths=host_lengths)
    ),
    *(st.integers(1, 20_000), st.integers(1, 5000), st.integers(1, 40), st.booleans(), st.booleans()),
)


class FakeKernel(AttentionKernel):
    """Computes as `PerSegment` does, for the shapes that it is told to support."""

    def __init__(
        self,
        name: str,
        supports: Callable[[AttentionShape], bool] = lambda shape: True,
        unavailable: str | None = None,
        *,
        dense: bool = False,
        last_resort: bool = False,
        plans: bool = False,
        change: Callable[[Tensor], Tensor] = lambda out: out,
    ) -> None:
        self.name = name
        self._supports = supports
        self._unavailable = unavailable
        self.needs_equal_segments = dense  # type: ignore[misc]
        self.is_last_resort = last_resort  # type: ignore[misc]
        self.plans_each_shape = plans
        self._change = change
        self.calls: list[tuple[int, int]] = []
        """(segments, longest) of each."""

    def __repr__(self) -> str:
        return self.name

    def unavailable_reason(self, device: torch.device) -> str | None:
        return self._unavailable

    def supports(self, shape: AttentionShape) -> bool:
        return self._supports(shape) and (shape.equal or not self.needs_equal_segments)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, cu: Tensor, longest: int, *rest: Any
    ) -> Tensor:
        self.calls.append((len(cu) - 1, longest))
        scale, target = rest
        if self.needs_equal_segments:  # the lengths, if read at all, may start anywhere
            cu = torch.arange(len(cu)) * (len(query) // (len(cu) - 1))
        elif len(query):
            assert cu[0] == 0
        return self._change(PerSegment()(query, key, value, cu, longest, scale, target))


class FakeFlashAttention:
    """FlashAttention 4's function, as far as it is used: attention by its arguments, noting every call."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        qv: Any = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        seqused_q: Any = None,
        seqused_k: Any = None,
        max_seqlen_q: int = 0,
        max_seqlen_k: int = 0,
        softmax_scale: float = 0.0,
        tile_mn: tuple[int, int] | None = None,
        mma_pv_is_rs: bool | None = None,
        out: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        self.calls.append({"rows": q.shape[0], "tile": tile_mn, "registers": mma_pv_is_rs})
        out = torch.full_like(q, float("nan")) if out is None else out
        assert out.shape == q.shape
        if cu_seqlens_q is None or cu_seqlens_k is None:
            batch = (x.transpose(1, 2) for x in (q, k, v))
            return out.copy_(
                F.scaled_dot_product_attention(*batch, scale=softmax_scale).transpose(1, 2)
            ), None
        assert cu_seqlens_q.shape == cu_seqlens_k.shape
        assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        queries, keys = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
        for entry in range(len(queries) - 1):
            mine, all_keys = slice(*queries[entry : entry + 2]), slice(*keys[entry : entry + 2])
            assert 0 <= mine.start <= mine.stop <= q.shape[0]
            assert mine.stop - mine.start <= max_seqlen_q
            assert all_keys.stop - all_keys.start <= max_seqlen_k
            a, b, c = (x[s].transpose(0, 1) for x, s in ((q, mine), (k, all_keys), (v, all_keys)))
            weights = torch.softmax(a @ b.transpose(1, 2) * softmax_scale, -1)
            out[mine] = (weights @ c).transpose(0, 1)
        return out, None


class Everywhere(AttentionMeter):
    """Measures on a CPU too."""

    def can_measure(self, device: torch.device) -> bool:
        return True


class FakeMeter(Everywhere):
    """Takes times from a table, or from a function of the shape.

    A kernel that is not in the table is rejected.
    """

    def __init__(self, microseconds: dict[str, float | Callable[[AttentionShape], float]]) -> None:
        super().__init__()
        self.microseconds = microseconds
        self.measured: list[tuple[AttentionShape, tuple[str, ...]]] = []

    def measure(self, kernels: Sequence[AttentionKernel], shape: AttentionShape) -> Measured:
        self.measured.append((shape, tuple(kernel.name for kernel in kernels)))
        found = Measured()
        for kernel in kernels:
            time = self.microseconds.get(kernel.name)
            if time is None:
                found.rejected[kernel.name] = "error 1; allowed: 0.1"
            else:
                found.microseconds[kernel.name] = time(shape) if callable(time) else time
        return found


def run_with_triton(code: str, **environment: str) -> None:
    """In a process of its own, in which Triton is imported anew."""
    environment |= {"PYTHONPATH": ":".join(sys.path), "PATH": os.environ.get("PATH", "")}
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def cumulative(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def fused_qkv(
    rows: int, heads: int = 3, head_dim: int = 8, *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value as strided views of one projection, as towers make them."""
    generator = torch.Generator().manual_seed(seed)
    query, key, value = torch.randn(rows, 3, heads, head_dim, generator=generator, dtype=dtype).unbind(1)
    return query, key, value


def reference(query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int], scale: float) -> Tensor:
    """Softmax attention in float64."""
    parts = [query.new_zeros(0, *query.shape[1:]).double()]
    for rows in itertools.starmap(slice, itertools.pairwise([0, *itertools.accumulate(lengths)])):
        q, k, v = (x[rows].double().transpose(0, 1) for x in (query, key, value))
        parts.append((torch.softmax(q @ k.transpose(1, 2) * scale, -1) @ v).transpose(0, 1))
    return torch.cat(parts)


def assert_attends(
    kernel: Callable[..., Tensor],
    values: Sequence[Tensor],
    lengths: Sequence[int],
    longest: int,
    scale: float,
) -> Tensor:
    """A kernel gives the reference: in a tensor of its own, which is contiguous, and in a larger buffer,
    whose later rows it leaves alone. Returns what it made.
    """
    rows, exact = sum(lengths), values[0].dtype == torch.float32
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if exact else {"rtol": 2e-2, "atol": 2e-2}
    expected = reference(*values, lengths, scale)
    cu_seqlens = cumulative(lengths)
    before = cu_seqlens.clone()
    result = kernel(*values, cu_seqlens, longest, scale)
    assert result.is_contiguous() and result.dtype == values[0].dtype
    torch.testing.assert_close(result[:rows].double(), expected, **tolerance)  # type: ignore[arg-type]
    out = torch.full((len(values[0]) + 2, *values[0].shape[1:]), 5.0, dtype=values[0].dtype)
    assert kernel(*values, cu_seqlens, longest, scale, out) is out
    torch.testing.assert_close(out[:rows].double(), expected, **tolerance)  # type: ignore[arg-type]
    assert out[len(values[0]) :].eq(5).all()
    assert torch.equal(cu_seqlens, before)
    return result
