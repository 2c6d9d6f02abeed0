"""Parameters that a capture baked in by address."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain
from operator import eq, getitem
from typing import Any, Protocol

from torch import Tensor, nn

from fxsplit_encoder._torch.distributed import local_part
from fxsplit_encoder._torch.tensors import as_plain_tensors, dense_parts, tensors_of, wrapped
from fxsplit_encoder.capture.buffers import storage_address, unstrided
from fxsplit_encoder.errors import WeightsLayoutError, WeightsMovedError

# Names in an error message.
_NAMED = 4


class CheckedParameters(Protocol):
    """What a capture asks of the parameters that it reads."""

    def check_addresses(self) -> None:
        """Raises WeightsMovedError if one moved or was replaced since the capture (capture rule 6)."""

    def memory(self) -> Sequence[Tensor]:
        """Returns aliases that keep their memory from being freed."""


class _Memory(list[Tensor]):
    """Other tensors over the same memory. A list has no weak references."""


class _Inside:
    """The tensors inside of a wrapper subclass, looked up through its holder: it may be replaced."""

    def __init__(self, holder: Any, key: str) -> None:
        self._holder = holder
        self._key = key

    def __getitem__(self, attribute: str) -> Tensor:
        return getattr(self._holder[self._key], attribute)  # type: ignore[no-any-return]

    def get(self, attribute: str) -> Tensor | None:
        return getattr(self._holder.get(self._key), attribute, None)


class MemoryOrders:
    """Detects tensors replaced by a permutation of themselves at one address, such as a transpose."""

    def __init__(self, tensors: Sequence[object]) -> None:
        found = {i: each for i, each in enumerate(tensors) if isinstance(each, Tensor) and _may_permute(each)}
        self.indices = [*found]
        """Which of the tensors could be permuted and keep their shape."""
        are_contiguous = all(tensor.is_contiguous() for tensor in found.values())
        self.order_of: Callable[[Any], Any] = Tensor.is_contiguous if are_contiguous else Tensor.stride
        self.baked = list(map(self.order_of, found.values()))

    def are_those_of(self, tensors: Iterable[Any]) -> bool:
        """Whether tensors, those at `indices`, have the same order. About 50 ns each."""
        return all(map(eq, map(self.order_of, tensors), self.baked))

    def changed(self, tensors: Sequence[Any]) -> list[int]:
        """Returns the indices of those among all tensors whose order is another one."""
        pairs = zip(self.indices, self.baked, strict=True)
        return [index for index, order in pairs if self.order_of(tensors[index]) != order]


class StaticParameters:
    """Parameters and constants that a capture baked in by address; of a wrapper subclass the inner tensors.
    Every check looks those of `module` up there, so as to see replaced ones.
    """

    def __init__(self, tensors: Iterable[Tensor], module: object = None) -> None:
        self._module = module
        self._baked = [part for tensor in tensors for part in dense_parts(tensor)]
        self._addresses = [_address(tensor) for tensor in self._baked]
        self._address_of = _address if unstrided(self._baked) else Tensor.data_ptr
        self._memory: Callable[[], _Memory | None] = lambda: None
        self.names: list[str] = []
        """Dotted names in the module, or descriptions of constants."""
        self._holders: list[Any] = []
        self._keys: list[str] = []
        owned, self._wrappers = _owned_tensors(module) if isinstance(module, nn.Module) else ({}, [])
        for number, tensor in enumerate(self._baked):
            unnamed = f"constant {number} of shape {tuple(tensor.shape)}"
            name, holder, key = owned.get(_identity(tensor), (unnamed, {unnamed: tensor}, unnamed))
            self.names.append(name)
            self._holders.append(holder)
            self._keys.append(key)
        self._orders = MemoryOrders(self._baked)
        self._permutable_holders = [self._holders[number] for number in self._orders.indices]
        self._permutable_keys = [self._keys[number] for number in self._orders.indices]
        self._places = [*self._addresses, *self._orders.baked]

    @classmethod
    def of_module(cls, module: nn.Module) -> StaticParameters:
        """Returns every parameter and buffer of a module."""
        return cls([*module.parameters(), *module.buffers()], module)

    def with_those_at(self, addresses: Collection[int]) -> StaticParameters:
        """These, and the module's others whose memory begins at one of the addresses."""
        if not isinstance(self._module, nn.Module):
            return self
        known = set(map(_identity, self._baked))
        owned = (*self._module.parameters(), *self._module.buffers())
        others = [
            tensor
            for each in owned
            for tensor in dense_parts(each)
            if not unstrided([tensor])
            and storage_address(tensor) in addresses
            and _identity(tensor) not in known
        ]
        return StaticParameters([*self._baked, *others], self._module) if others else self

    def memory(self) -> Sequence[Tensor]:
        """Aliases that keep the baked memory from being freed."""
        memory = self._memory()
        if memory is None:
            memory = _Memory(tensor.detach() for tensor in self._baked)
            self._memory = weakref.ref(memory)
        return memory

    def current(self) -> list[Tensor | None]:
        """Returns the tensors now in the places of the baked ones (None: removed), or WeightsLayoutError."""
        if changed := self.changed_wrappers():
            raise WeightsLayoutError(
                f"parameters: expected {changed[0]} with the constants of its subclass that were compiled; "
                "got others. Call clear() and capture() to compile the tower again"
            )
        return [holder.get(key) for holder, key in zip(self._holders, self._keys, strict=True)]

    def have_moved(self) -> bool:
        """Whether one has moved since the capture, or a wrapper's constants changed. About 100 ns each."""
        # Each has to be asked: `parameter.data = ...` changes its address and neither its identity nor its
        # version. Without lists of hundreds of numbers more of the processor's cache is left for others.
        addresses = map(self._address_of, map(getitem, self._holders, self._keys))
        orders = map(self._orders.order_of, map(getitem, self._permutable_holders, self._permutable_keys))
        try:
            with as_plain_tensors():  # vLLM's parameters have code of their own at every access
                have_moved = not all(map(eq, chain(addresses, orders), self._places))
            return have_moved or bool(self._wrappers and self.changed_wrappers())
        except (AttributeError, KeyError, TypeError):  # one was removed
            return True

    def changed_wrappers(self) -> list[str]:
        """Names of wrapper subclasses whose constants, or tensors without memory, have changed."""
        return [name for name, holder, key, kept in self._wrappers if _constants(holder.get(key)) != kept]

    def check_addresses(self) -> None:
        """Raises WeightsMovedError if a parameter moved or was replaced (capture rule 6)."""
        if not self.have_moved():
            return
        now = [holder.get(key) for holder, key in zip(self._holders, self._keys, strict=True)]
        pairs = zip(self.names, now, self._addresses, strict=True)
        moved = [name for name, tensor, baked in pairs if tensor is None or _address(tensor) != baked]
        if not moved:
            moved = [self.names[number] for number in self._orders.changed(now)]
        moved = [*dict.fromkeys(moved)] or self.changed_wrappers()
        more = f" and {len(moved) - _NAMED} more" if len(moved) > _NAMED else ""
        raise WeightsMovedError(
            f"capture rule 6: {', '.join(moved[:_NAMED])}{more}: moved since the capture ({len(moved)} of "
            f"{len(self.names)} parameters and constants); copy new weights in place (load_state_dict "
            "does), or call clear() and capture again"
        )


def _owned_tensors(
    module: nn.Module,
) -> tuple[dict[Any, tuple[str, Any, str]], list[tuple[str, Any, str, Any]]]:
    """For every parameter and buffer, also of wrapper subclasses: its dotted name, its holder, its key."""
    owned: dict[Any, tuple[str, Any, str]] = {}
    wrappers: list[tuple[str, Any, str, Any]] = []
    for prefix, submodule in module.named_modules():
        for holder in tensors_of(submodule):
            for key, tensor in holder.items():
                if tensor is None:
                    continue
                name = f"{prefix}.{key}" if prefix else key
                for part, place in _places(tensor, holder, key):
                    owned.setdefault(_identity(part), (name, *place))
                if (constants := _constants(tensor)) is not None:
                    wrappers.append((name, holder, key, constants))
    return owned, wrappers


def _places(tensor: Tensor, holder: Any, key: str) -> Iterator[tuple[Tensor, tuple[Any, str]]]:
    if (names := wrapped(tensor)) is None:
        yield tensor, (holder, key)
        return
    for name in names:
        yield from _places(getattr(tensor, name), _Inside(holder, key), name)


def _constants(tensor: Any) -> Any:
    """Returns the type and metadata of a wrapper subclass; None for other tensors and for `DTensor`."""
    if tensor is None or local_part(tensor) is not tensor:
        return None
    if wrapped(tensor) is not None:
        return type(tensor), repr(tensor.__tensor_flatten__()[1])  # type: ignore[attr-defined]
    has_memory = tensor.is_meta or not tensor.numel() or _address(tensor)
    return None if has_memory else id(tensor)


def _may_permute(tensor: Tensor) -> bool:
    sizes = [] if unstrided([tensor]) else [size for size in tensor.shape if size > 1]
    return len(set(sizes)) < len(sizes)


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    strides = None if unstrided([tensor]) else tensor.stride()
    return _address(tensor), tensor.shape, strides, tensor.dtype


def _address(tensor: Tensor) -> int:
    return id(tensor) if unstrided([tensor]) else tensor.data_ptr()  # sparse ones lie in several places
