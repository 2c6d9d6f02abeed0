"""Which ops torch runs."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Dispatched(TorchDispatchMode):
    """Notes the name and the arguments of every op inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((str(func.overloadpacket), args))
        return func(*args, **(kwargs or {}))

    def entries(self, name: str) -> int:
        """How many entries the first arguments of the ops of a name had, together."""
        return sum(args[0].numel() for called, args in self.calls if called == name)
