"""Encoders in processes of their own, on this host: what kills one, or leaks in one, ends there."""

from fxsplit_encoder.connector.processes.process_encoder import ProcessEncoder, ProcessOptions
from fxsplit_encoder.connector.processes.wire import EncoderProgram

__all__ = ["EncoderProgram", "ProcessEncoder", "ProcessOptions"]
