"""`capture(wait=False)` on a device: served soon and rightly while the rest is made; then the same."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import fxsplit_encoder as fx
from fxsplit_encoder.kernels.attention import AttentionShape
from fxsplit_encoder.kernels.meter import microseconds, timing_without_graphs

from .support import batch, encode, errors, manager_of, settled

pytestmark = pytest.mark.gpu

CONFIG = fx.EncoderConfig(
    mode="full", token_budgets=(16, 64, 256, 1024), max_items_per_batch=4, max_frames_per_batch=4
)
SIDES = (8, 16, 32)


def requests(features: int) -> list[dict[str, Any]]:
    return [batch([(1, side, side)], [], features) for side in SIDES]


def seconds(call: Any) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


@pytest.fixture
def empty_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))


def test_results_are_right_meanwhile_and_captures_the_same_at_the_end(
    towers: Any, empty_caches: None
) -> None:
    eager, precise, wrapped = towers
    asked = requests(wrapped.patch_features)
    expected = [encode(precise, each) for each in asked]
    allowed = [1.5 * errors(encode(eager, each), want) for each, want in zip(asked, expected, strict=True)]
    config = CONFIG.replace(token_budgets=(16, 256))  # of the smallest request and the largest
    manager = manager_of(wrapped, config)
    manager.capture(wait=False)
    number = 0
    while not manager.wait_captured(0):
        which = number % len(asked)
        assert errors(manager.execute(asked[which]), expected[which]) <= allowed[which]
        number += 1
        time.sleep(0.02)
    progress = manager.stats().progress
    assert progress is not None and progress.phase == "done", (progress, manager.reports)
    assert not manager.reports and number > 0 and manager.stats().items == number
    for which, each in enumerate(asked):
        assert errors(manager.execute(each), expected[which]) <= allowed[which]
    other = manager_of(wrapped, config)
    other.capture()
    old, new = other.paths["default"].ladder, manager.paths["default"].ladder
    assert {b: c.mode for b, c in old.captured.items()} == {b: c.mode for b, c in new.captured.items()}
    assert old.costs.keys() == new.costs.keys() and new.costs
    # Kernels are timed in another way meanwhile, so that another one may be chosen.
    assert errors(manager.execute(asked[1]), other.execute(asked[1])) <= 2 * allowed[1]
    manager.clear()
    other.clear()


@pytest.mark.alone
def test_the_first_request_is_soon_and_none_waits_long(towers: Any, empty_caches: None) -> None:
    eager, _, wrapped = towers
    asked = requests(wrapped.patch_features)
    for each in asked:
        encode(eager, each)
    usual = {
        n: statistics.median(seconds(lambda e=e: encode(eager, e)) for _ in range(9))
        for n, e in enumerate(asked)
    }
    manager = manager_of(wrapped, CONFIG)
    begin = time.perf_counter()
    manager.capture(wait=False)
    seconds(lambda: manager.execute(asked[1]))
    first = time.perf_counter() - begin
    took: list[float] = []
    number = 0
    while not manager.wait_captured(0):  # which itself captures nothing: requests do
        which = number % len(asked)
        took.append(seconds(lambda w=which: manager.execute(asked[w])) / usual[which])
        number += 1
        time.sleep(0.02)
    late = sorted(took)[-5:]
    print(
        f"first {first:.2f} s, {manager.stats().progress}, times eager's: {late}, "
        f"median {statistics.median(took)}"
    )
    assert first < 5
    assert statistics.median(took) < 1.5
    manager.clear()


def test_no_graph_is_captured_where_kernels_are_timed_beside_others(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    shape = AttentionShape(device, torch.bfloat16, 16, 64, tokens=64, longest=64, segments=1)
    rows = torch.randn(256, 256, device=device)
    assert shape.is_captured and microseconds(lambda: rows @ rows, shape) > 0

    def refuse(*arguments: Any, **settings: Any) -> Any:
        raise AssertionError("a graph is captured")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", refuse)
    with timing_without_graphs():
        assert microseconds(lambda: rows @ rows, shape) > 0
    with pytest.raises(AssertionError, match="a graph is captured"):
        microseconds(lambda: rows @ rows, shape)


def blocks() -> Counter[int]:
    """How often a size is allocated."""
    segments = torch.cuda.memory_snapshot()
    sizes = (block["size"] for each in segments for block in each["blocks"])
    states = (block["state"] for each in segments for block in each["blocks"])
    return Counter(size for size, state in zip(sizes, states, strict=True) if state != "inactive")


def test_what_it_takes_is_given_back(towers: Any) -> None:
    """Beside cuBLAS's memory, which torch keeps for each stream and each thread that ran at once."""
    manager = manager_of(towers[2], CONFIG)
    held: list[tuple[int, Counter[int]]] = []
    for to_the_end in (True, False, True):
        manager.capture(wait=False)
        if to_the_end:
            assert manager.wait_captured()
        manager.clear()
        progress = manager.stats().progress
        assert progress is not None and progress.phase == ("done" if to_the_end else "stopped"), progress
        assert manager.num_bytes == 0
        torch._C._cuda_clearCublasWorkspaces()
        held.append((settled()[0], blocks()))
    for later, now in held[1:]:
        assert later <= held[0][0] + 2**20, f"blocks that the first round did not leave: {now - held[0][1]}"
