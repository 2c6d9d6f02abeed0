"""Writes every request of a manager to a trace: sizes, how they were served, and what served them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from typing import Any

import torch

from fxsplit_encoder.manager.item_facts import ItemFacts
from fxsplit_encoder.manager.path import EncoderPath
from fxsplit_encoder.planning import Item, Limits
from fxsplit_encoder.planning.plan import PlannedBatch
from fxsplit_encoder.protocol import EncoderItemSpec, SupportsEncoderCudaGraph
from fxsplit_encoder.runtime import CaptureScope
from fxsplit_encoder.tuning.trace import TraceWriter

_PACKAGES = ("fxsplit-encoder", "torch", "transformers", "flash-attn-4", "nvidia-cudnn-frontend")


class Recorder:
    """The trace of one manager.

    Raises:
        InputError: the file cannot be opened.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        tower: SupportsEncoderCudaGraph,
        scope: CaptureScope,
        limits: Limits,
        paths: Mapping[str, EncoderPath],
        dtype: torch.dtype,
    ) -> None:
        self.tower = tower
        self.config = scope.config
        self.device = scope.pool.device
        self.limits = limits
        self.paths = paths
        self.dtype = dtype
        self.facts = ItemFacts(tower)
        self._writer = TraceWriter(path)
        self._is_described = False

    def captures_changed(self, paths: Mapping[str, EncoderPath]) -> None:
        """What serves is described anew before the next request.

        Args:
            paths: those that serve now.
        """
        self.paths = paths
        self._is_described = False

    def write(
        self,
        mm_kwargs: dict[str, Any],
        specs: Sequence[EncoderItemSpec],
        batches: Iterable[PlannedBatch],
        host_ms: float,
    ) -> None:
        """Appends one request.

        Args:
            batches: as they were served.
            host_ms: how long the call kept its thread.
        """
        if not self._is_described:
            self._writer.write_run(self._describe())
            self._is_described = True
        segments = self.facts.segments(mm_kwargs, len(specs))
        items = [Item(spec, segments=n) for spec, n in zip(specs, segments, strict=True)]
        served = [batch.as_dict() for batch in batches]
        self._writer.write(items, batches=served, host_ms=round(host_ms, 3))

    def close(self) -> None:
        """Closes the file."""
        self._writer.close()

    def _describe(self) -> dict[str, Any]:
        """What serves requests, as `tuning.recording.RunRecord` holds it."""
        is_cuda = self.device.type == "cuda"
        return {
            "tower": type(getattr(self.tower, "tower", self.tower)).__name__,
            "device": torch.cuda.get_device_name(self.device) if is_cuda else "CPU",
            "dtype": str(self.dtype).removeprefix("torch."),
            "versions": {name: version for name in _PACKAGES if (version := _version(name)) is not None},
            "config": self.config.model_dump(mode="json", exclude_unset=True, fallback=str),
            "max_items_per_batch": self.limits.max_items_per_batch,
            "max_frames_per_batch": self.limits.max_frames_per_batch,
            "paths": {name: _describe_path(path) for name, path in self.paths.items()},
            "notes": [note for path in self.paths.values() for note in path.notes],
        }


def measured_costs(path: EncoderPath) -> dict[str, Any] | None:
    """What was measured of a path, as `tuning.read_costs` takes it; None: nothing, or no capture was kept."""
    costs = path.costs
    if not (costs.measured and costs.replay and costs.exact):
        return None
    points = {"replay_ms": dict(costs.replay), "exact_ms": dict(costs.exact)}
    above = [budget for budget in path.ladder.no_graph_needed if budget > max(costs.replay)]
    return {**points, **({"not_kept_from": min(above)} if above else {})}


def _describe_path(path: EncoderPath) -> dict[str, Any]:
    return {
        "budgets": list(path.budgets),
        "captures": [
            {"budget": budget, "mode": captured.mode, "num_bytes": path.ladder.num_bytes(budget)}
            for budget, captured in sorted(path.captured.items())
        ],
        "not_kept": sorted(path.ladder.no_graph_needed),
        "costs": measured_costs(path),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
