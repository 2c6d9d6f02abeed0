"""Products of linear layers: ops in place of torch's, their kernels, and the choice between them.

`fxsplit::linear` computes a layer and its activation by a kernel that was measured; `fxsplit::fixed_linear`
(`products.fixed`) adds in one order however many rows it gets.
"""

from fxsplit_encoder.products.choice import ProductChooser, current_product_chooser, parse_products
from fxsplit_encoder.products.kernels.quack import has_fused_activations
from fxsplit_encoder.products.op import linear, multiply
from fxsplit_encoder.products.shape import ACTIVATIONS, ProductShape

__all__ = [
    "ACTIVATIONS",
    "ProductChooser",
    "ProductShape",
    "current_product_chooser",
    "has_fused_activations",
    "linear",
    "multiply",
    "parse_products",
]
