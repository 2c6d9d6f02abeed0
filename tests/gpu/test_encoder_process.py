"""Encoder processes with a GPU: features through the host, and in the GPU's own memory."""

from __future__ import annotations

import os

import pytest
import torch

from fxsplit_encoder.connector.interfaces import MODALITIES, PreparedItem
from fxsplit_encoder.connector.processes import EncoderProgram, ProcessEncoder, ProcessOptions
from fxsplit_encoder.errors import InputError
from tests.connector.resources import nothing_left

pytestmark = pytest.mark.gpu
DRIVERS = ("/dev/nvidia", "/dev/shm/cuda.shm")  # the descriptors that the GPU's driver keeps
FACTORY = "tests.gpu.cuda_encoders:slow"


def item(rows: int) -> PreparedItem:
    return PreparedItem("image", os.urandom(32), {"pixel_values": torch.randn(rows, 8)}, rows)


def encoder_of_its_own() -> ProcessEncoder:
    program = EncoderProgram(FACTORY, {"device": "cuda:0"})
    row_bytes = dict.fromkeys(MODALITIES, 4 * 8)
    return ProcessEncoder(program, row_bytes, ProcessOptions(max_bytes=1 << 24))


def test_features_are_complete() -> None:
    torch.cuda.init()
    encoder = encoder_of_its_own()
    encoder.start()
    try:
        for rows in ((100, 0, 7), (1000,), (30000,), (20000, 20000, 20000)):
            items = [item(count) for count in rows]
            features = encoder.encode(items)
            for feature, one in zip(features, items, strict=True):
                assert torch.equal(feature, 2 * one.inputs["pixel_values"])
        with pytest.raises(InputError, match="max_bytes"):
            encoder.encode([item(1 << 20)])
    finally:
        encoder.close()
    assert all(
        torch.equal(f.cpu(), 2 * i.inputs["pixel_values"]) for f, i in zip(features, items, strict=True)
    )


@pytest.mark.alone
def test_memory_of_the_gpu_comes_back() -> None:
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    encoder = encoder_of_its_own()
    with nothing_left(DRIVERS):
        encoder.start()
        encoder.encode([item(100)])
        encoder.close()
    torch.cuda.synchronize()
    assert torch.cuda.mem_get_info()[0] >= before - (64 << 20)
