"""Encoders in processes of their own, on this host: what kills one, or leaks in one, ends there."""

from fxsplit_encoder.connector.processes.process_encoder import EncoderProgram, ProcessEncoder, ProcessOptions

__all__ = ["EncoderProgram", "ProcessEncoder", "ProcessOptions"]
