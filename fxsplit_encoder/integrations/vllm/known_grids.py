"""Keeps what vLLM's towers compute of grids alone for replays of the same grids: indices, lengths and rotary
embeddings, some hundred microseconds of the host. Position embeddings depend on weights, and are not kept.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from fxsplit_encoder._torch.staging import mark_immutable

_REPLAY = "prepare_encoder_cudagraph_replay_buffers"
_METADATA = "prepare_encoder_metadata"

_OF_GRIDS = frozenset(
    (
        "cu_seqlens",
        "cu_window_seqlens",
        "max_seqlen",
        "max_seqlen_full",
        "max_seqlen_window",
        "reverse_indices",
        "rotary_pos_emb_cos",
        "rotary_pos_emb_sin",
        "sequence_lengths",
        "sequence_lengths_full",
        "sequence_lengths_window",
        "window_index",
    )
)
"""What depends on grids alone in vLLM 0.32 and 0.33. Of a tower that computes more, nothing is kept."""

_OF_WEIGHTS = "pos_embeds"
_MAKERS = ("fast_pos_embed_interpolate", "pos_embeds_interpolate")
"""The methods that make it of the grids, one a class."""

MOST_ENTRIES = 64
MOST_BYTES = 16 << 20
"""Of a device's memory, which vLLM has not measured: little."""

_is_replay: ContextVar[bool] = ContextVar("fxsplit_encoder_vllm_replay", default=False)


def keep_metadata(model: Any) -> None:
    """Has a model's towers keep what they prepare of grids, once. For replays alone: captures may take theirs
    as buffers.
    """
    prepare: Any = getattr(model, _REPLAY, None)
    towers = [module for module in model.modules() if callable(getattr(module, _METADATA, None))]
    if prepare is None or not towers or hasattr(prepare, "keeps_metadata"):
        return

    @functools.wraps(prepare)
    def prepare_for_replay(*args: Any, **kwargs: Any) -> Any:
        token = _is_replay.set(True)
        try:
            return prepare(*args, **kwargs)
        finally:
            _is_replay.reset(token)

    vars(prepare_for_replay)["keeps_metadata"] = True
    model.prepare_encoder_cudagraph_replay_buffers = prepare_for_replay
    for tower in towers:
        tower.prepare_encoder_metadata = KeptMetadata(tower)


class KeptMetadata:
    """In place of a tower's `prepare_encoder_metadata`."""

    def __init__(self, tower: nn.Module) -> None:
        self._prepare: Callable[..., Any] = getattr(tower, _METADATA)
        self._of_weights: Callable[[Any], Tensor] | None = next(
            (getattr(tower, name) for name in _MAKERS if hasattr(tower, name)), None
        )
        self._known: dict[Any, Mapping[str, Any]] = {}
        self._num_bytes = 0

    def __call__(self, grids: Any, **options: Any) -> Any:
        """Returns the result of the tower's own method."""
        key = _key_of(grids, options) if _is_replay.get() else None
        if key is None:
            return self._prepare(grids, **options)
        kept = self._known.get(key)
        if kept is None:
            metadata = self._prepare(grids, **options)
            if isinstance(metadata, dict) and self._may_keep(metadata):
                self._keep(key, metadata)
            return metadata
        if _OF_WEIGHTS not in kept:
            return dict(kept)
        assert self._of_weights is not None
        return {**kept, _OF_WEIGHTS: self._of_weights(grids)}

    def _may_keep(self, metadata: Mapping[str, Any]) -> bool:
        others = metadata.keys() - _OF_GRIDS
        return not others or (others == {_OF_WEIGHTS} and self._of_weights is not None)

    def _keep(self, key: Any, metadata: Mapping[str, Any]) -> None:
        kept = {name: None if name == _OF_WEIGHTS else value for name, value in metadata.items()}
        tensors = [value for value in kept.values() if isinstance(value, Tensor)]
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        if num_bytes > MOST_BYTES:
            return
        if len(self._known) >= MOST_ENTRIES or self._num_bytes + num_bytes > MOST_BYTES:
            self._known.clear()
            self._num_bytes = 0
        for tensor in tensors:
            mark_immutable(tensor)
        self._known[key] = kept
        self._num_bytes += num_bytes


def _key_of(grids: Any, options: Mapping[str, Any]) -> Any | None:
    """Return what metadata depend on, with the stream that they are ready on; None: unhashable grids."""
    if not isinstance(grids, list | tuple) or not all(
        isinstance(grid, list | tuple) and {*map(type, grid)} <= {int} for grid in grids
    ):
        return None
    has_streams = torch.cuda.is_initialized()
    stream = torch.cuda.current_stream().cuda_stream if has_streams else 0
    key = (tuple(map(tuple, grids)), stream, *sorted(options.items()))
    try:
        hash(key)
    except TypeError:
        return None
    return key
