"""What is served next, among priorities, tenants and flows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxsplit_encoder.encode_queue.fair_queue import FIRST, FairQueue


def served(queue: FairQueue[str]) -> list[str]:
    order = []
    while (first := queue.first()) is not None:
        assert len(list(queue)) == len(queue)
        queue.take(first)
        order.append(first)
    return order


def test_what_was_served_in_vain_comes_first_and_costs_nothing_again() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.push("a", flow="a", cost=5.0)
    queue.push("again", flow="b", cost=50.0, priority=FIRST)
    assert next(iter(queue)) == "again"
    queue.take("again")
    queue.push("c", flow="b", cost=1.0)
    assert served(queue) == ["c", "a"]


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0.01, 100.0), st.sampled_from("ptr")), max_size=60))
def test_it_holds_what_was_pushed_and_not_taken(moves: list[tuple[int, float, str]]) -> None:
    queue: FairQueue[int] = FairQueue()
    held: dict[int, float] = {}
    for number, (flow, cost, move) in enumerate(moves):
        if move == "p" or not held:
            queue.push(number, flow, cost)
            held[number] = cost
        else:
            thing = next(iter(queue))
            (queue.take if move == "t" else queue.discard)(thing)
            queue.discard(thing)
            del held[thing]
        assert set(queue) == held.keys() and len(queue) == len(held)
        assert queue.cost == (pytest.approx(sum(held.values())) if held else 0.0)


@given(st.lists(st.floats(0.5, 8.0), min_size=2, max_size=40))
def test_flows_that_always_wait_are_served_alike(costs: list[float]) -> None:
    queue: FairQueue[tuple[str, int]] = FairQueue()
    for number, cost in enumerate(costs):
        for flow in ("x", "y"):
            queue.push((flow, number), flow, cost if flow == "x" else 1.0)
    work = {"x": 0.0, "y": 0.0}
    longest = max(max(costs), 1.0)
    while len({flow for flow, _ in queue}) == 2:
        thing = next(iter(queue))
        queue.take(thing)
        work[thing[0]] += costs[thing[1]] if thing[0] == "x" else 1.0
        assert abs(work["x"] - work["y"]) <= 2 * longest


def test_a_queue_serves_tenants_alike_whatever_their_number_of_flows() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(6):
        queue.push(f"m{number}", flow=number, cost=1.0, tenant="many")
    queue.push("f0", 0, 2.0, "few")
    queue.push("f1", 0, 1.0, "few")
    queue.push("again", 7, 9.0, "few", priority=FIRST)
    order = served(queue)
    assert order[0] == "again"
    assert [name for name in order if name[0] == "m"] == [f"m{number}" for number in range(6)]
    assert order.index("f0") <= 2 and order.index("f1") <= 5


def test_priorities_go_before_tenants_and_a_flow_is_in_order() -> None:
    queue: FairQueue[str] = FairQueue()
    for name in ("a1", "a2", "a3"):
        queue.push(name, None, 1.0, "a")
    queue.push("b1", None, 1.0, "b")
    queue.push("a4", None, 0.0, "a", priority=1)
    queue.push("b2", None, 0.0, "b", priority=-1)
    assert served(queue) == ["a4", "a1", "b1", "a2", "a3", "b2"]
