"""The protocol between a tower and the manager, in the names of vLLM 0.33: a model written for its encoder
CUDA graphs is a tower here too. The manager reads attributes only, so vLLM's own classes serve as well.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeAlias, runtime_checkable

from fxsplit_encoder.errors import InputError

if TYPE_CHECKING:
    import torch  # for annotations alone: planning, which needs no torch, reads item sizes

EncoderCudaGraphPaddingLogic: TypeAlias = "Callable[[torch.Tensor, torch.Tensor], None]"
"""Copies a replay's value (second) into the captured buffer (first), at least as large in every dimension,
and sets the rest."""

ENCODER_CUDAGRAPH_AXIS_KEYS_KWARG = "encoder_cudagraph_axis_keys"
"""Where `select_encoder_cudagraph_items` of a tower with capture axes puts the keys of its sub-batch."""


@dataclass(frozen=True)
class EncoderItemSpec:
    """The size of one image or video."""

    input_size: int
    """Patches, the rows that the encoder attends over."""
    output_tokens: int
    """Rows of the item's embedding."""
    path_output_tokens: dict[str, int] = field(default_factory=dict)
    """Output tokens on each path of a multi-path encoder; empty if "default" is the only path."""

    def get_path_output_tokens(self, path: str) -> int:
        """Output tokens of this item on `path`; 0 if the item does not take that path."""
        if not self.path_output_tokens and path == "default":
            return self.output_tokens
        return self.path_output_tokens.get(path, 0)


@dataclass(frozen=True)
class EncoderCudaGraphPathConfig:
    """Budget range of one independently captured path."""

    min_token_budget: int | None = None
    """Output tokens of a tile, of which inferred budgets are multiples. None: the lower end of the range."""
    allow_zero_tokens: bool = False
    """Whether a batch may have no tokens on this path, which is then skipped."""


@dataclass(frozen=True)
class EncoderCudaGraphConfig:
    """The constants of a managed tower."""

    modalities: list[str]
    """The modalities that graphs serve, of "image", "video" and "audio"."""
    buffer_keys: list[str]
    """Names of the tensors that a capture reads."""
    out_hidden_size: int
    padding_logics: dict[str, EncoderCudaGraphPaddingLogic] = field(default_factory=dict)
    """How a buffer is filled if not by copying into the first rows and clearing the others."""
    max_frames_per_video: int = 1
    """Frames of the longest video."""
    paths: dict[str, EncoderCudaGraphPathConfig] = field(
        default_factory=lambda: {"default": EncoderCudaGraphPathConfig()}
    )
    """The independently captured paths, by name."""
    capture_axes: tuple[tuple[Hashable, ...], ...] = ()
    """The keys of further axes along which graphs differ; each budget is captured for each combination."""


@dataclass(frozen=True)
class BudgetDeclaration:
    """Declaration of budgets behind `torch.compile`: functions of a host op's arguments."""

    rows_per_output_token: Callable[..., int | Fraction]
    """Rows merged into one output token; a fraction where a row gives several."""
    budget_range: Callable[..., tuple[int, int]]
    """Smallest and largest useful budget, in output tokens."""
    segment_factors: Callable[..., Sequence[int]] | None = None
    """For every output: segments per image or frame, if it is cumulative lengths. None: one."""


@dataclass(eq=False)
class EncoderCudaGraphCaptureInputs:
    """The tensors of one capture."""

    values: Mapping[str, torch.Tensor | None]
    """The graph's input buffers by name; for None the forward gets None, without a buffer."""


@dataclass(eq=False)
class EncoderCudaGraphReplayBuffers:
    """The values of one replay."""

    values: dict[str, torch.Tensor | Sequence[torch.Tensor] | None]
    """Copied into each captured buffer, at most as many rows: a tensor, of which one without dimensions fills
    the buffer, or several one after the other. None keeps the contents; one with those of the capture may be
    left out."""


class Replayable(Protocol):
    """A captured forward, for example a `torch.cuda.CUDAGraph`."""

    def replay(self) -> None:
        """Run the forward again on what the buffers hold now."""


@dataclass(eq=False)
class BudgetGraphMetadata:
    """One captured budget of one path."""

    token_budget: int
    max_batch_size: int
    max_frames_per_batch: int
    """These three: the most output tokens, items and video frames of a replay."""
    graph: Replayable
    input_buffers: dict[str, torch.Tensor]
    """The tensors that the forward reads, owned by this capture."""
    output_buffer: torch.Tensor
    """The tensor that every replay overwrites, (token budget or more, hidden)."""
    axis_keys: tuple[Hashable, ...] = ()
    """The key on each capture axis."""
    mode: str = "full"
    """One of the configuration's modes."""
    graph_bytes: int = 0
    """Device memory that the capture added."""


@runtime_checkable
class SupportsEncoderCudaGraph(Protocol):
    """A vision encoder that the manager can pack, capture and replay. `mm_kwargs` are the multimodal inputs
    of a batch, as its processor made them; only the tower looks inside. Items keep the order of the inputs.
    """

    supports_encoder_cudagraph: ClassVar[Literal[True]] = True

    def get_encoder_cudagraph_config(self) -> EncoderCudaGraphConfig:
        """The constants of this tower."""

    def get_input_modality(self, mm_kwargs: dict[str, Any]) -> str:
        """The modality of a batch, "image" or "video"."""
        return "image"

    def get_max_frames_per_video(self) -> int:
        """Frames of the longest video that this tower encodes."""

    def get_encoder_cudagraph_budget_range(self, vllm_config: Any) -> tuple[int, int]:
        """Output tokens of the smallest item, and of the largest batch worth capturing."""

    def get_encoder_cudagraph_item_specs(self, mm_kwargs: dict[str, Any]) -> list[EncoderItemSpec]:
        """The size of every item of a batch, in order."""

    def select_encoder_cudagraph_items(self, mm_kwargs: dict[str, Any], indices: list[int]) -> dict[str, Any]:
        """The inputs of the items `indices` alone, in that order; with capture axes also their keys, under
        `ENCODER_CUDAGRAPH_AXIS_KEYS_KWARG`.
        """

    def prepare_encoder_cudagraph_capture_inputs(
        self,
        token_budget: int,
        max_batch_size: int,
        max_frames_per_batch: int,
        device: torch.device,
        dtype: torch.dtype,
        path: str = "default",
        axis_keys: tuple[Hashable, ...] | None = None,
    ) -> EncoderCudaGraphCaptureInputs:
        """Fresh tensors with room for `token_budget` output tokens, for `encoder_cudagraph_forward`."""

    def prepare_encoder_cudagraph_replay_buffers(
        self,
        mm_kwargs: dict[str, Any],
        max_batch_size: int,
        max_frames_per_batch: int,
        path: str = "default",
    ) -> EncoderCudaGraphReplayBuffers:
        """Returns the values that a replay of this batch copies into the captured buffers."""

    def encoder_cudagraph_forward(
        self, inputs: dict[str, torch.Tensor], path: str = "default"
    ) -> torch.Tensor:
        """The captured forward, (token budget or more, hidden); its shapes depend on no tensor's values."""

    def encoder_eager_forward(self, mm_kwargs: dict[str, Any], path: str = "default") -> torch.Tensor:
        """The forward of a batch that no graph serves, (output tokens, hidden)."""

    def postprocess_encoder_output(
        self,
        outputs: dict[str, torch.Tensor],
        indices: list[int],
        per_item_out_tokens: list[int],
        dest: dict[int, torch.Tensor] | list[torch.Tensor | None],
        clone: bool = False,
        batch_mm_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Puts the embedding of every item of a batch into `dest`, from each path's packed output. By default
        these are the rows of the path "default", as of `scatter_output_slices`.
        """
        scatter_output_slices(outputs["default"], indices, per_item_out_tokens, dest, clone)


def missing_methods(tower: object) -> list[str]:
    """The methods of `SupportsEncoderCudaGraph` that an object lacks, also by `__getattr__`."""
    methods = (name for name, value in vars(SupportsEncoderCudaGraph).items() if callable(value))
    public = (name for name in methods if not name.startswith("_"))
    return [name for name in public if not callable(getattr(tower, name, None))]


def scatter_output_slices(
    output: torch.Tensor,
    indices: Sequence[int],
    per_item_out_tokens: Sequence[int] | Mapping[int, int],
    dest: dict[int, torch.Tensor] | list[torch.Tensor | None],
    clone: bool = False,
) -> None:
    """Cuts the packed output of a batch into the embeddings of its items.

    Args:
        output: (rows, ...), the items' rows one after the other in the order of `indices`, then padding.
        indices: the items of the batch, by their position in the whole request.
        per_item_out_tokens: rows of each item, indexed by the same positions.
        dest: receives at each position a view of `output`, (rows of the item, ...).
        clone: put copies instead, which a later replay does not overwrite.

    Raises:
        InputError: `output` has fewer rows than the items need; `dest` is then unchanged.
    """
    rows = [per_item_out_tokens[index] for index in indices]
    if sum(rows) > output.shape[0]:
        raise InputError(
            f"the encoder's output is too short: items {list(indices)} need {sum(rows)} rows {rows}, got "
            f"{output.shape[0]}; make the tower's item specs declare the rows that its forward returns"
        )
    start = 0
    for index, count in zip(indices, rows, strict=True):
        embedding = output[start : start + count]
        dest[index] = embedding.clone() if clone else embedding
        start += count
