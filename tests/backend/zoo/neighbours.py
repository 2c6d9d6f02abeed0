"""Tokens that see those beside them: convolutions, pooling, windows, shifts, pads, parts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .entries import Entry, made, of
from .norms import Through, along

_LIKE_CONVOLUTIONS = {
    "kernel 3": {"kernel_size": 3, "padding": 1},
    "kernel 3, nothing padded": {"kernel_size": 3},
    "kernel 2": {"kernel_size": 2},
    "kernel 5": {"kernel_size": 5, "padding": 2},
    "stride 2": {"kernel_size": 3, "stride": 2, "padding": 1},
    "stride 2, kernel 2": {"kernel_size": 2, "stride": 2},
    "stride 2, kernel 1": {"kernel_size": 1, "stride": 2},
    "stride 3": {"kernel_size": 3, "stride": 3},
    "stride 4": {"kernel_size": 4, "stride": 4},
    "stride 4, padded": {"kernel_size": 7, "stride": 4, "padding": 3},
    "dilation 2": {"kernel_size": 3, "dilation": 2, "padding": 2},
    "dilation 3, nothing padded": {"kernel_size": 2, "dilation": 3},
    "depthwise": {"kernel_size": 3, "padding": 1, "groups": 8},
    "circular": {"kernel_size": 3, "padding": 1, "padding_mode": "circular"},
    "reflected": {"kernel_size": 3, "padding": 1, "padding_mode": "reflect"},
    "replicated": {"kernel_size": 3, "padding": 1, "padding_mode": "replicate"},
    "same": {"kernel_size": 4, "padding": "same"},
}


def _convolution(options: dict[str, object]) -> Entry:
    return made(lambda: along(nn.Conv1d(8, 8, **options)), least=7)


def _convolution_behind(before: int, behind: int) -> Through:
    """A convolution of the tokens and zeros before and behind them."""
    return Through(
        nn.Conv1d(8, 8, 3), lambda module, x: module(F.pad(x, (0, 0, before, behind)).t()[None])[0].t()
    )


def _on_grid(module: nn.Module, x: Tensor) -> Tensor:
    """A module of (1, 8, tokens / 4, 4)."""
    return module(x.t().reshape(1, 8, x.shape[0] // 4, 4)).reshape(8, x.shape[0]).t()


def _along(forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A function of (1, 8, tokens)."""
    return lambda x: forward(x.t()[None])[0].t()


CONVOLUTIONS = {
    **{f"convolution, {name}": _convolution(options) for name, options in _LIKE_CONVOLUTIONS.items()},
    "causal convolution": made(lambda: _convolution_behind(2, 0)),
    "anticausal convolution": made(lambda: _convolution_behind(0, 2)),
    "transposed convolution": made(lambda: along(nn.ConvTranspose1d(8, 8, 2, stride=2)), least=1),
    "convolution over tokens and features": made(
        lambda: Through(nn.Conv2d(1, 1, 3, padding=1), lambda module, x: module(x[None, None])[0, 0]), least=1
    ),
    "convolution over a grid of width 4": made(
        lambda: Through(nn.Conv2d(8, 8, 3, padding=1), _on_grid), step=4, least=4
    ),
    "average pooling, ceil": of(_along(lambda x: F.avg_pool1d(x, 3, ceil_mode=True)), least=3, runs=2),
    "average pooling of 4, ceil": of(_along(lambda x: F.avg_pool1d(x, 4, ceil_mode=True)), least=4, runs=2),
    "average pooling, pads not counted": of(
        _along(lambda x: F.avg_pool1d(x, 3, 1, 1, count_include_pad=False)), least=1
    ),
    "greatest pooling, ceil": of(_along(lambda x: F.max_pool1d(x, 3, ceil_mode=True)), least=3, runs=2),
    "greatest pooling, overlapping": of(_along(lambda x: F.max_pool1d(x, 3, 1, 1)), least=1),
    "greatest pooling and where": of(
        lambda x: F.max_pool1d(x.t()[None], 3, 1, 1, return_indices=True), least=1
    ),
    "lp pooling": of(_along(lambda x: F.lp_pool1d(x, 2, 3, ceil_mode=True)), least=3, runs=2),
    "pooling to 4": of(_along(lambda x: F.adaptive_avg_pool1d(x, 4)), least=1),
    "pooling to 1": of(lambda x: x + F.adaptive_avg_pool1d(x.t()[None], 1)[0].t(), least=1),
    "interpolated to 16": of(_along(lambda x: F.interpolate(x, 16, mode="linear")), least=1, tolerance=4),
    "interpolated to double": of(
        _along(lambda x: F.interpolate(x, scale_factor=2, mode="linear")), least=1, tolerance=4
    ),
    "interpolated to half and back": of(
        _along(lambda x: F.interpolate(F.interpolate(x, scale_factor=0.5), x.shape[2])), least=2
    ),
    "Gaussian of three": lambda x: _blurred(x),
}


def _blurred(x: Tensor) -> Tensor:
    before, behind = F.pad(x, (0, 0, 1, 0))[:-1], F.pad(x, (0, 0, 0, 1))[1:]
    return (before + 2 * x + behind) / 4


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


def _real_means_of_blocks(x: Tensor) -> Tensor:
    """Of a last block that is not whole, what is there counts."""
    counts = _windows(torch.ones_like(x)).sum(1)
    return _windows(x).sum(1) / counts


def _blocks_less_their_means(x: Tensor) -> Tensor:
    w = _windows(x)
    return (w - w.mean(1, keepdim=True)).reshape(-1, 8)[: x.shape[0]]


WINDOWS = {
    "window attention": of(_window_attention, least=1, runs=2),
    "shifted window attention": of(_shifted_window_attention, least=1, runs=2),
    "window attention as an op": of(_window_sdpa, least=1),
    "masked window attention": of(_masked_window_attention, least=1),
    "mask of the last partial group": of(_mask_last_group, runs=2),
    "last partial group apart": _last_group_apart,
    "means of blocks of 4": of(_means_of_blocks, least=1, runs=2),
    "means of what is in blocks of 4": of(_real_means_of_blocks, least=1),
    "means of whole blocks": of(lambda x: x.view(-1, 4, 8).mean(1), step=4, least=4),
    "means of the first whole blocks": of(lambda x: x[: x.shape[0] // 4 * 4].view(-1, 4, 8).mean(1), least=4),
    "sliding windows, step 2": of(lambda x: x.unfold(0, 3, 2).amax(-1), least=3),
    "shifted down": lambda x: torch.cat([x.new_zeros(1, 8), x[:-1]]),
    "mixed with the one before": of(lambda x: 0.7 * x + 0.3 * torch.cat([x[:1], x[:-1]]), least=1),
    "half the features shifted": lambda x: torch.cat([x[:, :4], x[:, 4:].roll(1, 0)], 1),
    "neighbours' difference": lambda x: x[1:] - x[:-1],
    "the tokens but the last": lambda x: x[:-1],
    "first token": of(lambda x: x[0], least=1),
    "last token": of(lambda x: x[-1], least=1),
    "first tokens": lambda x: x[:3],
    "middle token": of(lambda x: x[x.shape[0] // 2], least=1),
    "less the last token": of(lambda x: x - x[-1], least=1),
    "first half": lambda x: x[: x.shape[0] // 2],
    "every other": lambda x: x[::2],
    "even less odd": of(lambda x: x[::2] - x[1::2], step=2),
    "chunks": of(lambda x: x.chunk(2), least=2),
    "split into threes": of(lambda x: x.split(3)[0], least=3),
    "padded with zeros before": lambda x: F.pad(x, (0, 0, 2, 0)),
    "padded to 200": of(lambda x: F.pad(x, (0, 0, 0, 200 - x.shape[0])), least=1),
    "padded to a multiple of 8": of(lambda x: F.pad(x, (0, 0, 0, -x.shape[0] % 8)), place="after"),
    "padded by reflection": of(_along(lambda x: F.pad(x, (1, 1), "reflect")), least=2),
    "padded by replication": of(_along(lambda x: F.pad(x, (1, 2), "replicate")), least=1),
    "padded in a circle": of(_along(lambda x: F.pad(x, (1, 1), "circular")), least=1),
    "class token first": lambda x: torch.cat([x.new_ones(1, 8), x]),
    "a token behind": lambda x: torch.cat([x, x.new_ones(1, 8)]),
    "twice the tokens": lambda x: torch.cat([x, x]),
    "repeated": lambda x: x.repeat(2, 1),
    "each token twice": lambda x: x.repeat_interleave(2, 0),
    "pairs joined": of(lambda x: x.view(-1, 16), step=2),
    "tokens split in two": lambda x: x.view(-1, 4),
}
