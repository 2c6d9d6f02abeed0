"""What vLLM's worker spends on its encoder, told to the benchmark of its serving by the worker itself."""

from __future__ import annotations

import time
from typing import Any

import torch


class EncoderWatch:
    """A worker extension: vLLM adds it to the bases of its worker, and the engine calls it by name."""

    def watch_encoder(self) -> None:
        """Times every step that encodes from now on."""
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        encode = runner._execute_mm_encoder
        self._host_ms: list[float] = []
        self._device_events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

        def watched(scheduled: Any) -> Any:
            if not scheduled.scheduled_encoder_inputs:
                return encode(scheduled)
            events = _events()
            start = time.perf_counter()
            result = encode(scheduled)
            self._host_ms.append((time.perf_counter() - start) * 1e3)
            if events is not None:
                events[1].record()
                self._device_events.append(events)
            return result

        runner._execute_mm_encoder = watched

    def take_encoder_times(self) -> dict[str, list[float]]:
        """Milliseconds of the steps since it was last asked: of the "host", and between events around the
        step on the "device", waits for the host included.
        """
        host, events = self._host_ms, self._device_events
        self._host_ms, self._device_events = [], []
        if events:
            torch.cuda.synchronize()
        return {"host": host, "device": [start.elapsed_time(end) for start, end in events]}


def _events() -> tuple[torch.cuda.Event, torch.cuda.Event] | None:
    if not torch.cuda.is_available():
        return None
    events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    events[0].record()
    return events
