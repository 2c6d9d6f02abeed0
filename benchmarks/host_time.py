"""What the host does for a request: `execute` for one image beyond the replay itself, and planning.

    python benchmarks/host_time.py --output benchmarks/results/host_time_h200.json

27 blocks of the Qwen3-VL-8B vision tower, bf16, seeded random weights; one image, `full` graphs. Microseconds
that a call keeps the CPU, its device work not awaited, medians. "replay" is the launch of the graph and the
check of captured addresses, which runs beside it; "replay, piecewise" the same in that mode, with 27 eager
calls of attention. "torch.compile" is a call of the tower behind `torch.compile(backend="encoder_cg")` with
the same budgets, its guards included, beside `execute`; with "module guards skipped", Dynamo does not look at
modules and parameters
(`options={"guard_filter_fn": torch.compiler.skip_guard_on_all_nn_modules_unsafe}`). Every replay checks their
addresses all the same. "Dynamo alone" is the same call with a backend that does nothing but take equal blocks
as ours does. "attention op" is a call of `fxsplit::varlen_attention`, pinned to torch's kernel, beyond a call
of that. An image of a size that came before finds its metadata on the device; "new sizes" are images of sizes
that have not come before. "item specs", "kept plan", "metadata", "load" and the checks are parts of
`execute`, each called by itself, so with warmer caches of the processor than inside of it; "version check"
looks for changes in parameters of which other forms are kept. "plan of" is from item specs, without the plans
that are kept; most of these items are larger than all three budgets, and each of those is a batch of its own.
Nothing else should run on the host.
"""

from __future__ import annotations

import functools
import itertools
import random
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from environment import describe
from storage import make_parser, store
from tables.host_time import rows
from timing import cpu_ms
from torch.compiler import skip_guard_on_all_nn_modules_unsafe
from workloads import random_grid

import fxsplit_encoder as fx
from fxsplit_encoder.attention import KernelChooser, choosing, varlen_attention
from fxsplit_encoder.compile.blocks import end_blocks, takes_blocks
from fxsplit_encoder.models.random import demo_tower
from fxsplit_encoder.planning import Item

LIMITS: dict[str, Any] = {
    "token_budgets": (64, 128, 256),
    "max_items_per_batch": 16,
    "max_frames_per_batch": 0,
}


def image(height: int, width: int, features: int) -> dict[str, Any]:
    pixels = torch.randn(height * width, features, device="cuda").bfloat16()
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, height, width]])}


def new_sizes(manager: fx.EncoderCudaGraphManager, features: int) -> float:
    """Median microseconds of `execute` for images that are each of another size."""
    sizes = [(2 * h, 2 * w) for h, w in itertools.product(range(2, 17), repeat=2) if 100 < h * w <= 256]
    times = []
    for height, width in sizes:
        inputs = image(height, width, features)
        torch.cuda.synchronize()
        start = time.perf_counter()
        manager.execute(inputs)
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)


def measure(manager: fx.EncoderCudaGraphManager, features: int) -> Iterator[tuple[str, float]]:
    """What is measured and its microseconds, one after the other."""
    inputs = image(16, 16, features)
    for _ in range(50):
        manager.execute(inputs)
    path = manager.paths["default"]
    captured = path.ladder.best(64, 1)
    replay, execute = (1e3 * cpu_ms(call, 300) for call in (captured.replay, lambda: manager.execute(inputs)))
    yield from {"replay": replay, "execute": execute, "execute beyond replay": execute - replay}.items()
    specs, values = manager._item_specs(inputs), path.values(inputs)
    parts = {
        "item specs": lambda: manager._item_specs(inputs),
        "kept plan": lambda: manager._plans.of(inputs, specs),
        "metadata": lambda: path.values(inputs),
        "load": lambda: captured.load(values, path.forward.rows(values)),
        "address check": captured.parameters.check_addresses,
        "version check": path.program.program.derived.refresh,
    }
    yield from ((name, 1e3 * cpu_ms(part, 300)) for name, part in parts.items())
    yield "execute, new sizes", new_sizes(manager, features)
    generator = random.Random(1)
    for count in (1, 32, 256):
        grids = torch.tensor([random_grid(generator) for _ in range(count)])
        specs = manager.tower.get_encoder_cudagraph_item_specs({"image_grid_thw": grids})
        items = [Item(spec) for spec in specs]
        milliseconds = cpu_ms(lambda items=items: manager._plans.build(items), 100)
        yield f"plan of {count}", 1e3 * milliseconds


def attention_op() -> float:
    """Microseconds of the op beyond its kernel's call."""
    query, key, value = torch.randn(64, 3, 16, 72, device="cuda", dtype=torch.bfloat16).unbind(1)
    lengths = torch.tensor([0, 64], dtype=torch.int32, device="cuda")
    kernel = torch.ops.aten._flash_attention_forward.default
    alone = cpu_ms(
        lambda: kernel(query, key, value, lengths, lengths, 64, 64, 0.0, False, False, scale=0.1), 300
    )
    with choosing(KernelChooser("torch_flash")):
        op = cpu_ms(lambda: varlen_attention(query, key, value, lengths, 64, 0.1), 300)
    return 1e3 * (op - alone)


def other_ways(tower: Any, features: int, execute: float) -> Iterator[tuple[str, float]]:
    """What `piecewise` and the backend keep the CPU; `execute`: microseconds of the manager's call."""
    inputs = image(16, 16, features)
    config = fx.EncoderConfig(**LIMITS, mode="piecewise")
    manager = fx.EncoderCudaGraphManager(tower, config, log_interval=0)
    manager.capture()
    for _ in range(50):
        manager.execute(inputs)
    captured = manager.paths["default"].ladder.best(64, 1)
    yield "replay, piecewise", 1e3 * cpu_ms(captured.replay, 100)
    manager.clear()
    guards = {"": {}, ", module guards skipped": {"guard_filter_fn": skip_guard_on_all_nn_modules_unsafe}}
    for name, more in guards.items():
        torch._dynamo.reset()
        options = {**LIMITS, "mode": "full", **more}
        compiled = torch.compile(tower, backend="encoder_cg", fullgraph=True, options=options)
        fx.warmup(compiled)
        call = functools.partial(compiled, inputs["pixel_values"], inputs["image_grid_thw"])
        for _ in range(50):
            call()
        microseconds = 1e3 * cpu_ms(call, 300)
        yield f"torch.compile{name}", microseconds
        yield f"torch.compile{name}, beyond execute", microseconds - execute
        yield f"Dynamo alone{name}", dynamo_alone(tower, inputs, more)


def dynamo_alone(tower: Any, inputs: dict[str, Any], options: dict[str, Any]) -> float:
    """Microseconds of a call through a backend that returns the same tensors every time."""
    torch._dynamo.reset()

    @takes_blocks
    def same(graph: torch.fx.GraphModule, example_inputs: Any, **_: Any) -> Any:
        end_blocks()
        (outputs,) = graph.graph.output_node().args
        made = [torch.zeros([1] * node.meta["example_value"].dim(), device="cuda") for node in outputs]
        return lambda *args: made

    compiled = torch.compile(tower, backend=same, fullgraph=True, options=options)
    call = functools.partial(compiled, inputs["pixel_values"], inputs["image_grid_thw"])
    for _ in range(50):
        call()
    return 1e3 * cpu_ms(call, 300)


@torch.no_grad()
def main() -> None:
    parser = make_parser(__doc__)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(2, "host_time.py needs a CUDA device: there is nothing to replay without one\n")
    tower = fx.wrap(demo_tower(27, "cuda", torch.bfloat16))
    config = fx.EncoderConfig(**LIMITS, mode="full")
    manager = fx.EncoderCudaGraphManager(tower, config, log_interval=0)
    manager.capture()
    microseconds: dict[str, float] = {}
    result = {**describe(), "microseconds": microseconds}
    for what, value in measure(manager, tower.patch_features):
        microseconds[what] = value
        store(arguments.output, result)
    manager.clear()
    microseconds["attention op"] = attention_op()
    for what, value in other_ways(tower, tower.patch_features, microseconds["execute"]):
        microseconds[what] = value
        store(arguments.output, result)
    print(rows(microseconds, "simple"))


if __name__ == "__main__":
    main()
