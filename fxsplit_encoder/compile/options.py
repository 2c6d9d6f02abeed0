"""Options of a build, and the operators at which a graph is split.

Host ops are opaque ops that make metadata tensors of values on the host (a grid of image sizes). A program
runs them first, outside of CUDA graphs; the steps after the last are its *region*, which is captured.
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
"""Phases before the pieces: the Python forward traced, its ATen graph traced and split."""


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """Options of a build."""

    splitting_ops: tuple[str, ...]
    piece_compiler: str | Callable[..., Any]
    progress: Callable[[int, int], None] | None = None
    """Called with (done, total) after each phase and piece; until the split the total counts one piece."""
    passes: tuple[str, ...] | None = None
    """Names of `compile.passes.PASSES`; None: the defaults of the graph's device."""
    observe: Callable[[fx.GraphModule], None] | None = None
    """Called with the graph after the passes, before it is split."""
    requires_tokens: bool = False
    """Whether to refuse a graph without a token symbol before anything is compiled."""
    invariant: bool = False
    """Whether graphs add in one order for any number of rows, or are refused."""
    is_known: bool = False
    """Whether pieces are expected in Inductor's cache, so that no compile workers are started."""

    @classmethod
    def of(cls, config: EncoderConfig) -> CompileOptions:
        """Returns the options of a configuration."""
        passes = None if config.passes == "auto" else config.passes
        return cls(config.splitting_ops, config.piece_compiler, passes=passes, invariant=config.invariant)

    def report(self, done: int, num_pieces: int = 1) -> None:
        """Reports the number of phases and pieces that are done."""
        if self.progress is not None:
            self.progress(done, TRACING_PHASES + num_pieces)


DENSE_ATTENTION = "aten::scaled_dot_product_attention"
# AOT replaces the composite op by the kernel that suits device and dtype, and a pass that by ours.
_DENSE_ATTENTION_KERNELS = ("fxsplit::dense_attention", *DENSE_ATTENTION_KERNELS)


def splitting_targets(names: Sequence[str]) -> frozenset[Any]:
    """Returns the op overloads of configured names such as "fxsplit::varlen_attention"."""
    targets: set[Any] = set()
    for name in names:
        packet = _packet(name)
        if packet is None:
            raise ConfigError(
                f"splitting_ops: no operator {name!r} is registered; expected 'namespace::name' of an "
                "operator that torch knows (import the module that defines it first, or remove it from "
                "splitting_ops)"
            )
        kernels = map(_packet, _DENSE_ATTENTION_KERNELS) if name == DENSE_ATTENTION else ()
        for each in (packet, *filter(None, kernels)):
            targets.update(getattr(each, overload) for overload in each.overloads())
    return frozenset(targets)


def _packet(name: str) -> Any:
    namespace, separator, op = name.partition("::")
    return getattr(getattr(torch.ops, namespace), op, None) if separator else None


@dataclass(frozen=True, slots=True)
class HostOp:
    """How the compiler runs a host op."""

    run: Callable[..., Sequence[Tensor]]
    """Returns exact, unpadded outputs, on the CPU (as all cumulative lengths) or where they are cached."""
    declares_padding: Callable[..., bool] | None = None
    """From the op's arguments, whether its tower declares that rows may be padded; None: it does not."""
    budgets: object = None
    """Budgets that the tower declares for captures."""

    def __call__(self, *args: Any) -> Sequence[Tensor]:
        """Calls `run`, as a program's step does."""
        return self.run(*args)


# The attribute of an operator that holds its `HostOp`.
_HOST_OP = "fxsplit_host_op"


def register_host_op(overload: OpOverload, op: HostOp) -> None:
    """Registers an op as a host op."""
    setattr(overload, _HOST_OP, op)


def host_op(target: Any) -> HostOp | None:
    """Returns the registered host op of a node's target, if it is one."""
    found: HostOp | None = getattr(target, _HOST_OP, None)
    return found
