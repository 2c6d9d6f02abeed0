"""What a build is given: its options, and the operators at which a graph is split.

Host ops are opaque ops that turn Python-side facts (a grid of image sizes) into metadata tensors. They read
their inputs on the host, so they never run inside a CUDA graph: a program runs them first, and what follows
the last of them is its *region*, the part that is padded and captured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fxsplit_encoder._torch.dispatch import DENSE_ATTENTION_KERNELS, OpOverload
from fxsplit_encoder.config import EncoderConfig
from fxsplit_encoder.errors import ConfigError

if TYPE_CHECKING:
    from torch import fx

TRACING_PHASES = 2
"""What progress counts before the pieces: the Python forward traced, its ATen graph traced and split."""


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """What a build needs of the configuration."""

    splitting_ops: tuple[str, ...]
    piece_compiler: str | Callable[..., Any]
    progress: Callable[[int, int], None] | None = None
    """Called with (done, total) after each phase of the tracing and each piece; until the graph is split the
    total counts one piece.
    """
    passes: tuple[str, ...] | None = None
    """Names of `compile.passes.PASSES`; None: those that pay on the graph's device."""
    observe: Callable[[fx.GraphModule], None] | None = None
    """Is given the graph after the passes, before it is split."""
    requires_tokens: bool = False
    """Whether a graph is refused, before anything is compiled, if nothing tells what counts its tokens."""

    invariant: bool = False
    """Whether an item's bits may not depend on what else is encoded, see `EncoderConfig.invariant`."""
    is_known: bool = False
    """Whether its pieces are expected in Inductor's cache, so that no workers are started to compile them."""

    @classmethod
    def of(cls, config: EncoderConfig) -> CompileOptions:
        """What a configuration says of building."""
        passes = None if config.passes == "auto" else config.passes
        return cls(
            config.splitting_ops,
            config.piece_compiler,
            passes=passes,
            invariant=config.invariant,
        )

    def report(self, done: int, num_pieces: int = 1) -> None:
        """Reports how many phases and pieces are done."""
        if self.progress is not None:
            self.progress(done, TRACING_PHASES + num_pieces)


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
