"""What a run came to, and which of its stages was the limit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fxsplit_encoder.integrations.ray.shards import STAGES, Span


@dataclass(frozen=True)
class ShardReport:
    """One shard of a run."""

    shard: int
    images: int
    failed: int
    """Images that have an error in place of an embedding."""
    spans: Mapping[str, Span]
    """By stage: "prepare", "encode", "write"."""

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> ShardReport:
        """From what `write_shard` returns."""
        spans = {stage: (row[stage][0], row[stage][1]) for stage in STAGES}
        return cls(row["shard"], row["images"], row["failed"], spans)


@dataclass(frozen=True)
class Outcome:
    """What a run came to."""

    images: int
    """All of the output's."""
    written_before: int
    """Of these, by runs before this one."""
    shards: tuple[ShardReport, ...]
    """Of this run, in the order in which they were done."""
    workers: int
    """That encoded."""

    @property
    def failed(self) -> int:
        """Images of this run that have an error in place of an embedding."""
        return sum(shard.failed for shard in self.shards)

    @property
    def seconds(self) -> dict[str, float]:
        """What each stage took for all shards together."""
        return {stage: sum(_length(shard.spans[stage]) for shard in self.shards) for stage in STAGES}

    @property
    def encoding_share(self) -> float:
        """The part of the time from the first shard encoded to the last in which a worker was encoding, on
        average; 0.0 before the first."""
        spans = [shard.spans["encode"] for shard in self.shards]
        if not spans:
            return 0.0
        whole = max(end for _, end in spans) - min(begin for begin, _ in spans)
        return sum(map(_length, spans)) / (whole * self.workers) if whole else 1.0

    @property
    def cpus_per_worker(self) -> float:
        """CPUs that would have to prepare and write for one worker to encode all the time."""
        seconds = self.seconds
        return (seconds["prepare"] + seconds["write"]) / seconds["encode"] if seconds["encode"] else 0.0


def _length(span: Span) -> float:
    return span[1] - span[0]
