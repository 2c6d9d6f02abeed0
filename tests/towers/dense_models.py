"""Tiny dense models with random weights, and what every dense tower must pass.

In a module of its own, not in a conftest: Dynamo traces some of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

import fxsplit_encoder as fx

from .one_graph import only_dispatcher

MODES = ("auto", "full", "piecewise", "exact", "breakable", "none")
SHAPE = (3, 16, 16)

Encode = Callable[[Tensor], Tensor]
"""(tiles, channels, height, width) to (tiles, tokens, hidden), by what the adapter does not touch."""


class PlainTower(nn.Module):
    """A dense tower that comes from no library: a class token, two blocks of attention, all rows returned."""

    def __init__(self, width: int = 16, heads: int = 2, patch: int = 8) -> None:
        super().__init__()
        self.heads = heads
        self.embed = nn.Conv2d(3, width, patch, stride=patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, images: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        x = self.embed(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(x.shape[0], -1, -1), x], dim=1)
        for qkv, norm in zip(self.qkv, self.norms, strict=True):
            heads = (
                part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in qkv(norm(x)).chunk(3, -1)
            )
            x = x + F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        return {"features": x * scale}


class BiasedTower(PlainTower):
    """Attention gets a bias of each image's own, as relative positions make it."""

    def forward(self, images: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        x = self.embed(images).flatten(2).transpose(1, 2)
        for qkv in self.qkv:
            q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in qkv(x).chunk(3, -1))
            bias = q @ q.transpose(-1, -2)
            x = x + F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2)
        return {"features": x * scale}


def random_tiles(count: int, shape: Sequence[int] = SHAPE, seed: int = 0) -> Tensor:
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(seed))


def captured(
    wrapped: Any, budgets: Sequence[int], program: Any = None, **settings: Any
) -> fx.EncoderCudaGraphManager:
    """A captured manager, of a program that was traced before if one is given."""
    limits = {"token_budgets": tuple(budgets), "max_items_per_batch": 4, "exact_min_hits": 1, "debug": True}
    manager = fx.EncoderCudaGraphManager(wrapped, fx.EncoderConfig(**{**limits, **settings}), log_interval=0)
    path = manager.paths["default"]
    if program is not None:
        path.forward.bind(program)
    manager.capture()
    assert manager.reports == []
    mode = manager.config.mode
    assert (path.program is None) == (mode == "breakable")
    assert set(path.captured) == (set() if mode in ("exact", "none") else set(budgets))
    return manager


def managers(wrapped: Any, budgets: Sequence[int], **settings: Any) -> dict[str, fx.EncoderCudaGraphManager]:
    """A captured manager in each mode; the forward is traced once for all of them, but in `breakable`, which
    runs the untouched module.
    """
    made: dict[str, fx.EncoderCudaGraphManager] = {}
    program = None
    before = counters["stats"]["unique_graphs"]
    for mode in MODES:
        shared = program if mode != "breakable" else None
        made[mode] = captured(wrapped, budgets, shared, mode=mode, **settings)
        program = program or made[mode].paths["default"].program
    assert counters["stats"]["unique_graphs"] == before + 1
    return made


def assert_encodes_as(
    manager: fx.EncoderCudaGraphManager, encode: Encode, counts: Sequence[int], shape: Sequence[int] = SHAPE
) -> None:
    """Images of these many tiles against the reference."""
    tokens, hidden = manager.tower.tokens_per_tile, manager.tower.out_hidden_size  # type: ignore[attr-defined]
    pixels = random_tiles(sum(counts), shape, seed=sum(counts))
    with torch.no_grad():
        expected = [encode(part).reshape(-1, hidden) for part in pixels.split(list(counts))]
    assert expected[0].abs().max() > 0.3
    got = manager.execute({"pixel_values": pixels, "num_patches": torch.tensor(counts)})
    assert [tuple(item.shape) for item in got] == [(count * tokens, hidden) for count in counts]
    assert_close(got, expected)


def assert_close(got: Sequence[Tensor], expected: Sequence[Tensor], atol: float = 1e-5) -> None:
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=atol)


COUNTS = [[1], [2], [5], [1, 1], [3, 1, 2], [1, 4, 1, 2, 1], [9, 1]]
"""Tiles of the images of a batch: budgets of 1, 2 and 4 tiles hold some exactly, some padded, some not."""


def assert_all_modes(
    wrapped: Any, encode: Encode, shape: Sequence[int] = SHAPE
) -> fx.EncoderCudaGraphManager:
    """Every mode and batch; nothing is traced after the first. Returns the manager of mode `full`."""
    tokens = wrapped.tokens_per_tile
    made = managers(wrapped, [tokens, 2 * tokens, 4 * tokens])
    before = dict(counters["stats"])
    for mode, manager in made.items():
        for counts in COUNTS:
            assert_encodes_as(manager, encode, counts, shape)
        stats = manager.stats()
        assert (stats.hits > 10) == (mode != "none"), stats
    assert dict(counters["stats"]) == before
    assert not counters["graph_break"]
    program = made["full"].programs["default"]
    assert program is not None
    assert program.program.padding.proved, program.program.padding
    assert program.program.accepts({str(program.program.token_symbol): 1})
    return made["full"]


def assert_compiles_once(wrapped: Any, encode: Callable[[Any], Tensor], **settings: Any) -> None:
    """`torch.compile`, one tile first, over other counts: one graph, replayed for all within the budgets."""
    torch._dynamo.reset()
    counters.clear()
    tokens = wrapped.tokens_per_tile
    options = {"token_budgets": [tokens, 2 * tokens, 4 * tokens], "debug": True, **settings}
    others = fx.backend.dispatchers()
    compiled = torch.compile(wrapped, backend="encoder_cg", options=options, fullgraph=True)
    with torch.no_grad():
        for count in (1, 2, 5, 3, 4, 1):
            pixels = random_tiles(count, seed=count)
            torch.testing.assert_close(encode(compiled(pixels)), encode(wrapped(pixels)), rtol=0, atol=1e-5)
            assert not [name for name in vars(pixels) if name.startswith("_dynamo")]
    dispatcher = only_dispatcher(others)
    assert dispatcher.hits == 5
    assert dispatcher.misses == {fx.MissReason.OVER_LARGEST_BUDGET: 1}
    assert dispatcher.program.padding.proved
