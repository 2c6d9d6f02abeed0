"""How passes see a call of dense attention in an ATen graph."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from fxsplit_encoder._torch.dispatch import schema_of


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """All arguments of a call by name, defaults included."""
    declared = schema_of(node.target).arguments
    defaults = {argument.name: argument.default_value for argument in declared}
    names = (argument.name for argument in declared)
    return {**defaults, **dict(zip(names, node.args, strict=False)), **node.kwargs}


def is_only_result(node: fx.Node) -> bool:
    """Whether nobody reads what a kernel returns beside the attention."""
    read = [user for user in node.users if user.users or user.target is not operator.getitem]
    return all(user.target is operator.getitem and user.args[1] == 0 for user in read)
