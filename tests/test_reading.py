"""A request's inputs are read once, and each request's anew."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fxsplit_encoder as fx

from .small_tower import SmallAdapter


def test_grids_are_read_once_a_request_and_never_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[object] = []
    tolist = torch.Tensor.tolist

    def counted(value: torch.Tensor) -> object:
        if value is inputs["image_grid_thw"]:
            reads.append(value)
        return tolist(value)

    monkeypatch.setattr(torch.Tensor, "tolist", counted)
    tower = SmallAdapter()
    config = fx.EncoderConfig(mode="none", piece_compiler="eager")
    manager = fx.EncoderCudaGraphManager(tower, config, log_interval=0)
    numbers = np.array([[1, 4, 6]])
    inputs = {"image_grid_thw": torch.from_numpy(numbers)}
    inputs["pixel_values"] = torch.randn(24, tower.patch_features)
    before = manager.execute(inputs)
    assert len(reads) == 1
    numbers[:] = [[1, 6, 4]]  # leaves no trace in the tensor
    after = manager.execute(inputs)
    assert len(reads) == 2
    assert before[0].shape == after[0].shape
    assert not torch.equal(before[0], after[0])
