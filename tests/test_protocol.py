import inspect
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from fxsplit_encoder.errors import InputError
from fxsplit_encoder.protocol import (
    ENCODER_CUDAGRAPH_AXIS_KEYS_KWARG,
    SupportsEncoderCudaGraph,
    scatter_output_slices,
)

# Models are called with these names by keyword, so each is part of the interface.
PARAMETERS = {
    "get_encoder_cudagraph_config": "",
    "get_input_modality": "mm_kwargs",
    "get_max_frames_per_video": "",
    "get_encoder_cudagraph_budget_range": "vllm_config",
    "get_encoder_cudagraph_item_specs": "mm_kwargs",
    "select_encoder_cudagraph_items": "mm_kwargs, indices",
    "prepare_encoder_cudagraph_capture_inputs": (
        "token_budget, max_batch_size, max_frames_per_batch, device, dtype, path='default', axis_keys=None"
    ),
    "prepare_encoder_cudagraph_replay_buffers": (
        "mm_kwargs, max_batch_size, max_frames_per_batch, path='default'"
    ),
    "encoder_cudagraph_forward": "inputs, path='default'",
    "encoder_eager_forward": "mm_kwargs, path='default'",
    "postprocess_encoder_output": (
        "outputs, indices, per_item_out_tokens, dest, clone=False, batch_mm_kwargs=None"
    ),
}


def stranger(*without: str) -> object:
    """A model that shares no class with this library, only names."""
    names = {"supports_encoder_cudagraph": True, **dict.fromkeys(PARAMETERS, print)}
    return SimpleNamespace(**{name: value for name, value in names.items() if name not in without})


def parameters(method: Callable[..., object]) -> str:
    """The names after self, each with its default."""
    every = list(inspect.signature(method).parameters.values())[1:]
    return ", ".join(p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in every)


def test_methods_have_the_agreed_names_and_parameters() -> None:
    members = vars(SupportsEncoderCudaGraph)
    methods = {n: parameters(m) for n, m in members.items() if inspect.isfunction(m) and n[0] != "_"}
    assert methods == PARAMETERS
    assert SupportsEncoderCudaGraph.supports_encoder_cudagraph is True
    assert ENCODER_CUDAGRAPH_AXIS_KEYS_KWARG == "encoder_cudagraph_axis_keys"


def test_any_class_with_the_methods_conforms() -> None:
    assert isinstance(stranger(), SupportsEncoderCudaGraph)


@pytest.mark.parametrize("missing", ["supports_encoder_cudagraph", *PARAMETERS])
def test_every_member_is_required(missing: str) -> None:
    assert not isinstance(stranger(missing), SupportsEncoderCudaGraph)


@pytest.mark.parametrize("clone", [False, True])
def test_rows_go_to_their_items_in_batch_order(clone: bool) -> None:
    output = torch.arange(12.0).reshape(6, 2)  # one row more than the items need
    dest: list[torch.Tensor | None] = [None] * 4
    scatter_output_slices(output, [3, 0, 1], [2, 0, 7, 3], dest, clone)
    assert dest[3] is not None and dest[0] is not None and dest[1] is not None and dest[2] is None
    assert torch.equal(dest[3], output[:3])
    assert torch.equal(dest[0], output[3:5])
    assert dest[1].shape == (0, 2)
    before = dest[3].clone()
    output.zero_()
    assert torch.equal(dest[3], before) == clone


def test_a_short_output_is_refused_before_anything_is_written() -> None:
    dest: dict[int, torch.Tensor] = {}
    with pytest.raises(InputError, match=r"items \[1, 0\] need 5 rows \[3, 2\], got 4"):
        scatter_output_slices(torch.zeros(4, 2), [1, 0], [2, 3], dest)
    assert dest == {}


def test_postprocessing_defaults_to_the_rows_of_the_default_path() -> None:
    dest: dict[int, torch.Tensor] = {}
    output = torch.arange(6.0).reshape(3, 2)
    SupportsEncoderCudaGraph.postprocess_encoder_output(
        stranger(),  # type: ignore[arg-type]
        {"default": output},
        [1, 0],
        [1, 2],
        dest,
        clone=True,
    )
    assert torch.equal(dest[1], output[:2])
    assert torch.equal(dest[0], output[2:])
    assert dest[0].data_ptr() != output[2:].data_ptr()
    assert SupportsEncoderCudaGraph.get_input_modality(stranger(), {}) == "image"  # type: ignore[arg-type]
