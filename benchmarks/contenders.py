"""All that are compared."""

from __future__ import annotations

from collections.abc import Mapping

from variants import VARIANTS, Variant
from vllm_variants import VLLM_VARIANTS

CONTENDERS: Mapping[str, type[Variant]] = {**VARIANTS, **VLLM_VARIANTS}
"""By name, in the order in which they run."""
