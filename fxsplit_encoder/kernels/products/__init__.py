"""Products of linear layers: ops in place of torch's, their kernels, and the choice between them.

`fxsplit::linear` computes a layer and its activation by a kernel that was measured; `fxsplit::fixed_linear`
(`products.fixed`) adds in one order however many rows it gets.
"""

from fxsplit_encoder.kernels.products.kernels import ACTIVATIONS, ProductShape, has_fused_activations
from fxsplit_encoder.kernels.products.measured import (
    ProductChooser,
    compile_ahead,
    current_product_chooser,
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
