"""Parameters in another form (padded, merged), computed once and kept at one address for captured graphs.

They are computed again, into the same memory, when a source parameter has another address or version. A write
through `tensor.data` changes neither, but bits: samples of each source are compared with earlier ones
(`Fingerprints`). On CUDA one kernel does that as a part of the captured graph and writes to pinned memory,
which the host reads at the next call; elsewhere, and without Triton, the host compares at once.
"""

from __future__ import annotations

import logging
import math
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fxsplit_encoder._torch.tensors import as_plain_tensors, dense_parts, version_of

SAMPLES = 128
"""Elements of each tensor. One less is a prime, so that samples rarely lie in a few columns of a matrix."""

_HAS_TRITON = find_spec("triton") is not None

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


class Fingerprints:
    """Sampled bits of tensors at the last `take`."""

    def __init__(self) -> None:
        self._read: list[Callable[[], bytes]] = []
        self._before: list[bytes] = []
        self._on_device: _DeviceSamples | None = None

    @torch.inference_mode(False)
    @torch.no_grad()
    def take(self, tensors: Iterable[Tensor]) -> None:
        """Samples the tensors, which must stay where they are until the next call."""
        with as_plain_tensors():  # vLLM's parameters have code of their own
            dense = [part.detach() for each in tensors for part in dense_parts(each) if part.numel()]
        device = next((each.device for each in dense if each.is_cuda), None) if _HAS_TRITON else None
        on_device = [each for each in dense if each.device == device]
        on_host = [each for each in dense if each.device != device]
        self._read = [_reader(each.view(_INTEGERS[each.element_size()])) for each in on_host]
        self._before = [read() for read in self._read]
        if self._on_device is None or not self._on_device.take(on_device):
            self._on_device = _DeviceSamples(on_device) if on_device else None

    def compare(self) -> object:
        """Enqueues the comparison on CUDA, where it may be captured; elsewhere does nothing. Returns what
        a capture has to keep alive.
        """
        if self._on_device is not None:
            self._on_device.run(takes=False)
        return self._on_device

    def have_changed(self) -> bool:
        """Whether bits have changed, on CUDA by the comparisons that have run."""
        if self._on_device is not None and self._on_device.have_changed():
            return True
        return any(read() != before for read, before in zip(self._read, self._before, strict=True))


def _reader(bits: Tensor) -> Callable[[], bytes]:
    """Reads samples to the host; of CPU tensors by NumPy, since recordings of torch's calls miss it."""
    positions = _positions(bits.numel())
    if bits.device.type == "cpu":
        memory = np.atleast_1d(bits.numpy())  # not a copy
        index = np.unravel_index(positions.numpy(), memory.shape)
        return lambda: memory[index].tobytes()
    there = positions.to(bits.device)
    return lambda: torch.take(bits, there).cpu().numpy().tobytes()


class _DeviceSamples:
    """Samples on a CUDA device, read through a table of their addresses. A comparison that finds another bit
    writes the number of `take` calls until then, which tells one from before the last.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        device, addresses = tensors[0].device, _addresses(tensors)
        self._layouts = _layouts(tensors)
        self._taken = 0
        self._found = torch.zeros(1, dtype=torch.int64, device="cpu", pin_memory=True)
        self._found_on_host = self._found.numpy().data
        self._addresses = torch.empty_like(addresses, device=device)
        self._before = torch.zeros(addresses.shape, dtype=torch.int16, device=device)
        # How often samples were taken, and where a comparison writes it: pinned memory has one address.
        self._state = torch.tensor([0, self._found.data_ptr()], dtype=torch.int64, device=device)
        self.take(tensors)

    def take(self, tensors: Sequence[Tensor]) -> bool:
        """Samples tensors of the same layouts into the same table; for others clears it, which disables
        captured comparisons, and returns False.
        """
        if _layouts(tensors) != self._layouts:
            self._addresses.zero_()
            return False
        self._taken += 1
        self._addresses.copy_(_addresses(tensors))
        self._state[:1].fill_(self._taken)
        self.run(takes=True)
        return True

    def run(self, *, takes: bool) -> None:
        from fxsplit_encoder.compile.fingerprints_triton import compare_bits

        compare_bits(self._addresses, self._before, self._state, takes=takes)

    def have_changed(self) -> bool:
        return self._found_on_host[0] == self._taken


def _positions(count: int) -> Tensor:
    samples = min(count, SAMPLES)
    return torch.arange(samples, device="cpu") * (count - 1) // max(samples - 1, 1)


def _layouts(tensors: Iterable[Tensor]) -> list[tuple[Any, ...]]:
    return [(each.shape, each.stride(), each.element_size()) for each in tensors]


def _addresses(tensors: Sequence[Tensor]) -> Tensor:
    """Addresses of all samples, two bytes at each; an element of one byte is read with a neighbor."""
    layouts = _layouts(tensors)
    offsets = {layout: _offsets(*layout) for layout in dict.fromkeys(layouts)}
    starts = (offsets[layout] + each.data_ptr() for layout, each in zip(layouts, tensors, strict=True))
    return torch.cat(list(starts)) & ~1


def _offsets(shape: Sequence[int], strides: Sequence[int], element_size: int) -> Tensor:
    rest = _positions(math.prod(shape))
    elements = torch.zeros_like(rest)
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        elements += rest % size * stride
        rest = rest // size
    within = torch.arange(0, element_size, 2, device="cpu")
    return (elements[:, None] * element_size + within).flatten()


logger = logging.getLogger(__name__)

_WRITTEN = (
    "were written through `.data`, which leaves no version: they are computed again. What was encoded since "
    "that write may have used the old ones; call fxsplit_encoder.refresh(model) right after such a write"
)
_UNVERSIONED = (
    "are inference tensors, which have no versions: they are computed again at every call. Load the model "
    "under torch.no_grad() instead of torch.inference_mode()"
)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a parameter is derived from others."""

    make: Callable[..., Tensor]
    sources: tuple[int | Recipe, ...]
    """Slots of parameters that are given or derived before, and recipes of tensors that no step reads."""

    def slots(self) -> set[int]:
        """Returns the slots that it reads."""
        read = ({each} if isinstance(each, int) else each.slots() for each in self.sources)
        return set().union(*read)

    def made(self, tensors: Mapping[int, Tensor]) -> Tensor:
        """Returns the derived parameter, of tensors by slot."""
        return self.make(
            *(tensors[each] if isinstance(each, int) else each.made(tensors) for each in self.sources)
        )


class DerivedParameters:
    """The derived parameters of one program, for the parameters of its last run; none in a copy or a pickle
    until it is run. `recipes` are by slot, each after those whose slots it reads.
    """

    def __init__(self, recipes: Mapping[int, Recipe] = MappingProxyType({})) -> None:
        self.recipes = dict(recipes)
        read = (recipe.slots() for recipe in self.recipes.values())
        self._given = sorted(set().union(*read) - self.recipes.keys())
        self._sources: dict[int, Tensor] = {}
        self._addresses: list[int] = []
        self._versions: list[int] | None = []
        self._fingerprints = Fingerprints()
        self.values: dict[int, Tensor] = {}
        """The derived parameters, by slot."""
        self._is_outdated = False
        self._said: set[str] = set()
        self.stamp: object = None
        """A new object after each computation."""

    def __reduce__(self) -> Any:
        return DerivedParameters, (self.recipes,)

    @property
    def num_bytes(self) -> int:
        """Bytes of the derived parameters, without their sources."""
        return sum(value.numel() * value.element_size() for value in [*self.values.values()])

    def fill(self, slots: list[Any]) -> None:
        """Fills the slots of derived parameters."""
        if not self.recipes:
            return
        self._sources = {slot: slots[slot] for slot in self._given}
        self.refresh()
        self.follow_writes()
        for slot, value in self.values.items():
            slots[slot] = value

    def refresh(self, stamp: object = None) -> bool:
        """Recomputes if a source parameter has another address or version; returns whether any had. Since
        `stamp` no parameter has moved: only versions are compared.
        """
        if not self.recipes:
            return False
        sources = self._sources.values()
        versions: list[int] | None = None
        try:
            versions = list(map(version_of, sources))
        except RuntimeError:  # an inference tensor's
            self._say(_UNVERSIONED)
        are_known = stamp is not None and stamp is self.stamp
        addresses = self._addresses if are_known else list(map(torch.Tensor.data_ptr, sources))
        if versions == self._versions and addresses == self._addresses:
            return False
        self._compute()
        self._addresses, self._versions = addresses, versions
        return True

    def follow_writes(self) -> None:
        """Recomputes after a comparison found a write, after `outdate`, and for tensors without versions."""
        if not self.recipes:
            return
        is_asked_to = self._is_outdated or self._versions is None
        if not (is_asked_to or self._fingerprints.have_changed()) or self.refresh():
            return
        if not is_asked_to:
            self._say(_WRITTEN)
        self._compute()

    def compare(self) -> object:
        """Calls `Fingerprints.compare`."""
        return self._fingerprints.compare()

    def let_go(self) -> None:
        """Keeps no source alive until the next run, which computes again: others may lie where they did."""
        self._sources, self._addresses = {}, []

    def outdate(self) -> None:
        """Makes the next run or replay compute again."""
        self._is_outdated = True

    @torch.inference_mode(False)
    @torch.no_grad()
    def _compute(self) -> None:
        self.stamp = object()  # first: after one that fails, the stamp from before does not hold
        tensors = ChainMap(self._sources, self.values)
        for slot, recipe in self.recipes.items():
            made = recipe.made(tensors)
            kept = self.values.setdefault(slot, made)
            if kept is not made:
                kept.copy_(made)
        self._fingerprints.take(self._sources.values())
        self._is_outdated = False

    def _say(self, what: str) -> None:
        if what not in self._said:
            self._said.add(what)
            logger.warning(
                "parameters that are kept in another form (padded, merged, quantized), %d in all: they %s",
                *(len(self._sources), what),
            )
