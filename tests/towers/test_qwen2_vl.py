from __future__ import annotations

from typing import ClassVar

from torch import nn

from .packed_tower_tests import PackedTowerTests
from .tiny_packed import qwen2_vl


class TestQwen2VL(PackedTowerTests):
    metadata: ClassVar[list[str]] = ["position_ids", "cu_seqlens"]

    @classmethod
    def make_tower(cls) -> nn.Module:
        return qwen2_vl(blocks=3)
