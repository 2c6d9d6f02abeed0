"""What a linear layer is asked to compute."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_args

from fxsplit_encoder.kernels import CallShape, round_up

Activation = Literal["none", "gelu_tanh"]
ACTIVATIONS: tuple[str, ...] = get_args(Activation)


@dataclass(frozen=True, slots=True)
class ProductShape(CallShape):
    """One call of a linear layer; rounded, the class of calls that share a kernel."""

    operation: ClassVar[str] = "products"

    rows: int
    in_features: int
    out_features: int
    bias: bool
    residual: bool
    activation: str

    def rounded(self) -> ProductShape:
        """The class: rows rounded up to a power of two, or halfway to the next. The layer stays as it is."""
        return replace(self, rows=round_up(self.rows, halfway=True))

    def kind(self) -> tuple[int | str, ...]:
        """The layer, and what follows the product."""
        return self.in_features, self.out_features, self.bias, self.residual, self.activation

    def extents(self) -> tuple[int, ...]:
        """The rows."""
        return (self.rows,)

    def __str__(self) -> str:
        steps = [
            *(["bias"] if self.bias else []),
            *([self.activation] if self.activation != "none" else []),
            *(["residual"] if self.residual else []),
        ]
        return (
            f"{str(self.dtype).removeprefix('torch.')} {self.in_features} to {self.out_features}"
            f"{''.join(f' + {step}' for step in steps)}, rows {self.rows}"
        )
