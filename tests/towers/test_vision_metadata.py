from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fxsplit_encoder.compile.options import host_op
from fxsplit_encoder.protocol import BudgetDeclaration
from fxsplit_encoder.towers import wrap
from fxsplit_encoder.towers.packed import exact_metadata, vision_metadata

from .tiny_packed import qwen3_vl

GRIDS = [[[1, 4, 4]], [[1, 2, 2]] * 5, [[3, 4, 2], [1, 8, 6]]]


def make_tower() -> Any:
    return wrap(qwen3_vl())


@pytest.fixture(scope="module")
def tower() -> Any:
    return make_tower()


def batch(grids: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    grid = torch.tensor(grids)
    return torch.zeros(int(grid.prod(1).sum()), 4), grid


@pytest.mark.parametrize("grids", GRIDS, ids=str)
def test_the_fake_implementation_promises_what_the_op_makes(tower: Any, grids: list[list[int]]) -> None:
    pixels, grid = batch(grids)
    real = vision_metadata(pixels, grid, tower.registered_name)
    with FakeTensorMode() as mode:
        fake = vision_metadata(mode.from_tensor(pixels), mode.from_tensor(grid), tower.registered_name)
    assert len(fake) == len(real) == len(tower.metadata_columns) + 1
    for promised, made in zip(fake, real, strict=True):
        assert (promised.shape, promised.stride(), promised.dtype, promised.device) == (
            made.shape,
            made.stride(),
            made.dtype,
            made.device,
        )


def test_the_compiler_knows_the_op_as_a_host_op(tower: Any) -> None:
    pixels, grid = batch(GRIDS[2])
    op = host_op(vision_metadata)
    assert op is not None
    assert op.run is exact_metadata
    arguments = (pixels, grid, tower.registered_name)
    declared = op.budgets
    assert isinstance(declared, BudgetDeclaration)
    assert declared.rows_per_output_token(*arguments) == tower.rows_per_token == 4
    assert declared.budget_range(*arguments) == tower.get_encoder_cudagraph_budget_range(None)
    assert declared.segment_factors is not None
    assert list(declared.segment_factors(*arguments)) == [1, 1, 1, 1]


def test_metadata_of_a_batch_that_comes_again_is_kept(tower: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels, grid = torch.zeros(40, tower.patch_features), torch.tensor([[1, 4, 6], [1, 4, 4]])
    first = exact_metadata(pixels, grid, tower.registered_name)
    monkeypatch.setattr(tower, "metadata", None)  # nothing is computed again
    again = exact_metadata(pixels + 1, grid.clone(), tower.registered_name)
    assert all(a is b for a, b in zip(first, again, strict=True))
    with pytest.raises(TypeError):
        exact_metadata(pixels[:24], grid[:1], tower.registered_name)


def test_a_compiler_may_write_to_what_the_op_made(tower: Any) -> None:
    pixels, grid = batch([[1, 8, 6]])
    for tensor in vision_metadata(pixels, grid, tower.registered_name):
        tensor.fill_(77)
    for tensors in (vision_metadata, exact_metadata):
        assert not any((t == 77).any() for t in tensors(pixels, grid, tower.registered_name))
