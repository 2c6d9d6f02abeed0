"""One side of `bench.py ab`: a process that times whatever `fxsplit_encoder` its PYTHONPATH finds.

It answers commands through the connection whose file descriptor it is given. It must run against older
versions of the package too, so it uses names that do not change: `wrap`, `EncoderConfig`,
`EncoderCudaGraphManager` with `compile`, `capture` and `execute`.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from multiprocessing.connection import Connection
from typing import Any

import torch
from timing import replays_ms, timed, watching_replays
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

import fxsplit_encoder as fx


def make_tower(settings: dict[str, Any], device: str, dtype: torch.dtype) -> Any:
    """Qwen3-VL's vision tower with seeded weights; biases and positions are large enough to count."""
    with torch.device(device):
        tower = Qwen3VLVisionModel(Qwen3VLVisionConfig(**settings))
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in tower.named_parameters():
        is_scale = parameter.dim() == 1 and not name.endswith(".bias")
        deviation = 0.1 if parameter.dim() == 1 else 0.5 if "pos_embed" in name else 0.02
        parameter.data.normal_(float(is_scale), deviation, generator=generator)
        parameter.data = parameter.data.to(dtype)
    return tower.requires_grad_(False).eval()


def make_inputs(grids: list[list[int]], features: int, device: str, dtype: torch.dtype) -> dict[str, Any]:
    generator = torch.Generator(device).manual_seed(1)
    rows = sum(t * h * w for t, h, w in grids)
    pixels = torch.randn(rows, features, generator=generator, device=device)
    return {"pixel_values": pixels.to(dtype), "image_grid_thw": torch.tensor(grids)}


def packed(output: Any) -> torch.Tensor:
    """The rows of the model's own output, with those of deepstack beside them, as `execute` returns them."""
    return torch.cat([output.pooler_output, *output.deepstack_features], dim=1)


class Side:
    """The tower, its inputs by workload, what eager makes of them, and the managers."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        self.tower = make_tower(settings["tower"], self.device, self.dtype)
        features = self.tower.patch_embed.proj.weight[0].numel()
        self.inputs = {
            name: make_inputs(workload["grids"], features, self.device, self.dtype)
            for name, workload in settings["workloads"].items()
        }
        self.expected = {
            name: packed(self.tower(inputs["pixel_values"], inputs["image_grid_thw"].to(self.device)))
            for name, inputs in self.inputs.items()
        }
        self.managers: dict[str, Any] = {}

    def start(self) -> dict[str, Any]:
        """Compiles and captures every manager; seconds of each, and every workload's error."""
        wrapped = fx.wrap(self.tower)
        seconds = {}
        for name, config in self.settings["managers"].items():
            manager = fx.EncoderCudaGraphManager(wrapped, fx.EncoderConfig(**config), log_interval=0)
            for what in (manager.compile, manager.capture):
                seconds[f"{name}: {what.__name__}"] = timed(what)[0] / 1e3
            self.managers[name] = manager
        errors = {name: self.error(name) for name in self.inputs}
        return {"package": fx.__file__, "seconds": seconds, "errors": errors}

    def error(self, name: str) -> float:
        """Root mean square of the difference from eager, relative to eager's."""
        for _ in range(self.settings["warmups"]):
            items = self.execute(name)
        expected = self.expected.pop(name).double()
        difference = torch.cat(items).double() - expected
        return float(difference.square().mean().sqrt() / expected.square().mean().sqrt())

    def execute(self, name: str) -> Any:
        return self.managers[self.settings["workloads"][name]["manager"]].execute(self.inputs[name])

    def measure(self, name: str, samples: int) -> dict[str, list[float]]:
        """Milliseconds of each call: to the end of its device work, on the CPU, and of its graphs."""
        self.execute(name)
        call = functools.partial(self.execute, name)
        wall, host = zip(*(timed(call) for _ in range(samples)), strict=True)
        return {"execute": wall, "host": host, "replay": replays_ms(call, samples)}


@torch.no_grad()
def main() -> None:
    asked: Any = Connection(int(sys.argv[1]))
    side = Side(asked.recv())
    asked.send("ready")
    with watching_replays(), contextlib.suppress(EOFError):  # nobody asks any more
        while True:
            command, *arguments = asked.recv()
            asked.send(getattr(side, command)(*arguments))


if __name__ == "__main__":
    main()
