"""`fxsplit::varlen_attention`, at which graphs are split, and `fxsplit::dense_attention` for batches."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from fxsplit_encoder._torch.device import on_device
from fxsplit_encoder._torch.dispatch import define_op
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.kernels.attention.attention_kernel import AttentionKernel, AttentionShape
from fxsplit_encoder.kernels.attention.chooser import current_chooser, shape_of

traced: ContextVar[Callable[[Tensor], None] | None] = ContextVar("fxsplit_encoder_traced", default=None)
"""Called with the query of every traced `varlen_attention`, (tokens, heads, head_dim)."""

# --- what the ops run


def attend(
    query_THD: Tensor,
    key_THD: Tensor,
    value_THD: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    scale: float,
    out_THD: Tensor | None = None,
) -> Tensor:
    """Attends as `AttentionKernel.__call__`; InputError for a query that is not (tokens, heads, head_dim)."""
    _check_rank(query_THD)
    with on_device(query_THD.device):
        kernel = current_chooser().of(query_THD, cu_seqlens, max_seqlen)
        return kernel(query_THD, key_THD, value_THD, cu_seqlens, max_seqlen, scale, out_THD)


def attend_backward(
    grad_THD: Tensor, query_THD: Tensor, key_THD: Tensor, value_THD: Tensor, cu_seqlens: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `attend`, segment by segment: correct, not fast. Rows outside of segments get zero."""
    grads = [torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (query_THD, key_THD, value_THD)]
    boundaries = cu_seqlens.tolist()
    precise = torch.promote_types(query_THD.dtype, torch.float32)
    for start, end in itertools.pairwise(boundaries):
        rows = slice(start, end)
        g, q, k, v = (x[rows].to(precise).transpose(0, 1) for x in (grad_THD, query_THD, key_THD, value_THD))
        weights = torch.softmax(q @ k.transpose(1, 2) * scale, dim=-1)
        grad_weights = g @ v.transpose(1, 2)
        grad_logits = weights * (grad_weights - (grad_weights * weights).sum(-1, keepdim=True)) * scale
        results = (grad_logits @ k, grad_logits.transpose(1, 2) @ q, weights.transpose(1, 2) @ g)
        for grad, result in zip(grads, results, strict=True):
            grad[rows] = result.transpose(0, 1)
    return grads[0], grads[1], grads[2]


def _check_rank(query: Tensor) -> None:
    if query.dim() != 3:
        raise InputError(
            "fxsplit::varlen_attention: query: expected (tokens, heads, head_dim), got "
            f"{tuple(query.shape)}; join a batch with its tokens: query.flatten(0, 1)"
        )


# --- batches


def attend_dense(query_BHTD: Tensor, key_BHTD: Tensor, value_BHTD: Tensor, scale: float) -> Tensor:
    """Attends within each entry of a batch, (batch, heads, tokens, head_dim), stored token by token."""
    batch, heads, tokens, head_dim = query_BHTD.shape
    q_THD, k_THD, v_THD = (x.transpose(1, 2).flatten(0, 1) for x in (query_BHTD, key_BHTD, value_BHTD))
    lengths = _equal_lengths.of(batch, tokens, query_BHTD.device)
    with on_device(q_THD.device):
        kernel = current_chooser().of(q_THD, lengths, tokens, equal=True)
        out_THD = kernel(q_THD, k_THD, v_THD, lengths, tokens, scale)
    return out_THD.view(batch, tokens, heads, head_dim).transpose(1, 2)


class EqualLengths:
    """Cumulative lengths 0, tokens, 2 * tokens, ..., parts of tensors whose addresses graphs may hold."""

    def __init__(self) -> None:
        self.made: dict[tuple[int, torch.device], list[Tensor]] = {}
        self._lock = threading.Lock()

    def of(self, batch: int, tokens: int, device: torch.device) -> Tensor:
        """Returns the cumulative lengths of `batch` segments of so many tokens."""
        made = self.made.get((tokens, device))
        if made is None or made[-1].shape[0] <= batch:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                # The memory belongs to that graph, which makes them at every replay.
                return torch.arange(batch + 1, dtype=torch.int32, device=device) * tokens
            with self._lock:
                made = self.made.setdefault((tokens, device), [])
                if not made or made[-1].shape[0] <= batch:
                    entries = torch.arange((1 << batch.bit_length()) + 1, dtype=torch.int32, device="cpu")
                    # From the host, which waits: other streams may read it at once.
                    made.append((entries * tokens).to(device))
        return made[-1][: batch + 1]


_equal_lengths = EqualLengths()


# --- segments whose lengths the host knows: equal ones may be a batch for a dense kernel

# cuDNN plans each shape when it is first used, which takes it 35 ms, once per thread. A shape is worth
# that when it recurs; this many are remembered.
_MOST_SHAPES = 512


class KnownSegments:
    """Cumulative lengths, (segments + 1,) int32 on the device, and the same `boundaries` on the host."""

    def __init__(self, cu_seqlens: Tensor, boundaries: Sequence[int]) -> None:
        self.cu_seqlens = cu_seqlens
        self.boundaries = boundaries
        self._end = boundaries[-1]
        lengths = [end - start for start, end in itertools.pairwise(boundaries)]
        self._longest = max(lengths, default=0)
        self._are_equal = len(set(lengths)) == 1
        self._kernel: AttentionKernel | None = None

    def attend(self, query_THD: Tensor, key_THD: Tensor, value_THD: Tensor, scale: float) -> Tensor:
        """Attends as the function `attend`."""
        if 0 < self._end == query_THD.shape[0]:
            kernel = self._kernel or self._choose(query_THD)
            return kernel(query_THD, key_THD, value_THD, self.cu_seqlens, self._longest, scale)
        out_THD = torch.empty(query_THD.shape, dtype=query_THD.dtype, device=query_THD.device)
        return self.attend_out(query_THD, key_THD, value_THD, scale, out_THD)

    def attend_out(
        self, query_THD: Tensor, key_THD: Tensor, value_THD: Tensor, scale: float, out_THD: Tensor
    ) -> Tensor:
        """Attends into `out_THD`, which has at least `tokens` rows and keeps the later ones. Returns it."""
        values = (query_THD, key_THD, value_THD)
        if self._end != query_THD.shape[0]:  # every view costs the host a microsecond or two per layer
            values = (query_THD[: self._end], key_THD[: self._end], value_THD[: self._end])
        if self._end:
            kernel = self._kernel or self._choose(values[0])
            kernel(*values, self.cu_seqlens, self._longest, scale, out_THD)
        return out_THD

    def _choose(self, query: Tensor) -> AttentionKernel:
        segments = self.cu_seqlens.shape[0] - 1
        shape = shape_of(query, self._longest, segments, host_lengths=True, equal=self._are_equal)
        ranking = current_chooser().ranking(shape)
        ready = (k for k in ranking if not k.plans_each_shape or _shapes.is_worth_planning(k, shape))
        self._kernel = next(ready, ranking[0])
        return self._kernel


class Shapes(threading.local):
    """The shapes that this thread has met; plans belong to threads too."""

    def __init__(self) -> None:
        self._met: Counter[tuple[str, AttentionShape]] = Counter()

    def is_worth_planning(self, kernel: AttentionKernel, shape: AttentionShape) -> bool:
        """Counts the shape; returns whether it has come before."""
        key = (kernel.name, shape)
        if key in self._met or len(self._met) < _MOST_SHAPES:
            self._met[key] += 1
        return self._met[key] > 1


_shapes = Shapes()


# --- their registration


def _fake(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float
) -> Tensor:
    _check_rank(query)
    if (tell := traced.get()) is not None:
        tell(query)
    return torch.empty(query.shape, dtype=query.dtype, device=query.device)


def _fake_dense(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    return torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)


def _fake_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, scale: float
) -> tuple[Tensor, ...]:
    return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key, value))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    query, key, value, cu_seqlens, _, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, cu_seqlens)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return (*_attention_backward(grad, *ctx.saved_tensors, ctx.scale), None, None, None)


varlen_attention = define_op(
    "varlen_attention(Tensor query, Tensor key, Tensor value, Tensor cu_seqlens, SymInt max_seqlen, "
    "float scale) -> Tensor",
    dict.fromkeys(("CPU", "CUDA"), attend),
    _fake,
    backward=_backward,
    setup_context=_setup_context,
)
# An op too, so that tracing a backward does not read the boundaries.
_attention_backward = define_op(
    "attention_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor cu_seqlens, float scale)"
    " -> (Tensor, Tensor, Tensor)",
    dict.fromkeys(("CPU", "CUDA"), attend_backward),
    _fake_backward,
)
# Of a compiled graph alone, which knows no gradients.
dense_attention = define_op(
    "dense_attention(Tensor query, Tensor key, Tensor value, float scale) -> Tensor",
    dict.fromkeys(("CPU", "CUDA"), attend_dense),
    _fake_dense,
)
