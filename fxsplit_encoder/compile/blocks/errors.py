"""Why a block cannot be an op."""

from fxsplit_encoder.errors import CompileError


class BlockError(CompileError):
    """A block cannot be an op. The forward may be traced all the same, block by block."""
