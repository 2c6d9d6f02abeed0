"""Which rule an operation has, and the kinds of operations that the analysis tells apart by name.

Names are those of `states.operation`.
"""

from __future__ import annotations

from collections.abc import Callable

from fxsplit_encoder.compile.padding.states import NodeView, State

Rule = Callable[[NodeView], State]
"""The state of a node's result, given those of its arguments; raises NotProvedError where rows are mixed."""

RULES: dict[str, Rule] = {}
"""The rule of each operation that has one of its own."""


def rule(*operations: str) -> Callable[[Rule], Rule]:
    """Makes a function the rule of these operations, each of which has one rule."""

    def register(function: Rule) -> Rule:
        for operation in operations:
            assert operation not in RULES, operation
            RULES[operation] = function
        return function

    return register


DENSE_ATTENTIONS = (
    "dense_attention",
    "scaled_dot_product_attention",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)
ATTENTIONS = frozenset(("varlen_attention", *DENSE_ATTENTIONS))

_FILLED = ("zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty")
CONSTRUCTORS = frozenset(("arange", "scalar_tensor", *_FILLED))

COPIES = frozenset(("expand", "repeat"))
"""These make rows out of what has none."""

RESHAPES = ("view", "_unsafe_view", "reshape", "flatten", "unflatten")

SIZED = frozenset((*CONSTRUCTORS, *COPIES, *RESHAPES, "varlen_attention"))
"""These take sizes, which may follow the token count: their rules and the sizes of their results decide."""

SIZED_WITH_ROWS = frozenset(("native_group_norm",))
"""So do these, where they take rows and their rule is asked."""

PERMUTE_ROWS = "fxsplit::permute_rows"
_READS = ("embedding", "index", "_unsafe_index", "index_select", "gather", "take", PERMUTE_ROWS)
_SCATTERS = ("index_put", "index_add", "scatter")
LOOKUPS = frozenset((*_READS, *_SCATTERS))
"""These take indices, which may be out of range."""

_VIEWS = ("permute", "transpose", "t", "unsqueeze", "squeeze", "expand", "alias", "slice", "select")
_PARTS = ("split", "split_with_sizes", "unbind", "getitem", "cat", "stack", "clone", "_to_copy")
MOVERS = frozenset((*RESHAPES, *_VIEWS, *_PARTS))
"""These only move values about or repeat them."""
