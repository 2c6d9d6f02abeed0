from __future__ import annotations

import threading
import time

import torch

from fxsplit_encoder.capture.pool import GraphPool


def test_a_capture_keeps_out_replays_of_other_threads() -> None:
    shared, order = GraphPool(torch.device("cpu")), []

    def replay() -> None:
        with shared.replaying():
            order.append("replay")

    with shared.capturing():
        thread = threading.Thread(target=replay)
        thread.start()
        time.sleep(0.02)
        order.append("captured")
    thread.join()
    assert order == ["captured", "replay"]


def test_a_pool_owns_what_captured_calls_allocated_and_nothing_else() -> None:
    pool = GraphPool(torch.device("cpu"))
    pool.is_cuda = True  # nothing but the addresses is looked at
    given, outside = torch.ones(4), torch.ones(4)
    made = given + 1
    elsewhere = torch.empty(4, device="meta")
    results = {"view": given[1:], "made": [made], "empty": torch.empty(0), "elsewhere": elsewhere}
    pool.note_allocated(results, ((given,), {}))
    assert pool.owns(made)
    assert pool.owns(made[2:])
    assert not pool.owns(given)
    assert not pool.owns(outside)
    assert not pool.owns(torch.empty(0))
    pool.is_cuda = False
    assert not pool.owns(made)
