"""Checkpoints of a tiny tower, which the tests of models make."""

from ..models.conftest import save_checkpoint, tiny_tower

__all__ = ["save_checkpoint", "tiny_tower"]
