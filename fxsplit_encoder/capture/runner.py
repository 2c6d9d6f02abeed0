"""How a program's steps are recorded: pieces into graphs, splitting ops into them too, or between them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fxsplit_encoder.attention import attend_out, varlen_attention
from fxsplit_encoder.compile.program import DirectRunner

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import Tensor

    from fxsplit_encoder.attention import KnownSegments
    from fxsplit_encoder.capture.segmented import SegmentedCapture
    from fxsplit_encoder.compile import Step


class LiveSegments:
    """The true segments of the batch that runs, by the addresses of its cumulative lengths; eager attention
    steps read them at every replay.
    """

    def __init__(self, rows: int | None = None, segments: Iterable[KnownSegments] = ()) -> None:
        self.set(rows, segments)

    def clear(self) -> None:
        """Forgets the batch: all captured rows count as real."""
        self.set(None, ())

    def set(self, rows: int | None, segments: Iterable[KnownSegments]) -> None:
        """The batch's real rows (None: all that are captured) and its segments."""
        self.rows = rows
        self._by_address = {each.cu_seqlens.data_ptr(): each for each in segments}

    def of(self, cu_seqlens: Tensor) -> KnownSegments | None:
        """The segments behind captured cumulative lengths; None where nothing is known."""
        return self._by_address.get(cu_seqlens.data_ptr())


class ExactRunner(DirectRunner):
    """Runs at the exact shape, with the batch's own segments in place of the traced bound.

    The bound that a trace carries is often the token count: right for every batch, but FlashAttention 2
    launches blocks for it.

    Args:
        segments: those that attention reads and the host knows.
    """

    def __init__(self, segments: Iterable[KnownSegments]) -> None:
        self.live = LiveSegments(None, segments)

    def run_split(self, step: Step, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Calls the op; attention on the batch's own segments."""
        if step.call is varlen_attention:
            query, key, value, cu_seqlens, _, scale = args
            known = self.live.of(cu_seqlens)
            if known is not None:
                return known.attend(query, key, value, scale)
        return step.call(*args, **kwargs)


class RecordingRunner:
    """Runs a region's steps inside a `SegmentedCapture`."""

    def __init__(self, capture: SegmentedCapture, *, breaks: bool, live: LiveSegments) -> None:
        self.capture = capture
        self.breaks = breaks
        self.live = live
        self._outputs = _OutputBuffers()

    def run_piece(self, step: Step, args: Sequence[Any]) -> Any:
        """Records the piece into the running graph."""
        results = self.capture.captured(step.call, *args)
        self._outputs.release(step, results)
        return results

    def run_split(self, step: Step, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Records the op into the running graph, or breaks the graph there."""
        if not self.breaks:
            return self.capture.captured(step.call, *args, **kwargs)
        if step.call is varlen_attention:
            return self._break_at_attention(step, args)
        return self._break_at_op(step, args, kwargs)

    def _break_at_attention(self, step: Step, args: Sequence[Any]) -> Tensor:
        query, key, value = (self._borrowed(tensor) for tensor in args[:3])
        cu_seqlens, max_seqlen, scale = args[3:]
        out = self._outputs.acquire(step, query)
        live, captured_rows = self.live, query.shape[0]

        def attend_to_real_rows() -> None:
            known, rows = live.of(cu_seqlens), live.rows
            real = slice(captured_rows if rows is None else rows)
            if known is None:
                attend_out(query[real], key[real], value[real], cu_seqlens, max_seqlen, scale, out)
            else:
                known.attend_out(query[real], key[real], value[real], scale, out)

        self.capture.eager(attend_to_real_rows)
        return out

    def _borrowed(self, tensor: Tensor) -> Tensor:
        """The same memory without owning it, where a graph's pool owns it.

        Were the recorded step to own its arguments, the pool could not give the memory of one layer's query,
        key and value to the next layer: 27 layers of 4096 patches would hold 0.8 GB instead of 0.03.
        """
        return borrowed(tensor) if self.capture.pool.is_cuda else tensor

    def _break_at_op(self, step: Step, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Another splitting op: its results are copied to where those of the capture are."""
        kept: list[Any] = []

        def run() -> None:
            result = step.call(*args, **kwargs)
            results = (result,) if step.returns_tensor else result
            if not kept:
                kept.extend(results)
                return
            for old, new in zip(kept, results, strict=True):
                if isinstance(old, torch.Tensor):
                    old.copy_(new)

        self.capture.eager(run)
        return kept[0] if step.returns_tensor else kept


def borrowed(tensor: Tensor) -> Tensor:
    """The same memory of the device without owning it."""
    storage = tensor.untyped_storage()
    borrowed = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), tensor.device, storage.nbytes()
    )
    alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return alias.set_(borrowed, tensor.storage_offset(), tensor.size(), tensor.stride())


class _OutputBuffers:
    """Where eager attention writes: owned, zero at first, so pad rows stay finite (capture rule 1).

    Buffers are reused once the step that last reads them is recorded, unless a piece returned a view of one.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[Any, ...], list[Tensor]] = {}
        self._in_use: dict[int, Tensor] = {}

    def acquire(self, step: Step, query: Tensor) -> Tensor:
        free = self._free.get((query.shape, query.dtype))
        out = free.pop() if free else torch.zeros(query.shape, dtype=query.dtype, device=query.device)
        self._in_use[step.outputs[0]] = out
        return out

    def release(self, step: Step, results: Sequence[Any]) -> None:
        storages = {r.untyped_storage().data_ptr() for r in results if isinstance(r, torch.Tensor)}
        for slot in step.frees:
            buffer = self._in_use.pop(slot, None)
            if buffer is not None and buffer.untyped_storage().data_ptr() not in storages:
                self._free.setdefault((buffer.shape, buffer.dtype), []).append(buffer)
