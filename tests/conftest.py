"""Fixtures that several directories share: a tiny tower, batches for it, eager's answer, a clean compiler.

Faults that other encoder CUDA graphs had are each a test that would show it here. Its name holds the project
and the number of its public issue or pull request: vllm is vllm-project/vllm, omni vllm-project/vllm-omni,
ascend vllm-project/vllm-ascend, sglang sgl-project/sglang, sglang_omni sgl-project/sglang-omni, trtllm
NVIDIA/TensorRT-LLM. `found` are faults that were found by reading those projects; no issue is known.
"""

from __future__ import annotations

import copy
import gc
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, settings
from torch import Tensor

import fxsplit_encoder as fx
from fxsplit_encoder.backend import entry
from fxsplit_encoder.compile import trace
from fxsplit_encoder.compile.blocks import block_ops

from .towers.random_weights import randomize

Grid = tuple[int, int, int]
INPUTS = (("pixel_values", "image_grid_thw"), ("pixel_values_videos", "video_grid_thw"))
FEATURES = 1536
collect_ignore = ["vllm"]  # it has an environment of its own: `make test-vllm`
BUDGETS = (4, 16, 32, 64)

# No property fails for how long it takes, on however busy a machine. Fixtures are made once for all examples
# of a property, which is what they are for here: its examples share a tower.
settings.register_profile(
    "untimed",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("untimed")

# Processes that tests start read compiled modules, whatever the environment says of those.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# pytest adds handlers to loggers that do not propagate, and where this one has any, torch writes down each
# graph that it compiles: a fifth of the time of a test that compiles.
logging.getLogger("torch.__trace").handlers.clear()
logging.getLogger("torch.__trace").propagate = True

# After each compilation Dynamo flushes the caches and times the guards, for a log.
torch._dynamo.guards.profile_guard_manager = lambda *args: 0.0


def pytest_configure(config: pytest.Config) -> None:
    """Have pytest-xdist, where it is installed, start files in the order below."""
    config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with more slow tests come first, so that no process is left with a long one at the end."""
    num_slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -num_slow[item.path])


def pytest_collection_finish() -> None:
    """Keep the garbage collector, which captures run too, from the million objects that imports made."""
    gc.collect()
    gc.freeze()


class TinyTowers(NamedTuple):
    hugging_face: Any
    """The tower inside the wrapper."""
    reference: Any
    """An equal tower that nobody wrapped."""
    wrapped: Any


def random_tower(seed: int = 0) -> Any:
    """A Hugging Face tower of four blocks."""
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    config = Qwen3VLVisionConfig(
        depth=4,
        hidden_size=64,
        intermediate_size=128,
        num_heads=4,
        out_hidden_size=96,
        deepstack_visual_indexes=[1, 2],
    )
    return randomize(Qwen3VLVisionModel(config), seed, deviation=0.02)


def _make_batch(
    images: Sequence[Grid] = (), videos: Sequence[Grid] = (), *, seed: int = 0, features: int = FEATURES
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    inputs: dict[str, Any] = {}
    for grids, (pixels, key) in zip((images, videos), INPUTS, strict=True):
        if grids or (not videos and pixels == "pixel_values"):  # no items are tensors without rows
            rows = sum(t * h * w for t, h, w in grids)
            inputs[key] = torch.tensor(grids, dtype=torch.int64).view(-1, 3)
            inputs[pixels] = torch.randn(rows, features, generator=generator)
    return inputs


def _encode(tower: Any, inputs: dict[str, Any]) -> list[Tensor]:
    items: list[Tensor] = []
    for pixels, key in INPUTS:
        if len(inputs.get(key, ())):
            with torch.no_grad():
                output = tower(inputs[pixels], inputs[key])
            packed = torch.cat([output.pooler_output, *output.deepstack_features], dim=1)
            items += packed.split([t * h * w // 4 for t, h, w in inputs[key].tolist()])
    return items


@pytest.fixture(scope="session")
def make_tower() -> Callable[..., Any]:
    """Makes Hugging Face towers of four blocks: `make_tower(seed)`."""
    return random_tower


@pytest.fixture(scope="session")
def tiny_towers() -> TinyTowers:
    tower = random_tower()
    reference = copy.deepcopy(tower)
    return TinyTowers(tower, reference, fx.wrap(tower))


@pytest.fixture(scope="session")
def encode() -> Callable[[Any, dict[str, Any]], list[Tensor]]:
    """`encode(tower, inputs)`: every item through a Hugging Face tower, as the manager returns it."""
    return _encode


@pytest.fixture(scope="session")
def make_batch() -> Callable[..., dict[str, Any]]:
    """`make_batch(images, videos, seed=0)`: the grids and random patches."""
    return _make_batch


@pytest.fixture(scope="session")
def make_manager(tiny_towers: TinyTowers) -> Callable[..., Any]:
    """Managers of the tiny tower: `make_manager(mode="full")`. It is traced once; all of them share that."""
    traced: list[Any] = []

    def make(**settings: Any) -> fx.EncoderCudaGraphManager:
        limits = {"token_budgets": BUDGETS, "max_items_per_batch": 4, "max_frames_per_batch": 8}
        config = fx.EncoderConfig(**{**limits, "debug": True, **settings})
        manager = fx.EncoderCudaGraphManager(tiny_towers.wrapped, config, log_interval=0)
        path = manager.paths["default"]
        if traced:
            path.bind(traced[0])
        else:
            path.compile()
            assert path.program is not None, manager.reports
            traced.append(path.program)
        return manager

    return make


@pytest.fixture(scope="session")
def make_captured(make_manager: Callable[..., Any]) -> Callable[..., Any]:
    """Managers of the tiny tower that have been captured: `make_captured(mode="full")`."""

    def make(**settings: Any) -> fx.EncoderCudaGraphManager:
        manager: fx.EncoderCudaGraphManager = make_manager(**settings)
        manager.capture()
        return manager

    return make


@pytest.fixture(scope="session")
def assert_as_eager(tiny_towers: TinyTowers) -> Callable[[Any, dict[str, Any]], None]:
    """`assert_as_eager(manager, inputs)`: a manager of the tiny tower returns what an equal tower returns."""

    def check(manager: Any, inputs: dict[str, Any]) -> None:
        expected = _encode(tiny_towers.reference, inputs)
        torch.testing.assert_close(manager.execute(inputs), expected, rtol=0, atol=1e-5)

    return check


@pytest.fixture(scope="session")
def managers(make_captured: Callable[..., Any]) -> dict[str, fx.EncoderCudaGraphManager]:
    """A captured manager in each mode; tests may count on nothing in their statistics."""
    return {mode: make_captured(mode=mode) for mode in ("auto", "full", "piecewise", "none")}


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Uninitialised memory holds NaN, so that rows that nobody writes show on a CPU."""
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(1).isnan().all()
    yield
    torch.utils.deterministic.fill_uninitialized_memory = fills
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Dynamo without caches and counters, and a backend that has warned of nothing yet."""
    _forget()
    yield
    _forget()


def _forget() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    entry.warn_once.cache_clear()


@pytest.fixture
def inlined(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many weights of blocks each graph got."""
    counts: list[int] = []
    real = trace.inline_blocks

    def counted(module: Any) -> Any:
        weights = real(module)
        counts.append(len(weights))
        return weights

    monkeypatch.setattr(trace, "inline_blocks", counted)
    yield counts
    assert not block_ops.groups
    assert not block_ops.begun
