"""An accelerated model through whatever its owner does with it: as if nothing were there.

Most of these need no captures: with `enabled: false` the same code serves, and the manager encodes eagerly.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import fxsplit_encoder as fx
from fxsplit_encoder.integrations.hugging_face import served_towers_of
from fxsplit_encoder.planning import MissReason

from .comparisons import assert_close, assert_same_bits, generated
from .conftest import Loaded, config_of
from .models import MODELS

UNCAPTURED = fx.EncoderConfig(enabled=False)
QWEN, LLAVA = "qwen3-vl", "llava-next"
both = pytest.mark.parametrize("name", [QWEN, LLAVA])


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
def make_case(checkpoint: Callable[[str], Path]) -> Callable[[str], Case]:
    return lambda name: Case(name, checkpoint(name))


@pytest.fixture
def case(make_case: Callable[[str], Case]) -> Case:
    return make_case(QWEN)


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
    tower = case.tower
    case.assert_as_reference()
    assert fx.restore(case.model) is case.model
    assert "forward" not in vars(tower)
    assert fx.restore(case.model) is case.model
    with torch.no_grad():
        assert_same_bits(case.features(case.model), case.features(case.reference))
    fx.accelerate(case.model, UNCAPTURED)
    case.assert_as_reference()


def test_whoever_kept_the_forward_gets_the_towers_own_after_restoring(case: Case) -> None:
    kept = case.tower.forward
    inputs = case.tiny.image_inputs(case.tiny.images[:1])
    fx.restore(case.model)
    with torch.no_grad():
        got = kept(inputs["pixel_values"], inputs["image_grid_thw"])
        expected = case.reference.model.visual(inputs["pixel_values"], inputs["image_grid_thw"])
    assert_same_bits(got, expected)


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        ("a path", fx.InputError, "accelerate: expected a model of transformers; got 'a path'"),
        (nn.Linear(2, 2), fx.UnsupportedTowerError, "accelerate: Linear has no vision tower that is known"),
    ],
)
def test_what_is_no_model_with_a_tower_is_refused(model: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        fx.accelerate(model)


def test_a_model_whose_tower_is_wrapped_is_refused(case: Case) -> None:
    visual = case.reference.model.visual
    case.reference.model.visual = fx.wrap(visual)
    with pytest.raises(fx.InputError, match=r"whose model\.visual is wrapped; put the tower itself back"):
        fx.accelerate(case.reference)
    case.reference.model.visual = case.reference.model.visual.tower
    assert case.reference.model.visual is visual


def test_a_wrong_setting_is_refused_before_anything_is_touched(case: Case) -> None:
    before = served_towers_of(case.model)
    with pytest.raises(fx.ConfigError, match=r"packing: does not apply behind torch\.compile"):
        fx.accelerate(case.model, {"packing": "greedy"}, compile=True)
    with pytest.raises(fx.ConfigError, match=r"modes: unknown option; did you mean mode\?"):
        fx.accelerate(case.model, {"modes": "full"})
    assert served_towers_of(case.model) == before


def test_what_has_no_statistics_is_refused() -> None:
    for target in (nn.Linear(2, 2), "a path"):
        with pytest.raises(fx.InputError, match="stats: expected a model after accelerate"):
            fx.stats(target)


# --- copies, pickles, checkpoints


@both
def test_a_copy_is_the_plain_model(name: str, make_case: Callable[[str], Case]) -> None:
    case = make_case(name)
    case.assert_as_reference()
    copied = copy.deepcopy(case.model)
    assert not served_towers_of(copied)
    assert served_towers_of(case.model)
    with torch.no_grad():
        assert_same_bits(case.features(copied), case.features(case.reference))
    for parameter in copied.parameters():
        parameter.data.zero_()
    case.assert_as_reference()


@both
def test_a_pickle_is_the_plain_model_and_needs_no_library(
    name: str, make_case: Callable[[str], Case]
) -> None:
    case = make_case(name)
    fx.warmup(case.model)
    data = pickle.dumps(case.model)
    assert b"fxsplit" not in data
    saved = io.BytesIO()
    torch.save(case.model, saved)
    saved.seek(0)
    for unpickled in (pickle.loads(data), torch.load(saved, weights_only=False)):
        assert not served_towers_of(unpickled)
        with torch.no_grad():
            assert_same_bits(case.features(unpickled), case.features(case.reference))
        fx.accelerate(unpickled, UNCAPTURED)
        assert len(served_towers_of(unpickled)) == 1


def test_new_weights_are_used(loaded: Callable[[str], Loaded]) -> None:
    """Copied in place, and put in the place of the old ones: over captures, which read them by address."""
    model, tiny = loaded(QWEN).model, loaded(QWEN).tiny
    old = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    new = {name: tensor * 1.1 for name, tensor in old.items()}
    inputs = tiny.image_inputs(tiny.images[:2])
    other = tiny.load(loaded(QWEN).directory)
    other.load_state_dict(new)
    try:
        for assign in (False, True):
            model.load_state_dict(new, assign=assign)
            with torch.no_grad():
                assert_close(tiny.features(model, inputs), tiny.features(other, inputs))
            model.load_state_dict(old)
            with torch.no_grad():
                assert_close(tiny.features(model, inputs), tiny.features(loaded(QWEN).reference, inputs))
    finally:
        model.load_state_dict(old)


@both
def test_a_model_that_was_accelerated_before_it_had_weights(
    name: str, make_case: Callable[[str], Case]
) -> None:
    """As in a constructor, which `from_pretrained` calls on the meta device."""
    case = make_case(name)
    with torch.device("meta"):
        case.model = type(case.reference)(case.reference.config)
    fx.accelerate(case.model, UNCAPTURED).load_state_dict(case.reference.state_dict(), assign=True)
    for module, other in zip(case.model.modules(), case.reference.modules(), strict=True):
        for key, buffer in other.named_buffers(recurse=False):
            module.register_buffer(key, buffer.clone(), persistent=False)
    case.model.eval()
    case.assert_as_reference()
    assert set(case.misses()) == {MissReason.DISABLED}


@both
def test_another_dtype_is_encoded_in_it(name: str, make_case: Callable[[str], Case]) -> None:
    case = make_case(name)
    case.assert_as_reference()
    for change in (lambda m: m.double(), lambda m: m.to(torch.float32), lambda m: m.bfloat16()):
        change(case.model)
        change(case.reference)
        case.assert_as_reference(0.1 if case.model.dtype == torch.bfloat16 else 1e-5)
    assert set(case.misses()) == {MissReason.DISABLED}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "compile"), [(QWEN, False), (LLAVA, False), (LLAVA, True)])
def test_a_capture_leaves_the_random_numbers_that_follow(
    name: str, compile: bool, make_case: Callable[[str], Case]
) -> None:
    """What a model samples after its first image is what it samples without captures."""
    case = make_case(name)
    fx.accelerate(case.model, config_of(case.tiny), compile=compile)
    before = torch.get_rng_state()
    case.assert_as_reference()
    assert torch.equal(torch.get_rng_state(), before)
    assert fx.stats(case.model).hits > 0


# --- training


@both
def test_training_is_that_of_the_untouched_tower(name: str, make_case: Callable[[str], Case]) -> None:
    case = make_case(name)
    for checkpointing in (False, True):
        for model in (case.model, case.reference):
            model.train()
            if checkpointing:
                model.gradient_checkpointing_enable()
            model.zero_grad()
            total_of(case.features(model)).backward()
        gradients = dict(case.model.named_parameters())
        for key, parameter in case.reference.named_parameters():
            if parameter.grad is not None:
                assert torch.equal(gradients[key].grad, parameter.grad), key
    assert set(case.misses()) == {MissReason.GRADIENTS}
    for model in (case.model, case.reference):
        model.eval()
    case.assert_as_reference()


def total_of(features: Any) -> torch.Tensor:
    parts = features.pooler_output
    return sum(part.sum() for part in parts)  # type: ignore[no-any-return]


def test_gradients_in_evaluation_are_those_of_the_untouched_tower(case: Case) -> None:
    total_of(case.features(case.model)).backward()
    total_of(case.features(case.reference)).backward()
    weights = [tower.blocks[0].mlp.linear_fc1.weight for tower in (case.tower, case.reference_tower)]
    assert torch.equal(weights[0].grad, weights[1].grad)
    assert case.misses() == {MissReason.GRADIENTS: 2}
    case.model.requires_grad_(False)
    case.reference.requires_grad_(False)
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


def test_a_module_in_anothers_place_is_used(case: Case) -> None:
    case.assert_as_reference()
    for tower in (case.tower, case.reference_tower):
        torch.manual_seed(0)
        tower.merger.linear_fc2 = nn.Linear(128, 32)
    case.assert_as_reference()
    assert set(case.misses()) == {MissReason.DISABLED}


def test_another_forward_of_a_block_runs(case: Case) -> None:
    for tower in (case.tower, case.reference_tower):
        own = tower.blocks[0].forward
        tower.blocks[0].forward = lambda *args, own=own, **kwargs: 2 * own(*args, **kwargs)
    case.assert_as_reference()
    assert case.misses() == {MissReason.FOREIGN_CODE: 2}


def adapters(**options: Any) -> Any:
    peft = pytest.importorskip("peft")
    return peft.LoraConfig(r=2, init_lora_weights=False, **options)


@pytest.mark.parametrize("accelerated", ["before", "after"])
def test_adapter_layers_in_the_tower_run(accelerated: str, case: Case) -> None:
    peft = pytest.importorskip("peft")
    lora = adapters(target_modules=["linear_fc1", "qkv"])
    if accelerated == "after":
        fx.restore(case.model)
    torch.manual_seed(3)
    model = peft.get_peft_model(case.model, lora)
    torch.manual_seed(3)
    reference = peft.get_peft_model(case.reference, lora)
    fx.accelerate(model, UNCAPTURED)
    case.assert_as_reference()
    assert case.misses() == {MissReason.FOREIGN_CODE: 2}
    with model.disable_adapter(), reference.disable_adapter():
        case.assert_as_reference()
    model.merge_and_unload()
    reference.merge_and_unload()
    case.assert_as_reference()
    assert MissReason.DISABLED in case.misses()  # the captures' code again


def test_adapters_of_the_language_model_leave_the_tower_captured(case: Case) -> None:
    peft = pytest.importorskip("peft")
    lora = adapters(target_modules=["q_proj", "v_proj"])
    for model in (case.model, case.reference):
        torch.manual_seed(3)
        peft.get_peft_model(model, lora)
    inputs = case.tiny.inputs([case.tiny.images[:1]])
    assert torch.equal(generated(case.model, inputs), generated(case.reference, inputs))
    assert case.misses() == {MissReason.DISABLED: 1}


# --- accelerate's devices


@pytest.mark.parametrize("hooked", ["before", "after"])
@both
def test_device_hooks_leave_the_tower_captured(
    name: str, hooked: str, make_case: Callable[[str], Case]
) -> None:
    library = pytest.importorskip("accelerate")
    case = make_case(name)
    if hooked == "before":
        fx.restore(case.model)
    library.dispatch_model(case.model, {"": "cpu"}, force_hooks=True)
    fx.accelerate(case.model, UNCAPTURED)
    case.assert_as_reference()
    assert set(case.misses()) == {MissReason.DISABLED}
    if hooked == "before":
        library.hooks.remove_hook_from_module(case.model, recurse=True)
        case.assert_as_reference()
        assert served_towers_of(case.model)
    fx.restore(case.model)
    with torch.no_grad():
        assert_same_bits(case.features(case.model), case.features(case.reference))


def test_an_offloaded_tower_runs_where_it_is(case: Case, tmp_path: Path) -> None:
    library = pytest.importorskip("accelerate")
    library.disk_offload(case.model, str(tmp_path), execution_device=torch.device("cpu"))
    case.assert_as_reference()
    assert case.misses() == {MissReason.OFFLOADED: 2}
    fx.restore(case.model)


def test_a_device_map_of_transformers(checkpoint: Callable[[str], Path]) -> None:
    pytest.importorskip("accelerate")
    from transformers import Qwen3VLForConditionalGeneration

    case = Case(QWEN, checkpoint(QWEN))
    case.model = Qwen3VLForConditionalGeneration.from_pretrained(checkpoint(QWEN), device_map="auto").eval()
    fx.accelerate(case.model, UNCAPTURED)
    case.assert_as_reference()
    assert case.misses() == {MissReason.DISABLED: 2}


# --- attention


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_attention_that_computes_the_same_is_ours(implementation: str, case: Case) -> None:
    case.model.set_attn_implementation(implementation)
    case.reference.set_attn_implementation(implementation)
    case.assert_as_reference()
    assert set(case.misses()) == {MissReason.DISABLED}


@pytest.fixture
def halved_attention() -> Iterator[str]:
    """An attention function of the user's own."""

    def halved(*args: Any, **kwargs: Any) -> Any:
        output, weights = sdpa_attention_forward(*args, **kwargs)
        return output / 2, weights

    AttentionInterface.register("halved", halved)
    yield "halved"
    AttentionInterface._global_mapping.pop("halved")


def test_an_attention_function_of_the_users_own_runs(halved_attention: str, case: Case) -> None:
    for model in (case.model, case.reference):
        model.set_attn_implementation({"vision_config": halved_attention})
    case.assert_as_reference()
    assert case.misses() == {MissReason.FOREIGN_CODE: 2}


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
def test_options_are_those_of_the_tower(
    name: str, options: dict[str, Any], make_case: Callable[[str], Case]
) -> None:
    case = make_case(name)
    case.assert_as_reference(**options)
    assert set(case.misses()) == {MissReason.DISABLED}


def test_weights_of_attention_are_those_of_the_tower(case: Case) -> None:
    for model in (case.model, case.reference):
        model.set_attn_implementation("eager")
    case.assert_as_reference(output_attentions=True)


def test_what_the_configuration_asks_for_is_there(case: Case) -> None:
    for tower in (case.tower, case.reference_tower):
        tower.config.output_hidden_states = True
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


def test_a_user_who_compiles_the_tower_gets_the_untouched_one(
    make_case: Callable[[str], Case], fresh_dynamo: None
) -> None:
    case = make_case(LLAVA)
    pixels = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        got = torch.compile(case.tower, backend="eager", fullgraph=True)(pixels)
        assert_close(got, case.reference_tower(pixels))
    assert set(case.misses()) == {MissReason.OUTER_TRACE}


def test_a_trace_is_of_the_untouched_tower(make_case: Callable[[str], Case]) -> None:
    case = make_case(LLAVA)
    pixels = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        traced = torch.jit.trace(case.tower, pixels, strict=False)
        expected = case.reference_tower(pixels).last_hidden_state
        torch.testing.assert_close(traced(pixels)["last_hidden_state"], expected)
        other = torch.randn(2, 3, 16, 16)
        expected = case.reference_tower(other).last_hidden_state
        torch.testing.assert_close(traced(other)["last_hidden_state"], expected)


def test_the_forward_shows_the_towers_own_signature(case: Case) -> None:
    import inspect

    assert inspect.signature(case.tower.forward) == inspect.signature(case.reference_tower.forward)
    assert case.tower.forward.__doc__ == case.reference_tower.forward.__doc__
