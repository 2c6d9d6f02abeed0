"""While attention runs, which reads no weights, those of the layers after it are drawn into the L2 cache."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, fx

from fxsplit_encoder.compile.rewriting import cuts_after_host_ops, is_parameter, mark_prefetch, runs_beside

logger = logging.getLogger(__name__)

# Of the weights after one attention, in the order in which they are read. A choice: it leaves most of the
# 50 MB of Hopper's cache to what attention reads and writes.
_MOST_BYTES = 12 << 20

# The instruction is of Hopper and later.
_LEAST_CAPABILITY = (9, 0)

_library: Any = torch.library.Library("fxsplit", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("prefetch(Tensor[] weights) -> ()")


def _into_l2(weights: Sequence[Tensor]) -> None:
    from fxsplit_encoder.compile.passes.prefetch_kernel import prefetch

    prefetch(weights)


_library.impl("prefetch", _into_l2, "CUDA")

prefetch = torch.ops.fxsplit.prefetch.default


def prefetch_weights(module: fx.GraphModule) -> int:
    """Attention followed by layers with weights, which are read into the cache on a branch of the graph.

    Exact: nothing is computed. Only CUDA graphs without a break at attention do it: elsewhere the host would
    launch it while the device waits.
    """
    cuts = cuts_after_host_ops(module)
    weights = _weights_behind(module, cuts)
    found = [(cut, first) for cut in cuts if (first := _first(weights[cut]))]
    if found and (reason := _unavailable(found[0][1][0].meta["val"].device)) is not None:
        logger.warning("passes: prefetch_weights changes nothing: %s", reason)
        return 0
    for cut, nodes in found:
        mark_prefetch(cut, nodes)
    return len(found)


def _weights_behind(module: fx.GraphModule, cuts: Sequence[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """For each cut, the weights that are read between it and the next, in order; not those that are read on a
    branch.
    """
    weights: dict[fx.Node, list[fx.Node]] = {cut: [] for cut in cuts}
    behind: list[fx.Node] | None = None
    for node in module.graph.nodes:
        if node in weights:
            behind = weights[node]
        elif behind is not None and node.op == "call_function" and not runs_beside(node):
            behind += [n for n in node.all_input_nodes if _is_weight(n) and n not in behind]
    return weights


def _is_weight(node: fx.Node) -> bool:
    return node.op == "placeholder" and is_parameter(node) and node.meta["val"].dim() >= 2


def _first(weights: Sequence[fx.Node]) -> list[fx.Node]:
    """Those that fit together, and the first in any case."""
    chosen: list[fx.Node] = []
    total = 0
    for node in weights:
        total += node.meta["val"].numel() * node.meta["val"].element_size()
        if chosen and total > _MOST_BYTES:
            break
        chosen.append(node)
    return chosen


def _unavailable(device: torch.device) -> str | None:
    """Why a device cannot do it; None: it can, or has nothing to do."""
    if device.type != "cuda":
        return None
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        return f"it needs compute capability 9.0; {device} has {capability[0]}.{capability[1]}"
    return None if find_spec("triton") is not None else "triton is not installed"
