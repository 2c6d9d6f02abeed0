"""What every wrapped tower does, packed or dense."""

from __future__ import annotations

import itertools
import weakref
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from fxsplit_encoder._torch.tensors import tensors_of
from fxsplit_encoder.compile.blocks import begin_blocks
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.protocol import scatter_output_slices

_towers: weakref.WeakValueDictionary[str, WrappedTower] = weakref.WeakValueDictionary()
_numbers = itertools.count()

VIDEOS = "pixel_values_videos"
"""Where `mm_kwargs` holds videos."""


class WrappedTower(nn.Module):
    """A tower behind the manager's protocol that is still a module with the tower's own forward.

    An adapter gives the rest of the protocol's methods.
    """

    supports_encoder_cudagraph: ClassVar[Literal[True]] = True

    declares_padding: bool = False
    """Whether padding is taken to leave real rows alone without a proof."""

    has_plain_blocks: bool = False
    """Whether every block takes tensors, numbers and names alone and returns one tensor, so that
    torch.compile may trace one of them for all that are equal."""

    deepstack_levels: int = 0
    """How many further outputs follow the main one along the hidden dimension, each as wide as it."""

    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self.tower = tower
        self.registered_name = register_tower(self)
        self._first_parameters, self._first_name = _first_parameter(tower)

    def __getattr__(self, name: str) -> Any:
        """What the surrounding model reads from a tower (`config`, `spatial_merge_size`) is the tower's."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "tower":
                raise
            return getattr(self.tower, name)

    @property
    def device(self) -> torch.device:
        """The device of the tower's parameters."""
        # Walking the modules to the first parameter takes ten microseconds, so its place is kept.
        return self._first_parameters[self._first_name].device  # type: ignore[union-attr]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the tower's parameters."""
        return next(self.tower.parameters()).dtype

    def trace_plain_blocks_once(self) -> None:
        """Lets Dynamo, if it is tracing, trace one of the equal blocks for all. For a forward that uses only
        the results of its blocks.
        """
        if self.has_plain_blocks and not self.tower.training and torch.compiler.is_dynamo_compiling():
            trace_equal_blocks_once(self.registered_name)

    def postprocess_encoder_output(
        self,
        outputs: dict[str, Tensor],
        indices: list[int],
        per_item_out_tokens: list[int],
        dest: dict[int, Tensor] | list[Tensor | None],
        clone: bool = False,
        batch_mm_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Hands every item its rows of the output."""
        scatter_output_slices(outputs["default"], indices, per_item_out_tokens, dest, clone)

    def refuse_videos(self, mm_kwargs: dict[str, Any]) -> None:
        """For a tower that takes images only: raises InputError if there are videos."""
        if mm_kwargs.get(VIDEOS) is not None:
            raise InputError(f"{VIDEOS}: {type(self).__name__} takes images only; leave it out")


def given_batch(batch_mm_kwargs: dict[str, Any] | None) -> dict[str, Any]:
    """The inputs of the batch, for a tower whose output alone does not tell its items apart.

    Raises:
        InputError: they were left out.
    """
    if batch_mm_kwargs is None:
        raise InputError("batch_mm_kwargs: expected the inputs of the batch; got None")
    return batch_mm_kwargs


def is_hugging_face(tower: nn.Module) -> bool:
    """Whether a configuration may choose a tower's attention; one without needs no transformers."""
    return any(hasattr(module, "config") for module in tower.modules())


def _first_parameter(module: nn.Module) -> tuple[dict[str, nn.Parameter | None], str]:
    """Where the first parameter of a module is: the dictionary that holds it, and its key there."""
    for submodule in module.modules():
        for name, parameter in tensors_of(submodule)[0].items():
            if parameter is not None:
                return tensors_of(submodule)[0], name
    raise InputError(f"{type(module).__name__} has no parameters; expected a vision tower")


def register_tower(tower: WrappedTower) -> str:
    """Makes a tower known; returns the name under which it is found."""
    name = f"{type(tower).__name__}_{next(_numbers)}"
    _towers[name] = tower
    return name


def registered_tower(name: str) -> Any:
    """The tower of that name."""
    return _towers[name]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def trace_equal_blocks_once(tower_name: str) -> bool:
    """Replaces the equal blocks of a tower by ops in the trace that Dynamo is making; returns whether it did.
    Dynamo calls this and does not trace it.
    """
    return begin_blocks(registered_tower(tower_name).tower)
