"""`invariant: true` behind torch.compile: rows of an image have the same bits in any call, or are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed

from tests.manager.packings import packed_items, packings
from tests.small_tower import FEATURES, SmallAdapter
from tests.towers.tiny_inputs import Item, PackedInputs

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "one_thread")


def compiled(module: Any, **options: Any) -> Any:
    return torch.compile(module, backend="encoder_cg", options={"invariant": True, **options})


@pytest.mark.parametrize("mode", ["full", "piecewise", "none"])
def test_bits_are_those_of_an_image_alone(mode: str) -> None:
    inputs = PackedInputs(patch_shape=(FEATURES,))
    tower = compiled(SmallAdapter(), mode=mode, token_budgets=[8, 32, 64])

    def encoded(items: list[Item]) -> list[Tensor]:
        given = inputs.make(items)
        with torch.no_grad():
            output = tower(given["pixel_values"], given["image_grid_thw"])
        return list(output.split([inputs.tokens(item) for item in items]))

    items = packed_items(9, videos=False)
    alone = {item: encoded([item])[0] for item in items}
    for batches in packings(items, 3):
        for batch in batches:
            for item, result in zip(batch, encoded(batch), strict=True):
                assert torch.equal(result, alone[item]), item


class Pooled(nn.Module):
    """Its rows are added up."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, rows: Tensor) -> Tensor:
        return self.linear(rows) - rows.mean(0)


@pytest.mark.parametrize(
    ("module", "gradients", "message"),
    [
        (Pooled(), False, "invariant: mean: mean runs over as many entries"),
        (nn.Linear(8, 8), False, "traced for one shape"),
        (nn.Linear(8, 8), True, "invariant: a call with gradients enabled"),
    ],
    ids=["mixed rows", "one shape", "gradients"],
)
def test_what_may_not_be_invariant_is_refused(module: nn.Module, gradients: bool, message: str) -> None:
    rows = torch.randn(6, 8)
    if isinstance(module, Pooled):
        torch._dynamo.mark_dynamic(rows, 0)
    with torch.set_grad_enabled(gradients), pytest.raises(BackendCompilerFailed, match=message):
        compiled(module)(rows)
