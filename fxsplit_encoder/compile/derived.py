"""Parameters in another form (padded, merged), computed once and kept where captured graphs find them.

A derived parameter has one address for the life of its program, but for those that only others are derived
from, which are dropped once these are computed. Whenever the parameters that it comes from are others than at
the last check, it is computed again, into the same memory: at another address, or of another version, which
every change in place raises.

A write through `tensor.data` (merges of adapters, moving averages, weights from a trainer) changes neither
address nor version. It changes bits: of each tensor the first and the last element and those at even
distances between them are compared with what they were (`Fingerprints`). On CUDA one kernel compares all
samples, as a part of the captured graph, and writes to pinned memory, which the host reads at the next call
without waiting. Elsewhere, and without Triton, the host compares at once.
"""

from __future__ import annotations

import functools
import logging
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fxsplit_encoder._torch.tensors import as_plain_tensors, dense_parts, version_of

SAMPLES = 128
"""Elements of each tensor: 256 bytes of one in 16 bits. One less is a prime number, so that their distance is
rarely a multiple of a matrix's width, where all would lie in a few columns."""

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


class Fingerprints:
    """The sampled bits of some tensors, as they were when `take` was called last.

    A copy or a pickle has none: its tensors lie elsewhere.
    """

    def __init__(self) -> None:
        self._on_host: _HostSamples | None = None
        self._on_device: _DeviceSamples | None = None

    def __reduce__(self) -> Any:
        return Fingerprints, ()

    @torch.inference_mode(False)
    @torch.no_grad()
    def take(self, tensors: Iterable[Tensor]) -> None:
        """Samples the tensors, which stay where they are until the next time."""
        with as_plain_tensors():  # vLLM's parameters have code of their own
            dense = [part.detach() for each in tensors for part in dense_parts(each) if part.numel()]
        device = _device_of(dense)
        on_device = [each for each in dense if each.device == device]
        on_host = [each for each in dense if each.device != device]
        self._on_host = _HostSamples(on_host) if on_host else None
        if self._on_device is None or not self._on_device.take(on_device):
            self._on_device = _DeviceSamples(on_device) if on_device else None

    def compare(self) -> object:
        """Enqueues the comparison on CUDA, where it may be captured; elsewhere it does nothing. Returns what
        a capture of it needs to stay allocated.
        """
        if self._on_device is not None:
            self._on_device.compare()
        return self._on_device

    def have_changed(self) -> bool:
        """Whether bits are others than they were: on CUDA as far as comparisons have run."""
        if self._on_device is not None and self._on_device.have_changed():
            return True
        return self._on_host is not None and self._on_host.have_changed()


class _HostSamples:
    """Samples that are compared where the host asks. Those of a CPU's tensors are read by NumPy, which a
    recording of PyTorch's operations does not see: a tower may ask inside one.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._read = [_reader(each.view(_INTEGERS[each.element_size()])) for each in tensors]
        self._before = [read() for read in self._read]

    def have_changed(self) -> bool:
        now = (read() for read in self._read)
        return any(map(operator.ne, now, self._before))


def _reader(bits: Tensor) -> Callable[[], bytes]:
    """What reads the samples of a tensor of integers."""
    positions = _positions(bits.numel())
    if bits.device.type == "cpu":
        memory = np.atleast_1d(bits.numpy())  # not a copy
        index = np.unravel_index(positions.numpy(), memory.shape)
        return lambda: memory[index].tobytes()
    there = positions.to(bits.device)
    return lambda: torch.take(bits, there).cpu().numpy().tobytes()


class _DeviceSamples:
    """Samples on a CUDA device: a table of their addresses, through which a kernel goes.

    A comparison that finds another bit writes how often samples were taken until then. So one that was
    enqueued before they were taken again says nothing of the new ones.
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
        """Samples other tensors of the same layouts, where captured comparisons find them. Those of other
        layouts it does not; no captured comparison reads the old ones any more then.
        """
        if _layouts(tensors) != self._layouts:
            self._addresses.zero_()
            return False
        self._taken += 1
        self._addresses.copy_(_addresses(tensors))
        self._state[:1].fill_(self._taken)
        self._run(takes=True)
        return True

    def compare(self) -> None:
        self._run(takes=False)

    def _run(self, *, takes: bool) -> None:
        from fxsplit_encoder.compile.fingerprints_triton import compare_bits

        compare_bits(self._addresses, self._before, self._state, takes=takes)

    def have_changed(self) -> bool:
        return self._found_on_host[0] == self._taken


@functools.cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def _device_of(tensors: Iterable[Tensor]) -> torch.device | None:
    """Where a kernel compares samples; None: nowhere."""
    return next((each.device for each in tensors if each.is_cuda), None) if _has_triton() else None


def _positions(count: int) -> Tensor:
    """Positions of the samples among so many elements, in the order of a tensor's dimensions."""
    samples = min(count, SAMPLES)
    return torch.arange(samples, device="cpu") * (count - 1) // max(samples - 1, 1)


def _layouts(tensors: Iterable[Tensor]) -> list[tuple[Any, ...]]:
    return [(each.shape, each.stride(), each.element_size()) for each in tensors]


def _addresses(tensors: Sequence[Tensor]) -> Tensor:
    """Addresses of all samples, two bytes at each; of elements of one byte, with a neighbor."""
    layouts = _layouts(tensors)
    offsets = {layout: _offsets(*layout) for layout in dict.fromkeys(layouts)}
    starts = (offsets[layout] + each.data_ptr() for layout, each in zip(layouts, tensors, strict=True))
    return torch.cat(list(starts)) & ~1


def _offsets(shape: Sequence[int], strides: Sequence[int], element_size: int) -> Tensor:
    """Bytes from a tensor's first element to each sample."""
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
class DerivedParameter:
    """What fills a slot of a program from other slots."""

    slot: int
    sources: tuple[int, ...]
    """Slots of parameters, or of parameters derived before this one."""
    make: Callable[..., Tensor]
    """A function of the sources' tensors."""
    is_kept: bool = True
    """Whether a step reads it. One that only others are derived from is dropped as soon as they are."""


class DerivedParameters:
    """The derived parameters of one program, on the parameters that it was last run with.

    A copy or a pickle has none yet: they are computed when it is run.
    """

    def __init__(self, recipes: Iterable[DerivedParameter] = ()) -> None:
        self.recipes = _beside_readers(tuple(recipes))
        last_reads = {slot: recipe.slot for recipe in self.recipes for slot in recipe.sources}
        self._dropped = {
            recipe.slot: last_reads[recipe.slot] for recipe in self.recipes if not recipe.is_kept
        }
        made = {recipe.slot for recipe in self.recipes}
        self._given = sorted({slot for recipe in self.recipes for slot in recipe.sources} - made)
        self._sources: dict[int, Tensor] = {}
        self._addresses: list[int] = []
        self._versions: list[int] | None = []
        """None for inference tensors, which have none."""
        self._fingerprints = Fingerprints()
        self._values: dict[int, Tensor] = {}
        self._is_outdated = False
        self._said: set[str] = set()
        self.stamp: object = None
        """Another one whenever they have been computed."""

    def __reduce__(self) -> Any:
        return DerivedParameters, (self.recipes,)

    @property
    def num_bytes(self) -> int:
        """Memory that the derived parameters take in addition to those that they come from."""
        return sum(value.numel() * value.element_size() for value in self._values.values())

    def fill(self, slots: list[Any], stamp: object = None) -> None:
        """Fills the slots of the derived parameters of a run from those of its parameters.

        Args:
            stamp: as of `refresh`, of a time since when the parameters are the same tensors, too.
        """
        if not self.recipes:
            return
        if stamp is None or stamp is not self.stamp:
            self._sources = {slot: slots[slot] for slot in self._given}
        self.refresh(stamp)
        self.follow_writes()
        for slot, value in self._values.items():
            slots[slot] = value

    def refresh(self, stamp: object = None) -> bool:
        """Computes again what the parameters of the last run have outdated by their addresses and versions;
        returns whether anything was. About 150 nanoseconds per parameter that has derived ones on the host of
        an H200.

        Args:
            stamp: the one of a time since when the caller knows that no parameter has moved: where it still
                holds, parameters are asked for their versions alone.
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
        """Computes everything again after writes that changed neither addresses nor versions, once a
        comparison has found them (`compile.derived`), and after `outdate`; of tensors that have no
        versions always.
        """
        if not self.recipes:
            return
        is_asked_to = self._is_outdated or self._versions is None
        if not (is_asked_to or self._fingerprints.have_changed()) or self.refresh():
            return
        if not is_asked_to:
            self._say(_WRITTEN)
        self._compute()

    def compare(self) -> object:
        """As `Fingerprints.compare`, for a later `follow_writes`."""
        return self._fingerprints.compare()

    def outdate(self) -> None:
        """Has the next run or replay compute everything again."""
        self._is_outdated = True

    @torch.inference_mode(False)
    @torch.no_grad()
    def _compute(self) -> None:
        self.stamp = object()  # first: of one that fails, what was known before holds no more
        available = dict(self._sources)
        for recipe in self.recipes:
            made = recipe.make(*(available[slot] for slot in recipe.sources))
            available[recipe.slot] = self._keep(recipe.slot, made) if recipe.is_kept else made
            for slot in {*recipe.sources}:
                if self._dropped.get(slot) == recipe.slot:
                    del available[slot]
        self._fingerprints.take(self._sources.values())
        self._is_outdated = False

    def _keep(self, slot: int, made: Tensor) -> Tensor:
        """The tensor of a slot, where captures read it, with the values that were made."""
        kept = self._values.setdefault(slot, made)
        return kept if kept is made else kept.copy_(made)

    def _say(self, what: str) -> None:
        """Warns of something, once."""
        if what not in self._said:
            self._said.add(what)
            logger.warning(
                "parameters that are kept in another form (padded, merged, quantized), %d in all: they %s",
                *(len(self._sources), what),
            )


def _beside_readers(recipes: tuple[DerivedParameter, ...]) -> tuple[DerivedParameter, ...]:
    """Recipes in an order in which those that are not kept are next to the first that reads them, so that few
    lie in memory at a time; without those that none reads.
    """
    dropped = {recipe.slot: recipe for recipe in recipes if not recipe.is_kept}
    ordered: list[DerivedParameter] = []

    def add(recipe: DerivedParameter) -> None:
        for slot in recipe.sources:
            if slot in dropped:
                add(dropped.pop(slot))
        ordered.append(recipe)

    for recipe in recipes:
        if recipe.is_kept:
            add(recipe)
    return tuple(ordered)
