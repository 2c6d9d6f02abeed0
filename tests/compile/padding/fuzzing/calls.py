"""A random call of every operation that has a rule, and of every one that torch tags as pointwise.

Each argument is drawn by its name in the operation's schema, or else by its type.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

import fxsplit_encoder.kernels.attention  # noqa: F401  (registers the ops)
from fxsplit_encoder.compile import rewriting  # noqa: F401  (registers its op)
from fxsplit_encoder.compile.padding.rules import ATTENTIONS, CONSTRUCTORS, RESHAPES, RULES
from fxsplit_encoder.compile.passes import gelu_epilogue  # noqa: F401  (registers its op)

from .builder import Builder
from .inputs import NUM_IDS

aten, ours = torch.ops.aten, torch.ops.fxsplit
_END = 2**63 - 1
_DTYPES = (torch.float32, torch.float64, torch.float64, torch.int64, torch.bool, torch.float16)
_VIEWED = {torch.float64: (torch.float32, torch.int64, torch.int32), torch.float32: (torch.float64,)}

# --- which operations

_NOT_POINTWISE = frozenset(
    (
        "equal",  # returns a bool
        "rrelu",  # random
        "clone",  # has a rule of its own
        # These and polynomials loop as often as an argument says, which in pad rows may be anything.
        "special_zeta",
        "polygamma",
        "mvlgamma",
    )
)
_OTHER_OVERLOADS = frozenset(("device", "dtype_layout", "other", "prim_Device", "prim_dtype", "prim_other"))


def _overloads(packet: Any) -> list[Any]:
    return [getattr(packet, name) for name in packet.overloads()] if packet is not None else []


def _is_pointwise(target: Any) -> bool:
    random = torch.Tag.nondeterministic_seeded in target.tags
    return torch.Tag.pointwise in target.tags and not random and not target._schema.is_mutable


def _listed() -> dict[str, list[Any]]:
    names = {n.split("::")[1].split(".")[0] for n in torch._C._dispatch_get_all_op_names() if "aten::" in n}
    return {
        f"{name}.{target._overloadname}": [target]
        for name in sorted(n for n in names - _NOT_POINTWISE if "_polynomial_" not in n)
        for target in _overloads(getattr(aten, name, None))
        if _is_pointwise(target)
    }


def _may_be_called(target: Any, of_tensors: bool) -> bool:
    parameters = target._schema.arguments
    kinds = {str(p.type) for p in parameters}
    is_strange = (
        target._schema.is_mutable or target._overloadname in _OTHER_OVERLOADS or "Dimname" in str(kinds)
    )
    first = "Tensor" in str(parameters[0].type)
    return first == of_tensors and not is_strange and "out_dtype" not in [p.name for p in parameters]


def _by_rule(name: str) -> list[Any]:
    namespace, _, short = name.rpartition("::")
    packet = getattr(getattr(torch.ops, namespace or "aten"), short, None) or getattr(ours, short)
    is_made = name in CONSTRUCTORS and not name.startswith("new_")
    return [target for target in _overloads(packet) if _may_be_called(target, of_tensors=not is_made)]


POINTWISE = _listed()
"""By name and overload."""

OPERATIONS = {**{name: _by_rule(name) for name in sorted(RULES)}, **POINTWISE}
"""The overloads of what graphs are made of, by the names of rules and by the names of `POINTWISE`."""


# --- a call


def call(b: Builder, name: str) -> fx.Node | None:
    """Appends a call to a graph; None where the trace refuses the arguments that were drawn."""
    if name in _BY_HAND:
        return _BY_HAND[name](b, name)
    drawn = Drawn(b, name)
    target = b.choice(OPERATIONS[name])
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for parameter in target._schema.arguments:
        is_left_out = parameter.has_default_value() and (b.chance(0.3) or parameter.name in _DEFAULT)
        is_left_out = is_left_out and not (parameter.name == "dim" and name in _CUTS)
        if parameter.kwarg_only:
            if not is_left_out:
                kwargs[parameter.name] = drawn.argument(parameter)
        else:
            args.append(parameter.default_value if is_left_out else drawn.argument(parameter))
    return b.call(target, *args, **kwargs)


class Drawn:
    """The arguments of one call, drawn one after another.

    Args:
        name: that of the operation.
    """

    def __init__(self, b: Builder, name: str) -> None:
        self.b, self.name = b, name
        self.x: Any = None
        """The first tensor, which the others have to fit."""
        self.kind = ""
        """The type of the argument that is drawn."""
        self.sizes: list[Any] = []
        """The first list of sizes."""
        self.at: int | None = None
        """The dimension that was drawn, of one that others go by."""
        self.spatial = int([*re.findall(r"(\d)d", name), "2"][0])
        """How many dimensions an operation works on, which its name says."""

    def argument(self, parameter: Any) -> Any:
        self.kind = str(parameter.type)
        draw = _BY_NAME.get(parameter.name)
        if self.x is None and "Tensor" in self.kind:
            self.x = _first(self)
            if parameter.name not in ("condition", "mask"):
                return [self.x, *_partners(self)] if "List" in self.kind else self.x
        if draw is not None:
            return draw(self)
        if "Optional" in self.kind and self.b.chance(0.4):
            return None
        return self.of_type()

    def of_type(self) -> Any:
        """What an argument may be of which the name says nothing."""
        if "Tensor" in self.kind:
            return _operand(self.b, self.x)
        if "bool" in self.kind:
            return self.b.flag()
        if "int" in self.kind:
            return self.b.choice((1, 2, 3))
        return self.b.choice((0.5, 0.1, 2.0)) if "float" in self.kind else self.b.scalar()

    def each(self, *options: int) -> list[Any]:
        """One of these for all the dimensions that the operation works on."""
        return [self.b.choice(options)] * self.spatial

    def channels(self) -> int:
        shape = self.x.meta["val"].shape
        return shape[1] if len(shape) > 1 and isinstance(shape[1], int) else 1


# --- tensors

_INTEGERS_ONLY = ("bitwise_", "__lshift__", "__rshift__", "__xor__", "gcd", "lcm")
_SPATIAL = ("im2col", "_native_batch_norm_legit_no_training", "pixel_shuffle", "pixel_unshuffle")
_SHAPES: dict[str, tuple[tuple[list[int], int], ...]] = {
    "view_as_real": (([0, 2], 0), ([0, 3, 2], 0), ([3, 0, 2], 1)),
    "view_as_complex": (([0, 2], 0), ([0, 3, 2], 0), ([3, 0, 2], 1)),
    "col2im": (([0, 8, 4], 0), ([0, 8, 4], 0), ([2, 0, 4], 1), ([0, 4], 0)),
    "pixel_shuffle": (([0, 4, 2, 2], 0), ([3, 0, 4, 2, 2], 1), ([0, 2, 2], 0)),
    "pixel_unshuffle": (([0, 8, 2, 4], 0), ([0, 4, 2, 2], 0), ([0, 2, 2], 0)),
    "tril": (([0, 3, 4], 0), ([0, 3, 4], 1)),
    "triu": (([0, 3, 4], 0), ([0, 3, 4], 1)),
}
"""Shapes that an operation takes, beside any, and which of their dimensions is the tokens'."""


def _first(drawn: Drawn) -> fx.Node:
    b, name = drawn.b, drawn.name
    if name in _SHAPES and b.chance(0.7):
        x = b.rows(*b.choice(_SHAPES[name]))
        return (b.call(aten.view_as_complex.default, x) or x) if name == "view_as_real" else x
    if name in POINTWISE or name == "floor_divide":
        return b.integers() if name.startswith(_INTEGERS_ONLY) or b.chance(0.1) else b.floats()
    if name in ATTENTIONS:
        return _query(b, name)
    if name[-2:] in ("1d", "2d", "3d") or "2d_" in name or "3d_" in name or name in _SPATIAL:
        return _image(b, b.choice((2, 3, 4)) if "batch_norm" in name else drawn.spatial + 2)
    if name in ("expand", "repeat") and b.flag():
        return b.shared(b.choice(([], [1], [3], [1, 3], [2, 1, 3], [1, 1, 1])))
    if name in ("squeeze", "expand") and b.flag():
        x = b.floats()
        return b.call(aten.unsqueeze.default, x, b.dim(x, 0.5, extra=1)) or x
    x = b.pick(lambda v: v.dim() > 0) if b.chance(0.2) else None
    return x or b.floats(rank=2 if name == "t" else None, at_least=2 if "norm" in name else 1)


def _query(b: Builder, name: str) -> fx.Node:
    """(batch, heads, tokens, head_dim), tokens of the graph being its batch, most often; or packed."""
    if name == "varlen_attention":
        return b.floats(rank=3) if b.chance(0.2) else b.token_rows([2, 3])
    if b.chance(0.3):
        return b.floats(rank=b.choice((3, 4)))
    return b.rows([0, 2, 3, 4], 0) if b.chance(0.75) else b.rows([2, 2, 0, 4], b.choice((1, 2)))


def _mask(drawn: Drawn) -> fx.Node | None:
    """What is added to the logits."""
    b, tokens = drawn.b, drawn.x.meta["val"].shape[-2]
    if b.chance(0.7):
        return None
    if isinstance(tokens, int) and b.chance(0.7):
        mask = b.shared([1, 1, b.choice((1, tokens)), tokens])
        return mask if b.flag() else b.call(aten.expand.default, mask, [b.size(drawn.x, 0), -1, tokens, -1])
    return b.floats(rank=4)


def _image(b: Builder, rank: int) -> fx.Node:
    """(batch, channels, height, width) of as many spatial dimensions; sometimes without a batch."""
    if b.chance(0.1):
        return b.floats(rank=rank)
    shape = [0, 2, *[4] * (rank - 2)]
    if b.chance(0.15):
        shape = shape[1:]
    return b.rows(shape, 0 if b.chance(0.75) else b.random.randrange(len(shape)))


def _operand(b: Builder, other: fx.Node) -> fx.Node:
    """A tensor that most often broadcasts with another one."""
    value = other.meta["val"]
    kind = b.random.random()
    if kind < 0.3:
        return b.pick(lambda v: list(v.shape) == list(value.shape) and v.dtype == value.dtype) or other
    if kind < 0.65:
        rank = b.random.randint(0, value.dim())
        shape = value.shape[value.dim() - rank :]
        sizes = [s if isinstance(s, int) and b.chance(0.7) else 1 for s in shape]
        return b.shared(sizes, value.dtype if value.dtype != torch.complex128 else torch.float64)
    if kind < 0.8:
        return b.call(aten.unsqueeze.default, other, b.dim(other, 0.5, extra=1)) or other
    return b.pick(lambda v: v.dtype == value.dtype) or other


def _partners(drawn: Drawn) -> list[fx.Node]:
    return [_partner(drawn.b, drawn.x) for _ in range(drawn.b.choice((1, 1, 2)))]


def _partner(b: Builder, x: fx.Node) -> fx.Node:
    """A tensor of the same rank, or a class token for every row."""
    value = x.meta["val"]
    kind = b.random.random()
    if kind < 0.25 and value.dim() > 1:
        last = value.shape[-1]
        token = b.shared([*[1] * (value.dim() - 1), last if isinstance(last, int) else 1])
        sizes = b.sizes(x)
        if b.flag():
            sizes[b.random.randrange(len(sizes))] = 1
        return b.call(aten.expand.default, token, sizes) or x
    if kind < 0.5:
        return b.call(aten.tanh.default if value.is_floating_point() else aten.abs.default, x) or x
    return (b.flag() and b.pick(lambda v: v.dim() == value.dim() and v.dtype == value.dtype)) or x


def _changed(drawn: Drawn) -> fx.Node:
    return (drawn.b.flag() and drawn.b.call(aten.tanh.default, drawn.x)) or drawn.x


def _parameter(drawn: Drawn) -> fx.Node | None:
    """Of a normalization: a number for each channel, or for each entry that is normalized."""
    shape = drawn.sizes or [drawn.channels()]
    fixed = all(isinstance(size, int) for size in shape)
    return drawn.b.shared(shape) if fixed and drawn.b.flag() else None


# --- sizes


def _target_sizes(drawn: Drawn) -> list[Any]:
    b, x = drawn.b, drawn.x
    if drawn.name in RESHAPES:
        return _other_sizes(b, x)
    if drawn.name == "expand":
        new = [b.count() if b.chance(0.4) else b.choice((1, 2, 3)) for _ in range(b.choice((0, 0, 1, 2)))]
        return [*new, *(_grown(b, x, dim) for dim in range(x.meta["val"].dim()))]
    sizes: list[Any] = [b.choice((1, 2, 3)) for _ in range(b.choice((0, 1, 2)))]
    if b.chance(0.75):
        sizes.insert(b.random.randrange(len(sizes) + 1), b.count())
    return sizes


def _grown(b: Builder, x: fx.Node, dim: int) -> Any:
    if b.size(x, dim) == 1:
        return b.count() if b.chance(0.4) else b.choice((1, 2, 3, -1))
    return b.choice((-1, b.size(x, dim)))


def _other_sizes(b: Builder, x: fx.Node) -> list[Any]:
    """Sizes that hold as many entries, some of them left to torch, and some wrong."""
    sizes = b.sizes(x)
    for kind in b.random.choices(
        ("join", "split", "one", "regroup", "flat", "shuffle"), k=b.choice((1, 1, 2, 3))
    ):
        at, to = (b.random.randrange(len(sizes)) for _ in range(2))
        k = b.choice((2, 2, 3, 4))
        if kind == "flat":
            sizes = b.choice(([-1, k], [-1, 2 * k], [k, -1]))
        elif kind == "one" or -1 in sizes:
            sizes.insert(at, 1)
        elif kind == "shuffle":  # a size stands for a dimension that it is not
            sizes = b.random.sample(sizes, len(sizes))
        elif kind == "join":
            sizes[at : at + 2] = [b.number(operator.mul, sizes[at], (*sizes, 1)[at + 1])]
        else:
            sizes[at] = b.number(operator.floordiv, sizes[at], k)
            if kind == "split":
                sizes.insert(at + b.choice((0, 1)), k)
            else:
                sizes[to] = b.number(operator.mul, sizes[to], k)
    if b.chance(0.3) and -1 not in sizes:
        sizes[b.random.randrange(len(sizes))] = -1
    return sizes


def _unflattened(drawn: Drawn) -> list[Any]:
    b = drawn.b
    if b.chance(0.3):
        return [b.number(operator.floordiv, b.size(drawn.x, drawn.at or 0), 2), 2]
    return b.choice(([-1, 2], [2, -1], [-1, 4], [1, -1], [-1, 1]))


def _normalized(drawn: Drawn) -> list[Any]:
    """The sizes of the last dimensions, most often of those behind the tokens."""
    b, x = drawn.b, drawn.x
    rank = x.meta["val"].dim()
    behind = range(1, rank - max(b.token_dims(x), default=-1))
    drawn.sizes = b.sizes(x)[
        rank - (b.choice(behind) if behind and b.chance(0.9) else b.random.randint(1, rank)) :
    ]
    return drawn.sizes


def _amounts(drawn: Drawn) -> list[Any]:
    """Pairs from the last dimension on, of which that of the tokens is most often (0, 0)."""
    b, x = drawn.b, drawn.x
    rank = x.meta["val"].dim()
    amounts: list[Any] = [b.choice((0, 0, 1, 2, -1)) for _ in range(2 * b.random.randint(1, rank))]
    for index in (2 * (rank - 1 - dim) for dim in b.token_dims(x)):
        if b.chance(0.7) and index < len(amounts):
            amounts[index : index + 2] = [0, 0]
    if b.chance(0.05):
        amounts[0] = b.count()
    return amounts


def _padding(drawn: Drawn) -> list[Any]:
    b = drawn.b
    if "_pad" not in drawn.name:
        return drawn.each(0, 1)
    amounts: list[Any] = [b.choice((0, 1, 1, 2)) for _ in range(2 * drawn.spatial)]
    return amounts if b.chance(0.97) else [b.count(), *amounts[1:]]


def _output_size(drawn: Drawn) -> list[Any] | None:
    b = drawn.b
    if drawn.name == "col2im":
        return b.choice(([4, 4], [2, 2]))
    drawn.sizes = [b.choice((1, 2, 3, 6)) for _ in range(drawn.spatial)]
    if "Optional" in drawn.kind and b.flag():
        return drawn.sizes.clear()
    return [b.count(), *drawn.sizes[1:]] if b.chance(0.05) else list(drawn.sizes)


def _repeats(drawn: Drawn) -> list[Any]:
    b, tokens = drawn.b, drawn.b.token_dims(drawn.x)
    counts = [1 if d in tokens and b.chance(0.8) else _times(b) for d in range(drawn.x.meta["val"].dim())]
    return [*(_times(b) for _ in range(b.choice((0, 0, 1)))), *counts]


def _shifts(drawn: Drawn) -> list[Any]:
    drawn.sizes = drawn.b.dims(drawn.x)
    return [_rare_count(1, -1, 2)(drawn) for _ in drawn.sizes or [0]]


def _times(b: Builder) -> Any:
    return b.count() if b.chance(0.25) else b.choice((1, 1, 1, 2, 3))


def _parts(drawn: Drawn) -> Any:
    b = drawn.b
    drawn.at = b.dim(drawn.x, 0.85)
    if drawn.kind == "int":
        is_of_tokens = drawn.at % drawn.x.meta["val"].dim() in b.token_dims(drawn.x)
        return 5000 if is_of_tokens else b.choice((1, 2, 5))
    first = b.choice((1, 1, 2))
    return [first, b.number(operator.sub, b.size(drawn.x, drawn.at), first)]


# --- arguments


def _dim(drawn: Drawn) -> Any:
    b, x = drawn.b, drawn.x
    if "List" in drawn.kind:
        return b.dims(x) if "Optional" not in drawn.kind or b.chance(0.9) else None
    if drawn.name == "unbind" and len(b.token_dims(x)) == x.meta["val"].dim():
        return x.meta["val"].dim()  # there is none, which the trace refuses
    if drawn.at is None or drawn.name == "transpose":
        drawn.at = b.dim(x, _SAFE.get(drawn.name, 0.75), extra=int(drawn.name in ("unsqueeze", "stack")))
    return drawn.at


def _dims(drawn: Drawn) -> list[int]:
    b, rank = drawn.b, drawn.x.meta["val"].dim()
    if drawn.name != "permute":
        return drawn.sizes or b.dims(drawn.x)
    return [d - rank if b.chance(0.3) else d for d in b.random.sample(range(rank), rank)]


def _start(drawn: Drawn) -> Any:
    b = drawn.b
    if drawn.name == "arange":
        return b.choice((0, 0, 0, 1, b.count()))
    return b.choice((None, 0, 0, 1, -1, b.limit()) if b.chance(0.5) else (None, 0))


def _end(drawn: Drawn) -> Any:
    b = drawn.b
    if "Tensor" in drawn.kind:
        return drawn.of_type()
    if drawn.name == "arange":
        return b.count() if b.chance(0.8) else b.choice((3, 5))
    n = b.size(drawn.x, drawn.at or 0)
    ends = (n, b.number(operator.floordiv, n, 2), 3, -1, b.limit(), b.count())
    return b.choice(ends if b.chance(0.5) else (None, _END))


def _step(drawn: Drawn) -> Any:
    steps = (1, 2, 3, 0.5, -1, drawn.b.count()) if drawn.name == "arange" else (1, 1, 1, 2)
    return drawn.b.choice(steps)


def _dtype(drawn: Drawn) -> torch.dtype | None:
    if drawn.x is None:
        return drawn.b.choice((torch.float64, torch.int64, None))
    viewed = _VIEWED.get(drawn.x.meta["val"].dtype, (torch.int8,))
    return drawn.b.choice(viewed if drawn.name == "view" else _DTYPES)


def _rare_count(*others: Any) -> Callable[[Drawn], Any]:
    return lambda drawn: drawn.b.count() if drawn.b.chance(0.05) else drawn.b.choice(others)


_DEFAULT = frozenset(
    (
        *("device", "dropout_p", "enable_gqa", "layout", "memory_format", "pin_memory", "return_debug_mask"),
        *(
            "scales",
            "scales_d",
            "scales_h",
            "scales_w",
        ),  # beside sizes that are others, kernels read anywhere
    )
)
"""What is left as it is by default."""

_SAFE = {"unbind": 1.0, **dict.fromkeys(("slice", "transpose", "unflatten", "cumsum", "cumprod"), 0.5)}
"""How likely another dimension than the tokens' is drawn, where not as for others."""

_CUTS = ("split", "split_with_sizes", "unbind")
"""These make so many parts of a dimension; as many as there are tokens are too many."""

_BY_NAME: dict[str, Callable[[Drawn], Any]] = {
    # tensors
    "key": _changed,
    "value": lambda drawn: _changed(drawn) if drawn.name in ATTENTIONS else drawn.of_type(),
    "attn_mask": _mask,
    "attn_bias": _mask,
    "cu_seqlens": lambda drawn: drawn.b.segments() if drawn.b.chance(0.95) else drawn.b.integers(),
    "weight": lambda drawn: _parameter(drawn) if "norm" in drawn.name else drawn.of_type(),
    "bias": _parameter,
    "running_mean": lambda drawn: drawn.b.shared([drawn.channels()]),
    "running_var": lambda drawn: drawn.b.call(aten.exp.default, drawn.b.shared([drawn.channels()])),
    **dict.fromkeys(
        ("condition", "mask"), lambda drawn: drawn.b.call(aten.gt.Scalar, drawn.x, 0.1) or drawn.x
    ),
    # dimensions
    **dict.fromkeys(("dim", "dim0", "dim1", "dimension"), _dim),
    "dims": _dims,
    "start_dim": lambda drawn: drawn.b.choice((0, 1, -2)),
    "end_dim": lambda drawn: drawn.b.choice((1, 2, -1)),
    # sizes and places
    **dict.fromkeys(("size", "shape"), lambda d: d.b.choice((1, 2)) if d.kind == "int" else _target_sizes(d)),
    "sizes": _unflattened,
    "normalized_shape": _normalized,
    "output_size": _output_size,
    "scale_factors": lambda drawn: None if drawn.sizes else [drawn.b.choice((2.0, 1.5))] * drawn.spatial,
    "kernel_size": lambda drawn: drawn.each(2),
    "stride": lambda drawn: drawn.each(2) if "2" in drawn.name[:4] else drawn.each(1, 2),
    "dilation": lambda drawn: drawn.each(1),
    "padding": _padding,
    "pad": _amounts,
    "repeats": _repeats,
    "shifts": _shifts,
    **dict.fromkeys(("split_size", "split_sizes"), _parts),
    "start": _start,
    "end": _end,
    "step": _step,
    "index": _rare_count(0, 0, -1, 1),
    "diagonal": _rare_count(0, 1, -1),
    "max_seqlen": lambda drawn: drawn.b.size(drawn.x, 0) if drawn.b.chance(0.7) else drawn.b.count(),
    # others
    "dtype": _dtype,
    "half_to_float": lambda drawn: False,
    "scale": lambda drawn: (
        0.5 if drawn.b.chance(0.95) else drawn.b.number(operator.truediv, 1, drawn.b.count())
    ),
    "ord": lambda drawn: drawn.b.choice((2, 1, float("inf"), 0, 3)),
    "correction": lambda drawn: drawn.b.choice((None, 0, 1)),
    "rounding_mode": lambda drawn: drawn.b.choice((None, "floor", "trunc")),
    "approximate": lambda drawn: drawn.b.choice(("none", "tanh")),
}

# --- calls whose tensors have to fit one another


def _product(b: Builder, name: str) -> fx.Node | None:
    """Rows times a matrix, shared or not, in every place."""
    x = b.floats(rank=None if name in ("matmul", "linear") else 2)
    inner = x.meta["val"].shape[-1]
    weight = b.shared([inner, 3]) if isinstance(inner, int) else b.rows([0, 3], 0)
    if name == "matmul" and b.chance(0.3) and isinstance(inner, int):
        weight = b.shared([b.choice((1, 2, 3)), inner, 2])
    if b.chance(0.15):
        weight = b.pick(lambda v: v.is_floating_point() and v.dim() > 0) or weight
    if name in ("linear", "fxsplit::linear"):
        weight = b.call(aten.t.default, weight) or weight
    pair = (weight, x) if b.chance(0.1) else (x, weight)
    bias = b.shared(b.choice(([3], [3], [1, 3], [1]) if "addmm" in name else ([3],)))
    if "addmm" in name:
        target = aten.addmm.default if name == "addmm" else ours.addmm_gelu.default
        return b.call(target, bias if b.chance(0.85) else b.floats(rank=2), *pair)
    if name in ("mm", "matmul"):
        return b.call(getattr(aten, name).default, *pair)
    target = aten.linear.default if name == "linear" else getattr(ours, name.split("::")[1]).default
    activation = {"fxsplit::linear": [b.choice(("gelu", "gelu_tanh"))], "fxsplit::fixed_linear": [""]}
    return b.call(target, *pair, bias if b.flag() else None, *activation.get(name, []))


def _batched_product(b: Builder, name: str) -> fx.Node | None:
    x = b.floats(rank=3)
    batch, _, inner = x.meta["val"].shape
    if b.chance(0.3) and isinstance(inner, int) and isinstance(batch, int):
        other: fx.Node | None = b.shared([batch, inner, 2])
    else:
        other = b.pick(lambda v: v.dim() == 3 and v.is_floating_point() and v.shape[0] == batch)
        if other is None or b.chance(0.6):
            other = b.call(aten.transpose.int, x, 1, 2)
    pair = (other, x) if b.chance(0.3) else (x, other)
    if name == "bmm":
        return b.call(aten.bmm.default, *pair)
    added = b.shared(b.choice(([1, 1, 1], [1], [1, 1], []))) if b.chance(0.6) else b.floats(rank=3)
    return b.call(aten.baddbmm.default, added, *pair)


def _convolution(b: Builder, name: str) -> fx.Node | None:
    """Transposed or by groups, its input batched or not."""
    spatial = b.choice((1, 2, 2, 3))
    x = _image(b, spatial + 2)
    channels = x.meta["val"].shape[-spatial - 1] if x.meta["val"].dim() > spatial else 2
    channels = channels if isinstance(channels, int) else 1
    groups = channels if b.chance(0.2) else 1
    outer, transposed = groups * b.choice((1, 2)), b.chance(0.3)
    shape = [channels, outer // groups] if transposed else [outer, channels // groups]
    weight = b.shared([*shape, *[b.choice((1, 2, 3))] * spatial])
    bias = b.shared([outer]) if b.flag() else None
    stride, padding = [b.choice((1, 1, 2))] * spatial, [b.choice((0, 1))] * spatial
    arguments = (stride, padding, [1] * spatial, transposed, [0] * spatial, groups)
    return b.call(aten.convolution.default, x, weight, bias, *arguments)


def _group_norm(b: Builder, name: str) -> fx.Node | None:
    x = _image(b, b.choice((3, 4)))
    batch, channels, *others = b.sizes(x)
    rest: Any = 1
    for size in others:
        rest = b.number(operator.mul, rest, size)
    if b.chance(0.25):  # other sizes of the same product
        batch, channels, rest = b.choice(
            (
                (1, batch, b.number(operator.mul, channels, rest)),
                (b.number(operator.floordiv, batch, 2), b.number(operator.mul, channels, 2), rest),
                (b.number(operator.mul, batch, channels), 1, rest),
                (channels, batch, rest),
            )
        )
    weights = [b.shared([channels]) if isinstance(channels, int) and b.flag() else None for _ in range(2)]
    return b.call(
        aten.native_group_norm.default, x, *weights, batch, channels, rest, b.choice((1, 1, 2)), 1e-5
    )


# --- lookups by indices that are an input or computed from one, in tables shared or not


def _indices(b: Builder) -> fx.Node:
    """Integers in range for a table of NUM_IDS rows, at least those of real rows."""
    ids = b.integers()
    for _ in range(b.choice((0, 0, 1, 2))):
        ids = _moved(b, ids) or ids
    return ids


def _moved(b: Builder, ids: fx.Node) -> fx.Node | None:
    """Other indices; computed ones are in range for real rows, which are at least 1, and not for the zeros of
    pad rows.
    """
    tensors = [ids, (b.chance(0.3) and b.call(aten.sub.Tensor, ids, 1)) or ids]
    computed = ((aten.sub.Tensor, ids, 1), (aten.rsub.Scalar, ids, NUM_IDS), (aten.add.Scalar, ids, -1))
    moved = (
        (aten.unsqueeze.default, ids, b.dim(ids, 0.5, extra=1)),
        (aten.view.default, ids, b.choice(([-1], [-1, 2]))),
        (aten.stack.default, tensors, b.dim(ids, 0.8, extra=1)),
        (aten.cat.default, tensors, b.dim(ids)),
        (aten._to_copy.default, ids),
        (aten.select.int, ids, b.dim(ids), 0),
        (aten.expand.default, ids, [2, *b.sizes(ids)]),
        (aten.constant_pad_nd.default, ids, b.choice(([1, 0], [0, 1])), 1),
        (aten.slice.Tensor, ids, b.dim(ids), 0, 1),
    )
    target, *arguments = b.choice(computed if b.chance(0.3) else moved)
    return b.call(target, *arguments)


def _table(b: Builder, rank: int) -> fx.Node:
    if b.chance(0.1):
        return b.floats(rank)
    return b.shared([NUM_IDS] + [b.choice((1, 3, NUM_IDS)) for _ in range(rank - 1)])


def _embedding(b: Builder, name: str) -> fx.Node | None:
    return b.call(aten.embedding.default, _table(b, 2), _indices(b))


def _index(b: Builder, name: str) -> fx.Node | None:
    if b.chance(0.4):
        return _entries_of_rows(b, name)
    makers: dict[str, Callable[[], fx.Node | None]] = {
        "i": lambda: _indices(b),
        "-": lambda: None,
        "s": lambda: _shared_ids(b),
        "m": lambda: b.pick(lambda v: v.dtype == torch.bool) or b.rows([0], 0, torch.bool),
    }
    given = [makers[letter]() for letter in b.choice(("i", "i", "ii", "i-i", "-i", "is", "m"))]
    rank = max(len(given), b.choice((1, 2, 3)))
    table = b.shared([NUM_IDS] * rank) if b.chance(0.85) else b.floats()
    return b.call(getattr(aten, name).Tensor, table, given)


def _entries_of_rows(b: Builder, name: str) -> fx.Node | None:
    """Shared indices in some of the dimensions of rows, or of one row with its neighbours."""
    rank = b.choice((2, 3, 4))
    x = b.rows([NUM_IDS if rank < 4 else 3] * rank, b.random.randrange(rank))
    tokens = b.token_dims(x)
    given = []
    for dim in range(b.random.randint(1, rank)):
        kept = b.chance(0.9) if dim in tokens else b.chance(0.3)
        given.append(None if kept else _shared_ids(b, x.meta["val"].shape[dim]))
    return b.call(getattr(aten, name).Tensor, x, given) if any(i is not None for i in given) else None


def _shared_ids(b: Builder, size: Any = NUM_IDS) -> fx.Node:
    ids = b.shared(b.choice(([1], [], [2, 1], [3])), torch.int64)
    return ids if size == NUM_IDS else b.call(aten.remainder.Scalar, ids, 3) or ids


def _index_select(b: Builder, name: str) -> fx.Node | None:
    if b.chance(0.4):
        x = b.rows([NUM_IDS] * 3, b.random.randrange(3))
        return b.call(aten.index_select.default, x, b.dim(x), b.shared([2], torch.int64))
    table = _table(b, b.choice((1, 2, 3)))
    return b.call(aten.index_select.default, table, b.choice((0, 0, 0, -1)), _indices(b))


def _permute_rows(b: Builder, name: str) -> fx.Node | None:
    permutation = b.permutation()
    if b.chance(0.15):
        permutation = b.call(aten.flip.default, permutation, [0]) or permutation
    return b.call(ours.permute_rows.default, b.token_rows([3]) if b.chance(0.6) else b.floats(), permutation)


_PRODUCTS = (
    "mm",
    "matmul",
    "linear",
    "addmm",
    "fxsplit::addmm_gelu",
    "fxsplit::linear",
    "fxsplit::fixed_linear",
)
_BY_HAND: dict[str, Callable[[Builder, str], fx.Node | None]] = {
    **dict.fromkeys(_PRODUCTS, _product),
    **dict.fromkeys(("bmm", "baddbmm"), _batched_product),
    "convolution": _convolution,
    "native_group_norm": _group_norm,
    "embedding": _embedding,
    **dict.fromkeys(("index", "_unsafe_index"), _index),
    "index_select": _index_select,
    "fxsplit::permute_rows": _permute_rows,
}
