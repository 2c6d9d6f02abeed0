"""Keyword arguments of a tower's forward: which of them change what it returns. Libraries pass on what they
got, such as `return_dict=True`; each set would be another call to Dynamo, so they are settled before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fxsplit_encoder._torch.dispatch import tree_leaves

_IGNORED = frozenset(
    {
        *("use_cache", "cache_position", "logits_to_keep", "num_items_in_batch"),
        *("vision_feature_layer", "vision_feature_layers", "vision_feature_select_strategy"),
        *("vision_aspect_ratio", "batch_num_images", "output_router_logits"),
    }
)
"""What is meant for a language model, or for the model around a tower, and a tower ignores."""

_OFF = frozenset({"output_attentions", "output_hidden_states", "interpolate_pos_encoding"})
"""What changes nothing unless it is asked for."""


@dataclass(frozen=True, slots=True)
class Options:
    """The keyword arguments of a call, settled."""

    kept: dict[str, Any]
    """The tower's own inputs that were given by name."""
    changing: dict[str, Any]
    """What changes the result."""
    returns_dict: bool
    """Whether a tuple is not asked for."""


def settle(
    kwargs: Mapping[str, Any], own_names: Iterable[str], matters: Callable[[str, Any], bool]
) -> Options:
    """The keyword arguments of a call without those that change nothing: `matters` tells options that change
    the result, `own_names` are inputs.
    """
    kept, changing = {}, {}
    for name, value in kwargs.items():
        if name in own_names:
            kept[name] = value
        elif name != "return_dict" and matters(name, value):
            changing[name] = value
    return Options(kept, changing, kwargs.get("return_dict") is not False)


def matters(name: str, value: Any) -> bool:
    """Whether an option changes what any tower returns; None is what leaving it out means."""
    return not (value is None or name in _IGNORED or (name in _OFF and value is False))


class _ArgumentReadError(Exception):
    """An argument was read."""


class _Argument:
    """In the place of an argument: any use of it is an error."""

    def _raise(self, *args: Any, **kwargs: Any) -> Any:
        raise _ArgumentReadError

    __getattribute__ = __call__ = __enter__ = _raise


_KEPT = {*vars(_Argument), *("__new__", "__init__", "__init_subclass__", "__subclasshook__", "__class__")}
for _name in {*dir(torch.Tensor), *dir(tuple)} - _KEPT | {"__hash__"}:
    if _name.startswith("__") and callable(getattr(torch.Tensor, _name, _name)):
        setattr(_Argument, _name, _Argument.__call__)


def reads_argument(call: Callable[[dict[str, Any]], Any], name: str) -> bool:
    """Whether a forward, `call` with further arguments, uses or refuses an argument, or returns something
    else.
    """
    with torch.inference_mode(False), torch.no_grad():
        plain = tree_leaves(call({}).to_tuple())
        try:
            probed = tree_leaves(call({name: _Argument()}).to_tuple())
        except (_ArgumentReadError, TypeError, ValueError, RuntimeError):
            return True
    return len(plain) != len(probed) or not all(map(torch.equal, plain, probed))


def without_inference_tensors(values: Any) -> Any:
    """Copies of inference-mode tensors in tuples and dictionaries: a trace of one kind does not hold for the
    other.
    """
    if isinstance(values, torch.Tensor):
        if not values.is_inference():
            return values
        with torch.inference_mode(False):
            return values.clone()
    if isinstance(values, tuple):
        return tuple(map(without_inference_tensors, values))
    if isinstance(values, dict):
        return {name: without_inference_tensors(value) for name, value in values.items()}
    return values
