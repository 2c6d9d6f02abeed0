"""Towers written for vLLM's encoder protocol: classes of their own, nothing imported from this library."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

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

    def capture_values(self, budget: int) -> dict[str, Any]:
        """The inputs of a capture of `budget` tokens."""
        raise NotImplementedError

    def batch_values(self, mm_kwargs: dict[str, Any]) -> dict[str, Any]:
        raise NotImplementedError

    def made(self, values: dict[str, Any], budget: int | None = None) -> dict[str, Any]:
        """What a class makes of the inputs of a capture of `budget` tokens or, without, of a batch."""
        return values

    def prepare_encoder_cudagraph_capture_inputs(
        self, token_budget: int, *args: Any, **of_path: Any
    ) -> Values:
        return Values(self.made(self.capture_values(token_budget), token_budget))

    def prepare_encoder_cudagraph_replay_buffers(
        self, mm_kwargs: Any, *limits: int, **of_path: Any
    ) -> Values:
        return Values(self.made(self.batch_values(mm_kwargs)))

    def postprocess_encoder_output(
        self, outputs: dict[str, Tensor], indices: list[int], tokens: Any, dest: Any, **of_batch: Any
    ) -> None:
        lengths = [tokens[index] for index in indices]
        dest.update(zip(indices, outputs["default"][: sum(lengths)].split(lengths), strict=True))


def ones_behind(captured: Tensor, value: Tensor) -> None:
    captured.fill_(1)
    captured[: value.shape[0]].copy_(value)


class PackedModel(EncoderProtocol, nn.Module):
    """A packed encoder whose attention is its own arithmetic: no splitting op is in its graph.

    `divisor` must not be zero in pad rows, `item` says which rows attend to one another.
    """

    group: ClassVar[int] = 1
    """Rows of patches for a token."""

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
        parts = mm_kwargs["patches"].split([self.group * n for n in mm_kwargs["lengths"]])
        return {
            "patches": torch.cat([parts[i] for i in indices]),
            "lengths": [mm_kwargs["lengths"][i] for i in indices],
        }

    def capture_values(self, budget: int) -> dict[str, Any]:
        item = torch.ones(budget, dtype=torch.int64)
        return {"patches": torch.randn(budget, WIDTH), "item": item, "divisor": torch.ones(budget)}

    def batch_values(self, mm_kwargs: dict[str, Any]) -> dict[str, Any]:
        lengths = torch.tensor(mm_kwargs["lengths"])
        item = torch.arange(1, len(lengths) + 1).repeat_interleave(lengths)
        return {"patches": mm_kwargs["patches"], "item": item, "divisor": item.float() + 1}

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

    def capture_values(self, budget: int) -> dict[str, Any]:
        values = super().capture_values(budget)
        del values["item"]
        lengths = torch.full((budget // 2 + 2,), budget, dtype=torch.int32)
        lengths[0] = 0
        return {**values, "lengths": lengths}

    def batch_values(self, mm_kwargs: dict[str, Any]) -> dict[str, Any]:
        values = super().batch_values(mm_kwargs)
        del values["item"]
        ends = torch.tensor([0, *mm_kwargs["lengths"]]).cumsum(0)
        return {**values, "lengths": ends.to(torch.int32)}

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


# --- several paths, and capture axes


class PathsModel(EncoderProtocol, nn.Module):
    """An item has rows on every path of `path_configs`; its embedding is all of them, path after path.

    `mm_kwargs` hold for every path a list with the rows of each item. With `axes`, "keys" holds for every
    item its number of columns, which is the first key, and, with two axes, how many times they are repeated.
    Neither is known before the batch, so a graph is made for each.

    `runs` counts what ran: (path, columns) for a captured forward, ("eager", path) for an eager one.
    """

    path_configs: ClassVar[dict[str, PathConfig]] = {
        "global": PathConfig(),
        "local": PathConfig(allow_zero_tokens=True),
    }
    axes: ClassVar[tuple[tuple[Any, ...], ...]] = ()

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in self.path_configs})
        self.requires_grad_(False)
        self.runs: Counter[Any] = Counter()
        self.prepared: list[tuple[str, int, Any]] = []
        """Path, budget and axis keys of all inputs that were made for a capture."""

    def get_encoder_cudagraph_config(self) -> Any:
        return Config(
            ["image"],
            ["patches", "item", "copies"],
            WIDTH,
            paths=dict(self.path_configs),
            capture_axes=self.axes,
        )

    def path_lengths(self, mm_kwargs: dict[str, Any], path: str) -> list[int]:
        assert "encoder_cudagraph_axis_keys" not in mm_kwargs, "they are taken out before"
        return [len(rows) for rows in mm_kwargs[path]]

    def get_encoder_cudagraph_item_specs(self, mm_kwargs: dict[str, Any]) -> list[Any]:
        lengths = {path: self.path_lengths(mm_kwargs, path) for path in self.path_configs}
        items = [dict(zip(lengths, counts, strict=True)) for counts in zip(*lengths.values(), strict=True)]
        return [ItemSpec(sum(counts.values()), sum(counts.values()), counts) for counts in items]

    def select_encoder_cudagraph_items(self, mm_kwargs: dict[str, Any], indices: list[int]) -> dict[str, Any]:
        assert indices, "this tower cannot select nothing"
        names = [*self.path_configs, *(["keys"] if self.axes else [])]
        selected = {name: [mm_kwargs[name][index] for index in indices] for name in names}
        if self.axes:
            (keys,) = set(selected["keys"])  # what has different keys is never selected together
            selected["encoder_cudagraph_axis_keys"] = keys
        return selected

    def prepare_encoder_cudagraph_capture_inputs(
        self, token_budget: int, *args: Any, path: str = "default", axis_keys: Any = None
    ) -> Values:
        self.prepared.append((path, token_budget, axis_keys))
        columns, copies = (*(axis_keys or (WIDTH,)), 1)[:2]
        values = {
            "patches": torch.randn(token_budget, columns),
            "item": torch.ones(token_budget, dtype=torch.int64),
            "copies": torch.ones(copies),
        }
        return Values(self.made(values, token_budget))

    def prepare_encoder_cudagraph_replay_buffers(
        self, mm_kwargs: dict[str, Any], max_batch_size: int, max_frames_per_batch: int, path: str = "default"
    ) -> Values:
        columns, copies = (*(mm_kwargs["keys"][0] if self.axes else (WIDTH,)), 1)[:2]
        lengths = torch.tensor(self.path_lengths(mm_kwargs, path))
        item = torch.arange(1, len(lengths) + 1).repeat_interleave(lengths)
        patches = torch.cat([*mm_kwargs[path], torch.zeros(0, columns)])
        return Values(self.made({"patches": patches, "item": item, "copies": torch.ones(copies)}))

    def encoder_cudagraph_forward(self, inputs: dict[str, Tensor], path: str = "default") -> Tensor:
        torch._dynamo.graph_break()  # captured as it is: compiling would tell nothing here and take seconds
        self.runs[path, inputs["patches"].shape[1]] += 1
        return self.encode(inputs, path)

    def encode(self, inputs: dict[str, Tensor], path: str) -> Tensor:
        patches = inputs["patches"]
        layer = self.layers[path]
        x = patches @ layer.weight[:, : patches.shape[1]].t() + layer.bias
        x = x * len(inputs["copies"])
        apart = inputs["item"][:, None] != inputs["item"][None, :]
        return (x @ x.t()).masked_fill(apart, float("-inf")).softmax(-1) @ x

    def encoder_eager_forward(self, mm_kwargs: dict[str, Any], path: str = "default") -> Tensor:
        self.runs["eager", path] += 1
        return self.encode(self.prepare_encoder_cudagraph_replay_buffers(mm_kwargs, 0, 0, path).values, path)

    def postprocess_encoder_output(
        self, outputs: dict[str, Tensor], indices: list[int], tokens: Any, dest: Any, **of_batch: Any
    ) -> None:
        lengths = {path: self.path_lengths(of_batch["batch_mm_kwargs"], path) for path in outputs}
        rows = [outputs[path][: sum(counts)].split(counts) for path, counts in lengths.items()]
        for index, parts in zip(indices, zip(*rows, strict=True), strict=True):
            present = [part for part in parts if len(part)]
            # As vLLM's models do: what lies on one path alone is a view of its output.
            dest[index] = present[0] if len(present) == 1 else torch.cat(parts)


class AlwaysSkipped(PathsModel):
    """Both paths may be skipped."""

    path_configs: ClassVar[dict[str, PathConfig]] = {
        "global": PathConfig(allow_zero_tokens=True),
        "local": PathConfig(allow_zero_tokens=True),
    }


class AlwaysBothPaths(PathsModel):
    """Neither path may be skipped, though an item may have no rows on the second."""

    path_configs: ClassVar[dict[str, PathConfig]] = {"global": PathConfig(), "local": PathConfig()}


class PathsOfTiles(PathsModel):
    """Tiles of 3 tokens on one path, and of 2 on the other, which may be skipped."""

    path_configs: ClassVar[dict[str, PathConfig]] = {
        "global": PathConfig(3),
        "local": PathConfig(2, allow_zero_tokens=True),
    }


class AxesModel(PathsModel):
    """One path, two capture axes: columns, and how often they are added up."""

    path_configs: ClassVar[dict[str, PathConfig]] = {"default": PathConfig()}
    axes: ClassVar[tuple[tuple[Any, ...], ...]] = ((4, 8), (1, 2))


class AxesAndPaths(PathsModel):
    axes: ClassVar[tuple[tuple[Any, ...], ...]] = ((4, 8),)


def items(
    model: PathsModel, *sizes: Sequence[int], keys: Sequence[Any] = (), seed: int = 0
) -> dict[str, Any]:
    """A request: for every item its rows on each path, and its axis keys."""
    generator = torch.Generator().manual_seed(seed + sum(map(sum, sizes)))
    columns = [key[0] for key in keys] or [WIDTH] * len(sizes)
    request: dict[str, Any] = {
        path: [
            torch.randn(size[number], width, generator=generator)
            for size, width in zip(sizes, columns, strict=True)
        ]
        for number, path in enumerate(model.path_configs)
    }
    return request | ({"keys": list(keys)} if keys else {})


def eagerly(model: PathsModel, mm_kwargs: dict[str, Any]) -> list[Tensor]:
    """Every item by itself through the model's eager forward, of all its paths."""
    expected = []
    for index in range(len(mm_kwargs[next(iter(model.path_configs))])):
        single = model.select_encoder_cudagraph_items(mm_kwargs, [index])
        single.pop("encoder_cudagraph_axis_keys", None)
        values = {
            path: model.prepare_encoder_cudagraph_replay_buffers(single, 0, 0, path).values
            for path in model.path_configs
        }
        expected.append(torch.cat([model.encode(values[path], path) for path in values]))
    return expected


def assert_equal_items(output: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert [item.shape for item in output] == [item.shape for item in expected]
    for got, wanted in zip(output, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)


def assert_serves(manager: Any, request: dict[str, Any]) -> None:
    """Every item of a request is what the tower's own forward makes of it, in memory of its own."""
    tower = manager.tower
    expected = eagerly(tower, request) if isinstance(tower, PathsModel) else alone(tower, request)
    output = manager.execute(request)
    assert_equal_items(output, expected)
    assert all(item.untyped_storage().nbytes() == item.nbytes for item in output)
