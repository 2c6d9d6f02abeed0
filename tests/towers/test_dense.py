"""What all dense towers share, on a tower that comes from no library."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import (
    CLIPVisionConfig,
    CLIPVisionModel,
    Dinov2Config,
    Dinov2Model,
    SiglipVisionConfig,
    SiglipVisionModel,
)

import fxsplit_encoder as fx
from fxsplit_encoder.capture.buffers import parts_of
from fxsplit_encoder.towers.tiles import MASKED_ATTENTION_TAKES_UNKNOWN_SIZES, DenseTower, View, tiles

from .conformance import Case, assert_compiled_once, assert_modes_agree
from .dense_models import SHAPE, BiasedTower, PlainTower, assert_close, random_tiles
from .random_weights import randomize
from .tiny_inputs import TileInputs

TOKENS = 4
SPEC = fx.DenseTowerSpec(SHAPE, TOKENS, 16, output=lambda result: result["features"], rows=slice(1, None))


def joined(value: Any) -> Tensor:
    """The parts of a value in one tensor."""
    return torch.cat(list(parts_of(value)))


class ClipTower(DenseTower):
    """Takes videos too."""

    modalities = ("image", "video")
    max_tiles = 8

    def call(self, tiles: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.tower(tiles, *args, **kwargs)

    def features(self, tiles: Tensor) -> Tensor:
        features: Tensor = self.tower(tiles)["features"]
        return features[:, 1:]


def clip_tower() -> ClipTower:
    tower = randomize(PlainTower())
    return ClipTower(tower, View("pixel_values", SHAPE, TOKENS), 16)


@pytest.fixture(scope="module")
def wrapped() -> Any:
    return fx.wrap(randomize(PlainTower()), SPEC)


@pytest.fixture(scope="module")
def reference() -> Any:
    return randomize(PlainTower())


@pytest.fixture(scope="module")
def case(wrapped: Any) -> Case:
    return Case("PlainTower", wrapped, TileInputs())


def test_every_mode_and_batch(case: Case) -> None:
    assert_modes_agree(case)
    program = case.manager.programs["default"]
    assert program is not None
    assert program.program.padding.proved
    assert program.program.accepts({str(program.program.token_symbol): 1})
    assert (len(program.program.splits), len(program.program.pieces)) == (2, 3)
    assert case.manager.plan({"pixel_values": random_tiles(3)}).hits == 3


def test_one_trace_through_torch_compile(case: Case) -> None:
    assert_compiled_once(case)


@pytest.mark.parametrize("given", [[4, 13], []], ids=["given", "the tower's"])
@torch.no_grad()
def test_budgets_of_the_backend_count_output_tokens(
    given: list[int], wrapped: Any, fresh_dynamo: None
) -> None:
    others = fx.backend.dispatchers()
    options = {"token_budgets": given} if given else {}
    assert fx.warmup(torch.compile(wrapped, backend="encoder_cg", options=options))
    (dispatcher,) = [d for d in fx.backend.dispatchers() if d not in others]
    (ladder,) = [program.ladder for program in dispatcher.programs.values()]
    shapes = {b: c.inputs.buffers.popitem()[1].tensor.shape[0] for b, c in ladder.captured.items()}
    listed = fx.EncoderCudaGraphManager(wrapped).limits.path_budgets["default"]
    assert listed[:4] == (4, 8, 12, 16) and listed[-1] == 64
    assert shapes == {budget: budget // 4 for budget in given or listed}


@torch.no_grad()
def test_a_budget_below_one_tile_is_left_out(wrapped: Any, fresh_dynamo: None) -> None:
    manager = fx.EncoderCudaGraphManager(wrapped, fx.EncoderConfig(token_budgets=(3, 8), mode="breakable"))
    manager.capture()
    assert list(manager.budget_graphs["default"]) == [8]
    assert any("token_budgets: 3 has no room for a tile of PlainTower" in note for note in manager.reports)
    compiled = torch.compile(wrapped, backend="encoder_cg", options={"token_budgets": [3, 8]})
    with pytest.raises(
        fx.ConfigError, match="token_budgets: 3 has no capacity for an image; allowed: at least 4"
    ):
        compiled(random_tiles(1))


def test_a_single_budget_of_a_single_tile_is_compiled(
    wrapped: Any, reference: Any, fresh_dynamo: None
) -> None:
    config = fx.EncoderConfig(token_budgets=(TOKENS,), mode="full")
    manager = fx.EncoderCudaGraphManager(wrapped, config, log_interval=0)
    manager.capture()
    assert manager.reports == []
    assert manager.programs["default"] is not None
    x = random_tiles(3)
    assert_close(manager.execute({"pixel_values": x}), list(reference(x)["features"][:, 1:]))
    assert manager.stats().hits == 3


def test_one_tile_at_its_exact_shape_runs_the_program(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = case.manager_in("none")
    eager = manager.execute({"pixel_values": random_tiles(2)})
    monkeypatch.setattr(case.tower, "encoder_eager_forward", None)
    assert_close(manager.execute({"pixel_values": random_tiles(2)[:1]}), eager[:1])


def test_the_module_is_the_tower_seen_from_outside(wrapped: Any, reference: Any) -> None:
    assert isinstance(wrapped, fx.SupportsEncoderCudaGraph)
    assert wrapped.heads == wrapped.tower.heads == 2
    x = random_tiles(2)
    for output in (wrapped(x, 3.0), wrapped(pixel_values=x, scale=3.0)):
        torch.testing.assert_close(output["features"], 3 * reference(x)["features"], rtol=0, atol=1e-5)
    assert wrapped(*wrapped.example_inputs())["features"].shape == (1, 5, 16)
    config = wrapped.get_encoder_cudagraph_config()
    assert (config.modalities, config.buffer_keys, config.out_hidden_size) == (
        *(["image"], ["pixel_values"]),
        16,
    )
    assert wrapped.get_encoder_cudagraph_budget_range(None) == (4, 64)
    assert (wrapped.get_max_frames_per_video(), clip_tower().get_max_frames_per_video()) == (1, 8)
    assert clip_tower().get_encoder_cudagraph_config().modalities == ["image", "video"]


@pytest.mark.parametrize("container", [list, tuple, torch.tensor])
@pytest.mark.parametrize("key", ["num_patches", "image_num_patches"])
def test_images_of_several_tiles(wrapped: Any, key: str, container: Any) -> None:
    inputs = {"pixel_values": random_tiles(6), key: container([2, 1, 3])}
    specs = wrapped.get_encoder_cudagraph_item_specs(inputs)
    assert [(s.input_size, s.output_tokens) for s in specs] == [(2, 8), (1, 4), (3, 12)]


def test_without_counts_every_tile_is_an_image(wrapped: Any) -> None:
    specs = wrapped.get_encoder_cudagraph_item_specs({"pixel_values": random_tiles(3)})
    assert [s.output_tokens for s in specs] == [4, 4, 4]
    assert wrapped.get_encoder_cudagraph_item_specs({}) == []
    assert wrapped.get_encoder_cudagraph_item_specs({"pixel_values": random_tiles(0)}) == []


VIDEOS = random_tiles(6, seed=9)


@pytest.mark.parametrize(
    ("videos", "frames"),
    [
        ({"pixel_values_videos": VIDEOS.view(2, 3, *SHAPE)}, [3, 3]),
        ({"pixel_values_videos": [VIDEOS[:1], VIDEOS[1:]]}, [1, 5]),
        ({"pixel_values_videos": VIDEOS, "video_num_patches": torch.tensor([4, 2])}, [4, 2]),
    ],
)
def test_videos_follow_the_images(videos: dict[str, Any], frames: list[int]) -> None:
    tower = clip_tower()
    images = random_tiles(3)
    inputs = {"pixel_values": images, "num_patches": [1, 2], **videos}
    specs = tower.get_encoder_cudagraph_item_specs(inputs)
    assert [s.input_size for s in specs] == [1, 2, *frames]
    assert tower.get_input_modality(inputs) == "video"
    assert tower.get_input_modality({"pixel_values": images}) == "image"
    selected = tower.select_encoder_cudagraph_items(inputs, [3, 0])
    assert selected["num_patches"] == [frames[1], 1]
    assert torch.equal(joined(selected["pixel_values"]), torch.cat([VIDEOS[frames[0] :], images[:1]]))
    alone = tower.prepare_encoder_cudagraph_replay_buffers(videos, 4, 8).values["pixel_values"]
    assert alone is not None
    assert torch.equal(joined(alone), VIDEOS)


@given(
    st.lists(st.integers(1, 4), max_size=5).flatmap(
        lambda c: st.tuples(st.just(c), st.permutations(range(len(c))))
    )
)
@settings(max_examples=40)
def test_any_selection_keeps_the_tiles_of_its_items(counts_and_order: Any) -> None:
    counts, order = counts_and_order
    tower = clip_tower()
    x = torch.arange(float(sum(counts))).view(-1, 1, 1, 1).expand(-1, *SHAPE)
    first = sum(counts[: len(counts) // 2])
    inputs = {
        "pixel_values": x[:first],
        "num_patches": counts[: len(counts) // 2],
        "pixel_values_videos": list(x[first:].split(counts[len(counts) // 2 :])),
    }
    for chosen in (order, order[:1], order[1:]):
        selected = tower.select_encoder_cudagraph_items(inputs, list(chosen))
        parts = x.split(counts) if counts else []
        expected = torch.cat([parts[i] for i in chosen]) if chosen else x[:0]
        assert torch.equal(joined(selected["pixel_values"]), expected)
        assert selected["num_patches"] == [counts[i] for i in chosen]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (
            {"pixel_values": torch.zeros(2, 3, 8, 8)},
            r"pixel_values: expected \(tiles, 3, 16, 16\); got \(2, 3",
        ),
        ({"pixel_values": torch.zeros(3, 16)}, r"expected \(tiles, 3, 16, 16\); got \(3, 16\)"),
        ({"pixel_values": random_tiles(3), "num_patches": [1, 1]}, r"add up to its 3 tiles; got \[1, 1\]"),
        ({"pixel_values": random_tiles(3), "num_patches": [3, 0]}, r"at least 1 .*; got \[3, 0\]"),
        ({"pixel_values": random_tiles(3), "num_patches": torch.tensor([1.5, 1.5])}, r"got \[1.5, 1.5\]"),
        ({"pixel_values_videos": random_tiles(3)}, "of 4 dimensions needs video_num_patches"),
        (
            {"pixel_values_videos": random_tiles(3), "video_num_patches": [2]},
            "pixel_values_videos: .* 3 tiles",
        ),
        ({"pixel_values_videos": torch.zeros(1, 2, 3, 8, 8)}, "pixel_values_videos: expected"),
    ],
)
def test_inputs_that_contradict_one_another(inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(fx.InputError, match=message):
        clip_tower().get_encoder_cudagraph_item_specs(inputs)


def test_another_dtype_and_pixels_of_any_dtype(fresh_dynamo: None) -> None:
    tower = randomize(PlainTower()).double()
    reference = copy.deepcopy(tower)
    config = fx.EncoderConfig(token_budgets=(8,), mode="breakable")
    manager = fx.EncoderCudaGraphManager(fx.wrap(tower, SPEC), config, log_interval=0)
    x = random_tiles(4)
    expected = list(reference(x.double())["features"][:, 1:])
    assert_close(manager.execute({"pixel_values": x}), expected, 1e-9)  # nothing is captured yet
    manager.capture()
    assert_close(manager.execute({"pixel_values": x}), expected, 1e-9)


def test_the_marker_of_tiles_is_an_op_like_any_other() -> None:
    torch.library.opcheck(tiles, (random_tiles(2), 4, 16))


# --- Hugging Face's dense towers by a declaration: SigLIP, CLIP, DINOv2


SIZES = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8)
CLASS_TOKEN = fx.DenseTowerSpec(SHAPE, 4, 16, rows=slice(1, None))


def siglip(**options: Any) -> Any:
    return randomize(SiglipVisionModel(SiglipVisionConfig(**SIZES, intermediate_size=24, **options)))


def clip(**options: Any) -> Any:
    return randomize(CLIPVisionModel(CLIPVisionConfig(**{**SIZES, "intermediate_size": 24, **options})))


def dinov2() -> Any:
    return randomize(Dinov2Model(Dinov2Config(**SIZES, mlp_ratio=2)))


TOWERS = {
    "siglip": (siglip, fx.DenseTowerSpec(SHAPE, 4, 16)),
    "clip": (clip, CLASS_TOKEN),
    "clip before its last layer": (
        clip,
        replace(CLASS_TOKEN, output=lambda r: r.hidden_states[-2], options={"output_hidden_states": True}),
    ),
    "dinov2": (dinov2, CLASS_TOKEN),
}


@pytest.mark.parametrize("name", TOWERS)
@torch.no_grad()
def test_rows_are_those_that_the_declaration_names(name: str) -> None:
    make, spec = TOWERS[name]
    x = random_tiles(3)
    result = make()(x, **spec.options)
    output = spec.output(result) if callable(spec.output) else result[spec.output]
    got = fx.wrap(make(), spec).encoder_eager_forward({"pixel_values": x})
    assert_close([got], [output[:, spec.rows].flatten(0, 1)])


@pytest.mark.slow
def test_a_convolution_over_any_number_of_images_through_inductor() -> None:
    case = Case("clip", fx.wrap(clip(num_hidden_layers=1), CLASS_TOKEN), TileInputs())
    assert_compiled_once(case, piece_compiler="inductor")


@torch.no_grad()
def test_attention_with_a_bias_of_each_image(fresh_dynamo: None) -> None:
    tower = randomize(BiasedTower())
    spec = fx.DenseTowerSpec(SHAPE, 4, 16, output=lambda result: result["features"], attends_with_mask=True)
    wrapped = fx.wrap(tower, spec)
    compiled = torch.compile(
        wrapped, backend="encoder_cg", options={"token_budgets": [4, 16], "debug": True}, fullgraph=True
    )
    for count in (1, 2, 3, 4, 1):
        x = random_tiles(count, seed=count)
        torch.testing.assert_close(compiled(x)["features"], tower(x)["features"], rtol=0, atol=1e-5)
    apart = not MASKED_ATTENTION_TAKES_UNKNOWN_SIZES  # a single image is traced apart
    assert counters["stats"]["unique_graphs"] == 1 + apart
    assert not counters["graph_break"]


def test_images_under_another_name() -> None:
    spec = fx.DenseTowerSpec(SHAPE, 5, 16, output=lambda r: r["features"], input_name="images")
    tower = randomize(PlainTower())
    wrapped = fx.wrap(tower, spec)
    config = fx.EncoderConfig(token_budgets=(10,), mode="breakable")
    manager = fx.EncoderCudaGraphManager(wrapped, config, log_interval=0)
    manager.capture()
    x = random_tiles(2)
    assert_close(manager.execute({"images": x}), list(tower(x)["features"]))
    assert manager.stats().hits == 2
    torch.testing.assert_close(wrapped(images=x)["features"], tower(x)["features"], rtol=0, atol=0)


@pytest.mark.parametrize(("tokens", "hidden"), [(5, 16), (4, 8)])
def test_a_spec_that_does_not_describe_the_output_is_refused(tokens: int, hidden: int) -> None:
    wrapped = fx.wrap(clip(), fx.DenseTowerSpec(SHAPE, tokens, hidden, rows=slice(1, None)))
    with pytest.raises(
        fx.InputError, match=rf"expected features of \(tiles, {tokens}, {hidden}\); got \(1, 4, 16"
    ):
        wrapped.encoder_eager_forward({"pixel_values": random_tiles(1)})


@pytest.mark.parametrize(
    "sizes", [((3, 16), 4, 4), ((3, 0, 16), 4, 4), (SHAPE, 0, 4), (SHAPE, 4, -1)], ids=str
)
def test_impossible_specs(sizes: Any) -> None:
    with pytest.raises(fx.InputError, match=re.escape("got {}, {} and {}".format(*sizes))):
        fx.DenseTowerSpec(*sizes)
