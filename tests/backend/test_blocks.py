"""Equal blocks of a tower behind torch.compile: one is traced for all, and nobody else notices."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules

import fxsplit_encoder as fx
from fxsplit_encoder.backend.dispatch import stats_of_compiled
from fxsplit_encoder.compile import trace
from fxsplit_encoder.errors import CompileError, InputError, WeightsLayoutError
from fxsplit_encoder.planning.plan import MissReason
from tests.small_tower import SmallAdapter

from .towers import GRID, OPTIONS, assert_equal_features, compiled, features, num_weights

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def test_one_block_is_traced_for_all_in_every_trace_of_ours(
    small: Any, few_pixels: Tensor, inlined: list[int], made: Callable[[], list[Any]]
) -> None:
    """test_entry.py has a published tower."""
    tower = SmallAdapter(small)
    first = compiled(tower)
    for _ in range(2):
        assert_equal_features(first, small, few_pixels)
    assert inlined == [num_weights(small)]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert sum(dispatcher.hits for dispatcher in made()) == 2
    manager = fx.EncoderCudaGraphManager(tower, fx.EncoderConfig(**OPTIONS), log_interval=0)
    manager.capture()
    (item,) = manager.execute({"pixel_values": few_pixels, "image_grid_thw": GRID})
    torch.testing.assert_close(item, features(small, few_pixels), rtol=1e-4, atol=1e-5)
    assert inlined == [num_weights(small)] * 2
    features(first, few_pixels)
    assert len(inlined) == 2  # its guards still hold


def test_numbers_and_hooks_of_blocks_are_those_of_each_call(small: Any, few_pixels: Tensor) -> None:
    wrapped = SmallAdapter(small)
    module = compiled(wrapped)
    before = features(module, few_pixels)
    small.blocks[1].norm1.eps = 0.5
    small.merger.norm.register_forward_hook(lambda module, args, output: 2 * output)
    after = features(module, few_pixels)
    assert_equal_features(module, small, few_pixels)
    assert not torch.allclose(before, after)
    hook = modules.register_module_forward_hook(
        lambda module, args, output: 2 * output if isinstance(module, nn.LayerNorm) else None
    )
    try:
        with pytest.warns(UserWarning, match="global hooks"):
            torch.testing.assert_close(features(module, few_pixels), features(small, few_pixels))
    finally:
        hook.remove()
    assert stats_of_compiled(module).misses[MissReason.FOREIGN_CODE] == 1
    torch.testing.assert_close(features(module, few_pixels), after)


@pytest.mark.slow
def test_weights_are_looked_up_at_every_call(
    small: Any, few_pixels: Tensor, inlined: list[int], made: Callable[[], list[Any]]
) -> None:
    module = compiled(SmallAdapter(small))
    before = features(module, few_pixels)
    (dispatcher,) = made()
    programs = dict(dispatcher.programs)
    block = small.blocks[2]
    block.attn.proj.weight = nn.Parameter(block.attn.proj.weight.data, requires_grad=False)
    block.attn.proj.weight.data.mul_(2)
    assert_equal_features(module, small, few_pixels)
    assert dispatcher.programs == programs  # which were captured over the same memory
    block.mlp.linear_fc1.weight.data = block.mlp.linear_fc1.weight.data * 3
    block.attn.proj.bias = nn.Parameter(block.attn.proj.bias + 1, requires_grad=False)
    for change in (lambda: None, lambda: block.norm1.weight.mul_(2)):
        change()
        after = features(module, few_pixels)
        torch.testing.assert_close(after, features(small, few_pixels), rtol=1e-4, atol=1e-5)
        assert (after - before).abs().max() > 0.01
    del block.mlp.linear_fc1.weight
    with pytest.raises(InputError, match="parameters: 'weight' of a compiled block was removed"):
        features(module, few_pixels)
    assert len(inlined) == 1


def transpose_in_place(linear: nn.Linear) -> None:
    linear.weight = nn.Parameter(linear.weight.data.t(), requires_grad=False)


@pytest.mark.slow
def test_weights_of_another_layout_are_refused(small: Any, few_pixels: Tensor) -> None:
    module = compiled(SmallAdapter(small))
    expected = features(module, few_pixels)
    linear = small.blocks[1].attn.proj
    for change, message in (
        (nn.Linear.double, "expected them in the sizes, strides, dtype and device in which the module"),
        (transpose_in_place, "expected them in the sizes, strides"),  # square, at the same address
        (lambda linear: setattr(linear, "bias", None), "got None in the place of one"),
    ):
        weights = copy.deepcopy(dict(linear.named_parameters()))
        change(linear)
        with pytest.raises(WeightsLayoutError, match=message):
            features(module, few_pixels)
        for name, weight in weights.items():
            setattr(linear, name, weight)
    torch.testing.assert_close(features(module, few_pixels), expected)


@pytest.mark.slow
def test_copies_and_pickles_have_blocks_of_their_own(small: Any, few_pixels: Tensor) -> None:
    expected = features(small, few_pixels)
    features(compiled(SmallAdapter(small)), few_pixels)
    twin = copy.deepcopy(small)
    loaded = pickle.loads(pickle.dumps(small.blocks[0]))
    for block in twin.blocks:
        block.mlp.linear_fc1.weight.mul_(3)
    assert (features(twin, few_pixels) - expected).abs().max() > 0.01
    torch.testing.assert_close(features(small, few_pixels), expected)
    assert_equal_features(compiled(SmallAdapter(twin)), twin, few_pixels)
    assert loaded.forward.__func__ is type(loaded).forward


@pytest.mark.slow
def test_blocks_that_cannot_be_ops_are_traced_one_by_one(
    small: Any, few_pixels: Tensor, made: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    real = trace.inline_blocks

    def refusing(module: Any) -> Any:
        if real(module):
            raise CompileError("a block writes to its arguments")
        return real(module)

    monkeypatch.setattr(trace, "inline_blocks", refusing)
    module = compiled(SmallAdapter(small))
    assert_equal_features(module, small, few_pixels)
    assert "equal blocks are traced one by one, which takes longer: a block writes" in caplog.text
    assert [dispatcher.hits for dispatcher in made()] == [1]


@pytest.mark.slow
def test_what_a_failed_trace_began_is_ended_by_the_next(
    small: Any, few_pixels: Tensor, inlined: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any, **kwargs: Any) -> Any:
        torch._dynamo.graph_break()

    merger = small.merger.forward
    monkeypatch.setattr(small.merger, "forward", fails)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        features(compiled(SmallAdapter(small)), few_pixels)
    monkeypatch.setattr(small.merger, "forward", merger)
    torch._dynamo.reset()
    features(compiled(SmallAdapter(small)), few_pixels)
    assert len(inlined) == 1
