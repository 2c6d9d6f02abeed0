"""Linear layers: `fxsplit::linear` computes one and its activation by a kernel that was measured;
`fxsplit::fixed_linear` (`products.fixed`) adds in one order however many rows it gets.
"""

from fxsplit_encoder.kernels.products.measured import (
    ACTIVATIONS,
    ProductChooser,
    ProductShape,
    compile_ahead,
    current_product_chooser,
    has_fused_activations,
    linear,
)

__all__ = [
    "ACTIVATIONS",
    "ProductChooser",
    "ProductShape",
    "compile_ahead",
    "current_product_chooser",
    "has_fused_activations",
    "linear",
]
