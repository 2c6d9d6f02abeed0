"""The op `fxsplit::linear`, a linear layer with what follows it, its kernels and the choice between them."""

from fxsplit_encoder.products.choice import ProductChooser, current_product_chooser, parse_products
from fxsplit_encoder.products.op import linear, multiply
from fxsplit_encoder.products.shape import ACTIVATIONS, ProductShape

__all__ = [
    "ACTIVATIONS",
    "ProductChooser",
    "ProductShape",
    "current_product_chooser",
    "linear",
    "multiply",
    "parse_products",
]
