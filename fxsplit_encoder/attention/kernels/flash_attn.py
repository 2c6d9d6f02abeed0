"""FlashAttention 4, the package `flash-attn-4`."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from fxsplit_encoder.attention.kernels import ahead
from fxsplit_encoder.attention.kernels.base import AttentionShape, HalfPrecisionKernel, as_batch
from fxsplit_encoder.attention.kernels.flash_cache import switch_on
from fxsplit_encoder.kernels.base import capability

_HOPPER = 9


@functools.cache
def _ignores_bounds(device: torch.device) -> bool:
    """Whether no code for this device reads the bound of the queries: on Hopper. It decides nothing there but
    the name under which the package looks for what it compiled, which is another for segments of one tile, so
    that each variant would be compiled twice (`is_static_persistent` of flash-attn-4 4.0.0b36). Where nothing
    is launched, as in a process that compiles ahead, there is no device to ask.
    """
    return device.type == "cuda" and torch.cuda.is_available() and capability(device)[0] == _HOPPER


@functools.cache
def _ignore_warning() -> None:
    """Ignores one warning of CuTe DSL's for good: nothing is to be done about it, and to ignore it within a
    call would change the filters of other threads too. Its compiler says of every variant of the package
    that it passes an object of a class of its own.
    """
    message = r"Argument aux_data \(position \d+\) cannot be converted to a JitArgument"
    warnings.filterwarnings("ignore", message, UserWarning, r"cutlass\.base_dsl")


class FlashAttention4(HalfPrecisionKernel):
    """`flash-attn-4`: compiled when first called, once for each variant that a shape may need.

    Its call costs the host of an H200 80 to 100 microseconds, whatever the variant
    (benchmarks/results/attention.json): variants, which win by less, are for graphs alone.

    Args:
        tile: queries and keys of a step, on Hopper; None: the package's own choice, which is made for long
            segments.
        up_to: segments for which these tiles may be faster are at most so long, in tokens; None: any. What
            cannot win is neither compiled nor measured.
        probabilities_in_registers: whether the second product takes them from there rather than from shared
            memory; None: the package's own choice, which depends on head_dim alone.
    """

    module = "flash_attn.cute.interface"
    # The public function has no way to say where to write; torch's own adapter calls this one too.
    attribute = "_flash_attn_fwd"
    max_head_dim = 128
    suffix: ClassVar[str] = ""

    def __init__(
        self,
        tile: tuple[int, int] | None = None,
        *,
        up_to: int | None = None,
        probabilities_in_registers: bool | None = None,
    ) -> None:
        self.up_to = up_to
        self.name = "flash_attn_4" + (f"_{tile[0]}x{tile[1]}" if tile else "") + self.suffix
        self.in_graphs_alone = tile is not None or self.needs_equal_segments
        self.architectures = (9, 10, 11) if tile is None else (9,)
        self.is_invariant = tile is None and not self.needs_equal_segments
        self._variant: dict[str, Any] = {"tile_mn": tile, "mma_pv_is_rs": probabilities_in_registers}

    @property
    def is_awaited(self) -> bool:
        """Whether its next call waits for the processes that compile ahead."""
        return ahead.is_running()

    def package_problem(self, device: torch.device) -> str | None:
        """Why its package cannot be used; its cache is switched on before it is imported."""
        switch_on()
        _ignore_warning()
        return super().package_problem(device)

    def is_invariant_on(self, device: torch.device) -> bool:
        """On Hopper, where the tile follows from head_dim; on Blackwell the longest segment decides how many
        tiles of queries a block takes.
        """
        return self.is_invariant and capability(device)[0] == _HOPPER

    def supports(self, shape: AttentionShape) -> bool:
        """Segments that are not too long for its tiles; of the variants, in graphs."""
        if self.in_graphs_alone and shape.host_lengths:
            return False
        return super().supports(shape) and (self.up_to is None or shape.longest <= self.up_to)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        scale: float,
        target: Tensor | None,
    ) -> Tensor:
        lengths = (cu_seqlens, cu_seqlens, max_seqlen)
        return self._packed(query, key, value, lengths, scale, target, self._variant)

    def _packed(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        lengths: tuple[Tensor, Tensor, int],
        scale: float,
        target: Tensor | None,
        variant: Mapping[str, Any],
    ) -> Tensor:
        """A call of the package's function.

        Args:
            lengths: cumulative lengths of the queries and of the keys, and the bound of both.
            variant: the arguments that choose how it computes; none: the package chooses.
        """
        cu_queries, cu_keys, max_seqlen = lengths
        if ahead.is_running():
            ahead.wait()
        result: Tensor = self.function(
            query,
            key,
            value,
            cu_seqlens_q=cu_queries,
            cu_seqlens_k=cu_keys,
            max_seqlen_q=None if _ignores_bounds(query.device) else max_seqlen,
            max_seqlen_k=max_seqlen,
            softmax_scale=scale,
            out=target,
            **variant,
        )[0]
        return result if target is None else target


class DenseFlashAttention4(FlashAttention4):
    """The same kernels over a batch: they look for no segments, and know how many tiles each one has."""

    needs_equal_segments = True
    suffix = "_dense"

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        scale: float,
        target: Tensor | None,
    ) -> Tensor:
        count = cu_seqlens.shape[0] - 1
        q, k, v = (as_batch(tensor, count).transpose(1, 2) for tensor in (query, key, value))
        out = None if target is None else target.view(q.shape)
        if ahead.is_running():
            ahead.wait()
        result: Tensor = self.function(q, k, v, softmax_scale=scale, out=out, **self._variant)[0]
        return result.view(query.shape) if target is None else target
