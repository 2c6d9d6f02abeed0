"""The memory that a capture reads and writes, and the static inputs that each replay refills.

values of captured ops     owned by the graphs' pool; later steps borrow them
results of eager steps     buffers outside the pool, at fixed addresses, kept by the step that writes them
anything else              held by the step that reads it
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils import dlpack

from fxsplit_encoder._torch.distributed import local_part
from fxsplit_encoder._torch.staging import is_immutable
from fxsplit_encoder._torch.tensors import StorageWeakRef, is_dropped, weakly
from fxsplit_encoder.errors import ReplayError

# Where Linux says how much a container may take: of cgroups version 2, and version 1.
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def storage_address(tensor: Tensor) -> int:
    """Returns the address of the memory behind a tensor and all its views."""
    return local_part(tensor).untyped_storage().data_ptr()


def tensors_in(values: object) -> list[Tensor]:
    """Returns the tensors in nested tuples, lists and dicts: ten times as fast as `tree_leaves`."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, list | tuple):
        return []
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple | dict):
            found += tensors_in(value)
    return found


def unstrided(tensors: Iterable[Tensor]) -> str | None:
    """Returns the layout of the first tensor without plain strides; None: all have them."""
    for tensor in tensors:
        if tensor.is_nested:
            return "nested"
        if tensor.is_quantized:
            return "quantized"
        if tensor.layout != torch.strided:
            return str(tensor.layout).removeprefix("torch.").lstrip("_")
    return None


def has_strides(tensor: Tensor, like: Tensor) -> bool:
    """Whether a tensor has the shape of another, and its strides in dimensions of several entries."""
    strides = zip(like.shape, tensor.stride(), like.stride(), strict=True)
    return tensor.shape == like.shape and all(own == other or size == 1 for size, own, other in strides)


def copy_results(kept: Any, new: Any) -> None:
    """Copies the results of a repeated call into those of the first call."""
    if isinstance(kept, torch.Tensor):
        kept, new = local_part(kept), local_part(new)
        if kept.data_ptr() != new.data_ptr():
            for dim, strides in enumerate(zip(kept.stride(), new.stride(), strict=True)):
                if strides == (0, 0) and kept.shape[dim] > 1:
                    # Expanded: torch does not write to one place several times.
                    kept, new = kept.narrow(dim, 0, 1), new.narrow(dim, 0, 1)
            kept.copy_(new)
    elif isinstance(kept, list | tuple):
        for old, value in zip(kept, new, strict=True):
            copy_results(old, value)


class OwnedBuffers:
    """Memory for the results of eager steps: zero at first, so rows that are never written stay finite (rule
    1).

    A buffer is reused, by a later step of the same capture, once its result is unreferenced: what has read it
    then comes before that step at every replay.
    """

    def __init__(self) -> None:
        # With the memory of what was handed out, which a view of it keeps alive too.
        self._lent: dict[tuple[object, ...], list[tuple[Tensor, StorageWeakRef]]] = {}
        self._written: dict[int, int] = {}

    def clear_behind(self, buffer: Tensor, rows: int) -> None:
        """Zeroes what an earlier, larger batch left after the first `rows` rows: it may not be finite."""
        written = self._written.get(buffer.data_ptr(), buffer.shape[0])
        if written > rows:
            buffer[rows:written].zero_()
        self._written[buffer.data_ptr()] = rows

    def acquire(
        self, like: Tensor, layout: torch.memory_format = torch.preserve_format
    ) -> tuple[Tensor, Tensor]:
        """Returns a buffer like a tensor, and an alias to hand out, which keeps the memory alive."""
        strides = like.stride() if layout == torch.preserve_format else layout
        key = (like.shape, strides, like.dtype, like.device)
        lent = self._lent.setdefault(key, [])
        unused = next((place for place, (_, alias) in enumerate(lent) if is_dropped(alias)), None)
        if unused is None:
            buffer = torch.zeros_like(like, memory_format=layout, requires_grad=False)
        else:
            buffer, _ = lent.pop(unused)
        # A storage of its own, which holds the buffer's. Not every dtype of one byte can be exchanged.
        raw = buffer.view(torch.uint8) if buffer.dtype.itemsize == 1 else buffer
        alias = dlpack.from_dlpack(dlpack.to_dlpack(raw)).view(buffer.dtype)  # type: ignore[attr-defined]
        lent.append((buffer, weakly(alias)))
        return buffer, alias


@functools.cache
def memory_of(device: torch.device) -> int:
    """Returns the bytes of a device's memory, used or not; of the CPU, what the host allows this process."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([host, *(limit for limit in map(_read_limit, _LIMITS) if limit is not None)])


def _read_limit(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):  # no such file, or "max"
        return None


def gibibytes(num_bytes: int) -> str:
    """Returns a number of bytes for a message."""
    return f"{num_bytes / 2**30:,.1f} GiB"


StaticValue: TypeAlias = Tensor | Sequence[Tensor]
"""A value for a static buffer: a tensor, or several whose rows follow one another."""


@dataclass(slots=True, eq=False)
class _Contents:
    """The contents of memory that buffers share: the buffer filled last, and how far."""

    owner: object
    """The `StaticBuffer.token` of the last."""
    dirty: list[tuple[int, int]]
    """(first row, end) of what may not be zero, in order."""
    is_constant: bool
    """Whether these are the contents of the capture, and a batch may leave it out."""
    source: weakref.ref[Tensor] | None = None
    """The constant tensor that it was filled from."""


class StaticBuffer:
    """One static input. Its memory may be shared with other captures that never run at the same time.

    Args:
        token_dim: the dimension along which replays fill a part; None: the whole tensor is replaced.
        padding_logic: fills the tensor (first) from a value (second), which may be smaller in any dimension.
        is_permutation: whether it permutes rows (`compile.permute`).
        may_be_left_out: whether batches may leave it out until one has filled it, as a constant of the tower.
    """

    def __init__(
        self,
        name: str,
        tensor: Tensor,
        token_dim: int | None = 0,
        padding_logic: Callable[[Tensor, Tensor], None] | None = None,
        *,
        is_permutation: bool = False,
        may_be_left_out: bool = False,
    ) -> None:
        self.name = name
        self.tensor = tensor
        self.padding_logic = padding_logic
        self.token_dim = token_dim if tensor.dim() > 0 else None
        self.is_permutation = is_permutation
        self.address = tensor.data_ptr()
        self.capacity = 1 if self.token_dim is None else tensor.shape[self.token_dim]
        """Rows along the token dimension."""
        self.token = object()
        """Stands for this buffer where a reference would be a cycle."""
        self._contents = _Contents(self.token, [(0, self.capacity)], may_be_left_out)

    @property
    def dirty_rows(self) -> int:
        """The end of the rows that may not be zero."""
        ends = (min(end, self.capacity) for first, end in self._contents.dirty if first < self.capacity)
        return max(ends, default=0)

    def first_rows(self, like: Tensor) -> StaticBuffer | None:
        """A buffer over the first rows of this one, with the contents of `like`; None: it does not fit."""
        own = self.tensor
        if own.dim() == 0 or self.token_dim not in (0, None) or like.shape[1:] != own.shape[1:]:
            return None
        if like.shape[0] > own.shape[0] or (like.dtype, like.device) != (own.dtype, own.device):
            return None
        view = own[: like.shape[0]]
        if not has_strides(view, like):
            return None
        view.copy_(like)
        shorter = StaticBuffer(
            self.name, view, self.token_dim, self.padding_logic, is_permutation=self.is_permutation
        )
        shorter._contents = self._contents
        shorter._contents.owner = shorter.token
        shorter._contents.source = None
        shorter._clear_from(shorter.capacity)
        return shorter

    def check(self, value: StaticValue) -> None:
        """Raises ReplayError unless `value` has these dimensions and fits (capture rule 3)."""
        # Nearly every value is plainly as this one, or has fewer rows.
        is_plain = isinstance(value, Tensor) and (
            (got := value.shape) == (own := self.tensor.shape)
            or (self.token_dim == 0 and len(got) == len(own) and got[0] <= own[0] and got[1:] == own[1:])
        )
        if not is_plain:
            self._check_shape(value)
        if self.is_permutation:
            self._check_order(value)

    def _check_shape(self, value: StaticValue) -> None:
        expected, dim, rows = self.tensor.shape, self.token_dim, 0
        pads = self.padding_logic is not None
        for part in parts_of(value):
            got = part.shape
            if not got or (got == expected and not rows):
                rows = expected[dim] if dim is not None else 1
                continue
            fits = dim is not None and len(got) == len(expected)
            if fits:
                rows += got[dim]  # type: ignore[index]
                fits = rows <= expected[dim] and all(  # type: ignore[index]
                    got[d] == size or (pads and got[d] < size) for d, size in enumerate(expected) if d != dim
                )
            if not fits:
                room = (
                    "no dimension may be larger" if pads else "only rows may be fewer, each of the same size"
                )
                raise ReplayError(
                    f"{self.name}: got a value of shape {_shape(value)} for a captured buffer of "
                    f"{tuple(expected)}; {room}"
                )

    def _check_order(self, value: StaticValue) -> None:
        parts = parts_of(value)
        rows = sum(part.shape[0] for part in parts)
        for part in parts:
            if part.device.type != "cpu" or not part.numel():
                continue
            entries = part.numpy()  # by this thread alone, see `_torch.staging`
            first, last = int(entries.min()), int(entries.max())
            if first < 0 or last >= rows:
                raise ReplayError(
                    f"{self.name}: got an order of {rows} rows with entries from {first} to {last}; every "
                    "entry must be one of these rows"
                )

    def load(self, value: StaticValue) -> None:
        """Copies `value` into the first rows; clears those an earlier replay filled (capture rule 5)."""
        self._contents.owner = self.token
        self._contents.source = None
        self._contents.is_constant = False
        parts = (value,) if isinstance(value, Tensor) else value
        if self.token_dim is None:
            for part in parts:
                self.tensor.copy_(part, non_blocking=True)
            return
        if self.padding_logic is not None or (isinstance(value, Tensor) and value.dim() == 0):
            whole = parts[0] if len(parts) == 1 else torch.cat(list(parts), self.token_dim)
            fill = Tensor.copy_ if self.padding_logic is None or whole.dim() == 0 else self.padding_logic
            fill(self.tensor, whole)
            self._clear_from(self.capacity)
            return
        rows = 0
        for part in parts:
            end = rows + part.shape[self.token_dim]
            self._rows(rows, end).copy_(part, non_blocking=True)
            rows = end
        first, *others = self._contents.dirty
        if first != (0, rows) or (others and others[0][0] < self.capacity):
            self._clear_from(rows)

    def remember(self, source: StaticValue | None) -> None:
        """Records the constant tensor that the buffer was just filled from, see `holds`."""
        if isinstance(source, Tensor) and is_immutable(source):
            self._contents.source = weakref.ref(source)

    def holds(self, value: StaticValue | None) -> bool:
        """Whether the buffer was filled last from this same constant tensor."""
        contents = self._contents
        return (
            value is not None
            and contents.source is not None
            and contents.owner is self.token
            and contents.source() is value
        )

    def _rows(self, start: int, end: int) -> Tensor:
        if end - start == self.capacity:
            return self.tensor
        if self.token_dim == 0:
            return self.tensor[start:end]  # in less time than `narrow` takes
        assert self.token_dim is not None
        return self.tensor.narrow(self.token_dim, start, end - start)

    def _clear_from(self, rows: int) -> None:
        """Marks the first rows as filled and zeroes the others; those after this buffer stay as they were."""
        capacity, dirty = self.capacity, [(0, rows)]
        for first, end in self._contents.dirty:
            start, stop = first if first > rows else rows, end if end < capacity else capacity
            if start < stop:
                self._rows(start, stop).zero_()
            if end > capacity:
                dirty.append((first if first > capacity else capacity, end))
        self._contents.dirty = dirty

    @property
    def is_constant(self) -> bool:
        """Whether a batch may leave it out."""
        return self._contents.is_constant

    def restore(self, contents: Tensor) -> None:
        """Makes `contents` its constant again."""
        self.tensor.copy_(contents)
        self._clear_from(self.capacity)
        self._contents.source = None
        self._contents.is_constant = True

    def check_kept(self) -> None:
        """Raises ReplayError if another capture has filled the memory since (capture rule 4)."""
        if self._contents.owner is not self.token:
            raise ReplayError(
                f"{self.name}: the replay would keep what this buffer holds, but another budget has filled "
                "its memory since; give a value for every replay"
            )


class SharedBuffers:
    """Memory that the captures of one forward share: smaller ones read the first rows of the largest. A
    larger capture gets `growth` times as many rows as the last one; 1: as many as it needs.
    """

    def __init__(self, growth: int = 1) -> None:
        self.growth = growth
        self._largest: dict[str, StaticBuffer] = {}
        self._memory: dict[StorageWeakRef, int] = {}
        """Bytes of all that was the largest once, which earlier captures may still read."""

    def share(self, buffer: StaticBuffer) -> StaticBuffer:
        """A buffer like this one in shared memory, where it fits; else this one, for others to share."""
        largest = self._largest.get(buffer.name)
        shared = largest.first_rows(buffer.tensor) if largest is not None else None
        if shared is not None:
            return shared
        if largest is None or largest.tensor.nbytes < buffer.tensor.nbytes:
            self._largest[buffer.name] = grown = self._grown(buffer, largest)
            self._memory[weakly(grown.tensor)] = grown.tensor.untyped_storage().nbytes()
            if grown is not buffer:
                return grown.first_rows(buffer.tensor) or buffer
        return buffer

    def _grown(self, buffer: StaticBuffer, largest: StaticBuffer | None) -> StaticBuffer:
        own = buffer.tensor
        if largest is None or self.growth == 1 or own.dim() == 0 or buffer.token_dim not in (0, None):
            return buffer
        if not own.is_contiguous():  # more rows of other strides may overlap
            return buffer
        rows = max(own.shape[0], self.growth * largest.tensor.shape[0])
        tensor = own.new_zeros((rows, *own.shape[1:]))
        return StaticBuffer(
            buffer.name, tensor, buffer.token_dim, buffer.padding_logic, is_permutation=buffer.is_permutation
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that is shared, or still held by earlier captures."""
        self._memory = {place: size for place, size in self._memory.items() if not is_dropped(place)}
        return sum(self._memory.values())

    def clear(self) -> None:
        """Forgets the memory; captures that read it keep it alive."""
        self._largest.clear()


def _shape(value: StaticValue) -> object:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else [tuple(part.shape) for part in value]


def parts_of(value: StaticValue) -> Sequence[Tensor]:
    """Returns the tensors whose rows make up a value."""
    return (value,) if isinstance(value, torch.Tensor) else value
