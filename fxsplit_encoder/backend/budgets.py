"""The budgets of a program, and how many rows and segments each of them has room for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from fxsplit_encoder.capture import segment_capacity
from fxsplit_encoder.compile import Bindings, HostOp, Program
from fxsplit_encoder.compile.program import resolve
from fxsplit_encoder.config import EncoderConfig
from fxsplit_encoder.errors import ConfigError
from fxsplit_encoder.planning import generate_budgets, inferred_budgets

# Without an adapter nothing says how large batches get: powers of two over any size. Captures are lazy, so a
# long ladder costs nothing until it is used.
_LADDER_OF_UNKNOWN_RANGE = tuple(generate_budgets(1, 16384))


@dataclass(frozen=True, slots=True)
class ProgramBudgets:
    """What a configuration and the host ops of a program, which know its tower, tell of its budgets."""

    tokens: tuple[int, ...]
    """The budgets, in output tokens."""
    rows_per_token: int | Fraction
    """Rows of the token dimension that one token of a budget stands for."""
    segment_factors: Mapping[int, int]
    """By slot: segments that cumulative lengths have for each image or frame, where the host ops say so."""
    max_items: int
    """Images or frames of a batch; 0: as many as there are tokens."""

    @classmethod
    def of(cls, program: Program, config: EncoderConfig, bindings: Bindings) -> ProgramBudgets:
        """Those of a program, whose frame has what its host ops are called with.

        Raises:
            ConfigError: the smallest budget has no room for an image.
        """
        rows_per_token: int | Fraction = 1
        inferred = _LADDER_OF_UNKNOWN_RANGE
        segment_factors: dict[int, int] = {}
        for step in program.host_steps:
            assert isinstance(step.call, HostOp)
            args = [resolve(a, bindings) for a in step.args]
            rows_per_token = step.call.rows_per_output_token(*args)
            low, high = step.call.budget_range(*args)
            # Where a row gives several output tokens, budgets hold whole rows.
            tile = 1 if rows_per_token >= 1 else math.ceil(1 / rows_per_token)
            inferred = inferred_budgets(low, high, tile, config.max_items_per_batch)
            if step.call.segment_factors is not None:
                segment_factors |= zip(step.outputs, step.call.segment_factors(*args), strict=True)
        tokens = tuple(config.token_budgets) or inferred
        if tokens[0] * rows_per_token < 1:
            raise ConfigError(
                f"token_budgets: {tokens[0]} has no room for an image; allowed: at least "
                f"{math.ceil(1 / rows_per_token)} output tokens"
            )
        return cls(tokens, rows_per_token, segment_factors, config.max_items_per_batch)

    def rows(self, budget: int) -> int:
        """Rows that a budget has room for."""
        return int(budget * self.rows_per_token)

    def tokens_of(self, rows: int) -> int:
        """Output tokens that so many rows give."""
        return math.ceil(rows / self.rows_per_token)

    def counts_items(self, slot: int) -> bool:
        """Whether the cumulative lengths in a slot have one segment for each image or frame."""
        return self.segment_factors.get(slot, 1) == 1

    def segment_entries(self, slot: int, budget: int) -> int:
        """Entries of captured cumulative lengths. Only the number of images or frames is configured."""
        most = self.max_items if self.counts_items(slot) else 0
        return self.segment_factors.get(slot, 1) * segment_capacity(budget, most or budget) + 1
