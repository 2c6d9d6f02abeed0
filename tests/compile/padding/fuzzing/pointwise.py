"""Every operation that torch tags as pointwise, called with arguments that its schema asks for."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from .builder import Builder
from .calls.registry import call_of

aten = torch.ops.aten

_LEFT_OUT = frozenset(
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
_INTEGERS_ONLY = ("bitwise_", "__lshift__", "__rshift__", "__xor__", "gcd", "lcm")
_STRINGS = {"rounding_mode": (None, "floor", "trunc"), "approximate": ("none", "tanh")}


def _is_pointwise(overload: torch._ops.OpOverload) -> bool:
    tags = overload.tags
    changes = overload._schema.is_mutable
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags and not changes


def _listed() -> dict[str, torch._ops.OpOverload]:
    names = {n.split("::")[1].split(".")[0] for n in torch._C._dispatch_get_all_op_names() if "aten::" in n}
    found = {}
    for name in sorted(n for n in names - _LEFT_OUT if "_polynomial_" not in n):
        packet = getattr(aten, name, None)
        for overload in packet.overloads() if packet is not None else ():
            target = getattr(packet, overload)
            if _is_pointwise(target):
                found[f"{name}.{overload}"] = target
    return found


POINTWISE = _listed()
"""By name and overload."""


def call_pointwise(b: Builder, target: torch._ops.OpOverload) -> fx.Node | None:
    """A call with arguments made from the schema."""
    integers = target._schema.name.split("::")[1].startswith(_INTEGERS_ONLY)
    first = b.integers() if integers or b.chance(0.1) else b.floats()
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    tensors = 0
    for parameter in target._schema.arguments:
        if parameter.has_default_value() and (parameter.kwarg_only or not kwargs) and b.chance(0.5):
            if parameter.kwarg_only:
                continue
            value = parameter.default_value
        else:
            value = _argument(b, parameter, first if tensors == 0 else _operand(b, first))
        tensors += "Tensor" in str(parameter.type)
        if parameter.kwarg_only:
            kwargs[parameter.name] = value
        else:
            args.append(value)
    return b.call(target, *args, **kwargs)


def _argument(b: Builder, parameter: Any, tensor: fx.Node) -> Any:
    kind = str(parameter.type)
    if "Optional" in kind and b.chance(0.4):
        return None
    if parameter.name in _STRINGS:
        return b.choice(_STRINGS[parameter.name])
    if "Tensor" in kind:
        masked = parameter.name in ("condition", "mask")
        return b.call(aten.gt.Scalar, tensor, 0.1) or tensor if masked else tensor
    if kind == "bool":
        return b.flag()
    if kind == "int":
        return b.choice((1, 2, 3))
    return b.choice((0.5, 0.1, 2.0)) if "float" in kind else b.scalar()


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


@call_of("floor_divide")
def _floor_divide(b: Builder, name: str) -> fx.Node | None:
    """Pointwise too, though torch does not tag it."""
    return call_pointwise(b, b.choice((aten.floor_divide.default, aten.floor_divide.Scalar)))
