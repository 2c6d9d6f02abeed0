"""The default: both ends are one process, and tensors stay where they are."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Mapping

from torch import Tensor

from fxsplit_encoder.connector.transport.layout import copy_out, lay_out
from fxsplit_encoder.connector.transport.seam import Handle, Payload
from fxsplit_encoder.errors import InputError, TransportError, TransportFullError


class InProcessTransport:
    """A `Transport` that holds the tensors themselves.

    Args:
        max_bytes: of all tensors that are held. None: no bound.
    """

    def __init__(self, max_bytes: int | None = None) -> None:
        self.max_bytes = max_bytes
        self.owner = secrets.token_hex(8)
        self._held: dict[int, tuple[Handle, Payload]] = {}
        self._held_bytes = 0
        self._last = 0
        self._is_open = True
        self._lock = threading.Lock()

    @property
    def held_bytes(self) -> int:
        """Bytes of the tensors that were put and are not released."""
        return self._held_bytes

    def put(
        self, key: bytes, buffers: Mapping[str, Tensor], meta: Mapping[str, object] | None = None
    ) -> Handle:
        """Hold tensors until they are released; see `Transport.put`."""
        layouts, _ = lay_out(buffers)
        payload = Payload({name: tensor.detach() for name, tensor in buffers.items()}, dict(meta or {}))
        with self._lock:
            self._last += 1
            handle = Handle(self.owner, self._last, bytes(key), 0, layouts, payload.meta)
            self._check_room(handle.num_bytes)
            self._held[handle.number] = (handle, payload)
            self._held_bytes += handle.num_bytes
        return handle

    def _check_room(self, num_bytes: int) -> None:
        if not self._is_open:
            raise TransportError("the transport is closed")
        if self.max_bytes is None:
            return
        if num_bytes > self.max_bytes:
            raise InputError(f"buffers: expected at most max_bytes={self.max_bytes}; got {num_bytes} bytes")
        if self._held_bytes + num_bytes > self.max_bytes:
            raise TransportFullError(
                f"{num_bytes} bytes do not fit beside {self._held_bytes} of max_bytes={self.max_bytes}"
            )

    def get(self, handle: Handle, into: Mapping[str, Tensor] | None = None) -> Payload:
        """The very tensors that were put, or copies of them in `into`; see `Transport.get`."""
        with self._lock:
            held = self._held.get(handle.number) if handle.owner == self.owner else None
        if held is None:
            raise TransportError(f"nothing is held under handle {handle.number} of {handle.owner}")
        payload = held[1]
        return payload if into is None else Payload(copy_out(payload.buffers, into), payload.meta)

    def release(self, handle: Handle) -> None:
        """Give up what a handle holds; see `Transport.release`."""
        with self._lock:
            if handle.owner == self.owner and self._held.pop(handle.number, None) is not None:
                self._held_bytes -= handle.num_bytes

    def close(self) -> None:
        """Give up everything."""
        with self._lock:
            self._is_open = False
            self._held.clear()
            self._held_bytes = 0
