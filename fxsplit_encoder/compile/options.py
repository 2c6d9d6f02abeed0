"""What a build needs of the configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fxsplit_encoder.config import EncoderConfig

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
