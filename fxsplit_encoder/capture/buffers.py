"""Static inputs: tensors at fixed addresses that a capture reads, and their refilling before each replay."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fxsplit_encoder.errors import ReplayError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor


class StaticBuffer:
    """One static input. It owns its memory: nobody else holds or moves it.

    Args:
        name: for messages.
        tensor: the captured tensor; a copy of its address is kept.
        token_dim: the dimension along which replays fill a part; None: the whole tensor is replaced.
    """

    def __init__(self, name: str, tensor: Tensor, token_dim: int | None = 0) -> None:
        self.name = name
        self.tensor = tensor
        self.token_dim = token_dim if tensor.dim() > 0 else None
        self.address = tensor.data_ptr()
        self.dirty_rows = tensor.shape[self.token_dim] if self.token_dim is not None else 0

    @property
    def capacity(self) -> int:
        """Rows along the token dimension."""
        return 1 if self.token_dim is None else self.tensor.shape[self.token_dim]

    def check(self, value: Tensor) -> None:
        """Raises ReplayError unless `value` fits: same dimensions, at most as many rows (capture rule 3)."""
        expected = list(self.tensor.shape)
        if self.token_dim is not None and value.dim() == len(expected):
            rows = value.shape[self.token_dim]
            if rows <= expected[self.token_dim]:
                expected[self.token_dim] = rows
        if list(value.shape) != expected:
            raise ReplayError(
                f"{self.name}: got a value of shape {tuple(value.shape)} for a captured buffer of {tuple(self.tensor.shape)}; "
                "it must have the same dimensions and at most as many rows"
            )

    def load(self, value: Tensor) -> None:
        """Copies `value` into the first rows and clears those that an earlier replay filled (capture rule 5)."""
        if self.token_dim is None:
            self.tensor.copy_(value, non_blocking=True)
            return
        rows = value.shape[self.token_dim]
        self.tensor.narrow(self.token_dim, 0, rows).copy_(value, non_blocking=True)
        if rows < self.dirty_rows:
            self.tensor.narrow(self.token_dim, rows, self.dirty_rows - rows).zero_()
        self.dirty_rows = rows

    def check_address(self) -> None:
        """Raises ReplayError if the captured tensor has moved (capture rule 6)."""
        if self.tensor.data_ptr() != self.address:
            raise ReplayError(
                f"{self.name}: its captured buffer moved from {self.address:#x} to {self.tensor.data_ptr():#x}; static buffers "
                "must not be resized or replaced"
            )


class StaticInputs:
    """The static inputs of one capture, by name."""

    def __init__(self, buffers: Iterable[StaticBuffer]) -> None:
        self.buffers = {buffer.name: buffer for buffer in buffers}

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: buffer.tensor for name, buffer in self.buffers.items()}

    @property
    def num_bytes(self) -> int:
        return sum(b.tensor.numel() * b.tensor.element_size() for b in self.buffers.values())

    def check(self, values: Mapping[str, Tensor | None]) -> None:
        """Raises ReplayError unless every buffer gets a value that fits; nothing is copied before (rules 3 and 4)."""
        for name, buffer in self.buffers.items():
            if name not in values:
                raise ReplayError(
                    f"{name}: the replay needs this buffer and got no value; got {sorted(values)}. Pass None to keep what the "
                    "buffer holds"
                )
            value = values[name]
            if value is not None:
                buffer.check(value)

    def load(self, values: Mapping[str, Tensor | None]) -> None:
        """Checks everything, then fills every buffer. A value of None keeps what the buffer holds."""
        self.check(values)
        with torch.no_grad():
            for name, buffer in self.buffers.items():
                value = values[name]
                if value is not None:
                    buffer.load(value)

    def check_addresses(self) -> None:
        for buffer in self.buffers.values():
            buffer.check_address()


class StaticParameters:
    """Parameters and constants that a capture baked in by address."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = list(tensors)
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]

    def check_addresses(self) -> None:
        """Raises ReplayError if a parameter moved, by loading other weights into new tensors, say (rule 6).

        About 30 nanoseconds a parameter, so it is done at every replay.
        """
        if [tensor.data_ptr() for tensor in self._tensors] != self._addresses:
            moved = [i for i, t in enumerate(self._tensors) if t.data_ptr() != self._addresses[i]]
            raise ReplayError(
                f"{len(moved)} of {len(self._tensors)} parameters have moved since the capture (the first has shape "
                f"{tuple(self._tensors[moved[0]].shape)}); copy new weights in place (load_state_dict does), or call clear() "
                "and capture again"
            )
