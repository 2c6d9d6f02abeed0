"""What a model of transformers gains by `accelerate`, and what its own calls cost beyond the manager's.

    python benchmarks/bench.py accelerate --output out/accelerate.json

The Qwen3-VL-8B vision tower in a language model of one layer, bf16, seeded random weights. The model's own
`get_image_features`, wall milliseconds to the end of the device's work, medians:

* "eager": as transformers runs it; "accelerate": after `fx.accelerate(model)` and `warmup`; "execute": the
  manager with the tower alone, which makes no output of transformers' class.
* "error": relative to eager, the root of the mean square.

Then `generate`, once warm: what a second request still compiled, traced and captured.

With `--adapters` instead two of PEFT's, "a" and "b", of rank 16 in all linear layers of the blocks: "peft" is
eager with "a"; "accelerate, a" and "accelerate, b and a", a call and `set_adapter` of each, with and without
the pass `folded_adapters`. "captured" tells what the calls after both were seen captured.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

import torch
import transformers
from models import TINY_SETTINGS, PackedModel
from storage import Record
from timing import measure
from torch import Tensor, nn
from torch._dynamo.utils import counters
from worker import relative_error
from workloads import QUICK_WORKLOADS, WORKLOADS

import fxsplit_encoder as fx
from fxsplit_encoder.compile.passes import PASSES
from fxsplit_encoder.models.random import draw_weights
from fxsplit_encoder.models.registry import architecture

NAMES, TINY_NAMES = ("1x224", "1x448", "20x336"), ("1x64", "mixed3")
IMAGE, START, END = 60, 62, 63


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--adapters", action="store_true", help="PEFT's adapters in the tower instead")
    parser.add_argument("--samples", type=int, default=100, help="timed calls of a row")


def make_model(tiny: bool, device: str) -> Any:
    vision = architecture("qwen3-vl-8b").settings(None)["vision_config"] | (TINY_SETTINGS if tiny else {})
    width = vision["out_hidden_size"]
    text = {
        "hidden_size": width,
        "intermediate_size": width,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": width // 4,
        "vocab_size": 64,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    marks = {"image_token_id": IMAGE, "vision_start_token_id": START, "vision_end_token_id": END}
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=vision, video_token_id=61, **marks)
    with torch.device(device):
        model: Any = transformers.Qwen3VLForConditionalGeneration(config)
    draw_weights(model, 0)
    return model.to(torch.float32 if tiny else torch.bfloat16).eval()


def make_inputs(model: Any, tiny: bool) -> dict[str, dict[str, Tensor]]:
    """By workload; grids are on the device, too."""
    known, names = (QUICK_WORKLOADS, TINY_NAMES) if tiny else (WORKLOADS, NAMES)
    tower = PackedModel("", model.model.visual)
    batches = {name: tower.batch(known["packed"][name][0]) for name in names}
    return {name: dict(zip(batch.mm_kwargs, *batch.calls, strict=True)) for name, batch in batches.items()}


def make_prompt(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Arguments of `generate` with these images."""
    counts = (inputs["image_grid_thw"].prod(1) // 4).tolist()
    tokens = [1, *(each for count in counts for each in (START, *[IMAGE] * count, END)), 7]
    ids = torch.tensor([tokens], device=inputs["pixel_values"].device)
    types = (ids == IMAGE).int()
    return {**inputs, "input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": types}


def features(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    return torch.cat(list(model.get_image_features(**inputs).pooler_output))


def execute(manager: fx.EncoderCudaGraphManager, width: int, inputs: dict[str, Tensor]) -> Tensor:
    """Without the deepstack features, which lie beside an item's embedding."""
    return torch.cat(manager.execute(inputs))[:, :width]


def made_so_far(model: nn.Module) -> dict[str, int]:
    captures = fx.stats(model).budgets.values()
    return {
        "traced": counters["stats"]["unique_graphs"] + counters["frames"]["total"],
        "captured": sum(bool(each.mode) for each in captures),
    }


@torch.no_grad()
def run(arguments: argparse.Namespace, record: Record) -> None:
    tiny = arguments.tiny
    model = make_model(tiny, arguments.device)
    width = model.config.text_config.hidden_size
    inputs = make_inputs(model, tiny)
    record.settings["tower"] = "tiny" if tiny else "qwen3-vl-8b"
    expected = {name: features(model, each) for name, each in inputs.items()}

    def add(way: str, call: Callable[[dict[str, Tensor]], Tensor]) -> None:
        for name, each in inputs.items():
            row = {"workload": name, "way": way, "error": relative_error(call(each), expected[name])}
            record(row | measure([functools.partial(call, each)], arguments.samples, 3))

    settings: dict[str, Any] = {"token_budgets": [4, 32], "passes": ["folded_adapters"]} if tiny else {}

    def accelerated(way: str, **further: Any) -> None:
        fx.accelerate(model, {**settings, **further})
        fx.warmup(model)
        add(way, functools.partial(features, model))

    add("eager", functools.partial(features, model))
    if arguments.adapters:
        accelerated("accelerate")
        fx.restore(model)
        add_adapters(model)
        expected.update({name: features(model, each) for name, each in inputs.items()})
        add("peft", functools.partial(features, model))
        kept = [name for name in settings.get("passes", PASSES) if name != "folded_adapters"]
        for suffix, further in (("", {}), (" without folded_adapters", {"passes": kept})):
            accelerated(f"accelerate, a{suffix}", **further)
            captured = take_turns(model, functools.partial(add, f"accelerate, b and a{suffix}"))
            record.settings[f"captured, b and a{suffix}"] = captured
        record.store()
        return
    accelerated("accelerate")
    record.settings["generate, accelerate"] = generate_again(model, inputs)
    fx.restore(model)
    manager = captured(fx.wrap(model.model.visual), **settings)
    add("execute", functools.partial(execute, manager, width))


def take_turns(model: Any, add: Callable[[Callable[[dict[str, Tensor]], Tensor]], None]) -> dict[str, int]:
    """Adds rows of calls with "b" and "a" in turn; returns what was traced and captured meanwhile."""
    model.set_adapter("b")
    fx.warmup(model)
    before = made_so_far(model)
    add(functools.partial(in_turn, model))
    made = {name: count - before[name] for name, count in made_so_far(model).items()}
    fx.restore(model)
    return made


def in_turn(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    for adapter in ("b", "a"):
        model.set_adapter(adapter)
        found = features(model, inputs)
    return found


def add_adapters(model: Any) -> None:
    """Two of rank 16 in the linear layers of the tower's blocks; "a" is active."""
    import peft

    lora = peft.LoraConfig(
        r=16, init_lora_weights=False, target_modules=r".*visual\.blocks.*\.(qkv|proj|linear_fc\d)"
    )
    for seed, name in enumerate("ab"):
        torch.manual_seed(seed)
        model.add_adapter(lora, name)
    model.set_adapter("a")
    model.requires_grad_(False).eval()


def generate_again(model: Any, inputs: dict[str, dict[str, Tensor]]) -> dict[str, int]:
    """What requests after the first of all still traced and captured."""
    prompts = [make_prompt(each) for each in inputs.values()]
    model.generate(**prompts[0], max_new_tokens=2, do_sample=False)
    before = made_so_far(model)
    for prompt in prompts:
        model.generate(**prompt, max_new_tokens=2, do_sample=False)
    return {name: count - before[name] for name, count in made_so_far(model).items()}
