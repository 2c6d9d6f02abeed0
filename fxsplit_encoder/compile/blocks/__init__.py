"""Equal blocks, traced once.

Dynamo and AOT take as long for each of a tower's blocks as for the first, though all but their weights are
equal. So while a forward is traced, every block of a group of equal ones is a single op on the block's
arguments. For each group, and each layout of arguments, AOT then traces one block by itself, and a copy of
its graph takes the place of each op, with the weights of its block as inputs of the graph. What comes out is
the graph that a plain trace makes, but for operations that Dynamo spells in another way (it unpacks a tensor
by select).

A block that cannot be such an op ends the trace with an error, and the caller traces plainly: one that
returns anything but a new tensor, writes to its arguments, or changes its attributes.

Where the trace is not ours, but that of `torch.compile` with a backend of ours, a tower says when it is
traced (`begin_blocks`), and the backend when it is done (`end_blocks`).
"""

from fxsplit_encoder.compile.blocks.group import BlockError, ChangedBlocksError, LiveWeights
from fxsplit_encoder.compile.blocks.inlining import inline_blocks
from fxsplit_encoder.compile.blocks.op import begin_blocks, end_blocks, equal_blocks_as_ops, takes_blocks

__all__ = [
    "BlockError",
    "ChangedBlocksError",
    "LiveWeights",
    "begin_blocks",
    "end_blocks",
    "equal_blocks_as_ops",
    "inline_blocks",
    "takes_blocks",
]
