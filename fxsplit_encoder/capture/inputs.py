"""The static inputs of one capture, which are checked and filled together before each replay."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from fxsplit_encoder._torch.staging import copy_on_host
from fxsplit_encoder.capture.buffers import StaticBuffer, StaticValue, parts_of
from fxsplit_encoder.errors import ReplayError

# Bytes to which values are aligned in pinned memory; every dtype's size divides it.
_ALIGNMENT = 64


def example_values(shape: Sequence[int], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Draws normal numbers for a capture to run on, from a generator of their own: what the program draws
    stays the same.
    """
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

    @property
    def num_bytes(self) -> int:
        """Memory of the buffers, of their own or shared."""
        return sum(buffer.num_bytes for buffer in self.buffers.values())

    def check(self, values: Mapping[str, StaticValue | None]) -> None:
        """Raises ReplayError unless every value fits and none is missing (capture rules 3 and 4)."""
        self._checked(values, ())

    def _checked(
        self, values: Mapping[str, StaticValue | None], held: Collection[str]
    ) -> list[tuple[StaticBuffer, StaticValue]]:
        """The same; returns what is to be filled, and from what."""
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
        if self.buffers.keys() <= values.keys():
            return
        for name, buffer in self.buffers.items():
            if name not in values and not buffer.is_constant:
                raise ReplayError(
                    f"{name}: the replay needs this buffer and got no value; got {sorted(values)}. Pass "
                    "None to keep what the buffer holds"
                )

    def check_full(self, values: Mapping[str, StaticValue | None], but: Collection[str] = ()) -> None:
        """Raises ReplayError if a value leaves rows of its buffer to padding.

        Args:
            but: the buffers of which it may.
        """
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
        """Checks everything, then fills every buffer. A value of None keeps what the buffer holds; a constant
        may be left out.

        To be called without autograd.

        Args:
            held: the names of values of None whose buffers are known to hold what they have to.
        """
        for buffer, value in _pinned(self._checked(values, held)):
            buffer.load(value)

    @contextlib.contextmanager
    def kept_constants(self) -> Iterator[None]:
        """What is loaded inside is no batch: constants are what they were after it."""
        with contextlib.ExitStack() as buffers:
            for buffer in self.buffers.values():
                buffers.enter_context(buffer.kept_constant())
            yield

    def check_addresses(self) -> None:
        """Raises ReplayError if a captured tensor has moved (capture rule 6)."""
        for buffer in self.buffers.values():
            buffer.check_address()


def _pinned(
    given: Sequence[tuple[StaticBuffer, StaticValue]],
) -> Sequence[tuple[StaticBuffer, StaticValue]]:
    """The values with those on the host in one piece of pinned memory, in the dtype of their buffers; what
    lies in pinned memory already stays there.

    From pageable memory a copy would wait for the device, and converting there would take a copy more. torch
    reuses pinned memory only once the copies out of it are done.
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
    """Whether a copy to a device neither waits for it nor makes another on the host first."""
    return part.is_cuda or (part.dtype == dtype and part.is_contiguous() and part.is_pinned())


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
