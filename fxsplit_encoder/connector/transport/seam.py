"""What every transport does: tensors are put under a key in one place and got by their handle in another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from fxsplit_encoder.connector.transport.layout import TensorLayout


@dataclass(frozen=True)
class Handle:
    """Where buffers that were put lie. Plain values only, so that it fits into any message."""

    owner: str
    """Names the transport that holds them."""
    number: int
    """Names them there; never given twice."""
    key: bytes
    offset: int
    """Of what was put, in the owner's memory, in bytes."""
    tensors: tuple[TensorLayout, ...]
    meta: Mapping[str, object] = field(default_factory=dict)
    checksum: bytes = b""
    """Of the bytes, where the owner was asked for it; else empty."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.num_bytes for tensor in self.tensors)


class Payload(NamedTuple):
    """What was put, as `get` gives it."""

    buffers: Mapping[str, Tensor]
    meta: Mapping[str, Any]


class Transport(Protocol):
    """Hands tensors over. Its methods may be called from several threads at once.

    Memory has a bound that is never exceeded. What is put is held until it is released, by whoever put it or
    whoever got it, and no longer than until `close`.
    """

    @property
    def held_bytes(self) -> int:
        """What was put and is not released yet, in bytes of this transport's memory."""
        ...

    def put(
        self, key: bytes, buffers: Mapping[str, Tensor], meta: Mapping[str, object] | None = None
    ) -> Handle:
        """Hold tensors until they are released. Nobody writes to them any more.

        Args:
            key: what they are, for messages.
            buffers: by name; of any shape, strides and device.
            meta: what travels with them: numbers, strings, bytes, None, lists, tuples, mappings by strings,
                small tensors and arrays.

        Raises:
            InputError: they can never be held, for their kind or their size.
            TransportFullError: there is no room for them now.
            TransportError: the transport is closed.
        """
        ...

    def get(self, handle: Handle, into: Mapping[str, Tensor] | None = None) -> Payload:
        """The tensors of a handle.

        Args:
            handle: from `put`, here or at the other end.
            into: tensors of the same names, shapes and dtypes that are filled and given back. None: tensors
                that outlive the handle; within one process they are the very ones that were put.

        Raises:
            InputError: `into` does not fit; nothing was copied.
            TransportError: nothing is held under the handle.
        """
        ...

    def release(self, handle: Handle) -> None:
        """Give up what a handle holds; a second time, and after `close`, it does nothing."""
        ...

    def close(self) -> None:
        """Give up everything; idempotent. What `get` returned stays valid."""
        ...
