"""Linear layers in 8-bit floating point: `precision: fp8`.

    rows (M, K)     -> float8_e4m3fn, one scale per row, in every run
    weight (N, K)   -> float8_e4m3fn, one scale per row (an output channel), once: derived parameters
    product         -> summed in float32, rounded to bfloat16 (float32 where the tower is not in bfloat16)
    scaling         -> times both scales, plus the bias, in float32; then the rows' own dtype

The product alone is one operation, `fxsplit::product_fp8`; the rest are operations that Inductor fuses with
what is there anyway: `fxsplit::quantize_rows` is taken apart, so that the kernel of a layer norm writes
float8 and the scale, and the scaling goes into what reads the product. A GELU between two such layers is one
operation with the scaling before it and the quantizing after it, `fxsplit::gelu_rows_fp8`. The scales are not
given to the product since torch's kernel for a scale per row is slower than cuBLAS's for one per tensor.
Called with scales of one, the latter gives the bare sums. They are at most 448 * 448 * K, far inside
bfloat16's range, and rounding them loses what rounding the scaled product did: bfloat16's relative precision
does not depend on the scale.

What moves, in bytes a row of width W and hidden width H, beside the products' own operands:

    qkv    the rotary kernel reads the product of q and k in place of the layer's output; the values are
           scaled by a pass of their own, 4 W. A row's scale of a value cannot wait until after attention,
           which adds up rows. At 3136 rows of Qwen3-VL-8B 4 W are 14 MB.
    proj   the residual addition reads the product in place of the layer's output: nothing more
    fc1    activation and quantization read 2 H, the second time from the cache, and write H, where cuBLAS's
           epilogue wrote 2 H
    fc2    as proj; its operand is half as long as in bfloat16
    norms  write W and a scale in place of 2 W
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from fxsplit_encoder._torch.dispatch import scaled_mm
from fxsplit_encoder.compile.passes.layers import Linear, is_reshape, linears
from fxsplit_encoder.compile.rewriting import call_function, derivation, derived_parameter
from fxsplit_encoder.errors import ConfigError
from fxsplit_encoder.products.fp8 import quantize_rows
from fxsplit_encoder.products.gelu_fp8 import gelu_rows_fp8

aten = torch.ops.aten

_LEAST_FEATURES = 1024
"""Linear layers with fewer input or output features stay as they are."""
# cuBLAS asks for rows and columns of 16 bytes.
_MULTIPLE = 16
_CAPABILITY = (9, 0)

_library: Any = torch.library.Library("fxsplit", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("product_fp8(Tensor rows, Tensor weight, Tensor one, ScalarType dtype) -> Tensor")


def _reference(rows: Tensor, weight: Tensor, one: Tensor, dtype: torch.dtype) -> Tensor:
    """rows (M, K) and weight (N, K) in float8_e4m3fn, `one` the number 1 in float32: their product (M, N) in
    `dtype`. What the device's kernel computes, in float32.
    """
    return (rows.float() @ weight.float().t()).to(dtype)


def _product(rows: Tensor, weight: Tensor, one: Tensor, dtype: torch.dtype) -> Tensor:
    return scaled_mm(
        rows, weight.t(), scale_a=one, scale_b=one, bias=None, out_dtype=dtype, use_fast_accum=True
    )


def _fake(rows: Tensor, weight: Tensor, one: Tensor, dtype: torch.dtype) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[0], dtype=dtype)


_library.impl("product_fp8", _reference, "CPU")
_library.impl("product_fp8", _product, "CUDA")
torch.library.register_fake("fxsplit::product_fp8", _fake, lib=_library)

product_fp8 = torch.ops.fxsplit.product_fp8.default


_library.define("quantize_rows(Tensor matrix) -> (Tensor, Tensor)")
_library.impl("quantize_rows", quantize_rows, "CompositeImplicitAutograd")
_quantize_rows = torch.ops.fxsplit.quantize_rows.default


def quantized_weight(weight: Tensor) -> Tensor:
    """(N, K) in float8_e4m3fn."""
    return quantize_rows(weight)[0]


def channel_scales(weight: Tensor) -> Tensor:
    """(1, N) in float32."""
    return quantize_rows(weight)[1].t().contiguous()


def one_like(weight: Tensor) -> Tensor:
    """The number 1 in float32, a scalar on the device of a weight."""
    return torch.ones((), dtype=torch.float32, device=weight.device)


def relative_rms(result: Tensor, reference: Tensor) -> float:
    """Root mean square of the difference, over that of the reference: how an error in fp8 is compared with
    bfloat16's own, both against float32. 0 where they are equal, if only in being zero.
    """
    difference = (result.double() - reference.double()).square().mean().sqrt()
    return float(difference / reference.double().square().mean().sqrt()) if difference else 0.0


def fp8_linear(module: fx.GraphModule, least_features: int | None = None, kept: Collection[int] = ()) -> int:
    """The linear layers of the blocks, with at least 1024 (or `least_features`) input and output features.

    Not exact: each of the two factors keeps 4 significant bits. The first layer (the patch embedding), the
    last, and those that run on another number of rows than most (the merger and the projector after it) keep
    their dtype, and so do those that `kept` names by their positions among the others.

    Raises:
        ConfigError: the tower is on a CUDA device that cannot, or in another dtype than bfloat16 there.
    """
    found = candidates(module.graph, *(() if least_features is None else (least_features,)))
    for layer in found:
        _check_device(layer.rows.meta["val"])
    chosen = [layer for number, layer in enumerate(found) if number not in kept]
    made = _Made({}, {})
    for layer in chosen:
        _quantize(module.graph, layer, made)
    return len(chosen)


def candidates(graph: fx.Graph, least_features: int = _LEAST_FEATURES) -> list[Linear]:
    """The layers that `fp8_linear` quantizes if none is kept, in the graph's order."""
    return [layer for layer in _of_blocks(linears(graph)) if _is_large(layer, least_features)]


_PRODUCTS = (aten.mm.default, aten.addmm.default, aten.convolution.default)


def _of_blocks(layers: Sequence[Linear]) -> list[Linear]:
    """The layers that run on the number of rows that most have, with products before and after them."""
    counts = Counter(_rows(layer) for layer in layers)
    return [
        layer
        for layer in layers
        if _rows(layer) == counts.most_common(1)[0][0]
        and _reaches_product(layer.node, lambda node: node.all_input_nodes)
        and _reaches_product(layer.node, lambda node: node.users)
    ]


def _rows(layer: Linear) -> str:
    return str(layer.node.meta["val"].shape[0])


def _reaches_product(start: fx.Node, neighbors: Callable[[fx.Node], Iterable[fx.Node]]) -> bool:
    """Whether one follows from a node, in the direction of `neighbors`."""
    seen: set[fx.Node] = set()
    waiting = list(neighbors(start))
    while waiting:
        node = waiting.pop()
        if node.target in _PRODUCTS or node.target is product_fp8:
            return True
        if node not in seen:
            seen.add(node)
            waiting += neighbors(node)
    return False


def _is_large(layer: Linear, least_features: int) -> bool:
    features = (layer.in_features, layer.out_features)
    return all(n >= least_features and n % _MULTIPLE == 0 for n in features)


def _check_device(rows: Tensor) -> None:
    if rows.device.type != "cuda":
        return
    if rows.dtype != torch.bfloat16:
        raise ConfigError(
            f"precision: fp8 needs a tower in torch.bfloat16 on CUDA; got {rows.dtype}; allowed: such a "
            "tower, or precision: auto"
        )
    capability = torch.cuda.get_device_capability(rows.device)
    if capability < _CAPABILITY:
        raise ConfigError(
            f"precision: fp8 needs a device of compute capability {_CAPABILITY[0]}.{_CAPABILITY[1]}; got "
            f"{capability[0]}.{capability[1]}; allowed: a newer device, or precision: auto"
        )


class _Scaled(NamedTuple):
    """What a layer's result is made of."""

    product: fx.Node
    row_scales: fx.Node
    channel_scales: fx.Node
    bias: fx.Node | None


class _Made(NamedTuple):
    """What layers before have made of a graph."""

    scaled: dict[fx.Node, _Scaled]
    """Layers by their results."""
    quantized: dict[fx.Node, Sequence[fx.Node]]
    """Rows in fp8 and their scales, by the rows."""


def _quantize(graph: fx.Graph, layer: Linear, made: _Made) -> None:
    weight = derived_parameter(graph, quantized_weight, layer.weight)
    scales = derived_parameter(graph, channel_scales, layer.weight)
    one = _one(graph, layer.weight)
    dtype = layer.node.meta["val"].dtype
    summed = dtype if dtype == torch.bfloat16 else torch.float32
    with graph.inserting_before(layer.node):
        rows, row_scales = _quantized(graph, layer.rows, made)
        product = call_function(graph, product_fp8, rows, weight, one, summed)
        scaled = call_function(graph, aten.mul.Tensor, product, row_scales)
        scaled = call_function(graph, aten.mul.Tensor, scaled, scales)
        if layer.bias is not None:
            scaled = call_function(graph, aten.add.Tensor, scaled, layer.bias)
        result = call_function(graph, aten._to_copy.default, scaled, dtype=dtype)
    made.scaled[result] = _Scaled(product, row_scales, scales, layer.bias)
    layer.node.replace_all_uses_with(result)
    graph.erase_node(layer.node)


def _one(graph: fx.Graph, weight: fx.Node) -> fx.Node:
    """The scale of every product, once for a graph."""
    node: fx.Node
    for node in graph.find_nodes(op="placeholder"):
        found = derivation(node)
        if found is not None and found[0] is one_like:
            return node
    return derived_parameter(graph, one_like, weight)


def _quantized(graph: fx.Graph, rows: fx.Node, made: _Made) -> Sequence[fx.Node]:
    """Quantized rows and their scales, once for layers that read the same rows."""
    if rows not in made.quantized:
        activated = _gelu_of(rows, made)
        called = (_quantize_rows, rows) if activated is None else (gelu_rows_fp8, *activated)
        both = call_function(graph, *called)
        made.quantized[rows] = [call_function(graph, operator.getitem, both, part) for part in range(2)]
    return made.quantized[rows]


def _gelu_of(rows: fx.Node, made: _Made) -> tuple[Any, ...] | None:
    """What `gelu_rows_fp8` takes for rows that are a GELU of another layer's result; None: they are not."""
    gelu = _before_reshapes(rows)
    if gelu.target is not aten.gelu.default:
        return None
    scaled = made.scaled.get(_before_reshapes(gelu.args[0]))
    if scaled is None or scaled.product.meta["val"].shape != rows.meta["val"].shape:
        return None
    return (*scaled, gelu.kwargs.get("approximate") == "tanh")


def _before_reshapes(node: Any) -> Any:
    while is_reshape(node):
        node = node.args[0]
    return node
