"""An accelerated model through whatever its owner does with it: as if nothing were there.

Most of these need no captures: with `enabled: false` the same code serves, and the manager encodes eagerly.
"""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import disk_offload, dispatch_model
from accelerate.hooks import remove_hook_from_module
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from torch import nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import fxsplit_encoder as fx
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.hugging_face import served_towers_of
from fxsplit_encoder.planning.plan import MissReason
from tests.towers import tiny_towers
from tests.towers.tiny_inputs import Item

from .comparisons import assert_close, assert_same_bits, generated
from .conftest import config_of
from .models import MODELS, TOWER
from .tiny_model import randomize

UNCAPTURED = fx.EncoderConfig(enabled=False)
QWEN, LLAVA = "qwen3-vl", "llava-next"
both = pytest.mark.parametrize("case", [QWEN, LLAVA], indirect=True)
of_tiles = pytest.mark.parametrize("case", [LLAVA], indirect=True)


class Case:
    """A model and its untouched twin."""

    def __init__(self, name: str, directory: Path) -> None:
        self.tiny = MODELS[name]
        self.model, self.reference = self.tiny.load(directory), self.tiny.load(directory)
        fx.accelerate(self.model, UNCAPTURED)

    @property
    def tower(self) -> Any:
        (found,) = [module for module, _ in served_towers_of(self.model)]
        return found

    @property
    def reference_tower(self) -> Any:
        (name,) = [name for name, module in self.model.named_modules() if module is self.tower]
        return self.reference.get_submodule(name)

    def features(self, model: Any, **options: Any) -> Any:
        inputs = self.tiny.image_inputs(self.tiny.images[:2])
        dtype = model.dtype
        inputs["pixel_values"] = inputs["pixel_values"].to(dtype)
        return model.get_image_features(**inputs, **options)

    def assert_as_reference(self, tolerance: float = 1e-5, **options: Any) -> None:
        with torch.no_grad():
            got, expected = self.features(self.model, **options), self.features(self.reference, **options)
            assert_close(got, expected, tolerance)

    def misses(self) -> dict[MissReason, int]:
        """Those that tell why the tower itself was called for a whole call."""
        kept = dict(fx.stats(self.model).misses)
        kept.pop(MissReason.UNCAPTURED_OUTPUT, None)
        return kept


@pytest.fixture
def case(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> Case:
    """Of Qwen3-VL, unless a test names others."""
    name = getattr(request, "param", QWEN)
    return Case(name, checkpoint(name))


# --- accelerate and restore


def test_accelerating_twice_changes_nothing(case: Case) -> None:
    (before,) = served_towers_of(case.model)
    assert fx.accelerate(case.model, UNCAPTURED) is case.model
    (after,) = served_towers_of(case.model)
    assert after == before
    fx.accelerate(case.model, {"enabled": False, "token_budgets": [64]})
    (other,) = served_towers_of(case.model)
    assert other[1] is not before[1]
    case.assert_as_reference()


def test_restoring_twice_changes_nothing(case: Case) -> None:
    """Whoever kept the forward has the tower's own then."""
    tower, kept = case.tower, case.tower.forward
    case.assert_as_reference()
    inputs = case.tiny.image_inputs(case.tiny.images[:1])
    for _ in range(2):
        assert fx.restore(case.model) is case.model
        assert "forward" not in vars(tower)
        with pytest.raises(fx.InputError, match="stats: expected a model after accelerate"):
            fx.stats(case.model)
    with torch.no_grad():
        assert_same_bits(case.features(case.model), case.features(case.reference))
        got = kept(inputs["pixel_values"], inputs["image_grid_thw"])
        assert_same_bits(got, case.reference.model.visual(inputs["pixel_values"], inputs["image_grid_thw"]))
    fx.accelerate(case.model, UNCAPTURED)
    case.assert_as_reference()


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(fx.InputError, match="accelerate: expected a model of transformers; got 'a path'"):
        fx.accelerate("a path")


def test_a_model_whose_tower_is_wrapped_is_refused(case: Case) -> None:
    visual = case.reference.model.visual
    case.reference.model.visual = fx.wrap(visual)
    with pytest.raises(fx.InputError, match=r"whose model\.visual is wrapped; put the tower itself back"):
        fx.accelerate(case.reference)
    case.reference.model.visual = case.reference.model.visual.tower
    assert case.reference.model.visual is visual


def test_a_wrong_setting_is_refused_before_anything_is_touched(case: Case) -> None:
    before = served_towers_of(case.model)
    with pytest.raises(fx.ConfigError, match=r"modes: unknown option; did you mean mode\?"):
        fx.accelerate(case.model, {"modes": "full"})
    assert served_towers_of(case.model) == before


# --- copies, pickles, checkpoints


def pickled(model: Any) -> Any:
    data = pickle.dumps(model)
    assert b"fxsplit" not in data
    return pickle.loads(data)


def saved(model: Any) -> Any:
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled, saved])
@both
def test_a_copy_is_the_plain_model(duplicate: Callable[[Any], Any], case: Case) -> None:
    fx.warmup(case.model)
    copied = duplicate(case.model)
    assert not served_towers_of(copied)
    assert served_towers_of(case.model)
    with torch.no_grad():
        assert_same_bits(case.features(copied), case.features(case.reference))
    fx.accelerate(copied, UNCAPTURED)
    assert len(served_towers_of(copied)) == 1
    for parameter in copied.parameters():
        parameter.data.zero_()
    case.assert_as_reference()


@both
def test_a_model_that_was_accelerated_before_it_had_weights(case: Case) -> None:
    """As in a constructor, which `from_pretrained` calls on the meta device."""
    with torch.device("meta"):
        case.model = type(case.reference)(case.reference.config)
    fx.accelerate(case.model, UNCAPTURED).load_state_dict(case.reference.state_dict(), assign=True)
    for module, other in zip(case.model.modules(), case.reference.modules(), strict=True):
        for key, buffer in other.named_buffers(recurse=False):
            module.register_buffer(key, buffer.clone(), persistent=False)
    case.model.eval()
    case.assert_as_reference()
    assert set(case.misses()) == {MissReason.DISABLED}


@of_tiles
def test_a_capture_leaves_the_random_numbers_that_follow(case: Case) -> None:
    """What a model samples after its first image is what it samples without captures."""
    fx.accelerate(case.model, config_of(case.tiny))
    before = torch.get_rng_state()
    case.assert_as_reference()
    assert torch.equal(torch.get_rng_state(), before)
    assert fx.stats(case.model).hits > 0


# --- training


@both
def test_training_is_that_of_the_untouched_tower(case: Case) -> None:
    for checkpointing in (False, True):
        for model in (case.model, case.reference):
            model.train()
            if checkpointing:
                model.gradient_checkpointing_enable()
        assert_same_gradients(case)
    assert set(case.misses()) == {MissReason.GRADIENTS}
    for model in (case.model, case.reference):
        model.eval()
    case.assert_as_reference()


def assert_same_gradients(case: Case) -> None:
    for model in (case.model, case.reference):
        model.zero_grad()
        torch.cat(list(case.features(model).pooler_output)).sum().backward()
    got, expected = (
        {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
        for model in (case.model, case.reference)
    )
    assert expected
    assert_same_bits(got, expected)


def test_gradients_in_evaluation_are_those_of_the_untouched_tower(case: Case) -> None:
    assert_same_gradients(case)
    assert case.misses() == {MissReason.GRADIENTS: 2}
    case.model.requires_grad_(False)
    assert not case.features(case.model).pooler_output[0].requires_grad
    assert MissReason.DISABLED in case.misses()


def test_under_autocast_the_tower_itself_runs(case: Case) -> None:
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same_bits(case.features(case.model), case.features(case.reference))
    assert case.misses() == {MissReason.AUTOCAST: 2}


# --- code that others put into the tower


def test_hooks_of_the_tower_run_around_whatever_serves(case: Case) -> None:
    outputs: list[Any] = []
    case.tower.register_forward_hook(lambda module, args, output: outputs.append(output))
    case.assert_as_reference()
    assert len(outputs) == 1
    assert set(case.misses()) == {MissReason.DISABLED}


def test_hooks_inside_the_tower_run(case: Case, caplog: pytest.LogCaptureFixture) -> None:
    case.assert_as_reference()
    seen: list[Any] = []
    handle = case.tower.blocks[1].register_forward_hook(lambda module, args, output: seen.append(output))
    case.assert_as_reference()
    assert seen
    assert case.misses()[MissReason.FOREIGN_CODE] == 2
    assert "model.visual: encoded without captures: a hook of blocks.1" in caplog.text
    handle.remove()
    before = case.misses()
    case.assert_as_reference()
    assert case.misses()[MissReason.FOREIGN_CODE] == before[MissReason.FOREIGN_CODE]


@pytest.mark.parametrize("replaced", ["forward of a block", "attention function"])
def test_another_function_in_the_tower_runs(
    replaced: str, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    def halved(*args: Any, **kwargs: Any) -> Any:
        output, weights = sdpa_attention_forward(*args, **kwargs)
        return output / 2, weights

    monkeypatch.setitem(AttentionInterface._global_mapping, "halved", halved)
    for model, tower in ((case.model, case.tower), (case.reference, case.reference_tower)):
        own = tower.blocks[0].forward
        if replaced == "forward of a block":
            tower.blocks[0].forward = lambda *args, own=own, **kwargs: 2 * own(*args, **kwargs)
        else:
            model.set_attn_implementation({"vision_config": "halved"})
    case.assert_as_reference()
    assert case.misses() == {MissReason.FOREIGN_CODE: 2}


def test_adapters_of_the_language_model_leave_the_tower_captured(case: Case) -> None:
    peft = pytest.importorskip("peft")
    for model in (case.model, case.reference):
        torch.manual_seed(3)
        peft.get_peft_model(model, peft.LoraConfig(r=2, init_lora_weights=False, target_modules=["q_proj"]))
    inputs = case.tiny.inputs([case.tiny.images[:1]])
    assert torch.equal(generated(case.model, inputs), generated(case.reference, inputs))
    assert case.misses() == {MissReason.DISABLED: 1}


# --- accelerate's devices


@both
def test_device_hooks_from_before_leave_the_tower_captured(case: Case) -> None:
    """`test_reads.py` has those that come after."""
    fx.restore(case.model)
    dispatch_model(case.model, {"": "cpu"}, force_hooks=True)
    fx.accelerate(case.model, UNCAPTURED)
    case.assert_as_reference()
    assert set(case.misses()) == {MissReason.DISABLED}
    remove_hook_from_module(case.model, recurse=True)
    case.assert_as_reference()
    assert served_towers_of(case.model)
    fx.restore(case.model)
    with torch.no_grad():
        assert_same_bits(case.features(case.model), case.features(case.reference))


def test_an_offloaded_tower_runs_where_it_is(case: Case, tmp_path: Path) -> None:
    disk_offload(case.model, str(tmp_path), execution_device=torch.device("cpu"))
    case.assert_as_reference()
    assert case.misses() == {MissReason.OFFLOADED: 2}
    fx.restore(case.model)


# --- attention


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_attention_that_computes_the_same_is_ours(implementation: str, case: Case) -> None:
    for model in (case.model, case.reference):
        model.set_attn_implementation(implementation)
    case.assert_as_reference()
    assert set(case.misses()) == {MissReason.DISABLED}
    case.assert_as_reference(output_attentions=implementation == "eager")


# --- options and outputs


@pytest.mark.parametrize(
    "options",
    [
        {"output_hidden_states": True},
        {"return_dict": False},
        {"output_hidden_states": True, "return_dict": False},
        {"use_cache": False},
    ],
    ids=["hidden states", "tuple", "both", "neither"],
)
@both
def test_options_are_those_of_the_tower(options: dict[str, Any], case: Case) -> None:
    case.assert_as_reference(**options)
    assert set(case.misses()) == {MissReason.DISABLED}


def test_what_the_configuration_asks_for_is_there(case: Case) -> None:
    for tower in (case.tower, case.reference_tower):
        tower.config.output_hidden_states = True
        tower.config.return_dict = False
    case.assert_as_reference()
    assert len(case.features(case.model).hidden_states) == 3


@torch.no_grad()
def test_hidden_states_cost_nothing_until_they_are_read(case: Case) -> None:
    features = case.features(case.model, output_hidden_states=True)
    assert MissReason.UNCAPTURED_OUTPUT not in fx.stats(case.model).misses
    expected = case.features(case.reference, output_hidden_states=True)
    assert_same_bits(list(features.hidden_states), list(expected.hidden_states))
    assert_same_bits(features.last_hidden_state, expected.last_hidden_state)
    assert fx.stats(case.model).misses[MissReason.UNCAPTURED_OUTPUT] == 2  # both images


@torch.no_grad()
def test_metadata_that_the_caller_computed_goes_to_the_tower(case: Case) -> None:
    inputs = case.tiny.image_inputs(case.tiny.images[:1])
    cumulative = torch.tensor([0, 24], dtype=torch.int32)
    got = case.model.get_image_features(**inputs, image_cu_seqlens=cumulative)
    expected = case.reference.get_image_features(**inputs, image_cu_seqlens=cumulative)
    assert_same_bits(got, expected)
    assert case.misses() == {MissReason.OPTIONS: 1}


@torch.no_grad()
def test_inputs_that_no_capture_takes_are_the_towers_own_errors(case: Case) -> None:
    inputs = case.tiny.image_inputs(case.tiny.images[:1])
    pixels = inputs.pop("pixel_values")
    for wrong in (pixels[:-4], pixels[:, :-3]):
        errors = []
        for model in (case.model, case.reference):
            with pytest.raises(Exception) as caught:
                model.get_image_features(wrong, **inputs)
            errors.append((type(caught.value), str(caught.value)))
        assert errors[0] == errors[1]
    assert case.misses() == {MissReason.UNSUPPORTED_INPUT: 2}


@of_tiles
@pytest.mark.parametrize(
    ("trace", "reason"),
    [
        (lambda tower, _: torch.compile(tower, backend="eager", fullgraph=True), MissReason.OUTER_TRACE),
        (lambda tower, pixels: torch.jit.trace(tower, pixels, strict=False), MissReason.DISABLED),
    ],
    ids=["compiled", "traced"],
)
@torch.no_grad()
def test_whoever_traces_the_tower_gets_the_untouched_one(
    trace: Callable[..., Any], reason: MissReason, case: Case, fresh_dynamo: None
) -> None:
    images = [torch.randn(2, 3, 16, 16) for _ in range(2)]
    call = trace(case.tower, images[0])
    for pixels in images:
        expected = case.reference_tower(pixels)
        for field in ("last_hidden_state", "pooler_output"):
            torch.testing.assert_close(call(pixels)[field], expected[field])
    assert set(case.misses()) == {reason}


def test_the_forward_shows_the_towers_own_signature(case: Case) -> None:
    assert inspect.signature(case.tower.forward) == inspect.signature(case.reference_tower.forward)
    assert case.tower.forward.__doc__ == case.reference_tower.forward.__doc__


# --- promised bits


def test_images_get_the_bits_that_they_get_alone_and_other_calls_are_refused(one_thread: None) -> None:
    config = fx.EncoderConfig(invariant=True, mode="full", token_budgets=[16, 64], max_items_per_batch=4)
    tower: Any = fx.accelerate(tiny_towers.make("Qwen3VLVisionModel"), config)
    items = [Item("image", (1, side, 6), side) for side in (2, 4, 8)]
    inputs = tiny_towers.QWEN

    def encoded(chosen: list[Item]) -> list[torch.Tensor]:
        given = inputs.make(chosen)
        with torch.no_grad():
            output = tower(given["pixel_values"], given["image_grid_thw"])
        return list(output.pooler_output.split([inputs.tokens(item) for item in chosen]))

    together = encoded(items)
    for item, result in zip(items, together, strict=True):
        assert torch.equal(encoded([item])[0], result)
    assert served_towers_of(tower)
    assert fx.stats(tower).hit_rate == 1.0
    given = inputs.make(items)
    with (
        torch.autocast("cpu"),
        torch.no_grad(),
        pytest.raises(InputError, match=r"invariant: .*\(autocast\)"),
    ):
        tower(given["pixel_values"], given["image_grid_thw"])
    with pytest.raises(InputError, match=r"invariant: .*\(gradients\)"):
        tower(given["pixel_values"].requires_grad_(), given["image_grid_thw"])


# --- any sequence of what may happen to a tower, beside one that nobody accelerated


def tower() -> Any:
    model = transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**TOWER)).eval()
    randomize(model)
    return model


class Lifecycle(RuleBasedStateMachine):
    """Captures are switched off, so that nothing is traced: whatever is rebuilt is rebuilt all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.reference = tower()
        self.model = fx.accelerate(copy.deepcopy(self.reference), {"enabled": False})

    def both(self) -> tuple[Any, Any]:
        return self.model, self.reference

    @rule(count=st.integers(1, 3), hidden=st.booleans())
    def encode(self, count: int, hidden: bool) -> None:
        pixels = torch.randn(count, 3, 16, 16, dtype=self.reference.dtype)
        with torch.no_grad():
            got, expected = (each(pixels, output_hidden_states=hidden) for each in self.both())
        assert_close(got, expected)

    @rule(mode=st.booleans())
    def train(self, mode: bool) -> None:
        for each in self.both():
            each.train(mode)

    @rule(dtype=st.sampled_from([torch.float32, torch.float64]))
    def cast(self, dtype: torch.dtype) -> None:
        for each in self.both():
            each.to(dtype)

    @rule(factor=st.sampled_from([0.5, 1.0]), assign=st.booleans())
    def load(self, factor: float, assign: bool) -> None:
        state = {name: tensor * factor for name, tensor in self.reference.state_dict().items()}
        for each in self.both():
            each.load_state_dict(copy.deepcopy(state), assign=assign)

    @rule(block=st.integers(0, 1))
    def replace(self, block: int) -> None:
        linear = nn.Linear(32, 48, dtype=self.reference.dtype)
        for each in self.both():
            each.encoder.layers[block].mlp.fc1 = copy.deepcopy(linear)

    @rule(block=st.integers(0, 1))
    def hook(self, block: int) -> None:
        for each in self.both():
            layer = each.encoder.layers[block].mlp
            layer.register_forward_hook(lambda module, args, output: output * 0.5)

    @rule()
    def unhook(self) -> None:
        for each in self.both():
            for layer in each.encoder.layers:
                layer.mlp._forward_hooks.clear()  # a handle is that of a module, not of its copy

    @rule(budget=st.sampled_from([0, 34]))
    def accelerate(self, budget: int) -> None:
        settings: dict[str, Any] = {"enabled": False, "token_budgets": [budget] if budget else []}
        assert fx.accelerate(self.model, settings) is self.model

    @rule()
    def restore(self) -> None:
        fx.restore(self.model)

    @rule()
    def copy(self) -> None:
        self.model, kept = copy.deepcopy(self.model), self.model
        fx.restore(kept)

    @invariant()
    def the_parameters_are_the_models_own(self) -> None:
        assert_same_bits(self.model.state_dict(), self.reference.state_dict())


Lifecycle.TestCase.settings = settings(max_examples=12, stateful_step_count=12, derandomize=True)
TestLifecycle = Lifecycle.TestCase
