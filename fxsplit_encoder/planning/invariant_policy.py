"""What `invariant: true` allows, so that an item's bits do not depend on its batch (docs/invariant.md)."""

from __future__ import annotations

from dataclasses import dataclass

from fxsplit_encoder.config import EncoderConfig


@dataclass(frozen=True, slots=True)
class InvariantPolicy:
    """Answers for one configuration which code and which kernels may compute a batch."""

    is_invariant: bool

    @classmethod
    def of(cls, config: EncoderConfig) -> InvariantPolicy:
        """Returns the policy of a configuration."""
        return cls(config.invariant)

    @property
    def own_forward_may_serve(self) -> bool:
        """Whether a batch may run through the tower's own forward, whose products choose by its rows."""
        return not self.is_invariant

    @property
    def repeats_single_items(self) -> bool:
        """Whether an item that the compiled program does not take runs twice in one batch, where it may."""
        return self.is_invariant

    @property
    def one_attention_kernel(self) -> bool:
        """Whether one kernel attends in all calls with the same heads, chosen by its kind and not by time."""
        return self.is_invariant

    @property
    def one_order_of_sums(self) -> bool:
        """Whether graphs add in one order for any number of rows, or are refused."""
        return self.is_invariant


BATCH_DEPENDENT = InvariantPolicy(False)
"""The default: an item's bits may depend on its batch."""
