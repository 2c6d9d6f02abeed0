"""Inputs of more than one length, and dimensions elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .entries import of

_OWN = {"layout": "own"}


def _attend(x: Tensor) -> Tensor:
    """(batch, tokens, 8): attention within every entry of the batch."""
    q = x.view(x.shape[0], x.shape[1], 2, 4).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q).transpose(1, 2).reshape(x.shape)


def _masked_attention(x: Tensor, square: Tensor) -> Tensor:
    q = x.view(1, -1, 2, 4).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q, square).transpose(1, 2).reshape(-1, 8)


def _half_and_whole(x: Tensor, quarter: Tensor) -> Tensor:
    """Coarse tokens, each for four fine ones."""
    return x[: quarter.shape[0] * 4] + quarter.repeat_interleave(4, 0)


SHAPES = {
    "square's columns": lambda x, square: x * square.sum(0)[:, None],
    "square's diagonal": lambda x, square: x * square.diagonal()[:, None],
    "square as a bias": lambda x, square: (x @ x.t() + square).softmax(-1) @ x,
    "square of attention": of(_masked_attention, **_OWN),
    "columns": lambda x, columns: x + columns.t().mean(0),
    "quarter's mean": of(lambda x, quarter: x - quarter.mean(0), least=4),
    "quarter behind": lambda x, quarter: torch.cat([x, quarter]),
    "quarter as keys": of(lambda x, quarter: (x @ quarter.t()).softmax(-1) @ quarter, least=4),
    "quarter repeated": of(lambda x, quarter: x + quarter.repeat_interleave(4, 0), step=4, least=4),
    "quarter repeated, the rest cut": of(_half_and_whole, least=4),
    "quarter alone": lambda x, quarter: (x * 2, quarter.flip(0)),
    "double's halves": lambda x, double: x + double[: x.shape[0]] - double[x.shape[0] :],
    "one longer": lambda x, longer: x + longer[1:] - longer[:-1],
    "tiles' means": lambda x, tiles: x - tiles.mean((0, 1)),
    "batch's mean": of(lambda tiles: _attend(tiles) - tiles.mean(0), **_OWN),
    "batch as a sequence": of(lambda tiles: _attend(tiles.transpose(0, 1)), **_OWN),
    "batch attended, then across": of(lambda tiles: _attend(_attend(tiles).transpose(0, 1)), **_OWN),
    "time shift of a batch": of(
        lambda tiles: torch.cat([_attend(tiles)[1:], tiles.new_zeros(1, 5, 8)]), **_OWN
    ),
    "sequence's mean": of(lambda sequence: _attend(sequence) - sequence.mean(1, keepdim=True), **_OWN),
    "sequence in windows of 4": of(
        lambda sequence: _attend(F.pad(sequence, (0, 0, 0, -sequence.shape[1] % 4)).view(-1, 4, 8)).mean(0),
        least=1,
        **_OWN,
    ),
    "images' statistics": of(
        lambda images: F.batch_norm(_attend(images.reshape(-1, 24, 8)), None, None, training=True),
        least=2,
        **_OWN,
    ),
    "without attention, sorted": of(lambda x: x.sort(0).values, **_OWN),
    "without attention, row by row": of(lambda x: x.relu() * 2, **_OWN),
}
