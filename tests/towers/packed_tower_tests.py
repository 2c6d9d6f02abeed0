"""What every packed tower of Hugging Face must show by itself; `test_conformance.py` captures it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import fxsplit_encoder as fx
from fxsplit_encoder.capture.buffers import parts_of
from fxsplit_encoder.capture.inputs import pad_cu_seqlens

from .random_weights import randomize
from .tiny_packed import PATCH

Grid = tuple[int, int, int]
INPUTS = (("pixel_values", "image_grid_thw"), ("pixel_values_videos", "video_grid_thw"))
FEATURES = 3 * 2 * PATCH**2
CPU = torch.device("cpu")


def make_batch(images: Sequence[Grid], videos: Sequence[Grid] = (), seed: int = 0) -> dict[str, Any]:
    """The grids, and random patches."""
    generator = torch.Generator().manual_seed(seed)
    inputs: dict[str, Any] = {}
    for grids, (pixels, key) in zip((images, videos), INPUTS, strict=True):
        if grids:
            inputs[key] = torch.tensor(grids)
            inputs[pixels] = torch.randn(sum(t * h * w for t, h, w in grids), FEATURES, generator=generator)
    return inputs


def joined(buffers: Any) -> dict[str, Tensor]:
    """What a replay takes, with the parts of a value in one tensor."""
    return {name: torch.cat(list(parts_of(value))) for name, value in buffers.values.items()}


def padded_forward(wrapped: Any, inputs: dict[str, Any], tokens: int) -> Tensor:
    """The forward on buffers of so many output tokens, as captures pad them, without any compiler."""
    buffers = wrapped.prepare_encoder_cudagraph_capture_inputs(tokens, 4, 8, CPU, torch.float32).values
    for name, value in joined(wrapped.prepare_encoder_cudagraph_replay_buffers(inputs, 4, 8)).items():
        if name in wrapped.segment_inputs:
            buffers[name].copy_(pad_cu_seqlens(value, len(buffers[name]), len(buffers["pixel_values"])))
        else:
            buffers[name].zero_()
            buffers[name][: value.shape[0]] = value
    output: Tensor = wrapped.encoder_cudagraph_forward(buffers)
    return output


def assert_equal(got: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert [g.shape for g in got] == [e.shape for e in expected]
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


class Towers(NamedTuple):
    reference: Any
    """Hugging Face's, which nobody wrapped."""
    wrapped: Any


class PackedModuleTests:
    """Derive `Test...` from this in a module of the family."""

    metadata: ClassVar[list[str]]
    """The names of the host metadata."""
    out_hidden_size: ClassVar[int] = 24

    @classmethod
    def make_tower(cls) -> nn.Module:
        """A tower of several blocks, patches of 4 x 4 pixels and 24 features a token."""
        raise NotImplementedError

    @classmethod
    def run_reference(cls, tower: Any, pixels: Tensor, grid: Tensor) -> Any:
        """The output of Hugging Face's tower."""
        return tower(pixels, grid)

    @classmethod
    def encode(cls, tower: Any, inputs: dict[str, Any]) -> list[Tensor]:
        """Every item through Hugging Face's tower."""
        items: list[Tensor] = []
        for pixels, key in INPUTS:
            if key in inputs:
                output = cls.run_reference(tower, inputs[pixels], inputs[key]).pooler_output
                items += output.split([t * h * w // 4 for t, h, w in inputs[key].tolist()])
        return items

    @pytest.fixture(scope="class")
    @classmethod
    def towers(cls) -> Towers:
        tower = randomize(cls.make_tower())
        return Towers(copy.deepcopy(tower), fx.wrap(tower))

    # --- the module

    @torch.no_grad()
    def test_the_forward_is_that_of_the_tower(self, towers: Towers) -> None:
        for grids in ([(1, 4, 6)], [(1, 10, 12), (3, 2, 4), (1, 2, 2)]):
            inputs = make_batch(grids)
            pixels, grid = inputs["pixel_values"], inputs["image_grid_thw"]
            expected = self.run_reference(towers.reference, pixels, grid)
            for got in (towers.wrapped(pixels, grid), towers.wrapped(hidden_states=pixels, grid_thw=grid)):
                assert type(got) is type(expected)
                assert_equal(
                    [got.pooler_output, got.last_hidden_state],
                    [expected.pooler_output, expected.last_hidden_state],
                )

    @torch.no_grad()
    def test_the_towers_own_options_work(self, towers: Towers) -> None:
        inputs = make_batch([(1, 4, 6), (1, 2, 8)])
        pixels, grid = inputs["pixel_values"], inputs["image_grid_thw"]
        got = towers.wrapped(pixels, grid, output_hidden_states=True)
        expected = towers.reference(pixels, grid, output_hidden_states=True)
        assert len(got.hidden_states) == len(expected.hidden_states) > 2
        assert_equal([*got.hidden_states], [*expected.hidden_states])
        assert_equal(towers.wrapped(pixels, grid, return_dict=False)[:2], expected.to_tuple()[:2])

    def test_the_module_is_the_tower_seen_from_outside(self, towers: Towers) -> None:
        wrapped = towers.wrapped
        assert wrapped.config is wrapped.tower.config
        with pytest.raises(AttributeError):
            wrapped.no_such_attribute  # noqa: B018
        names = {name.removeprefix("tower.") for name in wrapped.state_dict()}
        assert names == set(towers.reference.state_dict())

    # --- the protocol

    def test_what_is_fixed_about_the_tower(self, towers: Towers) -> None:
        config = towers.wrapped.get_encoder_cudagraph_config()
        assert config.modalities == ["image", "video"]
        assert config.buffer_keys == ["pixel_values", *self.metadata]
        assert config.out_hidden_size == self.out_hidden_size
        assert not config.padding_logics
        assert towers.wrapped.get_encoder_cudagraph_budget_range(None) == (64, 4096)

    def test_a_capture_owns_its_inputs(self, towers: Towers) -> None:
        """A replay writes to them; metadata of the same size, which are cached, must not change with them."""
        wrapped = towers.wrapped
        first, second = (
            wrapped.prepare_encoder_cudagraph_capture_inputs(16, 4, 8, CPU, torch.float32).values
            for _ in range(2)
        )
        expected = {name: value.clone() for name, value in second.items()}
        for value in first.values():
            value.fill_(99)
        again = wrapped.prepare_encoder_cudagraph_capture_inputs(16, 4, 8, CPU, torch.float32).values
        for name in self.metadata:
            assert torch.equal(second[name], expected[name])
            assert torch.equal(again[name], expected[name])

    @torch.no_grad()
    def test_pad_rows_do_not_change_the_real_ones(self, towers: Towers) -> None:
        wrapped = towers.wrapped
        inputs = make_batch([(1, 4, 6)], [(2, 4, 4)])
        output = padded_forward(wrapped, inputs, 24)
        assert output.shape == (24, self.out_hidden_size)
        expected = torch.cat(self.encode(towers.reference, inputs))
        assert_equal([output[:14], wrapped.encoder_eager_forward(inputs)], [expected, expected])

    @torch.no_grad()
    def test_example_inputs_can_be_encoded(self, towers: Towers) -> None:
        pixels, grid = towers.wrapped.example_inputs()
        assert towers.wrapped(pixels, grid).pooler_output.shape == (64, 24)
