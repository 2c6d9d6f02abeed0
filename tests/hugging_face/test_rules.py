"""The dense rule: which modules are served without being named, and what is said of those that are not."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPooling

import fxsplit_encoder as fx
from fxsplit_encoder.hugging_face.lifecycle import find_towers
from fxsplit_encoder.hugging_face.rules import is_named
from fxsplit_encoder.planning.plan import MissReason

from .comparisons import assert_close
from .models import MODELS, SIZE, TOWER

SETTINGS = fx.EncoderConfig(piece_compiler="eager", mode="full")
UNTRACED = fx.EncoderConfig(compile=False, mode="full")


class Tower(transformers.PreTrainedModel):
    """Rows of patches, and a mean of them."""

    config_class = transformers.ViTConfig
    main_input_name = "pixel_values"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.patches = nn.Conv2d(3, 8, 4, 4)
        self.wide = nn.Linear(8, 5)
        self.post_init()

    def rows(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.patches(pixel_values).flatten(2).transpose(1, 2)

    def forward(self, pixel_values: torch.Tensor) -> Any:
        rows = self.rows(pixel_values)
        return BaseModelOutputWithPooling(last_hidden_state=rows, pooler_output=self.wide(rows.mean(1)))


def tower(kind: type[Tower] = Tower) -> Any:
    torch.manual_seed(0)
    return kind(transformers.ViTConfig(**TOWER)).eval()


def pixels(count: int = 2, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(count, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(count)).to(dtype)


def refusal(model: nn.Module) -> str:
    with pytest.raises(fx.UnsupportedTowerError) as caught:
        fx.accelerate(model)
    return str(caught.value)


# --- what is served


@torch.no_grad()
def test_fields_of_other_widths_come_from_one_replay() -> None:
    model, reference = fx.accelerate(tower(), SETTINGS), tower()
    for count in (1, 2, 3):
        assert_close(model(pixels(count)), reference(pixels(count)))
    stats = fx.stats(model)
    assert (stats.hits, stats.misses) == (3, {})


@torch.no_grad()
def test_a_pyramid_and_its_hidden_states() -> None:
    """Maps of several sizes, in a tuple; hidden states are captured once they were asked for."""
    config = transformers.ConvNextConfig(
        hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, image_size=32, out_indices=[1, 2]
    )
    images, reference = torch.randn(2, 3, 32, 32), transformers.ConvNextBackbone(config).eval()
    model = fx.accelerate(copy.deepcopy(reference), UNTRACED)
    for options in ({}, {"output_hidden_states": True}, {"output_hidden_states": True}):
        assert_close(model(images, **options), reference(images, **options))
    assert fx.stats(model).misses == {MissReason.UNCAPTURED_OUTPUT: 1}


@pytest.mark.parametrize("option", ["output_attentions", "return_dict"])
@torch.no_grad()
def test_fields_stand_where_the_tower_has_them(option: str) -> None:
    """Swin's line has others after attentions, and leaves them out of a tuple."""
    config = transformers.DonutSwinConfig(
        image_size=32, embed_dim=8, depths=[1, 1], num_heads=[1, 2], window_size=2
    )
    reference = transformers.DonutSwinModel(config).eval()
    both = fx.accelerate(copy.deepcopy(reference), {"enabled": False}), reference
    images, options = torch.randn(1, 3, 32, 32), {option: option == "output_attentions"}
    assert_close(*(each(images, output_hidden_states=True, **options) for each in both))


@torch.no_grad()
def test_a_tower_may_have_hidden_states_of_one_size_alone() -> None:
    """As Hiera; images of another size go to the tower itself, which is not asked for them."""

    class Part(Tower):
        def forward(self, pixel_values: torch.Tensor, output_hidden_states: bool = False) -> Any:
            output = super().forward(pixel_values)
            if output_hidden_states:
                output.hidden_states = (output.last_hidden_state.view(-1, 16, 8),)
            return output

    model = fx.accelerate(tower(Part), {"enabled": False, "exact_min_hits": 1})
    for images in (pixels(), torch.randn(1, 3, 24, 24)):
        assert_close(model(images), tower(Part)(images))
    assert fx.stats(model).misses == {MissReason.DISABLED: 1, MissReason.UNSUPPORTED_INPUT: 1}


@torch.no_grad()
def test_images_of_another_dtype() -> None:
    """Are served where the tower converts them; an error stays the tower's."""

    class Converts(Tower):
        def forward(self, pixel_values: torch.Tensor) -> Any:
            return super().forward(pixel_values.to(self.dtype))

    class Returns(Tower):
        def forward(self, pixel_values: torch.Tensor) -> Any:
            return BaseModelOutput(self.rows(pixel_values.to(self.dtype)).to(pixel_values.dtype))

    for kind, hits in ((Converts, 1), (Returns, 0)):
        model = fx.accelerate(tower(kind), SETTINGS)
        assert_close(model(pixels(2, torch.float16)), tower(kind)(pixels(2, torch.float16)))
        assert fx.stats(model).hits == hits
    with pytest.raises(RuntimeError, match=r"[Ii]nput type"):
        fx.accelerate(tower(), SETTINGS)(pixels(2, torch.float16))


# --- what is left alone


def test_a_tower_of_audio_is_left_alone() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            with torch.device("meta"):
                self.audio = transformers.WhisperModel(transformers.WhisperConfig())
            self.image = tower()

    (found,), refusals = find_towers(Both())
    assert (found.name, refusals) == ("image", [])


# --- what is refused


def test_a_text_model_has_words_of_its_own() -> None:
    config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=64)
    text = refusal(transformers.GPT2Model(config))
    assert text.startswith("accelerate: no vision tower was found in GPT2Model: none of its modules takes")
    assert "looked at the model (GPT2Model), wte (Embedding)" in text


# By the name of its class: the forward of a tower, and why it is refused.
REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "Random": (
        lambda self, pixel_values: BaseModelOutput(self.rows(pixel_values) + torch.rand(1)),
        "it draws random numbers: aten.rand.default",
    ),
    "Flat": (
        lambda self, pixel_values: BaseModelOutput(self.rows(pixel_values).flatten(0, 1)),
        "its last_hidden_state has the shape (16, 8) for one image and (32, 8) for two, not a row",
    ),
    "Bare": (
        lambda self, pixel_values: self.rows(pixel_values),
        "it returns a Tensor, not an output with fields",
    ),
    "Gridded": (
        lambda self, pixel_values, grid_thw: BaseModelOutput(self.rows(pixel_values)),
        "its forward makes no cu_seqlens by transformers.vision_utils",
    ),
    "Reads": (
        lambda self, pixel_values: BaseModelOutput(self.rows(pixel_values) * pixel_values.sum().item()),
        "a call with images of (1, 3, 16, 16) raises DataDependentOutputException: ",
    ),
    "Codes": (
        lambda self, pixel_values: BaseModelOutput(self.rows(pixel_values).argmax(-1)),
        "its fields are of torch.int64; a capture has one dtype, of floating point numbers",
    ),
}


def refused(name: str) -> Any:
    return tower(type(name, (Tower,), {"forward": REFUSED[name][0]}))


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_names_the_tower_and_the_reason(name: str) -> None:
    text = refusal(nn.ModuleDict({"encoder": refused(name)}))
    assert f"has no vision tower that can be served: encoder ({name}): {REFUSED[name][1]}" in text
    assert "Wrap it by wrap(tower, DenseTowerSpec(...))" in text


def test_another_tower_beside_a_served_one_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.ModuleDict({"first": tower(), "second": refused("Gridded")})
    with caplog.at_level(logging.WARNING, logger="fxsplit_encoder.hugging_face"):
        fx.accelerate(fx.accelerate(model, SETTINGS), SETTINGS)
    (record,) = caplog.records
    assert record.getMessage() == f"accelerate: left alone: second (Gridded): {REFUSED['Gridded'][1]}"


@torch.no_grad()
def test_images_that_read_one_another_are_not_served(caplog: pytest.LogCaptureFixture) -> None:
    """Which no shape shows; the tower itself serves them, and says so once."""

    class Mixes(Tower):
        def forward(self, pixel_values: torch.Tensor) -> Any:
            return super().forward(pixel_values + pixel_values.mean(0, keepdim=True))

    model = fx.accelerate(tower(Mixes), SETTINGS)
    with caplog.at_level(logging.WARNING, logger="fxsplit_encoder.hugging_face"):
        for _ in "12":
            assert_close(model(pixels()), tower(Mixes)(pixels()))
    assert fx.stats(model).misses == {MissReason.UNSUPPORTED_GRAPH: 2}
    (record,) = caplog.records
    assert record.getMessage().startswith("the model: encoded without captures: Mixes: its output changes by")


# --- which towers a model has


@pytest.mark.parametrize("name", MODELS)
def test_every_model_has_one_tower(name: str) -> None:
    with torch.device("meta"):
        model = MODELS[name].kind(MODELS[name].config())
    (found,), refusals = find_towers(model)
    assert is_named(found.module)
    assert not refusals
    assert model.get_submodule(found.name) is found.module
    assert find_towers(torch.compile(model)) == ([found], [])


@torch.no_grad()
def test_two_towers_of_a_model_are_both_accelerated() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            towers = (transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**TOWER)) for _ in "12")
            self.first, self.second = towers
            self.same = self.first

    model = Two().eval()
    assert [found.name for found in find_towers(model)[0]] == ["first", "second"]
    pixels = torch.randn(1, 3, 16, 16)
    expected = [tower(pixels).pooler_output for tower in (model.first, model.second)]
    fx.accelerate(model, {"enabled": False})
    for tower, value in zip((model.same, model.second), expected, strict=True):
        torch.testing.assert_close(tower(pixels).pooler_output, value, rtol=0, atol=1e-5)
    assert fx.stats(model).items == 2
    fx.restore(model)
    assert "forward" not in vars(model.first)
