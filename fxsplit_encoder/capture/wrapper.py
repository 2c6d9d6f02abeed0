"""`BreakableCUDAGraphWrapper`: any eager module, captured with breaks for every shape of its arguments."""

from __future__ import annotations

import itertools
import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from fxsplit_encoder._torch.dispatch import TreeSpec, tree_flatten, tree_unflatten
from fxsplit_encoder._torch.modes import foreign_around
from fxsplit_encoder._torch.structure import Structure
from fxsplit_encoder._torch.tensors import version_of
from fxsplit_encoder.caching import Recent
from fxsplit_encoder.capture.breakable import CONSTANTS, DEFAULT_SPLITTING_OPS, active_capture
from fxsplit_encoder.capture.buffers import StaticBuffer, unstrided
from fxsplit_encoder.capture.forward import CapturedForward, CaptureRequest
from fxsplit_encoder.capture.inputs import StaticInputs
from fxsplit_encoder.capture.parameters import StaticParameters
from fxsplit_encoder.capture.pool import GraphPool
from fxsplit_encoder.errors import CaptureError, InputError

logger = logging.getLogger(__name__)

# Host code may branch on every value of a tensor on the host. Longer ones are data, and belong on the device.
_MOST_HOST_VALUES = 4096

# Failures that are remembered, so that what cannot be captured is not tried again.
_MOST_FAILURES = 256


def describe(leaves: Sequence[Any], structure: TreeSpec, device: torch.device) -> Hashable:
    """Returns what is equal for calls that one capture serves: of a tensor on the device shape, strides and
    dtype, of one on the host its values too, and everything else itself. InputError: there is nothing.
    """
    return (structure, *(_describe(leaf, device) for leaf in leaves))


def _describe(leaf: Any, device: torch.device) -> Hashable:
    if not isinstance(leaf, torch.Tensor):
        try:
            hash(leaf)
        except TypeError as error:
            raise InputError(
                f"an argument of type {type(leaf).__name__} is not hashable, so no capture can be found by "
                "it; pass tensors, numbers, strings, or lists, tuples and dicts of them"
            ) from error
        return type(leaf), leaf  # 1, 1.0 and True are equal
    if (kind := unstrided([leaf])) is not None:
        raise InputError(f"an argument is a {kind} tensor, which no capture can hold; pass a strided one")
    layout = tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device
    if leaf.device.type == device.type:
        return layout
    if leaf.device.type != "cpu" or leaf.numel() > _MOST_HOST_VALUES:
        raise InputError(
            f"a tensor of shape {tuple(leaf.shape)} on {leaf.device} for a module on {device} is no part of "
            f"a capture, as at most {_MOST_HOST_VALUES} values on the host may be; move it to {device}"
        )
    # As bytes, since a NaN would equal no other.
    dense = leaf.detach().resolve_conj().resolve_neg().contiguous().flatten()
    return (*layout, dense.view(torch.uint8).numpy().tobytes() if leaf.numel() else b"")


class BreakableCUDAGraphWrapper(nn.Module):
    """A module with the same forward, which replays a breakable capture for arguments of known shapes.

    The first call with arguments of a new description warms the module up, captures it and replays; later
    ones copy the tensors in and replay. Outputs are copies. Tensors on the module's device are compared by
    shape, strides and dtype; tensors on the host, when the module is on a GPU, by their values as well;
    everything else by its value. So host values (grids, bounds) should repeat.

    The module runs as it is, uncounted, inside another breakable capture and under `torch.compile`; counted
    in `misses`, where one of its modules is in training mode or has to see each operation (global hooks,
    torch modes), where gradients are asked for, and where it cannot be captured: it reads values of the
    device outside of a break, writes to an argument, or returns something else than tensors, numbers and
    strings. It has to compute the same from the same arguments and parameters.

    A Hugging Face tower runs attention through the splitting op after
    `fxsplit_encoder.kernels.attention.hugging_face.use_varlen_attention(tower)`; give it the metadata that it
    otherwise computes on the host (`cu_seqlens`, `position_ids`, ...), on its device.

    Args:
        module: anything that computes on one device.
        pool: the captures' memory, which may be shared; None: a new one.
        max_captures: captures that are kept; the one that was used longest ago is evicted.
        splitting_ops: names of ops that break, in addition to the functions under
            `eager_break_during_capture`.
        debug: whether capture rules are checked at every replay.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        pool: GraphPool | None = None,
        max_captures: int = 32,
        splitting_ops: Sequence[str] = DEFAULT_SPLITTING_OPS,
        debug: bool = False,
    ) -> None:
        super().__init__()
        if max_captures < 1:
            raise InputError(f"max_captures: expected at least 1, got {max_captures}")
        self.module = module
        self.max_captures = max_captures
        self.splitting_ops = tuple(splitting_ops)
        self.debug = debug
        self.hits = 0
        """Calls that a capture served, the first of each among them."""
        self.captures = 0
        self.misses: Counter[str] = Counter()
        """Calls that ran eagerly, by reason."""
        self._pool = pool
        self._shares_pool = pool is not None
        self._entries: OrderedDict[Hashable, tuple[CapturedForward, TreeSpec]] = OrderedDict()
        """By the description of arguments; with the structure of what the module returned."""
        self._failures: Recent[Hashable, str] = Recent(_MOST_FAILURES)
        self._baked = StaticParameters.of_module(module)
        self._structure = Structure(module)
        self._lock = threading.RLock()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's forward."""
        if torch.compiler.is_compiling() or active_capture() is not None:
            return self.module(*args, **kwargs)
        with self._lock:
            found = self._find(args, kwargs)
            if not isinstance(found, str):
                captured, structure, leaves = found
                tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
                with captured.pool.replaying(), torch.no_grad():
                    self.hits += 1
                    captured.inputs.load(dict(zip(captured.inputs.buffers, tensors, strict=True)))
                    outputs = captured.replay(debug=self.debug)
                    owned = [each.clone() if isinstance(each, torch.Tensor) else each for each in outputs]
                return tree_unflatten(owned, structure)
            self.misses[found] += 1
        return self.module(*args, **kwargs)

    @property
    def num_captures(self) -> int:
        """Captures that are kept."""
        return len(self._entries)

    def clear(self) -> None:
        """Releases every capture and their memory, and forgets what could not be captured."""
        with self._lock:
            self._failures.clear()
            while self._entries:
                self._evict()

    def _find(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[CapturedForward, TreeSpec, list[Any]] | str:
        found = "training" if self.module.training else foreign_around()
        if found is not None:
            return found
        leaves, structure = tree_flatten((args, kwargs))
        device = next((each.device for each in self._tensors(leaves)), torch.device("cpu"))
        try:
            key = describe(leaves, structure, device)
        except InputError as error:
            return str(error)
        if torch.is_grad_enabled() and any(each.requires_grad for each in self._tensors(leaves)):
            return "gradients"
        have_moved = self._baked.have_moved()
        if have_moved or not self._structure.is_unchanged():
            if self._entries:
                reason = "parameters were replaced" if have_moved else self._structure.change()
                logger.warning("capturing again: since the capture: %s", reason)
            self.clear()
            self._baked, self._structure = StaticParameters.of_module(self.module), Structure(self.module)
        if self._structure.in_training() is not None:
            return "training"
        if key in self._failures:
            return self._failures[key]
        if key not in self._entries:
            try:
                self._entries[key] = self._captured(leaves, structure, self._pool_on(device))
            except CaptureError as error:
                logger.warning("%s runs eagerly: %s", type(self.module).__name__, error)
                self._failures[key] = str(error)
                return self._failures[key]
        self._entries.move_to_end(key)
        return *self._entries[key], leaves

    def _tensors(self, leaves: Sequence[Any]) -> Iterator[torch.Tensor]:
        every = itertools.chain(self.module.parameters(), self.module.buffers(), leaves)
        return (each for each in every if isinstance(each, torch.Tensor))

    def _captured(
        self, leaves: Sequence[Any], structure: TreeSpec, pool: GraphPool
    ) -> tuple[CapturedForward, TreeSpec]:
        while len(self._entries) >= self.max_captures:
            self._evict()
        with torch.inference_mode(False), torch.no_grad():
            own = [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        buffers = [
            StaticBuffer(f"argument {number}", leaf, None)
            for number, leaf in enumerate(own)
            if isinstance(leaf, torch.Tensor)
        ]
        versions = [version_of(buffer.tensor) for buffer in buffers]
        module, structures = self.module, list[TreeSpec]()

        def run() -> list[Any]:
            args, kwargs = tree_unflatten(own, structure)
            outputs, returned = tree_flatten(module(*args, **kwargs))
            for output in outputs:
                if not isinstance(output, (torch.Tensor, *CONSTANTS)):
                    raise CaptureError(
                        f"the module returned a {type(output).__name__}; it may return tensors, None, "
                        "numbers and strings, in tuples, lists and dicts"
                    )
            structures.append(returned)
            return outputs

        no_parameters = StaticParameters(())  # every call has compared them
        request = CaptureRequest(
            StaticInputs(buffers), run, no_parameters, None, splitting_ops=self.splitting_ops
        )
        forward = CapturedForward(request, "breakable", pool)
        forward.record()
        if [version_of(buffer.tensor) for buffer in buffers] != versions:
            forward.release()
            raise CaptureError("the module writes to an argument, which a replay would do to a copy of it")
        self.captures += 1
        return forward, structures[-1]

    def _evict(self) -> None:
        """Drops the capture used longest ago; with the last one the memory goes back."""
        _, (captured, _) = self._entries.popitem(last=False)
        pool = captured.pool
        if pool.is_cuda:  # its last replay may still run
            torch.cuda.synchronize(pool.device)
        captured.release()
        if not self._entries and not self._shares_pool:
            pool.retire()

    def _pool_on(self, device: torch.device) -> GraphPool:
        if self._pool is None or (self._pool.device != device and not self._shares_pool):
            self._pool = GraphPool(device)
        return self._pool
