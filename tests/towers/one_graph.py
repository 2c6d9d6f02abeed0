"""What a tower under `torch.compile` must have become: one graph, in one dispatcher."""

from __future__ import annotations

from collections.abc import Collection

from torch._dynamo.utils import counters

from fxsplit_encoder.backend import BudgetDispatcher, dispatchers


def only_dispatcher(known: Collection[BudgetDispatcher]) -> BudgetDispatcher:
    """The one that is not known yet; since Dynamo was reset its module was traced once, without a break."""
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    (dispatcher,) = set(dispatchers()) - set(known)
    return dispatcher
