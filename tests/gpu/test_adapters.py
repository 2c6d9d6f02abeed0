"""PEFT's adapters with CUDA graphs: a state that came before is replayed, and captures leave for memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fxsplit_encoder as fx
from fxsplit_encoder.models.random import random_inputs
from fxsplit_encoder.runtime import states
from tests.hugging_face.comparisons import assert_close
from tests.hugging_face.models import MODELS
from tests.hugging_face.test_models import num_traces
from tests.towers.tiny_towers import TINY

peft = pytest.importorskip("peft")

pytestmark = pytest.mark.gpu

NAMES = ("one", "two", "three")


@pytest.fixture(autouse=True)
def full_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def tower_with_adapters() -> Any:
    tower = TINY["Qwen3VLVisionModel"].make().requires_grad_(False)
    for rank, name in enumerate(NAMES, 2):
        torch.manual_seed(rank)
        vars(tower).pop("peft_config", None)  # of which the next would warn
        lora = peft.LoraConfig(r=rank, init_lora_weights=False, target_modules=["qkv", "linear_fc1"])
        peft.inject_adapter_in_model(lora, tower, adapter_name=name).eval()
    return tower.cuda()


def use(tower: Any, name: str) -> None:
    for module in tower.modules():
        if hasattr(module, "lora_A"):
            module.set_adapter(name)


class Served:
    """A manager that is told to capture what it was not yet."""

    def __init__(self, **settings: Any) -> None:
        self.tower = tower_with_adapters()
        use(self.tower, NAMES[0])
        wrapped = fx.wrap(self.tower)
        config = fx.EncoderConfig(token_budgets=(4, 16), capture_recurring=False, **settings)
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


@pytest.mark.parametrize(
    "settings",
    [{"mode": "full"}, {"mode": "piecewise"}, {"mode": "breakable"}],
    ids=lambda each: each["mode"],
)
@torch.no_grad()
def test_each_adapter_is_captured_once(settings: dict[str, Any]) -> None:
    served = Served(**settings)
    first = {name: served.encode(name) for name in NAMES}
    traces = num_traces()
    for name in (*NAMES, *NAMES[::-1]):
        assert torch.equal(served.encode(name), first[name])
    assert (served.captures, num_traces()) == (3, traces)
    assert not served.manager.stats().misses
    use(served.tower, NAMES[0])
    for module in served.tower.modules():
        if hasattr(module, "lora_A"):
            module.lora_B[NAMES[0]].weight.data.mul_(3)
    assert not torch.allclose(served.encode(NAMES[0]), first[NAMES[0]], rtol=1e-2)
    assert served.captures == 3


@torch.no_grad()
def test_memory_of_states_that_leave_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "_MOST_STATES", 1)
    served = Served(mode="full")
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
def test_a_model_with_adapters(compile: bool, tmp_path: Path) -> None:
    tiny = MODELS["llava-next"]
    tiny.make(tmp_path)
    models = []
    for _ in range(2):
        model = tiny.load(tmp_path).cuda()
        for rank, name in enumerate(NAMES, 2):
            torch.manual_seed(rank)
            lora = peft.LoraConfig(
                r=rank, init_lora_weights=False, target_modules=r".*vision_tower.*\.(q_proj|fc1)"
            )
            if name == NAMES[0]:
                model = peft.get_peft_model(model, lora, adapter_name=name)
            else:
                model.add_adapter(name, lora)
        models.append(model.cuda().eval())
    fx.accelerate(models[0], {"mode": "full"}, compile=compile)
    pixels = {
        name: value.cuda() if isinstance(value, torch.Tensor) else value
        for name, value in tiny.image_inputs(tiny.images[:2]).items()
    }
    for turn in range(4):
        if turn == 2:  # by then captures make all that is read
            traces, misses = num_traces(), fx.stats(models[0]).misses
        for name in NAMES:
            for model in models:
                model.set_adapter(name)
            assert_close(*(model.get_image_features(**pixels) for model in models), tolerance=1e-3)
    assert num_traces() == traces
    assert fx.stats(models[0]).misses == misses
    assert fx.stats(models[0]).hits > 0
