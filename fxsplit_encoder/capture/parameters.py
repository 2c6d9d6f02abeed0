"""Parameters that a capture baked in by address."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import eq, getitem
from typing import Any

from torch import Tensor, nn

from fxsplit_encoder._torch.distributed import local_part
from fxsplit_encoder._torch.tensors import as_plain_tensors, tensors_of
from fxsplit_encoder.capture.memory import storage_address, unstrided
from fxsplit_encoder.errors import WeightsMovedError

# Names in an error message.
_NAMED = 4


class _Memory(list[Tensor]):
    """Other tensors over the same memory. A list has no weak references."""


class StaticParameters:
    """Parameters and constants that a capture baked in by address.

    Args:
        tensors: what was baked in.
        module: where those of them that are parameters or buffers live; they are looked up there at every
            check, so that one that was replaced is seen too.
    """

    def __init__(self, tensors: Iterable[Tensor], module: object = None) -> None:
        self._module = module
        self._baked = list(tensors)
        self._addresses = [_address(tensor) for tensor in self._baked]
        plain = all(local_part(tensor) is tensor for tensor in self._baked) and not unstrided(self._baked)
        self._address_of = Tensor.data_ptr if plain else _address
        self._memory: Callable[[], _Memory | None] = lambda: None
        self.names: list[str] = []
        """What they are called: by the dotted names in the module, or as constants."""
        self._holders: list[Mapping[str, Tensor | None]] = []
        self._keys: list[str] = []
        owned = _owned_tensors(module) if isinstance(module, nn.Module) else {}
        for number, tensor in enumerate(self._baked):
            unnamed = f"constant {number} of shape {tuple(tensor.shape)}"
            name, holder, key = owned.get(_identity(tensor), (unnamed, {unnamed: tensor}, unnamed))
            self.names.append(name)
            self._holders.append(holder)
            self._keys.append(key)

    @classmethod
    def of_module(cls, module: object) -> StaticParameters:
        """Every parameter and buffer of a module; none of anything else."""
        if not isinstance(module, nn.Module):
            return cls(())
        return cls([*module.parameters(), *module.buffers()], module)

    def with_those_at(self, addresses: Collection[int]) -> StaticParameters:
        """These, and the module's others whose memory begins at one of these addresses."""
        if not isinstance(self._module, nn.Module):
            return self
        known = set(map(_identity, self._baked))
        owned = (*self._module.parameters(), *self._module.buffers())
        others = [
            tensor
            for tensor in owned
            if not unstrided([tensor])
            and storage_address(tensor) in addresses
            and _identity(tensor) not in known
        ]
        return StaticParameters([*self._baked, *others], self._module) if others else self

    def memory(self) -> Sequence[Tensor]:
        """What keeps the memory that was baked in from being freed, whatever becomes of the parameters."""
        memory = self._memory()
        if memory is None:
            memory = _Memory(tensor.detach() for tensor in self._baked)
            self._memory = weakref.ref(memory)
        return memory

    def current(self) -> list[Tensor | None]:
        """The tensors that are now where the baked ones were; None where there is none any more."""
        return [holder.get(key) for holder, key in zip(self._holders, self._keys, strict=True)]

    def have_moved(self) -> bool:
        """Whether one lies elsewhere than at the capture. About 100 nanoseconds a parameter."""
        # Each has to be asked: `parameter.data = ...` changes its address and neither its identity nor its
        # version. Without lists of hundreds of numbers more of the processor's cache is left for others.
        addresses = map(self._address_of, map(getitem, self._holders, self._keys))  # type: ignore[arg-type]
        try:
            with as_plain_tensors():  # vLLM's parameters have code of their own at every access
                return not all(map(eq, addresses, self._addresses))
        except (AttributeError, KeyError, TypeError):  # one was removed
            return True

    def check_addresses(self) -> None:
        """Raises WeightsMovedError if a parameter moved or was replaced (capture rule 6)."""
        if not self.have_moved():
            return
        now = [None if tensor is None else _address(tensor) for tensor in self.current()]
        pairs = zip(self.names, now, self._addresses, strict=True)
        moved = [name for name, address, baked in pairs if address != baked]
        more = f" and {len(moved) - _NAMED} more" if len(moved) > _NAMED else ""
        raise WeightsMovedError(
            f"capture rule 6: {', '.join(moved[:_NAMED])}{more}: moved since the capture ({len(moved)} of "
            f"{len(self.names)} parameters and constants); copy new weights in place (load_state_dict "
            "does), or call clear() and capture again"
        )


def _owned_tensors(module: nn.Module) -> dict[Any, tuple[str, Mapping[str, Tensor | None], str]]:
    """For every parameter and buffer: its dotted name, the dictionary that holds it, and its key there."""
    owned: dict[Any, tuple[str, Mapping[str, Tensor | None], str]] = {}
    for prefix, submodule in module.named_modules():
        for holder in tensors_of(submodule):
            for key, tensor in holder.items():
                if tensor is not None:
                    name = f"{prefix}.{key}" if prefix else key
                    owned.setdefault(_identity(tensor), (name, holder, key))
    return owned


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    return _address(tensor), tensor.shape, tensor.dtype


def _address(tensor: Tensor) -> int:
    part = local_part(tensor)
    return id(part) if unstrided([part]) else part.data_ptr()  # sparse ones lie in several places
