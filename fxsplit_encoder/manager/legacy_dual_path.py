"""Two-tower encoders in the older spelling, "global" and "local", read as encoders with two paths.

vLLM's encoder CUDA graphs first knew two paths by fixed names: fields of the configuration and of the item
specs, and a `local_output` argument. Towers written that way, or without what came later, are served too.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy as np
from torch import Tensor

from fxsplit_encoder.errors import FxSplitError, InputError
from fxsplit_encoder.messages import names_of, shown
from fxsplit_encoder.protocol import (
    EncoderCudaGraphConfig,
    EncoderCudaGraphPathConfig,
    EncoderItemSpec,
)

GLOBAL, LOCAL = "global", "local"

# Tables of costs count in 64 bits, and sums of a request's items must fit.
_MOST_TOKENS = 2**48


def read_model_config(tower: Any) -> EncoderCudaGraphConfig:
    """The tower's configuration, with the paths that `enable_dual_path_graph` stands for."""
    given = tower.get_encoder_cudagraph_config()
    later = {name: getattr(given, name) for name in ("paths", "capture_axes") if hasattr(given, name)}
    if getattr(given, "enable_dual_path_graph", False):
        later["paths"] = {
            GLOBAL: EncoderCudaGraphPathConfig(given.global_token_per_image),
            LOCAL: EncoderCudaGraphPathConfig(given.local_token_per_patch, allow_zero_tokens=True),
        }
    return EncoderCudaGraphConfig(
        modalities=list(given.modalities),
        buffer_keys=list(given.buffer_keys),
        out_hidden_size=given.out_hidden_size,
        padding_logics=dict(given.padding_logics),
        max_frames_per_video=given.max_frames_per_video,
        **later,
    )


def read_item_specs(tower: Any, mm_kwargs: Any) -> list[EncoderItemSpec]:
    """The sizes of a batch's items, with the path tokens that `global_output_tokens` and
    `local_output_tokens` stand for.

    Raises:
        InputError: the inputs are no mapping with anything in it, or the tower does not read them as items
            of sizes that can be.
    """
    is_mapping = type(mm_kwargs) is dict or isinstance(mm_kwargs, Mapping)  # of other types it takes longer
    if not is_mapping or not mm_kwargs:
        raise InputError(
            f"mm_kwargs: expected a mapping from names to the inputs of a batch; got {shown(mm_kwargs)}"
        )
    given = list(_specs_of(tower, mm_kwargs))
    for spec in given:
        if not hasattr(spec, "get_path_output_tokens") or spec.path_output_tokens:
            break
        rows, tokens = spec.input_size, spec.output_tokens
        if type(rows) is not int or type(tokens) is not int:
            break
        if not (0 <= rows <= _MOST_TOKENS and 0 <= tokens <= _MOST_TOKENS):
            break
    else:  # as nearly all are
        return given
    specs = [
        spec
        if hasattr(spec, "get_path_output_tokens")
        else EncoderItemSpec(
            spec.input_size,
            spec.output_tokens,
            global_output_tokens=getattr(spec, "global_output_tokens", None),
            local_output_tokens=getattr(spec, "local_output_tokens", None),
        )
        for spec in map(_with_integers, given)
    ]
    _check_sizes(tower, specs)
    return specs


def _check_sizes(tower: Any, specs: Sequence[EncoderItemSpec]) -> None:
    """Raises InputError for a size that no item has."""
    sizes = [size for spec in specs for size in (spec.input_size, spec.output_tokens)]
    sizes += [size for spec in specs if spec.path_output_tokens for size in spec.path_output_tokens.values()]
    if not sizes or (set(map(type, sizes)) == {int} and min(sizes) >= 0 and max(sizes) <= _MOST_TOKENS):
        return
    for index, spec in enumerate(specs):
        for size in (spec.input_size, spec.output_tokens, *spec.path_output_tokens.values()):
            if not _is_size(size):
                raise InputError(
                    f"mm_kwargs: {type(tower).__name__} reads item {index} as one of {shown(size)} rows; "
                    f"expected an integer from 0 to {_MOST_TOKENS}; got {shown(spec)}"
                )


def _specs_of(tower: Any, mm_kwargs: Mapping[str, Any]) -> Sequence[Any]:
    """The item specs as the tower gives them."""
    try:
        specs: Sequence[Any] = tower.get_encoder_cudagraph_item_specs(mm_kwargs)
        return specs
    except FxSplitError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise InputError(
            f"mm_kwargs: {type(tower).__name__} does not read {names_of(mm_kwargs)} as items: "
            f"{type(error).__name__}: {error}"
        ) from error


def _with_integers(spec: Any) -> Any:
    """A spec whose sizes are integers, of one that a tower computed from the numbers in its inputs."""
    size = spec.input_size
    if type(size) is int or not (
        isinstance(size, Tensor | np.generic) and hasattr(spec, "path_output_tokens")
    ):
        return spec
    integer: Any = operator.index
    try:
        paths = {name: integer(size) for name, size in spec.path_output_tokens.items()}
        return EncoderItemSpec(integer(spec.input_size), integer(spec.output_tokens), paths)
    except TypeError:  # of several elements, or no integer
        return spec


def _is_size(value: Any) -> bool:
    """Whether an item may have so many rows."""
    whole = isinstance(value, Integral) and type(value).__name__ != "bool"
    return whole and 0 <= int(value) <= _MOST_TOKENS


def postprocess_of(tower: Any) -> Callable[..., None]:
    """The tower's `postprocess_encoder_output`, taking the outputs of all paths by name.

    One with a `local_output` parameter gets the global path's output first and the local path's there.
    """
    postprocess: Callable[..., None] = tower.postprocess_encoder_output
    if "local_output" not in inspect.signature(postprocess).parameters:
        return postprocess

    def with_local_output(outputs: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> None:
        first = outputs.get(GLOBAL, outputs.get("default"))
        postprocess(first, *args, local_output=outputs.get(LOCAL), **kwargs)

    return with_local_output
