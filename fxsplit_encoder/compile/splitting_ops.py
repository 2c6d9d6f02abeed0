"""The operators at which a graph is split: those that the configuration names, and host ops.

Host ops are opaque ops that turn Python-side facts (a grid of image sizes) into metadata tensors. They read
their inputs on the host, so they never run inside a CUDA graph: a program runs them first, and what follows
the last of them is its *region*, the part that is padded and captured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxsplit_encoder._torch.dispatch import DENSE_ATTENTION_KERNELS, OpOverload
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


@dataclass(frozen=True, slots=True)
class HostOp:
    """What the compiler must know of a host op."""

    run: Callable[..., Sequence[Tensor]]
    """The op's work with exact, unpadded outputs, on the CPU, or where they are kept for batches that come
    again; cumulative lengths always on the CPU. The op's own kernel may pad them to what its fake declares.
    """
    declares_padding: Callable[..., bool] | None = None
    """From the op's arguments, whether the tower that it is of declares that its rows may be padded: the
    images of a batch do not see one another. None: it does not.
    """
    budgets: object = None
    """What the tower declares of budgets, for whoever captures; the compiler does not read it."""

    def __call__(self, *args: Any) -> Sequence[Tensor]:
        """`run`: what a program's step calls."""
        return self.run(*args)


_HOST_OPS: dict[Any, HostOp] = {}


def register_host_op(overload: OpOverload, op: HostOp) -> None:
    """Makes an op known to the compiler as a host op."""
    _HOST_OPS[overload] = op


def host_op(target: Any) -> HostOp | None:
    """The registered host op of a graph node's target, if it is one."""
    return _HOST_OPS.get(target)
