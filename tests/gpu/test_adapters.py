"""PEFT's adapters with CUDA graphs: a state that came before is replayed, and captures leave for memory."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers

import fxsplit_encoder as fx
from fxsplit_encoder.models.random import draw_weights, random_inputs
from fxsplit_encoder.models.registry import architecture
from fxsplit_encoder.runtime import states
from tests.hugging_face.test_models import num_traces
from tests.towers.tiny_towers import TINY

from .support import relative_rms

peft = pytest.importorskip("peft")

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("full_precision")]

NAMES = ("one", "two", "three")


def add_adapters(tower: Any, rank: int, names: Sequence[str], layers: Sequence[str]) -> None:
    for seed, name in enumerate(names):
        torch.manual_seed(seed)
        vars(tower).pop("peft_config", None)  # of which the next would warn
        lora = peft.LoraConfig(r=rank, init_lora_weights=False, target_modules=[*layers])
        peft.inject_adapter_in_model(lora, tower, adapter_name=name).eval()


def tower_with_adapters() -> Any:
    tower = TINY["Qwen3VLVisionModel"].make().requires_grad_(False)
    add_adapters(tower, 2, NAMES, ["qkv", "linear_fc1"])
    return tower.cuda()


def use(tower: Any, name: str) -> None:
    for module in tower.modules():
        if hasattr(module, "lora_A"):
            module.set_adapter(name)


class Served:
    """A manager that is told to capture what it was not yet."""

    def __init__(self, mode: str) -> None:
        self.tower = tower_with_adapters()
        use(self.tower, NAMES[0])
        wrapped = fx.wrap(self.tower)
        config = fx.EncoderConfig(mode=mode, packing="greedy", token_budgets=(4, 16), capture_recurring=False)
        self.manager = fx.EncoderCudaGraphManager(wrapped, config)
        self.manager.capture()
        self.inputs = random_inputs(wrapped, [4])
        self.captures = 1

    def encode(self, name: str) -> torch.Tensor:
        use(self.tower, name)
        try:
            (got,) = self.manager.execute(self.inputs)
        except fx.TowerChangedError:
            self.manager.capture()
            self.captures += 1
            (got,) = self.manager.execute(self.inputs)
        expected = self.manager.tower.encoder_eager_forward(self.inputs)
        torch.testing.assert_close(got, expected.view_as(got), rtol=1e-3, atol=1e-3)
        return got


@pytest.mark.parametrize("mode", ["full", "piecewise", "breakable"])
@torch.no_grad()
def test_each_adapter_is_captured_once(mode: str) -> None:
    served = Served(mode)
    first = {name: served.encode(name) for name in NAMES}
    traces = num_traces()
    for name in (*NAMES, *NAMES[::-1]):
        assert torch.equal(served.encode(name), first[name])
    assert (served.captures, num_traces()) == (3, traces)
    assert not served.manager.stats().misses
    use(served.tower, NAMES[0])
    for module in served.tower.modules():
        if hasattr(module, "lora_A"):
            module.lora_B[NAMES[0]].weight.mul_(3)
    assert not torch.allclose(served.encode(NAMES[0]), first[NAMES[0]], rtol=1e-2)
    assert served.captures == 3


@torch.no_grad()
def test_memory_of_states_that_leave_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "_MOST_STATES", 1)
    served = Served("full")
    served.encode(NAMES[1])
    torch.cuda.empty_cache()
    two, reserved = served.manager.num_bytes, torch.cuda.memory_reserved()
    for name in (NAMES[2], *NAMES):
        served.encode(name)
    torch.cuda.empty_cache()
    assert served.manager.num_bytes <= 1.5 * two
    assert torch.cuda.memory_reserved() <= reserved + two
    served.manager.clear()
    assert served.manager.num_bytes == 0


@pytest.mark.parametrize("compile", [False, True])
@torch.no_grad()
def test_two_adapters_in_turn_on_a_tower_of_real_widths(compile: bool) -> None:
    """Of Qwen3-VL-8B with six of its blocks; PEFT's eager model in float32 is the reference."""
    vision = {**architecture("qwen3-vl-8b").settings(None)["vision_config"], "depth": 6}
    vision["deepstack_visual_indexes"] = [1, 3, 5]
    with torch.device("cuda"):
        tower: Any = transformers.Qwen3VLVisionModel(transformers.Qwen3VLVisionConfig(**vision))
    draw_weights(tower, 0)
    add_adapters(
        tower.bfloat16().requires_grad_(False), 16, NAMES[:2], ["qkv", "proj", "linear_fc1", "linear_fc2"]
    )
    use(tower, NAMES[0])
    wrapped = fx.wrap(tower)
    config = fx.EncoderConfig(token_budgets=(64, 256), capture_recurring=False, compile=compile)
    manager = fx.EncoderCudaGraphManager(wrapped, config)
    manager.capture()
    use(tower, NAMES[1])
    manager.capture()
    reference = copy.deepcopy(tower).float()
    inputs, traces, captured = random_inputs(wrapped, [256]), num_traces(), manager.num_bytes
    outputs = {}
    for name in NAMES[:2] * 3:
        use(tower, name)
        use(reference, name)
        (got,) = manager.execute(inputs)
        exact = fx.wrap(reference).encoder_eager_forward(inputs).view_as(got)
        eager = wrapped.encoder_eager_forward(inputs).view_as(got)
        assert relative_rms(got, exact) <= 1.5 * relative_rms(eager, exact)
        assert torch.equal(outputs.setdefault(name, got), got)
    assert relative_rms(*outputs.values()) > 10 * relative_rms(eager, exact)
    assert (num_traces(), manager.num_bytes) == (traces, captured)
    assert manager.stats().hits == 6 and not manager.stats().misses
