"""Static inputs: tensors at fixed addresses that a capture reads, and their refilling before each replay."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fxsplit_encoder.errors import ReplayError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor

# Names in an error message.
_NAMED = 4


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
                f"{self.name}: got a value of shape {tuple(value.shape)} for a captured buffer of "
                f"{tuple(self.tensor.shape)}; it must have the same dimensions and at most as many rows"
            )

    def load(self, value: Tensor) -> None:
        """Copies `value` into the first rows; clears those an earlier replay filled (capture rule 5)."""
        if self.tensor.is_cuda and not value.is_cuda:
            # From pageable memory the copy would wait for the device; torch reuses pinned memory once copies
            # are done.
            value = value.pin_memory()
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
                f"{self.name}: its captured buffer moved from {self.address:#x} to "
                f"{self.tensor.data_ptr():#x}; static buffers must not be resized or replaced"
            )


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
        """Memory of the buffers."""
        return sum(b.tensor.numel() * b.tensor.element_size() for b in self.buffers.values())

    def check(self, values: Mapping[str, Tensor | None]) -> None:
        """Raises ReplayError unless every buffer gets a value that fits (capture rules 3 and 4)."""
        self.check_complete(values)
        for name, buffer in self.buffers.items():
            value = values[name]
            if value is not None:
                buffer.check(value)

    def check_complete(self, values: Mapping[str, Tensor | None]) -> None:
        """Raises ReplayError if a buffer got no value at all (capture rule 4)."""
        for name in self.buffers:
            if name not in values:
                raise ReplayError(
                    f"{name}: the replay needs this buffer and got no value; got {sorted(values)}. Pass "
                    "None to keep what the buffer holds"
                )

    def load(self, values: Mapping[str, Tensor | None]) -> None:
        """Checks everything, then fills every buffer. A value of None keeps what the buffer holds."""
        self.check(values)
        with torch.no_grad():
            for name, buffer in self.buffers.items():
                value = values[name]
                if value is not None:
                    buffer.load(value)

    def check_addresses(self) -> None:
        """Raises ReplayError if a captured tensor has moved (capture rule 6)."""
        for buffer in self.buffers.values():
            buffer.check_address()


class StaticParameters:
    """Parameters and constants that a capture baked in by address.

    Args:
        tensors: what was baked in.
        module: where those of them that are parameters or buffers live; they are looked up there at every
            check, so that one that was replaced is seen too.
    """

    def __init__(self, tensors: Iterable[Tensor], module: object = None) -> None:
        self._baked = list(tensors)
        self._addresses = [tensor.data_ptr() for tensor in self._baked]
        self._names: list[str] = []
        self._places: list[tuple[Mapping[str, Tensor | None], str]] = []
        owned = _owned_tensors(module) if isinstance(module, nn.Module) else {}
        for number, tensor in enumerate(self._baked):
            unnamed = f"constant {number} of shape {tuple(tensor.shape)}"
            name, holder, key = owned.get(_identity(tensor), (unnamed, {unnamed: tensor}, unnamed))
            self._names.append(name)
            self._places.append((holder, key))

    @classmethod
    def of_module(cls, module: object) -> StaticParameters:
        """Every parameter and buffer of a module; none of anything else."""
        if not isinstance(module, nn.Module):
            return cls(())
        return cls([*module.parameters(), *module.buffers()], module)

    def current(self) -> list[Tensor | None]:
        """The tensors that are now where the baked ones were; None where there is none any more."""
        return [holder.get(key) for holder, key in self._places]

    def have_moved(self) -> bool:
        """Whether one lies elsewhere than at the capture. About 100 nanoseconds a parameter."""
        try:
            return [holder[key].data_ptr() for holder, key in self._places] != self._addresses  # type: ignore[union-attr]
        except (AttributeError, KeyError):  # one was removed
            return True

    def check_addresses(self) -> None:
        """Raises ReplayError if a parameter moved or was replaced, by other weights say (capture rule 6)."""
        if not self.have_moved():
            return
        now = [None if tensor is None else tensor.data_ptr() for tensor in self.current()]
        pairs = zip(self._names, now, self._addresses, strict=True)
        moved = [name for name, address, baked in pairs if address != baked]
        more = f" and {len(moved) - _NAMED} more" if len(moved) > _NAMED else ""
        raise ReplayError(
            f"{', '.join(moved[:_NAMED])}{more}: moved since the capture ({len(moved)} of {len(self._names)} "
            "parameters and constants); copy new weights in place (load_state_dict does), or call clear() "
            "and capture again"
        )


def _owned_tensors(module: nn.Module) -> dict[Any, tuple[str, Mapping[str, Tensor | None], str]]:
    """For every parameter and buffer: its dotted name, the dictionary that holds it, and its key there."""
    owned: dict[Any, tuple[str, Mapping[str, Tensor | None], str]] = {}
    for prefix, submodule in module.named_modules():
        for holder in (submodule._parameters, submodule._buffers):
            for key, tensor in holder.items():
                if tensor is not None:
                    name = f"{prefix}.{key}" if prefix else key
                    owned.setdefault(_identity(tensor), (name, holder, key))
    return owned


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.dtype
