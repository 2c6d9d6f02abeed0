"""Towers written for vLLM's encoder protocol: classes of their own, nothing imported from this library."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import fxsplit_encoder as fx
from fxsplit_encoder.errors import ReplayError

WIDTH = 8


@dataclass
class ItemSpec:
    input_size: int
    output_tokens: int
    path_output_tokens: dict[str, int] = field(default_factory=dict)

    def get_path_output_tokens(self, path: str) -> int:
        if not self.path_output_tokens and path == "default":
            return self.output_tokens
        return self.path_output_tokens.get(path, 0)


@dataclass
class PathConfig:
    min_token_budget: int | None = None
    allow_zero_tokens: bool = False


@dataclass
class Config:
    modalities: list[str]
    buffer_keys: list[str]
    out_hidden_size: int
    padding_logics: dict[str, Any] = field(default_factory=dict)
    max_frames_per_video: int = 1
    paths: dict[str, PathConfig] = field(default_factory=lambda: {"default": PathConfig()})
    capture_axes: tuple[Any, ...] = ()


@dataclass
class Values:
    values: dict[str, Any]


class EncoderProtocol:
    """The defaults that such a model inherits."""

    supports_encoder_cudagraph: ClassVar[bool] = True

    def get_input_modality(self, mm_kwargs: dict[str, Any]) -> str:
        return "image"

    def get_max_frames_per_video(self) -> int:
        return 1

    def get_encoder_cudagraph_budget_range(self, vllm_config: Any) -> tuple[int, int]:
        return 4, 16

    def postprocess_encoder_output(
        self,
        outputs: dict[str, Tensor],
        indices: list[int],
        per_item_out_tokens: list[int],
        dest: Any,
        clone: bool = False,
        batch_mm_kwargs: Any = None,
    ) -> None:
        start = 0
        for index in indices:
            rows = outputs["default"][start : start + per_item_out_tokens[index]]
            dest[index] = rows.clone() if clone else rows
            start += per_item_out_tokens[index]


def ones_behind(captured: Tensor, value: Tensor) -> None:
    captured.fill_(1)
    captured[: value.shape[0]].copy_(value)


class PackedModel(EncoderProtocol, nn.Module):
    """A packed encoder whose attention is its own arithmetic: no splitting op is in its graph.

    `divisor` must not be zero in pad rows, `item` says which rows attend to one another.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.requires_grad_(False)
        self.forwards = 0

    def get_encoder_cudagraph_config(self) -> Config:
        return Config(["image"], ["patches", "item", "divisor"], WIDTH, {"divisor": ones_behind})

    def get_encoder_cudagraph_item_specs(self, mm_kwargs: dict[str, Any]) -> list[ItemSpec]:
        return [ItemSpec(n, n) for n in mm_kwargs["lengths"]]

    def select_encoder_cudagraph_items(self, mm_kwargs: dict[str, Any], indices: list[int]) -> dict[str, Any]:
        parts = mm_kwargs["patches"].split(mm_kwargs["lengths"])
        return {
            "patches": torch.cat([parts[i] for i in indices]),
            "lengths": [mm_kwargs["lengths"][i] for i in indices],
        }

    def prepare_encoder_cudagraph_capture_inputs(
        self,
        token_budget: int,
        max_batch_size: int,
        max_frames_per_batch: int,
        device: torch.device,
        dtype: torch.dtype,
        path: str = "default",
        axis_keys: Any = None,
    ) -> Values:
        return Values(
            {
                "patches": torch.randn(token_budget, WIDTH, device=device, dtype=dtype),
                "item": torch.ones(token_budget, device=device, dtype=torch.int64),
                "divisor": torch.ones(token_budget, device=device, dtype=dtype),
            }
        )

    def prepare_encoder_cudagraph_replay_buffers(
        self, mm_kwargs: dict[str, Any], max_batch_size: int, max_frames_per_batch: int, path: str = "default"
    ) -> Values:
        lengths = torch.tensor(mm_kwargs["lengths"])
        item = torch.arange(1, len(lengths) + 1).repeat_interleave(lengths)
        return Values({"patches": mm_kwargs["patches"], "item": item, "divisor": item.float() + 1})

    def encoder_cudagraph_forward(self, inputs: dict[str, Tensor], path: str = "default") -> Tensor:
        self.forwards += 1
        x = self.linear(inputs["patches"]) / inputs["divisor"][:, None]
        apart = inputs["item"][:, None] != inputs["item"][None, :]
        return (x @ x.t()).masked_fill(apart, float("-inf")).softmax(-1) @ x

    def encoder_eager_forward(self, mm_kwargs: dict[str, Any], path: str = "default") -> Tensor:
        values = self.prepare_encoder_cudagraph_replay_buffers(mm_kwargs, 0, 0).values
        return self.encoder_cudagraph_forward(values)


class SplitModel(PackedModel):
    """The same with packed attention as a splitting op, so that the forward is compiled and split."""

    def get_encoder_cudagraph_config(self) -> Config:
        return Config(["image"], ["patches", "lengths", "divisor"], WIDTH, {"divisor": ones_behind})

    def prepare_encoder_cudagraph_capture_inputs(
        self, token_budget: int, *args: Any, **kwargs: Any
    ) -> Values:
        values = super().prepare_encoder_cudagraph_capture_inputs(token_budget, *args, **kwargs).values
        del values["item"]
        lengths = torch.full((token_budget // 2 + 2,), token_budget, dtype=torch.int32)
        lengths[0] = 0
        return Values({**values, "lengths": lengths})

    def prepare_encoder_cudagraph_replay_buffers(
        self, mm_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Values:
        values = super().prepare_encoder_cudagraph_replay_buffers(mm_kwargs, *args, **kwargs).values
        del values["item"]
        ends = torch.tensor([0, *mm_kwargs["lengths"]]).cumsum(0)
        return Values({**values, "lengths": ends.to(torch.int32)})

    def encoder_cudagraph_forward(self, inputs: dict[str, Tensor], path: str = "default") -> Tensor:
        x = self.linear(inputs["patches"]) / inputs["divisor"][:, None]
        q = x.view(-1, 1, WIDTH)
        out = torch.ops.fxsplit.varlen_attention(q, q, q, inputs["lengths"], q.shape[0], 1.0)
        return out.view(-1, WIDTH) / inputs["divisor"][:, None]


class UntraceableModel(PackedModel):
    def encoder_cudagraph_forward(self, inputs: dict[str, Tensor], path: str = "default") -> Tensor:
        torch._dynamo.graph_break()
        return super().encoder_cudagraph_forward(inputs, path)


def batch(*lengths: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return {"patches": torch.randn(sum(lengths), WIDTH, generator=generator), "lengths": list(lengths)}


def alone(model: PackedModel, inputs: dict[str, Any]) -> list[Tensor]:
    """Every item through the eager forward; `divisor` numbers the items of a batch."""
    return list(model.encoder_eager_forward(inputs).split(inputs["lengths"]))


MODELS = [PackedModel, SplitModel, UntraceableModel]


@pytest.fixture(params=MODELS, ids=lambda c: c.__name__)
def model(request: pytest.FixtureRequest) -> Any:
    return request.param()


@pytest.mark.parametrize("mode", ["full", "piecewise", "auto", "none"])
def test_a_foreign_tower_is_planned_captured_and_replayed(model: Any, mode: str) -> None:
    config = fx.EncoderConfig(mode=mode, token_budgets=(4, 8, 16), max_items_per_batch=4, debug=True)
    manager = fx.EncoderCudaGraphManager(model, config)
    manager.capture()
    assert sorted(manager.budget_graphs["default"]) == ([] if mode == "none" else [4, 8, 16])
    for lengths in ((3,), (2, 5), (1, 1, 1, 1), (8, 8), (3,), (17,)):
        inputs = batch(*lengths)
        # A batch in one piece, so that the numbers of the items are those of the whole.
        assert len(manager.plan(inputs).batches) == 1
        output, expected = manager.execute(inputs), alone(model, inputs)
        assert [len(item) for item in output] == list(lengths)
        for got, wanted in zip(output, expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)
            assert got.untyped_storage().nbytes() == got.nbytes
    stats = manager.stats()
    assert (stats.hits, stats.items) == ((0, 11) if mode == "none" else (10, 11))


def test_what_does_not_compile_is_captured_whole_and_noted() -> None:
    for model, reason in (
        (UntraceableModel(), "does not trace as one graph"),
        (PackedModel(), "it has no splitting op"),
    ):
        config = fx.EncoderConfig(mode="piecewise", token_budgets=(4, 8), max_items_per_batch=2)
        manager = fx.EncoderCudaGraphManager(model, config)
        manager.capture()
        (report,) = manager.reports
        assert report.startswith("path default: captured without compiling: ")
        assert reason in report
        assert manager.programs == {"default": None}
        calls = model.forwards
        manager.execute(batch(3))
        assert model.forwards == calls + 1  # the recorded call, once
        assert manager.stats().hits == 1


def test_a_compiled_tower_has_no_notes() -> None:
    manager = fx.EncoderCudaGraphManager(
        SplitModel(), fx.EncoderConfig(token_budgets=(4, 8), max_items_per_batch=2)
    )
    manager.capture()
    assert manager.reports == []
    assert manager.programs["default"].segment_inputs == ("lengths",)


def test_a_padding_logic_decides_what_pad_rows_hold(model: Any) -> None:
    config = fx.EncoderConfig(mode="full", token_budgets=(8,), max_items_per_batch=2)
    manager = fx.EncoderCudaGraphManager(model, config)
    manager.capture()
    manager.execute(batch(3, 4))
    captured = manager.paths["default"].captured[8]
    assert captured.inputs.tensors["divisor"].tolist() == [2.0] * 3 + [3.0] * 4 + [1.0]
    # Zeros, as all other buffers have them, would divide by zero.
    assert captured.outputs[0].isfinite().all()


def test_a_value_that_is_too_large_falls_back_before_any_buffer_is_written() -> None:
    model = SplitModel()
    manager = fx.EncoderCudaGraphManager(
        model, fx.EncoderConfig(mode="full", token_budgets=(8,), max_items_per_batch=2)
    )
    manager.capture()
    manager.execute(batch(3, 4))
    captured = manager.paths["default"].captured[8]
    before = {name: tensor.clone() for name, tensor in captured.inputs.tensors.items()}

    prepare = model.prepare_encoder_cudagraph_replay_buffers
    longer = torch.ones(9)

    def oversize(mm_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> Values:
        return Values({**prepare(mm_kwargs, *args, **kwargs).values, "divisor": longer})

    model.prepare_encoder_cudagraph_replay_buffers = oversize
    manager.tower.encoder_eager_forward = lambda mm_kwargs, path="default": torch.full((2, WIDTH), 5.0)
    manager.paths["default"].program = None
    (output,) = manager.execute(batch(2))
    assert output.eq(5).all()
    assert manager.stats().misses == {fx.MissReason.EXTENT_EXCEEDED: 1}
    assert all(torch.equal(tensor, before[name]) for name, tensor in captured.inputs.tensors.items())


def test_a_missing_buffer_is_an_error_and_none_keeps_it(model: Any) -> None:
    manager = fx.EncoderCudaGraphManager(
        model, fx.EncoderConfig(mode="full", token_budgets=(8,), max_items_per_batch=2)
    )
    manager.capture()
    prepare = model.prepare_encoder_cudagraph_replay_buffers
    inputs = batch(3, 4)
    expected = manager.execute(inputs)
    changes: dict[str, Any] = {"divisor": None}

    def changed(mm_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> Values:
        values = {**prepare(mm_kwargs, *args, **kwargs).values, **changes}
        return Values({k: v for k, v in values.items() if v != "missing"} if "x" in changes else values)

    model.prepare_encoder_cudagraph_replay_buffers = changed
    for got, wanted in zip(manager.execute(inputs), expected, strict=True):
        assert torch.equal(got, wanted)

    def incomplete(mm_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> Values:
        values = prepare(mm_kwargs, *args, **kwargs).values
        return Values({name: value for name, value in values.items() if name != "divisor"})

    model.prepare_encoder_cudagraph_replay_buffers = incomplete
    with pytest.raises(ReplayError, match="divisor: the replay needs this buffer"):
        manager.execute(inputs)


class TwoPaths(PackedModel):
    """Items of an image go through the "global" path, the tokens of its tiles through the "local" one."""

    def get_encoder_cudagraph_config(self) -> Config:
        config = super().get_encoder_cudagraph_config()
        config.paths = {"global": PathConfig(), "local": PathConfig(allow_zero_tokens=True)}
        return config

    def get_encoder_cudagraph_item_specs(self, mm_kwargs: dict[str, Any]) -> list[ItemSpec]:
        pairs = zip(mm_kwargs["lengths"], mm_kwargs["tiles"], strict=True)
        return [ItemSpec(n, n + t, {"global": n, "local": t}) for n, t in pairs]

    def select_encoder_cudagraph_items(self, mm_kwargs: dict[str, Any], indices: list[int]) -> dict[str, Any]:
        tiles = mm_kwargs["tile_patches"].split(mm_kwargs["tiles"])
        return {
            **super().select_encoder_cudagraph_items(mm_kwargs, indices),
            "tile_patches": torch.cat([tiles[i] for i in indices]),
            "tiles": [mm_kwargs["tiles"][i] for i in indices],
        }

    def prepare_encoder_cudagraph_replay_buffers(
        self, mm_kwargs: dict[str, Any], max_batch_size: int, max_frames_per_batch: int, path: str = "default"
    ) -> Values:
        name, lengths = ("patches", "lengths") if path == "global" else ("tile_patches", "tiles")
        single = {"patches": mm_kwargs[name], "lengths": mm_kwargs[lengths]}
        values = super().prepare_encoder_cudagraph_replay_buffers(single, max_batch_size, 0).values
        return Values({**values, "divisor": torch.ones(len(values["item"]))})

    def encoder_eager_forward(self, mm_kwargs: dict[str, Any], path: str = "default") -> Tensor:
        return self.encoder_cudagraph_forward(
            self.prepare_encoder_cudagraph_replay_buffers(mm_kwargs, 0, 0, path).values, path
        )

    def encoder_cudagraph_forward(self, inputs: dict[str, Tensor], path: str = "default") -> Tensor:
        return super().encoder_cudagraph_forward(inputs) * (1 if path == "global" else -1)

    def postprocess_encoder_output(
        self,
        outputs: dict[str, Tensor],
        indices: list[int],
        per_item_out_tokens: list[int],
        dest: Any,
        clone: bool = False,
        batch_mm_kwargs: Any = None,
    ) -> None:
        starts = [0, 0]
        for position, index in enumerate(indices):
            parts = []
            for number, (path, key) in enumerate((("global", "lengths"), ("local", "tiles"))):
                count = batch_mm_kwargs[key][position]
                if count:
                    parts.append(outputs[path][starts[number] : starts[number] + count])
                    starts[number] += count
            dest[index] = torch.cat(parts)


@pytest.mark.parametrize("mode", ["full", "none"])
def test_two_paths_are_captured_apart_and_joined_by_the_tower(mode: str) -> None:
    model = TwoPaths()
    config = fx.EncoderConfig(
        mode=mode, token_budgets=(4, 16), max_items_per_batch=4, paths={"local": {"token_budgets": [8]}}
    )
    manager = fx.EncoderCudaGraphManager(model, config)
    manager.capture()
    if mode == "full":
        assert {name: sorted(graphs) for name, graphs in manager.budget_graphs.items()} == {
            "global": [4, 16],
            "local": [8],
        }
    inputs = {**batch(3, 4, 2), "tile_patches": torch.randn(12, WIDTH), "tiles": [2, 0, 10]}
    output = manager.execute(inputs)
    singles = [model.select_encoder_cudagraph_items(inputs, [i]) for i in range(3)]
    for got, single in zip(output, singles, strict=True):
        wanted = [model.encoder_eager_forward(single, "global")]
        if sum(single["tiles"]):
            wanted.append(model.encoder_eager_forward(single, "local"))
        torch.testing.assert_close(got, torch.cat(wanted), rtol=0, atol=1e-5)
    stats = manager.stats()
    if mode == "full":
        # Ten tiles exceed the local path's budget: that item is a miss, although its global part is replayed.
        assert (stats.hits, stats.misses) == (2, {fx.MissReason.OVER_LARGEST_BUDGET: 1})
        assert stats.budgets["global", 4, ()].replays + stats.budgets["global", 16, ()].replays == 2
        assert stats.budgets["local", 8, ()].replays == 1
    # A batch without tiles skips the path.
    manager.execute({**batch(3), "tile_patches": torch.zeros(0, WIDTH), "tiles": [0]})
    if mode == "full":
        assert manager.stats().budgets["local", 8, ()].replays == 1
