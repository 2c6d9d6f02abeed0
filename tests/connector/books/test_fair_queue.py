from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fxsplit_encoder.connector.books.parts import FairQueue


def served(queue: FairQueue[str]) -> list[str]:
    order = []
    while len(queue):
        first = next(iter(queue))
        queue.take(first)
        order.append(first)
    return order


def test_equals_come_first_in_first_out() -> None:
    queue: FairQueue[str] = FairQueue()
    for name in "abcd":
        queue.push(name, flow=name, cost=1.0)
    assert served(queue) == list("abcd")


def test_a_request_of_many_items_lets_others_pass_between_them() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(4):
        queue.push(f"many{number}", flow="many", cost=1.0)
    queue.push("one", flow="one", cost=1.0)
    assert served(queue) == ["many0", "one", "many1", "many2", "many3"]


def test_what_is_long_waits_for_no_more_than_its_own_length() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.push("video", flow="video", cost=10.0)
    order = []
    for number in range(30):  # an image comes whenever one is served
        queue.push(f"image{number}", flow=number, cost=1.0)
        first = next(iter(queue))
        queue.take(first)
        order.append(first)
    assert order.index("video") == 9


def test_what_was_served_in_vain_comes_first_and_costs_nothing_again() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.push("a", flow="a", cost=5.0)
    queue.push("again", flow="b", cost=50.0, first=True)
    assert next(iter(queue)) == "again"
    queue.take("again")
    queue.push("c", flow="b", cost=1.0)
    assert served(queue) == ["c", "a"]


def test_what_nobody_wants_is_gone() -> None:
    queue: FairQueue[str] = FairQueue()
    for name in "abc":
        queue.push(name, flow="f", cost=2.0)
    queue.remove("b")
    queue.discard("b")
    assert "b" not in queue and "a" in queue
    assert queue.cost == 4.0
    assert served(queue) == ["a", "c"]
    assert queue.cost == 0.0


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0.01, 100.0), st.sampled_from("ptr")), max_size=60))
def test_it_holds_what_was_pushed_and_not_taken(moves: list[tuple[int, float, str]]) -> None:
    queue: FairQueue[int] = FairQueue()
    held: set[int] = set()
    for number, (flow, cost, move) in enumerate(moves):
        if move == "p" or not held:
            queue.push(number, flow, cost)
            held.add(number)
        else:
            thing = next(iter(queue))
            (queue.take if move == "t" else queue.remove)(thing)
            held.remove(thing)
        assert set(queue) == held and len(queue) == len(held)


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
