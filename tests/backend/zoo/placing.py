"""Attention around a forward: the backend finds the tokens by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import fxsplit_encoder.kernels.attention  # noqa: F401  (registers the op)

from .entries import input_names
from .inputs import WIDTH


def attend_packed(x: Tensor, cu: Tensor) -> Tensor:
    """Two heads over (tokens, 8), within the segments of `cu`."""
    q = x.view(x.shape[0], 2, WIDTH // 2)
    attended = torch.ops.fxsplit.varlen_attention(q, q, q, cu, q.shape[0], 0.5)
    return attended.view(x.shape[0], WIDTH)


def attend_dense(x: Tensor) -> Tensor:
    """Every token of (tokens, 8) is a batch entry of two heads over two places."""
    q = x.view(x.shape[0], 2, 2, WIDTH // 4)
    return nn.functional.scaled_dot_product_attention(q, q, q).reshape(x.shape[0], WIDTH)


def attend_sequence(x: Tensor) -> Tensor:
    """Two heads over (tokens, 8) as the only sequence of a batch."""
    q = x.view(1, x.shape[0], 2, WIDTH // 2).transpose(1, 2)
    return nn.functional.scaled_dot_product_attention(q, q, q).transpose(1, 2).reshape(x.shape[0], WIDTH)


def _extreme_at_0(x: Tensor) -> Tensor:
    """Tokens of 0 become the greatest ones in half of the features, the least ones in the others."""
    signs = torch.tensor([1, -1, 1, -1, 1, -1, -1, 1], dtype=x.dtype)
    return (2 * x).cos() * signs * 2


class Placed(nn.Module):
    """A forward and attention around it.

    Args:
        forward: of an entry.
        layout: packed, dense, sequence or own.
        place: of the forward: before attention, after it, or between two.
        lively: whether what the forward gets is far from 0 where the tokens are 0, as those of padding are.
    """

    def __init__(self, forward: Callable[..., Any], layout: str, place: str, lively: bool) -> None:
        super().__init__()
        self.entry = forward
        self.layout = layout
        self.place = place
        self.lively = lively
        self.takes_segments = "cu" in input_names(forward)

    def forward(self, **inputs: Tensor) -> Any:
        if self.layout == "own":
            return self.entry(**inputs)
        x, cu = inputs.pop("x"), inputs.get("cu")
        if not self.takes_segments:
            inputs.pop("cu", None)
        if self.place != "before":
            x = self._attend(x, cu)
        x = self.entry(_extreme_at_0(x) if self.lively else x, **inputs)
        return x if self.place == "after" else self._attend(x, cu)

    def _attend(self, x: Tensor, cu: Tensor | None) -> Tensor:
        if self.layout == "packed":
            assert cu is not None
            return attend_packed(x, cu)
        return attend_dense(x) if self.layout == "dense" else attend_sequence(x)

    @property
    def inputs(self) -> list[str]:
        """The names of its inputs."""
        names = input_names(self.entry)
        return [*names, "cu"] if self.layout == "packed" and "cu" not in names else names
