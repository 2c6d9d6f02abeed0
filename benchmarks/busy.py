"""How busy a GPU is meanwhile, as nvidia-smi says: the share of time in which a kernel ran."""

from __future__ import annotations

import contextlib
import shutil
import statistics
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

_EVERY_MS = 100


@dataclass
class Busy:
    """Samples, from 0 to 1."""

    samples: list[float] = field(default_factory=list)

    @property
    def mean(self) -> float | None:
        """None: nothing was sampled."""
        return statistics.fmean(self.samples) if self.samples else None


@contextlib.contextmanager
def watched_gpu() -> Iterator[Busy]:
    """Samples the first GPU that there is; nothing without CUDA or nvidia-smi."""
    busy = Busy()
    if not torch.cuda.is_available() or shutil.which("nvidia-smi") is None:
        yield busy
        return
    query = ["--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "--id=0"]
    command = ["nvidia-smi", *query, f"--loop-ms={_EVERY_MS}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    lines = process.stdout

    def read() -> None:
        for line in lines:
            with contextlib.suppress(ValueError):
                busy.samples.append(int(line) / 100)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield busy
    finally:
        process.terminate()
        reader.join(5)
        process.wait(5)
