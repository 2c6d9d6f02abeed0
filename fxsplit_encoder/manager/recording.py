"""Writes every request of a manager to a trace: sizes, how they were served, and what served them."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from fxsplit_encoder.errors import InputError
from fxsplit_encoder.manager.path import EncoderPath
from fxsplit_encoder.manager.tower import ItemFacts
from fxsplit_encoder.planning import Item, Limits
from fxsplit_encoder.planning.plan import PlannedBatch
from fxsplit_encoder.protocol import EncoderItemSpec, SupportsEncoderCudaGraph
from fxsplit_encoder.runtime import CaptureScope

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


class TraceWriter:
    """Appends requests to a trace. Threads may write at the same time; every request is a line of its own.

    Each line goes to the operating system at once, so that a process which is killed loses none before it.
    Processes need files of their own.

    Raises:
        InputError: the file cannot be opened.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._lock = threading.Lock()
        try:
            self._file = open(self.path, "a", encoding="utf-8", buffering=1)
        except OSError as error:
            raise InputError(f"trace {self.path}: cannot be written: {error.strerror}") from None

    def write(self, items: Sequence[Item], **served: Any) -> None:
        """Append one request.

        Args:
            items: of which the sizes and segments are written.
            served: how it was served, as JSON; see `recording`.

        Raises:
            InputError: the writer is closed.
        """
        self._append({"items": [_as_json(item) for item in items], **served})

    def write_run(self, run: Mapping[str, Any]) -> None:
        """Append what serves the requests from now on.

        Raises:
            InputError: the writer is closed.
        """
        self._append({"run": run})

    def _append(self, value: Mapping[str, Any]) -> None:
        line = json.dumps(value, default=str) + "\n"
        with self._lock:
            if self._file.closed:
                raise InputError(f"trace {self.path}: the writer is closed; open another to append to it")
            self._file.write(line)

    def close(self) -> None:
        """Close the file; closing twice does nothing."""
        with self._lock:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _as_json(item: Item) -> dict[str, Any]:
    # Sizes may be NumPy's integers, which JSON does not know.
    spec = item.spec
    sizes: dict[str, Any] = {"input_size": int(spec.input_size), "output_tokens": int(spec.output_tokens)}
    if item.segments != 1:
        sizes["segments"] = int(item.segments)
    if spec.path_output_tokens:
        sizes["path_output_tokens"] = {name: int(count) for name, count in spec.path_output_tokens.items()}
    return sizes
