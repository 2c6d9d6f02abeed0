"""`UnpaddedCaptures`: captures of the token counts that occur, made once a count has been used enough.

Captures are keyed by the token count alone: the segments are data. They are kept in generations, each with a
memory pool of its own, which are evicted as a whole, the least recently used one first.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

import torch

from fxsplit_encoder.capture.forward import CaptureRequest
from fxsplit_encoder.capture.ladder import BudgetLadder
from fxsplit_encoder.capture.pool import GraphPool
from fxsplit_encoder.planning.plan import MissReason

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

# Generations at the limit of captures: evicting one then drops a quarter of them.
_GENERATIONS = 4

# Sizes whose uses are counted before they are captured; the least recent ones are forgotten.
_COUNTED_SIZES = 4096


class UnpaddedCaptures:
    """Captures of one forward at exact sizes, each in the mode that measures cheapest, if it is faster than
    no capture.

    Args:
        pool: gives the device and the record of what callers hold; the captures' memory is their own.
        threshold: sum of the weights of a size's uses from which on it is captured.
        max_captures: at most so many are held.
        max_bytes: limit of their device memory, asked before every capture; None: the device's.
        agree: as for `BudgetLadder`. Times differ between ranks, so nothing is measured then.
        attention_ms: as for `BudgetLadder`.
    """

    def __init__(
        self,
        request: Callable[[int], CaptureRequest],
        pool: GraphPool,
        *,
        threshold: float = 2.0,
        max_captures: int = 64,
        max_bytes: Callable[[], int | None] = lambda: None,
        agree: Callable[[bool], bool] | None = None,
        attention_ms: Callable[[int], float] = lambda tokens: 0.0,
    ) -> None:
        self.device = pool.device
        self.threshold = threshold
        self.max_captures = max_captures
        self.max_bytes = max_bytes
        self.refused: dict[int, str] = {}
        """Reasons of sizes that could not be captured; they are not tried again before `clear`."""
        self.not_faster: set[int] = set()
        """Sizes at which a replay was measured to gain nothing."""
        self.on_trial: set[int] = set()
        """Captured sizes that were not compared yet with the batch that they were captured for."""
        self.num_evicted = 0
        """Captures that were evicted for others."""
        self._request = request
        self._prepared: CaptureRequest | None = None
        self._agreed = agree or bool
        self._measured = agree is None
        self._pool = pool
        self._attention_ms = attention_ms
        self._generations: list[BudgetLadder] = []
        self._last_use: dict[BudgetLadder, int] = {}
        self._stream: torch.cuda.Stream | None = None
        """For all generations, which never capture at once."""
        self._held: dict[int, BudgetLadder] = {}
        self._uses: OrderedDict[int, float] = OrderedDict()
        self._clock = 0
        self._bytes_per_token = 0.0

    def find(self, tokens: int, weight: float = 1.0, *, on_trial: bool = False) -> BudgetLadder | None:
        """The ladder that holds a capture of exactly so many tokens, made now if it is due; None: none, for a
        `reason`.

        Args:
            weight: added to the uses of a size that is not captured.
            on_trial: whether the caller compares a new capture with the batch in hand, and calls `conclude`;
                if not, it is compared here, on a single segment.
        """
        self._clock += 1
        ladder = self._held.get(tokens)
        if ladder is None and self._is_due(tokens, weight):
            ladder = self._capture(tokens, on_trial=on_trial and self._measured)
        if ladder is not None:
            self._last_use[ladder] = self._clock
        return ladder

    def conclude(self, tokens: int, *, gains: bool) -> None:
        """Ends the trial of a size: without a gain its capture is released."""
        self.on_trial.discard(tokens)
        if not gains and (ladder := self._held.pop(tokens, None)) is not None:
            self.not_faster.add(tokens)
            ladder.drop(tokens, "it gains nothing")
            ladder.forget_drop(tokens)
            if not ladder.captured:
                self._release(ladder)

    def reason(self, tokens: int) -> MissReason:
        """Why a size is not captured."""
        if tokens in self.not_faster:
            return MissReason.EXACT_IS_FASTER
        return MissReason.NOT_CAPTURED if tokens in self.refused else MissReason.NEW_SHAPE

    def __contains__(self, tokens: object) -> bool:
        return tokens in self._held

    def __len__(self) -> int:
        return len(self._held)

    @property
    def sizes(self) -> list[int]:
        """The sizes that are captured, increasing."""
        return sorted(self._held)

    @property
    def num_bytes(self) -> int:
        """Device memory of all captures."""
        return sum(ladder.pool.used_bytes for ladder in self._generations)

    def clear(self) -> None:
        """Releases every capture and forgets what was counted."""
        while self._generations:
            self._release(self._generations[-1])
        self.refused.clear()
        self.not_faster.clear()
        self._uses.clear()

    # --- when

    def _is_due(self, tokens: int, weight: float) -> bool:
        if tokens in self.refused or tokens in self.not_faster:
            return False
        uses = self._uses.pop(tokens, 0.0) + weight
        if uses >= self.threshold:
            return True
        self._uses[tokens] = uses
        if len(self._uses) > _COUNTED_SIZES:
            self._uses.popitem(last=False)
        return False

    # --- capture

    def _capture(self, tokens: int, *, on_trial: bool) -> BudgetLadder | None:
        if not self._free_memory_for(tokens):
            return None  # memory may be free when the size has come as often again
        ladder = self._open_generation()
        # What one rank alone cannot do must show before its forward runs: inside, others would wait for it.
        if not self._agreed(self._prepare(tokens)):
            self._refuse(ladder, tokens, "another rank has no inputs of this size")
            return None
        ladder.exact_may_win = not on_trial
        captured = self._attempt(tokens, ladder.capture)
        if not self._agreed(captured is not None or tokens in ladder.no_graph_needed):
            self._refuse(ladder, tokens, "another rank could not capture it")
        elif tokens in ladder.no_graph_needed:
            ladder.no_graph_needed.discard(tokens)
            self.not_faster.add(tokens)
        else:
            self._held[tokens] = ladder
            self._keep_limit(ladder, tokens)
        if not ladder.captured:
            self._release(ladder)
        if on_trial and tokens in self._held:
            self.on_trial.add(tokens)
        return self._held.get(tokens)

    def _prepare(self, tokens: int) -> bool:
        """Makes the capture request of a size; False: that failed."""
        self._prepared = self._attempt(tokens, self._request)
        return self._prepared is not None

    def _attempt(self, tokens: int, make: Callable[[int], _T]) -> _T | None:
        """The result of `make`; None: it raised, which is noted: other ranks wait for a vote."""
        try:
            return make(tokens)
        except AssertionError:  # of this library's own
            raise
        except Exception as error:
            logger.warning("%d tokens are not captured: %s: %s", tokens, type(error).__name__, error)
            self.refused[tokens] = str(error)
            return None

    def _refuse(self, ladder: BudgetLadder, tokens: int, reason: str) -> None:
        """Notes why a size is not captured: the error of its own capture, or `reason`."""
        self._held.pop(tokens, None)
        if tokens in ladder.captured:
            ladder.drop(tokens, reason)
        self.refused.setdefault(tokens, ladder.dropped.pop(tokens, reason))
        if not ladder.captured:
            self._release(ladder)

    def _open_generation(self) -> BudgetLadder:
        """The newest generation, or a new one if that is full."""
        newest = self._generations[-1] if self._generations else None
        if newest is None or len(newest.captured) >= max(1, self.max_captures // _GENERATIONS):
            base = self._pool
            pool = GraphPool(
                self.device, handed_out=base.handed_out, stream=self._stream, priority=base.priority
            )
            self._stream = pool.stream
            newest = BudgetLadder(
                self._take_prepared,
                "auto",
                pool,
                measured=self._measured,
                attention_ms=self._attention_ms,
            )
            self._last_use[newest] = self._clock
            self._generations.append(newest)
        return newest

    def _take_prepared(self, tokens: int) -> CaptureRequest:
        request, self._prepared = self._prepared, None
        assert request is not None
        return request

    # --- limits

    def _free_memory_for(self, tokens: int) -> bool:
        """Evicts what has to go for one more capture; False: there is too little memory even so."""
        if len(self._held) >= self.max_captures:
            self._evict()
        while not self._agreed(self._has_memory(tokens)):
            if not self._generations:
                logger.warning("%d tokens are not captured: too little device memory is free", tokens)
                return False
            self._evict()
        return True

    def _has_memory(self, tokens: int) -> bool:
        """Whether another capture of so many tokens fits in the device's free memory."""
        free = free_bytes(self.device)
        return free is None or free >= self._bytes_per_token * tokens

    def _keep_limit(self, ladder: BudgetLadder, tokens: int) -> None:
        """Evicts others until the limit of bytes holds; releases the new capture if it alone exceeds it."""
        num_bytes = ladder.num_bytes(tokens)
        self._bytes_per_token = max(self._bytes_per_token, num_bytes / tokens)
        limit = self.max_bytes()
        while self._generations and not self._agreed(limit is None or self.num_bytes <= limit):
            if len(self._generations) > 1:
                self._evict(but=ladder)
                continue
            reason = f"captures take {self.num_bytes} bytes, max_graph_bytes leaves {limit} for them"
            self._refuse(ladder, tokens, reason)
            self._release(ladder)

    def _evict(self, but: BudgetLadder | None = None) -> None:
        oldest = min((each for each in self._generations if each is not but), key=self._last_use.__getitem__)
        self.num_evicted += len(oldest.captured)
        logger.info("the captures of %s tokens are evicted", list(oldest.captured))
        self._release(oldest)

    def _release(self, ladder: BudgetLadder) -> None:
        if ladder not in self._generations:
            return
        for tokens in ladder.captured:
            self._held.pop(tokens, None)
            self.on_trial.discard(tokens)
        ladder.clear()
        ladder.pool.retire()
        self._generations.remove(ladder)
        del self._last_use[ladder]


def free_bytes(device: torch.device) -> int | None:
    """Free memory of a device; None for one without a limit of its own."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
