"""Captures of the token counts that recur, at their exact size: when they are made, tried, kept and evicted.

They are kept in generations, each with a memory pool of its own, which are evicted as a whole, the least
recently used one first.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from fxsplit_encoder.caching import Recent
from fxsplit_encoder.capture.buffers import SharedBuffers
from fxsplit_encoder.capture.forward import CaptureRequest, measure_ms
from fxsplit_encoder.capture.ladder import BudgetLadder
from fxsplit_encoder.capture.pool import GraphPool
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.planning.costs import CostCurve, PathCosts
from fxsplit_encoder.planning.plan import CaptureSize, MissReason, PathPlan
from fxsplit_encoder.runtime.requests import CaptureScope

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

# Inputs of larger captures than any before get as many rows again to spare: sizes come in no order.
_GROWTH = 2

# Captures at most: more sizes than a service sees often. Their memory is bounded by `max_graph_bytes`.
_MAX_CAPTURES = 64

# Generations at the limit of captures: evicting one then drops a quarter of them.
_GENERATIONS = 4

# Sizes whose uses are counted before they are captured; the least recent ones are forgotten.
_COUNTED_SIZES = 4096

_KEPT_WEIGHTS = 1024

# What runs at the exact shape lose to a replay only a trial tells. A size is tried once a capture costs this
# share of what its runs took. A choice.
_TRIAL_SHARE = 0.1

_NEVER_REPLAYED = frozenset({MissReason.DISABLED, MissReason.UNSUPPORTED_INPUT})


class UnpaddedCaptures:
    """Captures of one forward by size, a token count or the sizes of a call without one, each in `mode`; the
    segments are data.

    By hits, with `mode: exact` and where padding is not proved, a size is captured when it has come
    `exact_min_hits` times, and kept: the host launches no kernels any more. By cost, with `mode: auto` on a
    device, it is captured once what its batches lost to padding and launches adds up to the cost of a
    capture, so that at worst about twice the least is paid; one that runs at its exact shape also once a
    capture costs a tenth of its runs. It is kept if a replay is faster than the run, measured once with the
    batch in hand.
    """

    def __init__(
        self,
        request: Callable[[CaptureSize, SharedBuffers], CaptureRequest],
        scope: CaptureScope,
        *,
        attention_ms: Callable[[int], float] = lambda tokens: 0.0,
    ) -> None:
        self.inputs = SharedBuffers(_GROWTH)
        self.threshold = scope.config.exact_min_hits
        """Sum of the weights of a size's uses from which on it is captured."""
        self.max_captures = _MAX_CAPTURES
        self.refused: dict[CaptureSize, str] = {}
        """Reasons of sizes that could not be captured; they are not tried again before `clear`."""
        self.not_faster: set[CaptureSize] = set()
        """Sizes at which a replay was measured to gain nothing."""
        self.on_trial: set[CaptureSize] = set()
        """Captured sizes that were not compared yet with the batch that they were captured for."""
        self.mode = "auto"
        """As for `BudgetLadder`."""
        self.request = request
        self._prepared: dict[CaptureSize, CaptureRequest] = {}
        self._agreed = scope.agree or bool
        self._measured = scope.agree is None  # times differ between ranks
        self._remaining_bytes = scope.remaining_bytes
        self._pool = scope.pool
        """Gives the device; generations have memory of their own."""
        self._attention_ms = attention_ms
        self.generations: list[BudgetLadder] = []
        self._last_use: dict[BudgetLadder, int] = {}
        self._stream: torch.cuda.Stream | None = None  # for all generations, which never capture at once
        self._held: dict[CaptureSize, BudgetLadder] = {}
        self._uses: Recent[CaptureSize, float] = Recent(_COUNTED_SIZES)
        self._clock = 0
        self._bytes_per_row = 0.0
        self._costs = PathCosts()
        self._replay_curve = CostCurve(())
        self._capture_ms = 0.0
        self._weights: Recent[PathPlan, float] = Recent(_KEPT_WEIGHTS)  # by plan, of which a service sees few

    def use_costs(self, costs: PathCosts, capture_ms: float) -> None:
        """Sets the costs of replays, of other runs and of a capture, for `by_cost`."""
        self._costs = costs
        self._replay_curve = CostCurve(tuple(sorted(costs.replay.items())))
        self._capture_ms = capture_ms
        self._weights.clear()

    def find(self, planned: PathPlan, *, by_cost: bool, now: bool = False) -> BudgetLadder | None:
        """Returns the ladder with a capture of the batch's tokens, made if it is due or `now`; or None."""
        if planned.tokens == 0 or planned.reason in _NEVER_REPLAYED:
            return None
        size = planned.size
        weight = 1.0
        if now:
            weight = math.inf
        elif by_cost and size not in self._held:
            weight = self._kept_weight(planned) * self.threshold
            if not weight and size not in self._uses:
                return None
        ladder = self.of_size(size, weight, on_trial=by_cost)
        if ladder is None and not self._held:
            self.inputs.clear()  # of captures that were not made, or are no more
        return ladder

    def of_size(
        self, size: CaptureSize, weight: float = 1.0, *, on_trial: bool = False
    ) -> BudgetLadder | None:
        """Returns the ladder with a capture of exactly this size, made if its uses and `weight` suffice;
        or None. With `on_trial`, `keeps` compares a new capture with the batch in hand.
        """
        self._clock += 1
        ladder = self._held.get(size)
        if ladder is None and self._is_due(size, weight):
            ladder = self._capture(size, on_trial=on_trial and self._measured)
        if ladder is not None:
            self._last_use[ladder] = self._clock
        return ladder

    def make_due(self, size: CaptureSize) -> None:
        """Makes the next batch of this size the one for which it is captured, if it can be."""
        self._uses[size] = self.threshold

    def keeps(self, size: CaptureSize, replay: Callable[[], Any], exact: Callable[[], Any]) -> bool:
        """Returns whether the capture of a size serves; one on trial is timed against the exact shape."""
        if size not in self.on_trial:
            return True
        replay_ms = measure_ms(replay, self._pool.device)
        try:
            exact_ms = measure_ms(exact, self._pool.device)
        except (InputError, torch.OutOfMemoryError):  # the batch is served by the replay alone
            exact_ms = math.inf
        logger.info("%s: replay %.3f ms, exact shape %.3f", _shown(size), replay_ms, exact_ms)
        gains = replay_ms < exact_ms
        self.conclude(size, gains=gains)
        return gains

    def conclude(self, size: CaptureSize, *, gains: bool) -> None:
        """Ends the trial of a size; without a gain its capture is released."""
        self.on_trial.discard(size)
        if not gains and (ladder := self._held.pop(size, None)) is not None:
            self.not_faster.add(size)
            ladder.drop(size, "it gains nothing")
            ladder.forget_drop(size)
            if not ladder.captured:
                self._release(ladder)

    def reason(self, planned: PathPlan) -> MissReason | None:
        """Returns why a batch that was not replayed counts as a miss; None: for the planned reason."""
        if planned.reason in _NEVER_REPLAYED:
            return None
        if planned.size in self.not_faster:
            return MissReason.EXACT_IS_FASTER
        return MissReason.NOT_CAPTURED if planned.size in self.refused else MissReason.NEW_SHAPE

    def __contains__(self, size: object) -> bool:
        return size in self._held

    @property
    def sizes(self) -> list[CaptureSize]:
        """The sizes that are captured, increasing."""
        return sorted(self._held)

    @property
    def graph_bytes(self) -> int:
        """Bytes of the captures without their inputs."""
        return sum(ladder.pool.used_bytes for ladder in self.generations)

    @property
    def num_bytes(self) -> int:
        """Bytes of the captures and their inputs."""
        return self.graph_bytes + self.inputs.num_bytes

    def clear(self) -> None:
        """Releases every capture and forgets what was counted."""
        while self.generations:
            self._release(self.generations[-1])
        self.refused.clear()
        self.not_faster.clear()
        self._uses.clear()
        self.inputs.clear()

    # --- when

    def _is_due(self, size: CaptureSize, weight: float) -> bool:
        if size in self.refused or size in self.not_faster:
            return False
        uses = self._uses.pop(size, 0.0) + weight
        if uses >= self.threshold:
            return True
        self._uses[size] = uses
        return False

    def _kept_weight(self, planned: PathPlan) -> float:
        try:
            return self._weights[planned]  # `get` would be a call in Python
        except KeyError:
            weight = self._weights[planned] = self._weight(planned)
            return weight

    def _weight(self, planned: PathPlan) -> float:
        """Cost of a batch beyond a replay at its own size, as a share of a capture's cost."""
        costs, tokens = self._costs, planned.tokens
        if not self._capture_ms or not self._replay_curve.points:
            return 0.0
        if planned.budget is not None:
            spent = costs.replay[planned.budget]
        else:
            spent = min(costs.exact_curve.at(tokens), costs.eager_curve.at(tokens))
        lost = max(0.0, spent - self._replay_curve.at(tokens))
        if planned.budget is None and math.isfinite(spent):
            lost = max(lost, spent * _TRIAL_SHARE)
        return lost / self._capture_ms

    # --- capture

    def _capture(self, size: CaptureSize, *, on_trial: bool) -> BudgetLadder | None:
        if not self._free_memory_for(size):
            return None  # memory may be free when the size has come as often again
        ladder = self._open_generation()
        request = self._attempt(size, lambda each: self.request(each, self.inputs))
        # What one rank alone cannot do must show before its forward runs: inside, others would wait for it.
        if not self._agreed(request is not None):
            self._refuse(ladder, size, "another rank has no inputs of this size")
            return None
        assert request is not None
        self._prepared[size] = request
        captured = self._attempt(size, ladder.capture)
        if not self._agreed(captured is not None):
            self._refuse(ladder, size, "another rank could not capture it")
        else:
            self._held[size] = ladder
            self._keep_limit(ladder, size)
        if not ladder.captured:
            self._release(ladder)
        if on_trial and size in self._held:
            self.on_trial.add(size)
        return self._held.get(size)

    def _attempt(self, size: CaptureSize, make: Callable[[CaptureSize], _T]) -> _T | None:
        """Returns the result of `make`; None: it raised, which is noted."""
        try:
            return make(size)
        except AssertionError:  # of this library's own
            raise
        except Exception as error:  # the boundary to other ranks, which wait for this one's vote
            logger.warning("%s are not captured: %s: %s", _shown(size), type(error).__name__, error)
            self.refused[size] = str(error)
            return None

    def _refuse(self, ladder: BudgetLadder, size: CaptureSize, reason: str) -> None:
        self._held.pop(size, None)
        if size in ladder.captured:
            ladder.drop(size, reason)
        self.refused.setdefault(size, ladder.dropped.pop(size, reason))
        if not ladder.captured:
            self._release(ladder)

    def _open_generation(self) -> BudgetLadder:
        newest = self.generations[-1] if self.generations else None
        if newest is None or len(newest.captured) >= max(1, self.max_captures // _GENERATIONS):
            pool = GraphPool(self._pool.device, stream=self._stream, priority=self._pool.priority)
            self._stream = pool.stream
            newest = BudgetLadder(
                self._prepared.pop,
                self.mode,
                pool,
                measured=self._measured,
                attention_ms=lambda size: self._attention_ms(rows_of(size)),
            )
            # Beside another process on the device a run is so slow that its launches seem to cost nothing.
            newest.exact_may_win = False
            self._last_use[newest] = self._clock
            self.generations.append(newest)
        return newest

    # --- limits

    def _free_memory_for(self, size: CaptureSize) -> bool:
        """Evicts captures to make memory for one more; False: there is too little even so."""
        if len(self._held) >= self.max_captures:
            self.evict()
        while not self._agreed(self._has_memory(size)):
            if not self.generations:
                logger.warning("%s are not captured: too little device memory is free", _shown(size))
                return False
            self.evict()
        return True

    def _has_memory(self, size: CaptureSize) -> bool:
        free = free_bytes(self._pool.device)
        return free is None or free >= self._bytes_per_row * rows_of(size)

    def _keep_limit(self, ladder: BudgetLadder, size: CaptureSize) -> None:
        self._bytes_per_row = max(self._bytes_per_row, ladder.num_bytes(size) / rows_of(size))
        remaining = self._remaining_bytes()
        limit = None if remaining is None else remaining + self.graph_bytes
        while self.generations and not self._agreed(limit is None or self.graph_bytes <= limit):
            if len(self.generations) > 1:
                self.evict(but=ladder)
                continue
            reason = f"captures take {self.graph_bytes} bytes, max_graph_bytes leaves {limit} for them"
            self._refuse(ladder, size, reason)
            self._release(ladder)

    def evict(self, but: BudgetLadder | None = None) -> None:
        """Releases the captures that were used longest ago, of all `but` one generation."""
        oldest = min((each for each in self.generations if each is not but), key=self._last_use.__getitem__)
        logger.info("the captures of %s are evicted", ", ".join(map(_shown, oldest.captured)))
        self._release(oldest)

    def _release(self, ladder: BudgetLadder) -> None:
        if ladder not in self.generations:
            return
        for size in ladder.captured:
            self._held.pop(size, None)
            self.on_trial.discard(size)
        ladder.clear()
        ladder.pool.retire()
        self.generations.remove(ladder)
        del self._last_use[ladder]


def rows_of(size: CaptureSize) -> int:
    """Returns the rows that a size stands for: its tokens, or the product of a call's sizes."""
    return size if isinstance(size, int) else max(1, int(math.prod(size)))


def _shown(size: CaptureSize) -> str:
    return f"{size} tokens" if isinstance(size, int) else f"calls of sizes {size}"


def free_bytes(device: torch.device) -> int | None:
    """Free memory of a device; None for one without a limit of its own."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
