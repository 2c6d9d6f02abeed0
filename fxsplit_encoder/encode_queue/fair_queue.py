"""Order and bounds among tenants: `FairQueue` says what is served next, `Shares` who may add to it."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T", bound=Hashable)


class _Place(NamedTuple, Generic[T]):
    finish: float
    """The virtual time at which it would be done."""
    number: int
    thing: T
    cost: float
    tenant: str
    flow: Hashable


@dataclass(eq=False)
class _Tenant(Generic[T]):
    served: float
    """Work that it has had."""
    order: list[_Place[T]] = field(default_factory=list)
    virtual: float = 0.0
    finish: dict[Hashable, float] = field(default_factory=dict)
    lengths: Counter[Hashable] = field(default_factory=Counter)


class FairQueue(Generic[T]):
    """Orders things between tenants, then between the flows of a tenant, such as requests.

    Tenants are served by the work that each has had. Within a tenant a thing is tagged, as it comes, with the
    virtual time at which it would be done if all flows were served at once (self-clocked fair queuing): it
    waits for at most as much work of each other flow as its own has asked for, so a long video lets images
    pass. What was served before without a result goes before all of them, and is no work again.
    """

    def __init__(self) -> None:
        self.cost = 0.0
        """Of all things in the queue."""
        self._first: dict[T, float] = {}
        """What goes before all others, in order, with its cost."""
        self._places: dict[T, _Place[T]] = {}
        self._tenants: dict[str, _Tenant[T]] = {}
        self._virtual = 0.0
        self._number = 0

    def __len__(self) -> int:
        return len(self._first) + len(self._places)

    def __contains__(self, thing: T) -> bool:
        return thing in self._places or thing in self._first

    def __iter__(self) -> Iterator[T]:
        """In the order in which they are due. The queue must not change during iteration."""
        yield from self._first
        heads = [(tenant.served, name, 0) for name, tenant in self._tenants.items()]
        heapify(heads)
        while heads:
            served, name, index = heappop(heads)
            order = self._tenants[name].order
            yield order[index].thing
            if index + 1 < len(order):
                heappush(heads, (served + order[index].cost, name, index + 1))

    def first(self) -> T | None:
        """The thing that is due."""
        return next(iter(self), None)

    def push(
        self, thing: T, flow: Hashable, cost: float, tenant: str = "", *, is_first: bool = False
    ) -> None:
        """Add a thing, which uses the share of a flow and of a tenant unless it goes before all others."""
        assert thing not in self
        self.cost += cost
        if is_first:
            self._first[thing] = cost
            return
        own = self._tenants.setdefault(tenant, _Tenant(self._virtual))
        finish = max(own.virtual, own.finish.get(flow, 0.0)) + cost
        own.finish[flow] = finish
        own.lengths[flow] += 1
        self._places[thing] = _Place(finish, self._number, thing, cost, tenant, flow)
        insort(own.order, self._places[thing])
        self._number += 1

    def take(self, thing: T) -> None:
        """Remove a thing because it is served now."""
        if (place := self._places.get(thing)) is not None:
            own = self._tenants[place.tenant]
            self._virtual = max(self._virtual, own.served)
            own.virtual = max(own.virtual, place.finish)
            own.served += place.cost
        self.discard(thing)

    def discard(self, thing: T) -> bool:
        """Remove a thing that is not wanted any more; whether it was there."""
        if (cost := self._first.pop(thing, None)) is None:
            place = self._places.pop(thing, None)
            if place is None:
                return False
            cost = place.cost
            self._remove(place)
        # Rounding errors do not outlast the last thing.
        self.cost = self.cost - cost if self else 0.0
        return True

    def _remove(self, place: _Place[T]) -> None:
        own = self._tenants[place.tenant]
        del own.order[bisect_left(own.order, place)]
        own.lengths[place.flow] -= 1
        if not own.lengths[place.flow]:
            del own.lengths[place.flow], own.finish[place.flow]
        if not own.order:
            del self._tenants[place.tenant]
        if not self._tenants:
            self._virtual = 0.0


class Shares:
    """How much of something bounded each tenant has. One with less than its even share is not refused for
    what others have: up to twice as much as the bound may be used then.
    """

    def __init__(self) -> None:
        self.used = self.peak = 0
        self._own: dict[str, int] = {}

    def change(self, tenant: str, amount: int) -> None:
        """Give a tenant so much more, or less."""
        self.used += amount
        self.peak = max(self.peak, self.used)
        self._own[tenant] = self._own.get(tenant, 0) + amount
        if not self._own[tenant]:
            del self._own[tenant]

    def is_refused(self, tenant: str, wanted: int, most: int) -> bool:
        """Whether a tenant may not have so much more, of `most`."""
        if self.used + wanted <= most:
            return False
        own = self._own.get(tenant, 0)
        share = most / len({*self._own, tenant}) if own else most
        return own + wanted > share or self.used + wanted > 2 * most
