from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from fxsplit_encoder.connector.store.entries import Entries
from fxsplit_encoder.connector.transport.seam import Handle


def handle(number: int) -> Handle:
    return Handle("own", number, b"", 0, ())


def filled(*keys: bytes) -> Entries:
    entries = Entries()
    for number, key in enumerate(keys, start=1):
        entries.add(key, handle(number), num_bytes=10 * number)
    return entries


def test_what_was_used_longest_ago_is_given_up_first() -> None:
    entries = filled(b"a", b"b", b"c")
    entries.touch(b"a")
    held = entries.hold(b"b", "reader")
    assert held is not None
    entries.release(held.number, "reader")
    assert [entries.give_up() for _ in range(4)] == [handle(3), handle(1), handle(2), None]
    assert len(entries) == 0


def test_what_anybody_holds_stays() -> None:
    entries = filled(b"a")
    for holder in ("one", "one", "two"):
        assert entries.hold(b"a", holder) == handle(1)
    assert (entries.num_held, entries.free_bytes) == (1, 0)
    entries.release(1, "one")
    entries.release(1, "two")
    entries.release(1, "two")
    entries.release(1, "three")
    entries.release(7, "one")
    assert entries.give_up() is None
    entries.release(1, "one")
    assert (entries.num_held, entries.free_bytes) == (0, 10)
    assert entries.give_up() == handle(1)


def test_a_holder_that_is_gone_holds_nothing() -> None:
    entries = filled(b"a", b"b")
    for key in (b"a", b"a", b"b"):
        entries.hold(key, "gone")
    entries.hold(b"b", "other")
    entries.drop_holder("gone")
    assert entries.num_held == 1
    assert entries.give_up() == handle(1)
    assert entries.hold(b"a", "other") is None


steps = st.tuples(st.sampled_from("ahrdg"), st.integers(0, 4), st.sampled_from("xy"))


@given(st.lists(steps, max_size=60))
def test_any_history(history: list[tuple[str, int, str]]) -> None:
    entries, present, held = Entries(), {}, Counter()
    for number, (step, which, holder) in enumerate(history, start=1):
        key = bytes([which])
        match step:
            case "a" if key not in present:
                present[key] = number
                entries.add(key, handle(number), 1)
            case "h":
                got = entries.hold(key, holder)
                assert (got is None) == (key not in present)
                held[present.get(key), holder] += got is not None
            case "r" if key in present:
                entries.release(present[key], holder)
                held[present[key], holder] = max(0, held[present[key], holder] - 1)
            case "d":
                entries.drop_holder(holder)
                held = Counter({place: n for place, n in held.items() if place[1] != holder})
            case "g":
                free = {n for n in present.values() if not any(held[n, h] for h in "xy")}
                given_up = entries.give_up()
                assert (given_up.number in free) if given_up else not free
                present = {k: n for k, n in present.items() if given_up is None or n != given_up.number}
        assert len(entries) == len(present)
        assert entries.free_bytes == sum(not any(held[n, h] for h in "xy") for n in present.values())
