"""FlashAttention: generation 4 of the package `flash-attn-4`, and vLLM's build of 2 and 3."""

from __future__ import annotations

import functools
import importlib.util
import sys
import types
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from fxsplit_encoder._torch.streams import Branch
from fxsplit_encoder.kernels import compile_jobs
from fxsplit_encoder.kernels.attention.attention_kernel import (
    AttentionShape,
    HalfPrecisionKernel,
    Target,
    as_batch,
)
from fxsplit_encoder.kernels.kernel import capability, find, processors

_HOPPER = 9


@functools.cache
def ignores_bounds(device: torch.device) -> bool:
    """Whether FlashAttention 4 computes the same without the bound of the queries."""
    # On Hopper the bound of the queries decides only the name in the package's cache, by which each variant
    # would be compiled twice (`is_static_persistent` of 4.0.0b36).
    return device.type == "cuda" and torch.cuda.is_available() and capability(device)[0] == _HOPPER


@functools.cache
def ignore_warning() -> None:
    """Filters the warning of CuTe DSL's compiler, once a process."""
    # CuTe DSL's compiler gives it for every variant. Filters that change in a call change for other threads.
    message = r"Argument aux_data \(position \d+\) cannot be converted to a JitArgument"
    warnings.filterwarnings("ignore", message, UserWarning, r"cutlass\.base_dsl")


class FlashAttention4(HalfPrecisionKernel):
    """`flash-attn-4`, compiled when first called, once for each variant that a shape may need. A call costs
    the host of an H200 80 to 100 microseconds, more than variants win, so these are for graphs alone.

    Args:
        tile: queries and keys of a step, on Hopper; None: the package's own choice, made for long segments.
        up_to: tokens of the longest segment for which these tiles may be faster; None: any.
        probabilities_in_registers: else in shared memory; None: the package's own choice, by head_dim.
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
        """Whether compile jobs run, for which its next call waits."""
        return compile_jobs.is_running()

    def package_problem(self, device: torch.device) -> str | None:
        """Why its package cannot be used; switches on its cache before it is imported."""
        compile_jobs.keep_flash_attention()
        ignore_warning()
        return super().package_problem(device)

    def is_invariant_on(self, device: torch.device) -> bool:
        """On Hopper; on Blackwell the longest segment decides how many tiles a block takes."""
        return self.is_invariant and capability(device)[0] == _HOPPER

    def supports(self, shape: AttentionShape) -> bool:
        """Segments that are not too long for the tiles; variants in graphs alone."""
        if self.in_graphs_alone and shape.host_lengths:
            return False
        return super().supports(shape) and (self.up_to is None or shape.longest <= self.up_to)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float, into: Target
    ) -> Tensor:
        return self._packed(q, k, v, (cu_seqlens, cu_seqlens, max_seqlen), scale, into, self._variant)

    def _packed(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lengths: tuple[Tensor, Tensor, int],
        scale: float,
        into: Target,
        variant: Mapping[str, Any],
    ) -> Tensor:
        # `lengths` are the cumulative lengths of queries and keys, and the bound of both.
        cu_queries, cu_keys, max_seqlen = lengths
        compile_jobs.wait()
        result: Tensor = self.function(
            q,
            k,
            v,
            cu_seqlens_q=cu_queries,
            cu_seqlens_k=cu_keys,
            max_seqlen_q=None if ignores_bounds(q.device) else max_seqlen,
            max_seqlen_k=max_seqlen,
            softmax_scale=scale,
            out=into,
            **variant,
        )[0]
        return result if into is None else into


class DenseFlashAttention4(FlashAttention4):
    """The same kernels over a batch, without a search for segments."""

    needs_equal_segments = True
    suffix = "_dense"

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float, into: Target
    ) -> Tensor:
        count = cu_seqlens.shape[0] - 1
        batch = [as_batch(tensor, count).transpose(1, 2) for tensor in (q, k, v)]
        out = None if into is None else into.view(batch[0].shape)
        compile_jobs.wait()
        result: Tensor = self.function(*batch, softmax_scale=scale, out=out, **self._variant)[0]
        return result.view(q.shape) if into is None else into


# --- one long segment, cut at whole waves
#
# A tile of queries of a head is a block, and a multiprocessor of Hopper holds one block of the large tiles at
# a time. So 3136 tokens of 16 heads are 272 blocks: two waves of 132 and a third of 8. Cut, 3072 queries fill
# two waves less 8 blocks, and the other 64 go to smaller tiles at the same time.

# Queries of the tile that the package takes for itself on Hopper, by the widest heads that get it
# (`_tile_size_fwd_sm90` of flash-attn-4 4.0.0b36). Were it another, cuts would be off whole waves, and lose
# when they are measured.
_OWN_ROWS = ((96, 192), (128, 128))

# What lets the package choose.
_OWN: Mapping[str, Any] = {}

# After more whole waves a nearly empty one is a small part of the time: such segments are not cut.
_MOST_WAVES = 4

# The same where more than this part of the last wave is full. On an H200, with 16 heads of 80, 0.67 of it, at
# 4096 tokens, left 4 % to gain; 0.06, at 3136, left 22 %.
_FULLEST_LAST_WAVE = 0.5


def rows_of_whole_waves(rows: int, heads: int, tile_rows: int, processors: int) -> int:
    """The first queries of a segment whose tiles, one a multiprocessor, fill about whole waves; 0: no cut."""
    if not processors:
        return 0
    waves, last = divmod(-(-rows // tile_rows) * heads, processors)
    cut = waves * processors // heads * tile_rows
    pays = 1 <= waves <= _MOST_WAVES and last <= _FULLEST_LAST_WAVE * processors
    return cut if pays and cut < rows else 0


class WholeWaves(FlashAttention4):
    """The queries that fill whole waves by the package's own tiles, the rest by a smaller `tile` on a side
    stream. Only for one segment: waves of several cannot be counted ahead.
    """

    depends_on_tokens = True

    def __init__(self, tile: tuple[int, int], *, probabilities_in_registers: bool | None = None) -> None:
        super().__init__(tile, probabilities_in_registers=probabilities_in_registers)
        self.name = f"flash_attn_4_waves_{tile[0]}x{tile[1]}"

    def supports(self, shape: AttentionShape) -> bool:
        """One segment, in graphs, that is some whole waves long and a part of one."""
        return (
            super().supports(shape)
            and shape.segments == 1
            and self._cut(shape.tokens, shape.heads, shape.head_dim, shape.device) > 0
        )

    def _cut(self, rows: int, heads: int, head_dim: int, device: torch.device) -> int:
        tile_rows = next((own for widest, own in _OWN_ROWS if head_dim <= widest), None)
        return 0 if tile_rows is None else rows_of_whole_waves(rows, heads, tile_rows, processors(device))

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float, into: Target
    ) -> Tensor:
        rows, heads, head_dim = q.shape
        cut = self._cut(rows, heads, head_dim, q.device)
        if not cut:  # a call that is pinned, or of another size than what was measured
            return self._packed(q, k, v, (cu_seqlens, cu_seqlens, max_seqlen), scale, into, _OWN)
        # Made here: memory of the side stream could be given to this one while it is in use.
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if into is None else into
        first = cu_seqlens.clamp(max=cut)
        rest = torch.empty_like(first)
        branch = Branch(q.device, "attention")
        branch.fork()
        # The large part first: its blocks should be the ones that get free multiprocessors.
        self._packed(q[:cut], k, v, (first, cu_seqlens, max_seqlen), scale, out[:cut], _OWN)
        with branch.entered():
            torch.sub(cu_seqlens, first, out=rest)
            self._packed(q[cut:], k, v, (rest, cu_seqlens, max_seqlen), scale, out[cut:], self._variant)
        branch.join()
        return out


# --- vLLM's build: generation 3 on Hopper, 2 elsewhere

VLLM_ALIAS = "fxsplit_encoder_vllm_flash_attn"


class VllmFlashAttention(HalfPrecisionKernel):
    """`vllm.vllm_flash_attn`, without importing the rest of vLLM, which changes settings of torch."""

    name = "vllm_flash_attn"
    architectures = (8, 9)

    def package_problem(self, device: torch.device) -> str | None:
        """Why vLLM's extension for this device is missing."""
        return vllm_function(_vllm_version(device))[1]

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float, into: Target
    ) -> Tensor:
        version = _vllm_version(q.device)
        result: Tensor = vllm_function(version)[0](
            q,
            k,
            v,
            max_seqlen_q=max_seqlen,
            cu_seqlens_q=cu_seqlens,
            max_seqlen_k=max_seqlen,
            cu_seqlens_k=cu_seqlens,
            softmax_scale=scale,
            out=into,
            fa_version=version,
        )
        return result if into is None else into


def _vllm_version(device: torch.device) -> int:
    return 3 if capability(device)[0] == 9 else 2


@functools.cache
def vllm_function(version: int) -> tuple[Any, str | None]:
    """Returns FlashAttention as vLLM compiled it, or None and why there is none."""
    package = "vllm.vllm_flash_attn" if "vllm" in sys.modules else _vllm_alias()
    if package is None:
        return None, "vllm is not installed"
    interface = f"{package}.flash_attn_interface"
    function, problem = find(interface, "flash_attn_varlen_func")
    if problem is None and not find(interface, f"FA{version}_AVAILABLE")[0]:
        reason = find(interface, f"FA{version}_UNAVAILABLE_REASON")[0]
        problem = f"vllm has no FlashAttention {version}: {reason}"
    return function, problem


def _vllm_alias() -> str | None:
    """vLLM's directory as a package of another name, so that `vllm` itself is not imported."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return None
    package = types.ModuleType(VLLM_ALIAS)
    package.__path__ = [str(Path(spec.submodule_search_locations[0]) / "vllm_flash_attn")]
    sys.modules[VLLM_ALIAS] = package
    return VLLM_ALIAS
