"""Rows among embeddings on the device: the right ones, without waiting for it, as fast as torch copies."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fxsplit_encoder.connector.positions import PositionMap, merge_rows

from .support import no_synchronization

pytestmark = pytest.mark.gpu

WIDTH, ROWS = 4096, 5_000
IMAGE = 9


def prompts() -> dict[str, tuple[list[int], list[int]]]:
    """Token ids, and the rows of every item."""
    frames = [token for _ in range(50) for token in [1] * 8 + [IMAGE] * 100]
    return {
        "one item": ([1] * 100 + [IMAGE] * ROWS + [1] * 100, [ROWS]),
        "ten items": (([1] * 20 + [IMAGE] * 500) * 10, [500] * 10),
        "a video of fifty runs": (frames, [ROWS]),
    }


def prompt_of(name: str) -> tuple[list[int], list[int], PositionMap]:
    tokens, counts = prompts()[name]
    modality = "video" if "video" in name else "image"
    prompt = PositionMap(tokens, [modality] * len(counts), {modality: IMAGE})  # type: ignore[list-item, dict-item]
    return tokens, counts, prompt


@pytest.mark.parametrize("levels", [0, 3])
@pytest.mark.parametrize("name", prompts())
def test_rows_reach_their_places_without_a_synchronization(name: str, levels: int) -> None:
    tokens, counts, prompt = prompt_of(name)
    wide = 64 * (1 + levels)
    rows = [torch.randn(count, wide, device="cuda", dtype=torch.bfloat16) for count in counts]
    out = torch.zeros(len(tokens), 64, device="cuda", dtype=torch.bfloat16)
    with no_synchronization():
        merged = merge_rows(dict(enumerate(rows)), prompt.places(counts, 0, len(tokens)), out, levels)
    where = np.flatnonzero(np.array(tokens) == IMAGE)
    assert merged.positions.tolist() == where.tolist()
    assert torch.equal(out[merged.positions], torch.cat(rows)[:, :64])
    assert int((out.abs().sum(1) > 0).sum()) == len(where)
    for level in range(levels):
        assert torch.equal(merged.levels[level], torch.cat(rows)[:, 64 * (level + 1) : 64 * (level + 2)])


@pytest.mark.alone
@pytest.mark.parametrize("name", prompts())
def test_five_thousand_rows_take_little_longer_than_torchs_copies_of_them(name: str) -> None:
    tokens, counts, prompt = prompt_of(name)
    rows = [torch.randn(count, WIDTH, device="cuda", dtype=torch.bfloat16) for count in counts]
    out = torch.zeros(len(tokens), WIDTH, device="cuda", dtype=torch.bfloat16)
    places, by_item = prompt.places(counts, 0, len(tokens)), dict(enumerate(rows))

    def copy() -> None:
        moved = torch.from_numpy(places.positions).pin_memory().to("cuda", non_blocking=True)
        out.index_copy_(0, moved, torch.cat(rows))

    best = {"merge": float("inf"), "copy": float("inf")}
    for _ in range(50):
        for which, call in (("merge", lambda: merge_rows(by_item, places, out)), ("copy", copy)):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            call()
            end.record()
            torch.cuda.synchronize()
            best[which] = min(best[which], start.elapsed_time(end))
    assert best["merge"] < 1.5 * best["copy"], best
