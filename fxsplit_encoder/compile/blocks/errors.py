"""Why a block cannot be an op, or its op is no longer right."""

from fxsplit_encoder.errors import CompileError, InputError


class BlockError(CompileError):
    """A block cannot be an op. The forward may be traced all the same, block by block."""


class ChangedBlocksError(InputError):
    """Blocks are no longer what a graph was made of. Nothing was computed; another trace has them right."""
