"""Results of a repeated call are written to where those of the first call are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fxsplit_encoder.capture.buffers import copy_results


@pytest.mark.parametrize(
    "make",
    [
        lambda values: values.clone(),
        lambda values: values.clone().t(),
        lambda values: values[:, :1].clone().expand(3, 4),
        lambda values: values[:1, :1].clone().expand(3, 4),
        lambda values: values[:, :1].clone().expand(2, 3, 1),
    ],
    ids=["whole", "transposed", "one column", "one number", "one dimension more"],
)
def test_tensors_of_every_layout(make: Callable[[Tensor], Tensor]) -> None:
    first, second = torch.rand(3, 4), torch.rand(3, 4)
    kept, expected = make(first), make(second)
    place = kept.data_ptr()
    copy_results([kept, None, (kept,)], [make(second), None, (make(second),)])
    assert torch.equal(kept, expected) and kept.data_ptr() == place


def test_what_is_expanded_here_and_not_there_is_refused() -> None:
    kept = torch.rand(3, 1).expand(3, 4)
    with pytest.raises(RuntimeError, match="single memory location"):
        copy_results(kept, torch.rand(3, 4))
