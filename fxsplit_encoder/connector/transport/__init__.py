"""How tensors get from one place to another: one seam, and what lies behind it."""

from fxsplit_encoder.connector.transport.in_process import InProcessTransport
from fxsplit_encoder.connector.transport.seam import Handle, Payload, Transport

__all__ = ["Handle", "InProcessTransport", "Payload", "Transport"]
