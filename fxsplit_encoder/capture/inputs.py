"""The static inputs of one capture, which are checked and filled together before each replay.

    rows      0 . . . . . . . . . n . . . . . . . . . . . . B
    segments  [ image ][ image    ]          (then empty ones)

The pad rows belong to no segment. Masks keep them finite in a compiled forward (`compile.masks`), attention
in a module's own code (`capture.breakable`).
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from fxsplit_encoder._torch.staging import copy_on_host
from fxsplit_encoder.capture.buffers import StaticBuffer, StaticValue, parts_of
from fxsplit_encoder.errors import InputError, ReplayError

# Bytes to which values are aligned in pinned memory; every dtype's size divides it.
_ALIGNMENT = 64


def example_values(shape: Sequence[int], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Draws normal numbers from a generator of their own, so the program's stay the same."""
    generator = None if device.type == "meta" else torch.Generator(device).manual_seed(0)
    return torch.randn(shape, generator=generator, device=device, dtype=dtype)


class StaticInputs:
    """The static inputs of one capture, by name."""

    def __init__(self, buffers: Iterable[StaticBuffer]) -> None:
        self.buffers = {buffer.name: buffer for buffer in buffers}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The captured tensors by name."""
        return {name: buffer.tensor for name, buffer in self.buffers.items()}

    def check(
        self, values: Mapping[str, StaticValue | None], held: Collection[str] = ()
    ) -> list[tuple[StaticBuffer, StaticValue]]:
        """Returns the buffers to fill, with their values; ReplayError by capture rules 3 and 4."""
        if not self.buffers.keys() <= values.keys():
            self.check_complete(values)
        given: list[tuple[StaticBuffer, StaticValue]] = []
        for name, buffer in self.buffers.items():
            if (value := values.get(name)) is not None:
                buffer.check(value)
                given.append((buffer, value))
            elif name not in held:
                buffer.check_kept()
        return given

    def check_complete(self, values: Mapping[str, StaticValue | None]) -> None:
        """Raises ReplayError if a buffer that is no constant got no value at all (capture rule 4)."""
        for name, buffer in self.buffers.items():
            if name not in values and not buffer.is_constant:
                raise ReplayError(
                    f"{name}: the replay needs this buffer and got no value; got {sorted(values)}. Pass "
                    "None to keep what the buffer holds"
                )

    def check_full(self, values: Mapping[str, StaticValue | None], but: Collection[str] = ()) -> None:
        """Raises ReplayError if a value leaves rows of its buffer to padding, but for those in `but`."""
        for name, buffer in self.buffers.items():
            value = values.get(name)
            if value is None or buffer.token_dim is None or name in but:
                continue
            parts = [part.shape for part in parts_of(value) if part.dim()]
            rows = sum(shape[buffer.token_dim] for shape in parts) if parts else buffer.capacity
            if rows < buffer.capacity or any(
                got < size
                for shape in parts
                for dim, (got, size) in enumerate(zip(shape, buffer.tensor.shape, strict=True))
                if dim != buffer.token_dim
            ):
                raise ReplayError(
                    f"{name}: got {rows} rows for {buffer.capacity}; nothing says that this capture may be "
                    "padded"
                )

    def load(self, values: Mapping[str, StaticValue | None], held: Collection[str] = ()) -> None:
        """Checks everything, then fills every buffer; None keeps what it holds. Call it without autograd."""
        for buffer, value in _pinned(self.check(values, held)):
            buffer.load(value)

    @contextlib.contextmanager
    def kept_constants(self) -> Iterator[None]:
        """Restores constants after what is loaded inside, which is no batch."""
        constants = [(each, each.tensor.clone()) for each in self.buffers.values() if each.is_constant]
        yield
        for buffer, contents in reversed(constants):
            buffer.restore(contents)


def _pinned(
    given: Sequence[tuple[StaticBuffer, StaticValue]],
) -> Sequence[tuple[StaticBuffer, StaticValue]]:
    """Copies values on the host into one piece of pinned memory, in the dtype of their buffers: from pageable
    memory a copy would wait for the device, and converting there would take another copy.
    """
    num_bytes = 0
    for buffer, value in given:
        if isinstance(value, Tensor) and value.is_cuda:
            continue
        if buffer.tensor.is_cuda:
            for part in parts_of(value):
                if not _can_be_sent(part, buffer.tensor.dtype):
                    num_bytes += _aligned(part.numel() * buffer.tensor.element_size())
    if num_bytes == 0:
        return given
    memory = torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    offset = 0
    result = []
    for buffer, value in given:
        dtype, parts = buffer.tensor.dtype, []
        for part in parts_of(value):
            if not _can_be_sent(part, dtype):
                end = offset + part.numel() * dtype.itemsize
                place = memory[offset:end].view(dtype).view(part.shape)
                offset = _aligned(end)
                part = copy_on_host(place, part)
            parts.append(part)
        result.append((buffer, parts))
    return result


def _can_be_sent(part: Tensor, dtype: torch.dtype) -> bool:
    return part.is_cuda or (part.dtype == dtype and part.is_contiguous() and part.is_pinned())


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


# An image or frame of a served model seldom has fewer output tokens (224 x 224 pixels in Qwen3-VL have 49).
# Every segment of a capture costs thread blocks of attention, used or not: with 8 empty segments beside one
# real one FlashAttention 2 took 66 instead of 49 microseconds at 1024 tokens (one H200, 16 heads of 72,
# benchmarks/cases/attention.py).
_TYPICAL_SEGMENT_TOKENS = 32
_MIN_SEGMENTS = 8


def segment_capacity(token_budget: int, max_segments: int) -> int:
    """Segments that a capture of so many output tokens holds, `max_segments` at most."""
    return max(1, min(max_segments, max(_MIN_SEGMENTS, token_budget // _TYPICAL_SEGMENT_TOKENS)))


def full_cu_seqlens(capacity: int, rows: int, segments: int = 1) -> Tensor:
    """(capacity + 1,) int32: lengths of `rows` rows in equal segments, then empty ones."""
    result = torch.full((capacity + 1,), rows, dtype=torch.int32, device="cpu")
    result[: segments + 1] = torch.arange(segments + 1, device="cpu") * rows // segments
    return result


# A service sees few sizes of images. A batch of a thousand frames takes 8 KiB.
@lru_cache(maxsize=256)
def pad_cu_seqlens(given: tuple[int, ...], length: int, rows: int) -> Tensor:
    """Extends cumulative lengths, which rise from 0, to (length,) int32 on the CPU by empty segments (capture
    rule 2). The result is cached: never write to it. InputError: they fall, or do not start at 0.
    ReplayError: more segments, or more than `rows` rows.
    """
    if not given or given[0] != 0 or any(end < start for start, end in itertools.pairwise(given)):
        raise InputError(f"cu_seqlens: expected entries that rise from 0; got {list(given[:8])}...")
    real = given[-1]
    segments = bisect.bisect_left(given, real)
    if real > rows or segments > length - 1:
        raise ReplayError(
            f"cu_seqlens: {segments} segments over {real} rows do not fit a capture of {length - 1} "
            f"segments over {rows} rows"
        )
    # In pinned memory it need not be copied on the host before it goes to a device.
    pinned = torch.cuda.is_initialized()
    lengths = given[: segments + 1] + (real,) * (length - segments - 1)
    with torch.inference_mode(False):
        return torch.tensor(lengths, dtype=torch.int32, device="cpu", pin_memory=pinned)


def pad_cu_seqlens_on_device(cu_seqlens: Tensor, length: int) -> Tensor:
    """As `pad_cu_seqlens` for (segments + 1,) int32, without a host read: values go unchecked."""
    spare = length - cu_seqlens.shape[0]
    if spare < 0:
        raise ReplayError(f"cu_seqlens: {cu_seqlens.shape[0]} entries do not fit a capture of {length}")
    return torch.cat([cu_seqlens, cu_seqlens[-1:].expand(spare)]) if spare else cu_seqlens


def fill_cu_seqlens(buffer: Tensor, value: Tensor) -> None:
    """Copies cumulative lengths into a buffer of as many or more, extended by empty segments."""
    buffer.copy_(pad_cu_seqlens_on_device(value, buffer.shape[0]))


def is_cumulative(tensor: Tensor) -> bool:
    """Whether a tensor looks like cumulative lengths: 32-bit integers that rise from 0."""
    if tensor.dim() != 1 or tensor.dtype != torch.int32 or tensor.shape[0] < 2:
        return False
    entries = tensor.tolist()
    return entries[0] == 0 < entries[-1] and all(a <= b for a, b in itertools.pairwise(entries))
