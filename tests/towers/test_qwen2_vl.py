from __future__ import annotations

from typing import ClassVar

import pytest
from torch import nn

from .packed_tower_tests import PackedTowerTests
from .tiny_packed import qwen2_vl


@pytest.mark.slow
class TestQwen2VL(PackedTowerTests):
    metadata: ClassVar[list[str]] = ["position_ids", "cu_seqlens"]

    @classmethod
    def make_tower(cls) -> nn.Module:
        return qwen2_vl(blocks=3)
