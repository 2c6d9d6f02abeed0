"""A queue in which no request makes another wait for more than its own share."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Hashable, Iterator
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T", bound=Hashable)


class _Tag(NamedTuple):
    finish: float
    number: int
    cost: float


class FairQueue(Generic[T]):
    """Self-clocked fair queuing between flows, first in first out within one and among equals.

    A thing is tagged, as it comes, with the virtual time at which it would be done if all flows were served
    at once; tags decide the order. So a thing waits for at most as much work of each other flow as its own
    flow has asked for: a long video lets images pass, and a flow of many things lets others between them.
    """

    def __init__(self) -> None:
        self.cost = 0.0
        """Of all things in the queue."""
        self._order: list[tuple[_Tag, T]] = []
        self._tags: dict[T, tuple[_Tag, Hashable]] = {}
        self._finish: dict[Hashable, float] = {}
        self._lengths: Counter[Hashable] = Counter()
        self._virtual = 0.0
        self._number = 0

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[T]:
        """In the order in which they are due. The queue must not change meanwhile."""
        return (thing for _, thing in self._order)

    def __contains__(self, thing: T) -> bool:
        return thing in self._tags

    def push(self, thing: T, flow: Hashable, cost: float, *, first: bool = False) -> None:
        """Add a thing.

        Args:
            thing: is not in the queue.
            flow: whose share it uses, such as a request.
            cost: not negative, in any unit.
            first: ahead of all, and for free: it was served before, in vain.
        """
        assert thing not in self._tags
        start = max(self._virtual, self._finish.get(flow, 0.0))
        finish = float("-inf") if first else start + cost
        self._finish[flow] = max(start, finish)
        self._lengths[flow] += 1
        tag = _Tag(finish, self._number, cost)
        self._number += 1
        self.cost += cost
        self._tags[thing] = tag, flow
        insort(self._order, (tag, thing), key=lambda entry: entry[0])

    def take(self, thing: T) -> None:
        """Remove a thing because it is served now."""
        finish = self._tags[thing][0].finish
        self._virtual = max(self._virtual, finish)
        self.remove(thing)

    def discard(self, thing: T) -> None:
        """Remove a thing, if it is there."""
        if thing in self._tags:
            self.remove(thing)

    def remove(self, thing: T) -> None:
        """Remove a thing because nobody wants it any more."""
        tag, flow = self._tags.pop(thing)
        index = bisect_left(self._order, tag, key=lambda entry: entry[0])
        assert self._order[index][1] == thing
        del self._order[index]
        self.cost = self.cost - tag.cost if self._order else 0.0  # no rounding is left in an empty queue
        self._lengths[flow] -= 1
        if not self._lengths[flow]:
            del self._lengths[flow], self._finish[flow]
