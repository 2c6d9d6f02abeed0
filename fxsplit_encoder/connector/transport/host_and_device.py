"""A GPU's tensors through its own memory, others through the host's."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from fxsplit_encoder.connector.transport.cuda import CudaTransport
from fxsplit_encoder.connector.transport.seam import Handle, Payload
from fxsplit_encoder.connector.transport.shared_memory import SharedMemoryTransport


class HostAndDevice:
    """A `Transport` over two. Neither is closed with it.

    Args:
        host: for every tensor that the other does not take.
        device: for tensors of a GPU. None: there is none.
    """

    def __init__(self, host: SharedMemoryTransport, device: CudaTransport | None = None) -> None:
        self.host = host
        self.device = device

    @property
    def held_bytes(self) -> int:
        """What is held in both memories of this end."""
        return self.host.held_bytes + (self.device.held_bytes if self.device is not None else 0)

    def put(
        self,
        key: bytes,
        buffers: Mapping[str, Tensor],
        meta: Mapping[str, object] | None = None,
        timeout: float = 0.0,
    ) -> Handle:
        """Put tensors where they are; see `Transport.put`."""
        is_on_device = all(getattr(tensor, "is_cuda", False) for tensor in buffers.values())
        if self.device is not None and self.device.may_put and is_on_device:
            return self.device.put(key, buffers, meta, timeout)
        return self.host.put(key, buffers, meta, timeout)

    def get(self, handle: Handle, into: Mapping[str, Tensor] | None = None) -> Payload:
        """Copies of what was put, in the kind of memory that it was put into; see `Transport.get`."""
        return self._of(handle).get(handle, into)

    def release(self, handle: Handle) -> None:
        """Give up a handle of either memory; see `Transport.release`."""
        self._of(handle).release(handle)

    def _of(self, handle: Handle) -> CudaTransport | SharedMemoryTransport:
        return self.device if self.device is not None and self.device.knows(handle) else self.host
