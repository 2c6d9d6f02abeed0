"""Passes inside captured towers: derived parameters follow the tower's weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.models.internvl.modeling_internvl import InternVLModel

import fxsplit_encoder as fx
from fxsplit_encoder.capture.breakable import SegmentedCapture
from fxsplit_encoder.compile.derived import Fingerprints
from fxsplit_encoder.compile.passes import PASSES
from tests.towers.dense_models import random_tiles
from tests.towers.random_weights import randomize
from tests.towers.tiny_tiles import internvl_config

from . import managers

SETTINGS: dict[str, Any] = {
    "token_budgets": (4, 16),
    "max_items_per_batch": 2,
    "max_frames_per_batch": 2,
    "passes": tuple(PASSES),
    "debug": True,
}


def tower(seed: int, **config_changes: Any) -> Any:
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    settings = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 120,
        "num_heads": 2,
        "out_hidden_size": 48,
        "deepstack_visual_indexes": [0],
    }
    config = Qwen3VLVisionConfig(**(settings | config_changes))
    made = Qwen3VLVisionModel(config).requires_grad_(False).train(False)
    generator = torch.Generator().manual_seed(seed)
    for parameter in made.parameters():
        parameter.normal_(0.0, 0.2, generator=generator)
    return made


def wide_tower(seed: int) -> Any:
    """With heads of 72, as Qwen3-VL's, which a pass makes wider."""
    return tower(seed, hidden_size=144)


def load(target: Any, source: Any) -> None:
    """Gives a tower the weights of another, each of which gets another version."""
    target.load_state_dict(source.state_dict())


def write_data(target: Any, source: Any) -> None:
    """The same without a version, as adapters are merged and trainers send weights."""
    for own, other in zip(target.parameters(), source.parameters(), strict=True):
        own.data.copy_(other)


def assert_same(manager: Any, reference: Any, encode: Any, batch: Any) -> None:
    for output, expected in zip(manager.execute(batch), encode(reference, batch), strict=True):
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def captured() -> Any:
    """A captured manager whose program has every pass, and its tower."""
    inner = wide_tower(0)
    manager = fx.EncoderCudaGraphManager(fx.wrap(inner), fx.EncoderConfig(mode="full", **SETTINGS))
    manager.capture()
    return manager, inner


def test_every_pass_changes_the_tower(captured: Any) -> None:
    program = captured[0].programs["default"].program
    assert program.pass_report == {
        "folded_adapters": 0,
        "conv_to_linear": 1,
        "pad_mlp_width": 4,
        "decomposed_bias": 0,
        "dense_attention": 0,
        "merged_projections": 0,
        "wide_heads": 2,
        "measured_activations": 4,
        "gelu_epilogue": 0,  # which that leaves none
        "output_branch": 1,
    }
    assert len(program.derived.recipes) == 3 * (4 + 2)  # of layers that are padded, and of wider heads
    assert program.padding.proved


@pytest.mark.parametrize("write", [load, write_data])
def test_replays_and_exact_runs_see_weights_that_change_in_place(
    captured: Any, make_batch: Callable[..., Any], encode: Any, write: Callable[[Any, Any], None]
) -> None:
    manager, inner = captured
    replayed, exact = make_batch([(1, 4, 6)]), make_batch([(1, 8, 10)])
    for seed in (0, 1, 2):
        write(inner, wide_tower(seed))
        before = manager.stats()
        assert_same(manager, wide_tower(seed), encode, replayed)
        assert manager.stats().hits == before.hits + 1
        assert_same(manager, wide_tower(seed), encode, exact)


def sharing(manager: Any, **changes: Any) -> Any:
    """A captured manager of the same tower and program with other settings."""
    other = fx.EncoderCudaGraphManager(manager.tower, manager.config.replace(**changes))
    other.paths["default"].bind(manager.programs["default"])
    other.capture()
    return other


@pytest.mark.parametrize("debug", [False, True])
def test_a_replay_is_made_again_only_where_weights_have_changed(
    captured: Any, make_batch: Callable[..., Any], encode: Any, monkeypatch: pytest.MonkeyPatch, debug: bool
) -> None:
    inner = captured[1]
    # Without CUDA a replay of mode `full` begins its program anew, and looks at the weights itself.
    manager = sharing(captured[0], mode="piecewise", debug=debug)
    replays: list[SegmentedCapture] = []
    original = SegmentedCapture.replay

    def replay(self: SegmentedCapture) -> None:
        replays.append(self)
        original(self)

    monkeypatch.setattr(SegmentedCapture, "replay", replay)
    # On a GPU samples are compared by the replay itself.
    monkeypatch.setattr(Fingerprints, "have_changed", lambda self: False)
    batch = make_batch([(1, 4, 6)])
    for seed in (4, 5):
        inner.load_state_dict(wide_tower(seed).state_dict())
        for changed in (True, False):
            replays.clear()
            before = manager.stats().hits
            assert_same(manager, wide_tower(seed), encode, batch)
            assert len(replays) == (2 if changed and not debug else 1)
            assert manager.stats().hits == before + 1


@pytest.mark.parametrize("write", [load, write_data])
def test_between_two_looks_at_weights_replays_see_what_changes_in_place(
    captured: Any, make_batch: Callable[..., Any], encode: Any, write: Callable[[Any, Any], None]
) -> None:
    inner = captured[1]
    write(inner, wide_tower(2))
    manager = sharing(captured[0], debug=False, weight_check_seconds=1e6)
    batch = make_batch([(1, 4, 6)])
    for seed in (0, 1):
        write(inner, wide_tower(seed))
        assert_same(manager, wide_tower(seed), encode, batch)
    # What no sample shows is seen once it is said.
    weight = inner.blocks[0].mlp.linear_fc2.weight
    weight.data[0, 1] += 100
    manager.check_weights()
    assert_same(manager, inner, encode, batch)
    assert manager.stats().misses == {}


def test_invariant_products_come_before_the_marks_of_branches(
    make_batch: Callable[..., Any], encode: Any, one_thread: None
) -> None:
    """A node that takes the place of a marked one has no mark."""
    settings = {**SETTINGS, "passes": ("conv_to_linear", "output_branch"), "invariant": True}
    manager = fx.EncoderCudaGraphManager(fx.wrap(wide_tower(0)), fx.EncoderConfig(**settings))
    manager.capture()
    assert_same(manager, wide_tower(0), encode, make_batch([(1, 4, 4), (1, 4, 8)]))
    report = manager.programs["default"].program.pass_report
    assert report["output_branch"] == 1 and report["fixed_products"] > 0


def internvl() -> Any:
    """Two blocks with heads of 72, and weights that are the same at every call."""
    return randomize(InternVLModel(internvl_config({"hidden_size": 144}, 2))).bfloat16()


def test_queries_keys_and_values_come_from_one_layer_that_is_kept_once_where_heads_are_made_wide() -> None:
    inner, changed = internvl(), internvl()
    for parameter in changed.parameters():
        parameter.mul_(1.25)
    passes = ("conv_to_linear", "dense_attention", "merged_projections", "wide_heads")
    limits = (4, 8, 32)
    manager = managers.captured(fx.wrap(inner), mode="piecewise", passes=passes, token_budgets=limits)
    program = manager.programs["default"].program
    assert program.pass_report == {**dict.fromkeys(passes, 2), "conv_to_linear": 1}
    assert program.padding.proved and program.num_distinct == len(program.pieces) == 3
    # In each of two blocks three layers to two heads of 80 and one from them, without biases.
    assert program.derived.num_bytes == 2 * 4 * (2 * 80) * 144 * torch.bfloat16.itemsize
    results = []
    for reference in (inner, changed):
        inner.load_state_dict(reference.state_dict())
        plain = managers.manager_of(fx.wrap(copy.deepcopy(reference)), enabled=False, token_budgets=limits)
        for count in (1, 3):
            batch = {"pixel_values": random_tiles(count).bfloat16(), "num_patches": [count]}
            (found,), (expected,) = manager.execute(batch), plain.execute(batch)
            scale = float(expected.abs().max())
            torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02 * scale)
            results.append(found)
    assert (results[2] - results[0]).abs().max() > 0.2 * scale
    assert manager.stats().hits == 4
