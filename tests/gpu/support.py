"""What the GPU tests share: batches, eager's answer, errors, poisoned memory."""

from __future__ import annotations

import contextlib
import gc
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch

import fxsplit_encoder as fx
from fxsplit_encoder.capture.pool import GraphPool
from fxsplit_encoder.kernels.attention.chooser import KernelChooser, Measurements

Grid = tuple[int, int, int]


@contextlib.contextmanager
def no_synchronization() -> Iterator[None]:
    """Makes it an error to wait for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def encode(tower: Any, inputs: dict[str, Any]) -> list[torch.Tensor]:
    """Every item through a Hugging Face tower, packed as the manager returns it."""
    dtype = next(tower.parameters()).dtype
    items: list[torch.Tensor] = []
    for pixels, grid in (("pixel_values", "image_grid_thw"), ("pixel_values_videos", "video_grid_thw")):
        if grid in inputs:
            output = tower(inputs[pixels].to(dtype), inputs[grid].cuda())
            packed = torch.cat([output.pooler_output, *output.deepstack_features], dim=1)
            items += packed.split([t * h * w // 4 for t, h, w in inputs[grid].tolist()])
    return items


def batch(images: list[Grid], videos: list[Grid], features: int) -> dict[str, Any]:
    inputs: dict[str, Any] = {}
    for grids, pixels, key in (
        (images, "pixel_values", "image_grid_thw"),
        (videos, "pixel_values_videos", "video_grid_thw"),
    ):
        if grids:
            inputs[key] = torch.tensor(grids)
            rows = sum(t * h * w for t, h, w in grids)
            inputs[pixels] = torch.randn(rows, features, device="cuda")
    return inputs


def seeded(grids: list[Grid], features: int, seed: int = 0, device: str = "cpu") -> dict[str, Any]:
    """Images whose pixels are the same on every device."""
    rows = sum(t * h * w for t, h, w in grids)
    pixels = torch.randn(rows, features, generator=torch.Generator().manual_seed(seed))
    return {"pixel_values": pixels.to(device), "image_grid_thw": torch.tensor(grids)}


def manager_of(wrapped: Any, config: fx.EncoderConfig) -> fx.EncoderCudaGraphManager:
    """One that knows nothing of attention, neither from this process nor from the disk."""
    manager = fx.EncoderCudaGraphManager(wrapped, config)
    manager.kernels.attention = KernelChooser(measurements=Measurements())
    return manager


def random_batch(source: random.Random, features: int) -> dict[str, Any]:
    def side() -> int:
        return 2 * source.randint(1, 16)

    images = [(1, side(), side()) for _ in range(source.randint(0, 6))]
    videos = [(source.randint(1, 6), side(), side()) for _ in range(source.choice([0, 0, 1, 2]))]
    return batch(images or [(1, side(), side())], videos, features)


def errors(output: list[torch.Tensor], reference: list[torch.Tensor]) -> float:
    assert len(output) == len(reference)
    assert all(a.shape == b.shape for a, b in zip(output, reference, strict=True))
    pairs = zip(output, reference, strict=True)
    return max((a.float() - b).abs().max().item() / b.abs().max().item() for a, b in pairs)


def relative_rms(result: torch.Tensor, reference: torch.Tensor) -> float:
    """Root mean square of the difference, over that of the reference."""
    exact = reference.double()
    return float((result.double() - exact).norm() / exact.norm())


def mean_error(output: list[torch.Tensor], reference: list[torch.Tensor]) -> float:
    """`relative_rms` of all tensors together."""
    return relative_rms(*(torch.cat([each.flatten() for each in given]) for given in (output, reference)))


def captured(call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of a call that has run on the stream of the capture before, and what it returned there."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph, stream=stream):
        out = call()
    return graph, out


def settled() -> tuple[int, int]:
    """Allocated and reserved bytes without garbage, which may be any earlier test's."""
    torch.cuda.synchronize()
    gc.collect()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


def poison(pool: GraphPool) -> None:
    """Fills free blocks of the caching allocator, and those of a graph pool, with NaN: what a kernel reads
    without having written it shows.
    """
    torch.cuda.synchronize()
    _fill_with_nan()
    graph = torch.cuda.CUDAGraph()
    with pool.capturing():
        pool.begin(graph)
        _fill_with_nan()
        pool.end(graph)
    graph.replay()
    torch.cuda.synchronize()


def _fill_with_nan() -> None:
    """Four blocks each of 1 to 64 MiB."""
    sizes = [2**19 << power for power in range(7)] * 4
    kept = [torch.full((size,), float("nan"), device="cuda", dtype=torch.bfloat16) for size in sizes]
    del kept
