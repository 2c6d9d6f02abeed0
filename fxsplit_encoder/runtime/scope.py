"""What the captured programs of one owner share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fxsplit_encoder.capture import GraphPool
from fxsplit_encoder.config import EncoderConfig


@dataclass(frozen=True)
class CaptureScope:
    """The settings, the memory and the ranks of one owner's captures."""

    config: EncoderConfig
    pool: GraphPool
    remaining_bytes: Callable[[], int | None] = lambda: None
    """What the memory limit leaves for more captures; None: there is no limit."""
    agree: Callable[[bool], bool] | None = None
    """For a forward with collectives: whether every rank says yes."""
    not_compiled: str = ""
    """Why nothing is compiled; empty: it is."""
    compares_kernels: bool = True
    """Whether attention kernels that were not compared yet are compared before captures."""

    @property
    def measured(self) -> bool:
        """Whether ways to run are timed, to choose by it: only on a device, and not where ranks must choose
        the same, since their times differ.
        """
        return self.agree is None and self.pool.is_cuda
