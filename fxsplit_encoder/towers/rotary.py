"""Cosines and sines of positions, from the rotary embedding of whichever transformers a tower comes from."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn


def gives_angles(rotary: nn.Module) -> bool:
    """Whether a vision tower's rotary embedding makes angles of positions, as transformers' did before 5.17;
    later ones make cosines and sines, for hidden states that they get too.
    """
    return len(inspect.signature(rotary.forward).parameters) == 1


def cosines_and_sines(
    rotary: Any, hidden: Tensor, position_ids: Tensor, *, from_angles: bool
) -> tuple[Tensor, Tensor]:
    """(patches, head_dim) each, from (patches, 2) positions.

    Args:
        from_angles: whether the embedding `gives_angles`; the towers of that time take each of them for both
            halves of a head.
    """
    if not from_angles:
        return rotary(hidden, position_ids)  # type: ignore[no-any-return]
    angles = rotary(position_ids)
    both_halves = torch.cat((angles, angles), dim=-1)
    return both_halves.cos(), both_halves.sin()
