"""Where the device's time of one full graph replay goes, kernel by kernel.

    python benchmarks/kernel_times.py --output benchmarks/results/kernel_times_h200.json

The vision tower of `--model` (packed towers only) at its published size, bf16, seeded random weights, one
image of each number of patches, a budget of exactly that size. Microseconds of every kernel in one replay,
means of many replays under torch.profiler (CUPTI), and of the replay itself between events, without the
profiler; the difference is the launch and the gaps between kernels. `documents.py` writes the tables in
docs/performance.md. `--small` runs narrow blocks and takes operators for kernels, on a machine without a GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from environment import describe
from narrow_tower import narrow_tower
from storage import make_parser, store
from tables import kernel_times as tables
from timing import device_ms, synchronize
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import fxsplit_encoder as fx
from fxsplit_encoder.models.random import DEMO_MODEL, demo_tower, random_inputs
from fxsplit_encoder.models.registry import ARCHITECTURES, architecture
from fxsplit_encoder.towers.packed import PackedTower

PATCHES = (196, 784, 3136, 7056)
SMALL_PATCHES = (16, 64)
REPLAYS = 30


def make_tower(model: str, small: bool) -> Any:
    """A tower behind the manager's protocol."""
    if small:
        return fx.wrap(narrow_tower(2))
    return architecture(model).family.wrap(demo_tower(None, "cuda", torch.bfloat16, model=model))


def kernel_times(call: Callable[[], Any], device: torch.device, calls: int = REPLAYS) -> list[dict[str, Any]]:
    """How often a call runs each kernel and the microseconds of those runs together, the longest first.

    Where there is no GPU, operators stand for kernels, each without those that it calls.

    Raises:
        RuntimeError: the profiler saw nothing run.
    """
    is_cuda = device.type == "cuda"
    call()
    synchronize()
    with profile(activities=[ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU]) as profiler:
        for _ in range(calls):
            call()
        synchronize()
    counts: Counter[str] = Counter()
    microseconds: Counter[str] = Counter()
    for event in profiler.events():
        if (event.device_type == DeviceType.CUDA) == is_cuda:
            counts[event.name] += 1
            taken = event.time_range.elapsed_us() if is_cuda else event.self_cpu_time_total
            microseconds[event.name] += taken  # type: ignore[assignment]
    if not counts:
        raise RuntimeError("the profiler saw no kernel: CUPTI is missing, or this user may not profile")
    return [
        {"kernel": name, "calls": counts[name] / calls, "us": total / calls}
        for name, total in microseconds.most_common()
    ]


def measure(wrapped: Any, sizes: Sequence[int]) -> Iterator[dict[str, Any]]:
    """For each number of patches, the replay's microseconds and those of its kernels."""
    tokens = {size: size // wrapped.merge_size**2 for size in sizes}
    limits = {"token_budgets": tuple(tokens.values()), "max_items_per_batch": 1, "max_frames_per_batch": 1}
    manager = fx.EncoderCudaGraphManager(wrapped, fx.EncoderConfig(mode="full", **limits), log_interval=0)
    manager.capture()
    path = manager.paths["default"]
    modes = {budget: graph.mode for budget, graph in manager.budget_graphs["default"].items()}
    if lost := [size for size in sizes if modes.get(tokens[size]) != "full"]:
        raise RuntimeError(f"not captured as one graph: {lost} patches: {'; '.join(manager.reports)}")
    for size in sizes:
        values = path.values(random_inputs(wrapped, [size]))
        captured = path.best_capture(path.ladder, tokens[size], values)
        captured.load(values, path.forward.rows(values))
        replay = 1e3 * device_ms(captured.replay, manager.device)
        kernels = kernel_times(captured.replay, manager.device)
        yield {"patches": size, "replay us": replay, "kernels": kernels}


@torch.no_grad()
def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", choices=ARCHITECTURES, default=DEMO_MODEL, metavar="NAME")
    parser.add_argument("--patches", type=int, nargs="+", help="of the images, whole tokens of a near-square")
    parser.add_argument("--small", action="store_true", help="narrow blocks, on the CPU")
    arguments = parser.parse_args()
    small = arguments.small
    if not (small or torch.cuda.is_available()):
        parser.exit(2, "kernel_times.py needs a CUDA device, or --small\n")
    wrapped = make_tower(arguments.model, small)
    if not isinstance(wrapped, PackedTower):
        parser.error(f"--model {arguments.model}: its images are tiles of one size; expected a packed tower")
    tower = f"{arguments.model} vision, {'2 narrow blocks' if small else 'bf16'}, random weights"
    rows: list[dict[str, Any]] = []
    result = {**describe(), "tower": tower, "rows": rows}
    for row in measure(wrapped, arguments.patches or (SMALL_PATCHES if small else PATCHES)):
        rows.append(row)
        store(arguments.output, result)
    print(f"{tables.kinds(rows, 'simple')}\n\n{tables.largest(rows, 'simple')}")


if __name__ == "__main__":
    main()
