"""The operators at which a graph is split, by the names that the configuration has for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fxsplit_encoder._torch.dispatch import DENSE_ATTENTION_KERNELS
from fxsplit_encoder.errors import ConfigError

DENSE_ATTENTION = "aten::scaled_dot_product_attention"
# AOT replaces the composite op by the kernel that suits device and dtype, and a pass that by ours.
_DENSE_ATTENTION_KERNELS = (
    "fxsplit::dense_attention",
    *DENSE_ATTENTION_KERNELS,
)


def splitting_targets(names: Sequence[str]) -> frozenset[Any]:
    """The op overloads of configured names such as "fxsplit::varlen_attention"."""
    targets: set[Any] = set()
    for name in names:
        packets = [_packet(name)]
        if name == DENSE_ATTENTION:
            packets += [_packet(kernel) for kernel in _DENSE_ATTENTION_KERNELS if _exists(kernel)]
        for packet in packets:
            targets.update(getattr(packet, overload) for overload in packet.overloads())
    return frozenset(targets)


def _exists(name: str) -> bool:
    namespace, _, op = name.partition("::")
    return hasattr(getattr(torch.ops, namespace), op)


def _packet(name: str) -> Any:
    namespace, separator, op = name.partition("::")
    if not separator or not _exists(name):
        raise ConfigError(
            f"splitting_ops: no operator {name!r} is registered; expected 'namespace::name' of an operator "
            f"that torch knows (import the module that defines it first, or remove it from splitting_ops)"
        )
    return getattr(getattr(torch.ops, namespace), op)
