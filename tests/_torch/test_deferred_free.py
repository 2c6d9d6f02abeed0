from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fxsplit_encoder._torch.allocator import defer_frees, free_later
from fxsplit_encoder.capture.breakable import BreakableCUDAGraphCapture, SegmentedCapture
from fxsplit_encoder.capture.pool import GraphPool

CPU = torch.device("cpu")


class Resource:
    """Stands in for what only a device has."""


def deferred() -> Callable[[], Resource | None]:
    resource = Resource()
    free_later([resource])
    return weakref.ref(resource)


def test_what_is_deferred_lives_to_the_end_of_the_outermost_capture() -> None:
    assert deferred()() is None
    with GraphPool(CPU).capturing():
        with GraphPool(CPU).capturing():
            first = deferred()
        second = deferred()
        assert first() is not None
        assert second() is not None
    assert (first(), second()) == (None, None)
    assert deferred()() is None


def test_a_failed_capture_lets_go_too() -> None:
    with pytest.raises(KeyError), defer_frees():
        resource = deferred()
        raise KeyError
    assert resource() is None


def test_another_thread_lets_go_at_once() -> None:
    found: list[Resource | None] = []
    with defer_frees():
        thread = threading.Thread(target=lambda: found.append(deferred()()))
        thread.start()
        thread.join()
    assert found == [None]


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_is_not_collected_meanwhile_and_the_users_setting_returns(enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(KeyError), defer_frees():
            with defer_frees():
                pass
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() is enabled
    finally:
        gc.enable()


# --- what owns graphs or memory


def recorded(capture: Any) -> Any:
    """The ops that stand in for a capture's graph."""
    return weakref.ref(capture.segments[0].__self__)


def test_a_capture_that_makes_room_for_the_next_frees_its_graph_after_that() -> None:
    pool, x, graph = GraphPool(CPU), torch.ones(2), None
    for _ in range(3):
        with BreakableCUDAGraphCapture(pool) as capture:  # the name lets go of the one before
            assert graph is None or graph() is not None
            y = x + 1
        assert graph is None or graph() is None
        graph = recorded(capture)
        assert graph() is not None
    x.fill_(2)
    capture.replay()
    assert y.tolist() == [3.0, 3.0]


@pytest.mark.parametrize("let_go", ["released", "dropped"])
def test_a_capture_of_another_pool_may_end_inside_a_capture(let_go: str) -> None:
    def work(x: Tensor) -> Tensor:
        return x * 2

    def make() -> BreakableCUDAGraphCapture:
        with BreakableCUDAGraphCapture(GraphPool(CPU)) as capture:
            work(torch.ones(1))
        return capture

    held = [make()]
    graph = recorded(held[0])
    with SegmentedCapture(GraphPool(CPU)) as capture:
        if let_go == "released":
            held[0].release()
            assert held[0].segments == []
        held.clear()
        assert graph() is not None
        capture.captured(work, torch.ones(1))
    assert graph() is None


def test_the_memory_of_a_pool_is_freed_after_the_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    memory: list[weakref.ref[Resource]] = []

    def make(device: torch.device) -> Resource:
        made = Resource()
        memory.append(weakref.ref(made))
        return made

    monkeypatch.setattr("fxsplit_encoder.capture.pool.memory_pool", make)
    pools = [GraphPool(torch.device("cuda", 0), stream=Resource())]  # type: ignore[arg-type]
    (held,) = memory
    with GraphPool(CPU).capturing():
        pools.clear()
        assert held() is not None
    assert held() is None
