"""All captures of a manager: made largest first over one pool, and kept under the memory limit."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping

from fxsplit_encoder.capture import GraphPool
from fxsplit_encoder.manager.captures import least_useful
from fxsplit_encoder.manager.path_captures import PathCaptures
from fxsplit_encoder.manager.statistics import Statistics
from fxsplit_encoder.planning.limits import CaptureKey


class CaptureSet:
    """The captures of every path at every combination of axis keys.

    Args:
        routes: the paths by (name, axis keys).
        skippable_paths: names of those that a batch without tokens there skips.
        max_bytes: memory that captures and their static inputs may take; None: no limit.
    """

    def __init__(
        self,
        routes: Mapping[tuple[str, tuple[Hashable, ...]], PathCaptures],
        pool: GraphPool,
        statistics: Statistics,
        skippable_paths: frozenset[str],
        max_bytes: int | None,
    ) -> None:
        self.routes = routes
        self.pool = pool
        self.statistics = statistics
        self.skippable_paths = skippable_paths
        self.max_bytes = max_bytes

    @property
    def num_bytes(self) -> int:
        """Memory that all captures hold: their graphs' pools and their static inputs."""
        paths = self.routes.values()
        return self.pool.used_bytes + sum(path.input_bytes + path.exact_bytes for path in paths)

    @property
    def remaining_bytes(self) -> int | None:
        """What the limit leaves for more; None: there is no limit."""
        return None if self.max_bytes is None else self.max_bytes - self.num_bytes

    @property
    def num_captured(self) -> int:
        """Budgets that are captured, over all paths."""
        return sum(len(path.captured) for path in self.routes.values())

    def capture(self, keys: Iterable[CaptureKey], progress: Callable[[int, int], None] | None = None) -> None:
        """Captures budgets, largest first, and drops those that the memory limit has no room for."""
        self._capture(keys, progress)
        while self._over_limit():
            self._drop_least_useful()

    def release(self) -> None:
        """Releases every capture; their memory goes back to the device."""
        for path in self.routes.values():
            path.clear()
        self.statistics.record_clear()
        self.pool.retire()

    def _capture(
        self, keys: Iterable[CaptureKey], progress: Callable[[int, int], None] | None = None
    ) -> None:
        ordered = sorted(keys, key=lambda key: -key.budget)
        for done, key in enumerate(ordered):
            self._capture_one(key)
            if progress is not None:
                progress(done + 1, len(ordered))

    def _capture_one(self, key: CaptureKey) -> None:
        path = self.routes[key.path, key.axis_keys]
        path.capture(key.budget)
        captures = self.num_captured
        if captures == 1 and key.budget in path.captured and self._over_limit():
            path.drop(key.budget, f"{self._excess()}, by this one alone")
            captures = 0
        if captures == 0:  # what was tried and released left its memory in the pool
            path.shared.clear()
            self.pool.retire()
        if key.budget in path.captured:
            num_bytes = path.ladder.num_bytes(key.budget)
            self.statistics.record_capture(key, path.captured[key.budget].mode, num_bytes)
            if (costs := path.ladder.costs.get(key.budget)) is not None:
                self.statistics.record_time(key, costs.best)

    def _over_limit(self) -> bool:
        return self.remaining_bytes is not None and self.remaining_bytes < 0

    def _excess(self) -> str:
        return f"captures take {self.num_bytes} bytes, max_graph_bytes allows {self.max_bytes}"

    def _drop_least_useful(self) -> None:
        """Drops the budgets that gain least for their bytes, and captures the rest anew.

        Memory of a pool is given back as a whole, so what remains has to be captured again.
        """
        assert self.max_bytes is not None
        excess, reason = self.num_bytes - self.max_bytes, self._excess()
        # Whether the last one fits by itself, capturing it anew tells.
        while excess > 0 and self.num_captured > 1:
            path, budget = self._least_useful()
            excess -= max(1, path.num_bytes(budget))
            path.drop(budget, f"{reason}; it gains least for its memory")
        kept = [path.key(budget) for path in self.routes.values() for budget in path.captured]
        self.release()
        self._capture(kept)

    def _least_useful(self) -> tuple[PathCaptures, int]:
        found = []
        for path in self.routes.values():
            if budgets := sorted(path.captured):
                sizes = [path.num_bytes(budget) for budget in budgets]
                skippable = path.name in self.skippable_paths
                budget, gain = least_useful(path.costs(), budgets, sizes, skippable)
                found.append((gain, path, budget))
        assert found, "nothing is captured, so no limit is exceeded"
        _, path, budget = min(found, key=lambda each: each[0])
        return path, budget
