"""Linear layers in 8-bit floating point: `precision: fp8`.

    rows (M, K)     -> float8_e4m3fn, one scale per row, in every run
    weight (N, K)   -> float8_e4m3fn, one scale per row (an output channel), once: derived parameters
    product         -> summed in float32, times both scales, plus the bias, in the rows' own dtype

`fxsplit::quantize_rows` is a name for its parts: a compiler takes it apart, so that Inductor quantizes rows
in the kernel that makes them. The product is one operation, `fxsplit::linear_fp8`.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxsplit_encoder._torch.dispatch import scaled_mm
from fxsplit_encoder.compile.passes.layers import Linear, linears
from fxsplit_encoder.compile.rewriting import call_function, derived_parameter
from fxsplit_encoder.errors import ConfigError

aten = torch.ops.aten

FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(FP8).max
# A row of zeros has no scale of its own.
_SMALLEST_SCALE = 1e-12

_LEAST_FEATURES = 1024
"""Linear layers with fewer input or output features stay as they are."""
# cuBLAS and CUTLASS ask for rows and columns of 16 bytes.
_MULTIPLE = 16
_CAPABILITY = (9, 0)

_library: Any = torch.library.Library("fxsplit", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "linear_fp8(Tensor rows, Tensor row_scales, Tensor weight, Tensor weight_scales, Tensor? bias,"
    " ScalarType dtype) -> Tensor"
)


def _reference(
    rows: Tensor,
    row_scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """rows (M, K) and weight (N, K) in float8_e4m3fn, row_scales (M, 1), weight_scales (N, 1) in float32,
    bias (N,): (M, N) in `dtype`. What the device's kernel computes, in float32.
    """
    product = (rows.float() @ weight.float().t()) * row_scales * weight_scales.t()
    return (product if bias is None else product + bias.float()).to(dtype)


def _scaled_product(
    rows: Tensor,
    row_scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    return scaled_mm(
        rows,
        weight.t(),
        scale_a=row_scales,
        scale_b=weight_scales.t(),
        bias=bias,
        out_dtype=dtype,
        use_fast_accum=True,
    )


def _fake(
    rows: Tensor,
    row_scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[0], dtype=dtype)


_library.impl("linear_fp8", _reference, "CPU")
_library.impl("linear_fp8", _scaled_product, "CUDA")
torch.library.register_fake("fxsplit::linear_fp8", _fake, lib=_library)

linear_fp8 = torch.ops.fxsplit.linear_fp8.default


def quantize_rows(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix in float8_e4m3fn, and the scale of each row (or output channel) in float32, (rows, 1).

    The scale maps the largest entry of a row to the largest number of the format, 448.
    """
    exact = matrix.float()
    scales = (exact.abs().amax(dim=-1, keepdim=True) / _LARGEST).clamp_min(_SMALLEST_SCALE)
    return (exact / scales).clamp(-_LARGEST, _LARGEST).to(FP8), scales


_library.define("quantize_rows(Tensor matrix) -> (Tensor, Tensor)")
_library.impl("quantize_rows", quantize_rows, "CompositeImplicitAutograd")
_quantize_rows = torch.ops.fxsplit.quantize_rows.default


def quantized_weight(weight: Tensor) -> Tensor:
    """(N, K) in float8_e4m3fn."""
    return quantize_rows(weight)[0]


def weight_scales(weight: Tensor) -> Tensor:
    """(N, 1) in float32."""
    return quantize_rows(weight)[1]


def relative_rms(result: Tensor, reference: Tensor) -> float:
    """Root mean square of the difference, over that of the reference: how an error in fp8 is compared with
    bfloat16's own, both against float32.
    """
    difference = (result.double() - reference.double()).square().mean().sqrt()
    return float(difference / reference.double().square().mean().sqrt())


def fp8_linear(module: fx.GraphModule, least_features: int = _LEAST_FEATURES) -> int:
    """The linear layers of the blocks, with at least `least_features` input and output features.

    Not exact: each of the two factors keeps 4 significant bits. The first layer (the patch embedding), the
    last, and those that run on another number of rows than most (the merger and the projector after it) keep
    their dtype.

    Raises:
        ConfigError: the tower is on a CUDA device that cannot, or in another dtype than bfloat16 there.
    """
    chosen = [layer for layer in _of_blocks(linears(module.graph)) if _is_large(layer, least_features)]
    for layer in chosen:
        _check_device(layer.rows.meta["val"])
        _quantize(module.graph, layer)
    return len(chosen)


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
        if node.target in _PRODUCTS or node.target is linear_fp8:
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


def _quantize(graph: fx.Graph, layer: Linear) -> None:
    weight = derived_parameter(graph, quantized_weight, layer.weight)
    scales = derived_parameter(graph, weight_scales, layer.weight)
    dtype = layer.node.meta["val"].dtype
    with graph.inserting_before(layer.node):
        rows, row_scales = _quantized(graph, layer.rows)
        product = call_function(graph, linear_fp8, rows, row_scales, weight, scales, layer.bias, dtype)
    layer.node.replace_all_uses_with(product)
    graph.erase_node(layer.node)


def _quantized(graph: fx.Graph, rows: fx.Node) -> Sequence[fx.Node]:
    """Quantized rows and their scales, once for layers that read the same rows."""
    both = next((user for user in rows.users if user.target is _quantize_rows), None)
    if both is not None:
        return sorted(both.users, key=lambda part: int(part.args[1]))  # type: ignore[arg-type]
    both = call_function(graph, _quantize_rows, rows)
    return [call_function(graph, operator.getitem, both, number) for number in range(2)]
