"""Tokens that see those beside them: convolutions, pooling, windows, shifts, pads, parts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .entries import Through, along, made, of

_LIKE_CONVOLUTIONS = {
    "kernel 3": {"kernel_size": 3, "padding": 1},
    "kernel 2": {"kernel_size": 2},
    "stride 2": {"kernel_size": 3, "stride": 2, "padding": 1},
    "stride 4, padded": {"kernel_size": 7, "stride": 4, "padding": 3},
    "dilation 3, nothing padded": {"kernel_size": 2, "dilation": 3},
    "circular": {"kernel_size": 3, "padding": 1, "padding_mode": "circular"},
}


def _on_grid(module: nn.Module, x: Tensor) -> Tensor:
    """A module of (1, 8, tokens / 4, 4)."""
    return module(x.t().reshape(1, 8, x.shape[0] // 4, 4)).reshape(8, x.shape[0]).t()


def _along(forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A function of (1, 8, tokens)."""
    return lambda x: forward(x.t()[None])[0].t()


def _windows(x: Tensor, size: int = 4) -> Tensor:
    """Windows of tokens, the last one filled with zeros."""
    return F.pad(x, (0, 0, 0, -x.shape[0] % size)).view(-1, size, 8)


def _window_attention(x: Tensor) -> Tensor:
    """Swin's and SAM's: the zeros take part in the softmax."""
    w = _windows(x)
    return ((w @ w.transpose(1, 2)).softmax(-1) @ w).reshape(-1, 8)[: x.shape[0]]


def _shifted_window_attention(x: Tensor) -> Tensor:
    return _window_attention(x.roll(-2, 0)).roll(2, 0)


def _window_sdpa(x: Tensor) -> Tensor:
    w = _windows(x)[:, None]
    return F.scaled_dot_product_attention(w, w, w).reshape(-1, 8)[: x.shape[0]]


def _masked_window_attention(x: Tensor) -> Tensor:
    """The zeros are kept out by a mask that the count makes."""
    w = _windows(x)
    real = (torch.arange(w.shape[0] * 4) < x.shape[0]).view(-1, 1, 4)
    return ((w @ w.transpose(1, 2)).masked_fill(~real, -1e4).softmax(-1) @ w).reshape(-1, 8)[: x.shape[0]]


def _mask_last_group(x: Tensor) -> Tensor:
    """Only groups of 4 that are whole keep their tokens."""
    rows = torch.arange(x.shape[0])
    return x * (rows < x.shape[0] // 4 * 4)[:, None]


def _last_group_apart(x: Tensor) -> Tensor:
    whole = x.shape[0] // 4 * 4
    return torch.cat([x[:whole] * 2, x[whole:] - 1])


def _means_of_blocks(x: Tensor) -> Tensor:
    return _windows(x).mean(1)


NEIGHBOURS = {
    **{
        f"convolution, {name}": made(lambda options=options: along(nn.Conv1d(8, 8, **options)), least=7)
        for name, options in _LIKE_CONVOLUTIONS.items()
    },
    "causal convolution": made(
        lambda: Through(nn.Conv1d(8, 8, 3), lambda module, x: module(F.pad(x, (0, 0, 2, 0)).t()[None])[0].t())
    ),
    "transposed convolution": made(lambda: along(nn.ConvTranspose1d(8, 8, 2, stride=2)), least=1),
    "convolution over a grid of width 4": made(
        lambda: Through(nn.Conv2d(8, 8, 3, padding=1), _on_grid), step=4, least=4
    ),
    "average pooling, ceil": of(_along(lambda x: F.avg_pool1d(x, 3, ceil_mode=True)), least=3, runs=2),
    "pooling to 4": of(_along(lambda x: F.adaptive_avg_pool1d(x, 4)), least=1),
    "interpolated to 16": of(_along(lambda x: F.interpolate(x, 16, mode="linear")), least=1, tolerance=4),
    "window attention": of(_window_attention, least=1, runs=2),
    "shifted window attention": of(_shifted_window_attention, least=1, runs=2),
    "window attention as an op": of(_window_sdpa, least=1),
    "masked window attention": of(_masked_window_attention, least=1),
    "mask of the last partial group": of(_mask_last_group, runs=2),
    "last partial group apart": _last_group_apart,
    "means of blocks of 4": of(_means_of_blocks, least=1, runs=2),
    "means of whole blocks": of(lambda x: x.view(-1, 4, 8).mean(1), step=4, least=4),
    "sliding windows, step 2": of(lambda x: x.unfold(0, 3, 2).amax(-1), least=3),
    "shifted down": lambda x: torch.cat([x.new_zeros(1, 8), x[:-1]]),
    "the tokens but the last": lambda x: x[:-1],
    "last token": of(lambda x: x[-1], least=1),
    "less the last token": of(lambda x: x - x[-1], least=1),
    "first half": lambda x: x[: x.shape[0] // 2],
    "every other": lambda x: x[::2],
    "chunks": of(lambda x: x.chunk(2), least=2),
    "padded to 200": of(lambda x: F.pad(x, (0, 0, 0, 200 - x.shape[0])), least=1),
    "padded in a circle": of(_along(lambda x: F.pad(x, (1, 1), "circular")), least=1),
    "class token first": lambda x: torch.cat([x.new_ones(1, 8), x]),
    "twice the tokens": lambda x: torch.cat([x, x]),
    "pairs joined": of(lambda x: x.view(-1, 16), step=2),
    "tokens split in two": lambda x: x.view(-1, 4),
}
