"""What is refused inside a capture, where it depends on the device of a tensor ("meta" stands for it)."""

from __future__ import annotations

import pytest
import torch

from fxsplit_encoder.capture.breakable import refuse_synchronization
from fxsplit_encoder.errors import CaptureError

META = torch.device("meta")
INDEX_PUT = torch.ops.aten.index_put_.default


def through_a_mask(value: torch.Tensor) -> tuple[object, ...]:
    x = torch.empty(4, device=META)
    return x, [torch.empty(4, device=META, dtype=torch.bool)], value


def test_a_number_of_the_host_is_written_through_a_mask() -> None:
    refuse_synchronization(INDEX_PUT, through_a_mask(torch.tensor(0.0)), {}, META)


@pytest.mark.parametrize("size", [1, 2])
def test_values_of_the_device_need_the_positions_of_the_mask(size: int) -> None:
    with pytest.raises(CaptureError, match="aten::index_put_ cannot be captured: the host needs values"):
        refuse_synchronization(INDEX_PUT, through_a_mask(torch.empty(size, device=META)), {}, META)
