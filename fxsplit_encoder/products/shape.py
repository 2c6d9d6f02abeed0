"""What a linear layer is asked to compute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from fxsplit_encoder.kernels import CallShape

Activation = Literal["none", "gelu", "gelu_tanh", "swiglu"]
ACTIVATIONS: tuple[str, ...] = get_args(Activation)
"""What may follow a product: a GELU in its erf or its tanh form, or silu(gate) * up, whose two layers are one
with their rows in turn: gate, up, gate, up.
"""


def features_after(activation: str, out_features: int) -> int:
    """The width of a result: of gates and what they gate half is left."""
    return out_features // 2 if activation == "swiglu" else out_features


@dataclass(frozen=True, slots=True)
class ProductShape(CallShape):
    """One call of a linear layer, which is a class by itself: how full the last wave of tiles is decides
    between kernels, and a few rows more begin another one.
    """

    operation: ClassVar[str] = "products"

    rows: int
    in_features: int
    out_features: int
    """Of the product, before the activation."""
    bias: bool
    activation: str

    def rounded(self) -> ProductShape:
        """The class: itself. Only what will be captured is measured, so there are as many as budgets."""
        return self

    def kind(self) -> tuple[int | str, ...]:
        """The layer, and what follows the product."""
        return self.in_features, self.out_features, self.bias, self.activation

    def extents(self) -> tuple[int, ...]:
        """The rows."""
        return (self.rows,)

    def __str__(self) -> str:
        steps = [
            *(["bias"] if self.bias else []),
            *([self.activation] if self.activation != "none" else []),
        ]
        return (
            f"{str(self.dtype).removeprefix('torch.')} {self.in_features} to {self.out_features}"
            f"{''.join(f' + {step}' for step in steps)}, rows {self.rows}"
        )
