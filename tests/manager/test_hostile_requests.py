"""Requests that no processor makes: refused by name, before anything of the size that they claim is made."""

from __future__ import annotations

import contextlib
import functools
import tracemalloc
from collections import UserDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fxsplit_encoder as fx
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.towers import base

from ..small_tower import FEATURES, SmallAdapter
from ..towers.tiny_inputs import items
from ..towers.tiny_towers import make, tiny
from .mock_towers import PackedModel, assert_equal_items, batch

MEBIBYTE = 1 << 20
FAR = 1 << 40
QWEN, KIMI_VL, KIMI_K25 = "Qwen3VLVisionModel", "KimiVLVisionModel", "Kimi_K25VisionModel"
QWEN25, GLM = "Qwen2_5_VisionTransformerPretrainedModel", "Glm4vVisionModel"
INTERN, LLAMA = "InternVLModel", "Llama4VisionModel"
DEEPSEEK, STEP3, MOCK = "DeepseekOcrVisionModel", "Step3VisionModel", "mock"
PACKED = (QWEN, QWEN25, GLM, KIMI_K25, KIMI_VL)
OTHERS = (KIMI_VL, INTERN, LLAMA, DEEPSEEK, STEP3)


@functools.cache
def manager_of(name: str) -> Any:
    tower = PackedModel() if name == MOCK else fx.wrap(make(name))
    return fx.EncoderCudaGraphManager(tower, fx.EncoderConfig(mode="none"), log_interval=0)  # type: ignore[arg-type]


def good_request(name: str) -> dict[str, Any]:
    if name == MOCK:
        return batch(3, 2)
    inputs = tiny(name).inputs
    request: dict[str, Any] = inputs.make(items("image", inputs.images[:2]))
    return request


@functools.cache
def expected_items(name: str) -> list[Tensor]:
    result: list[Tensor] = manager_of(name).execute(good_request(name))
    return result


class Allocations(TorchDispatchMode):
    """Bytes that operators of torch have returned."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.num_bytes += result.untyped_storage().nbytes()
        return result


@contextlib.contextmanager
def idle(manager: Any) -> Iterator[None]:
    """A tower that neither computes metadata nor encodes."""

    def work(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the tower was put to work")

    with pytest.MonkeyPatch.context() as patch:
        for name in ("metadata", "segment_lengths", "core", "encode", "encoder_cudagraph_forward"):
            if hasattr(manager.tower, name):
                patch.setattr(manager.tower, name, work)
        yield


def assert_refused(call: Callable[[], Any], message: str) -> None:
    """An error of the tree that matches, and less than 10 MiB on the way to it."""
    allocations = Allocations()
    tracemalloc.start()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(base, "foreign_around", lambda: None)  # which would find the mode that looks on
            with allocations, pytest.raises(InputError, match=message) as raised:
                call()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(str(raised.value)) < 1000
    assert peak < 10 * MEBIBYTE
    assert allocations.num_bytes < 10 * MEBIBYTE


class Raises:
    """Whatever is asked of it."""

    def __repr__(self) -> str:
        raise RuntimeError("no")

    def __len__(self) -> int:
        raise RuntimeError("no")

    def tolist(self) -> Any:
        raise RuntimeError("no")


NESTED: list[Any] = functools.reduce(lambda inner, _: [inner], range(10**4), [])
ENDLESS: list[Any] = []
ENDLESS.append(ENDLESS)

Case = tuple[str, Callable[[dict[str, Any]], Any], str]

# A name, what becomes of a good request, and what the message says.
CASES: dict[str, Case] = {}


def add(label: str, towers: str | tuple[str, ...], change: Any, message: str) -> None:
    """A case for each of some towers; `change` makes a request of a good one, or is what values become."""
    values = change

    def replace(request: dict[str, Any]) -> dict[str, Any]:
        return {**request, **values}

    for tower in (towers,) if isinstance(towers, str) else towers:
        assert f"{tower}-{label}" not in CASES
        CASES[f"{tower}-{label}"] = (tower, replace if isinstance(change, dict) else change, message)


# What is no request at all.
for label, value in {"nothing": {}, "None": None, "text": "pixel_values", "an iterator": count()}.items():
    add(f"request is {label}", (QWEN, MOCK), lambda _, v=value: v, "^mm_kwargs: expected a mapping")
for label, change, message in (
    ("misspelt", lambda request: {"pixels": request["pixel_values"]}, "pixel_values.*got pixels"),
    ("all None", dict.fromkeys, "pixel_values.*got nothing"),
):
    add(label, (QWEN, *OTHERS), change, message)
add("other keys", MOCK, lambda _: {"pixel_values": torch.zeros(3, 8)}, "PackedModel.* KeyError: 'lengths'")
add("a mapping of numbers", QWEN, lambda _: {3: 4}, "pixel_values, .*got 3")
add("a mapping of another class", QWEN, lambda _: UserDict(pixels=3), "pixel_values, .*got pixels")

for label, values in {
    "image_embeds": {"pixel_values": None, "image_embeds": torch.zeros(4, 96)},
    "video_embeds": {"video_embeds": torch.zeros(4, 96)},
}.items():
    add(label, QWEN, values, f"{label}: these are embeddings already")

# Pixels.
PIXELS: dict[str, tuple[Any, str]] = {
    "NumPy": (np.zeros((28, 4), np.float32), r"expected a tensor; got ndarray of \(28, 4\).*from_numpy"),
    "a list in itself": (ENDLESS, "expected a tensor; got "),
    "a hostile object": (Raises(), "expected a tensor; got an object of Raises"),
    "an iterator": (count(), "expected a tensor; got count"),
    "complex": (torch.zeros(28, 4, dtype=torch.complex64), "expected floating point.* got torch.complex64"),
    "without dimensions": (torch.tensor(3.0), "tensor without dimensions"),
    "sparse": (torch.zeros(28, 4).to_sparse(), "dense tensor; got one of layout torch.sparse_coo"),
    "on the meta device": (torch.zeros(28, 4, device="meta"), "meta device"),
    "of another width": (torch.zeros(28, 5), r"expected \(.*; got \(28, 5\)"),
    "wide without data": (torch.zeros(1, 1).expand(28, FAR), "pixel_values: expected"),
    "long without data": (torch.zeros(1, 1).expand(FAR, 4), "expected at most 2147483647 rows"),
}
for label, (value, message) in PIXELS.items():
    add(f"pixels are {label}", QWEN, {"pixel_values": value}, f"^pixel_values: .*{message}|{message}")
for label in ("NumPy", "complex", "of another width", "long without data", "sparse"):
    add(f"pixels are {label}", OTHERS, {"pixel_values": PIXELS[label][0]}, "^pixel_values: expected")
add("no pixels", (QWEN25, GLM, KIMI_K25, KIMI_VL), {"pixel_values": None}, "^pixel_values: .*got 0 rows")

# Grids.
GRIDS: dict[str, tuple[Any, str]] = {
    "missing": (None, "image_grid_thw: expected the grids of pixel_values; got None"),
    "larger than pixels": (torch.tensor([[1, 4096, 4096]]), "describes 16777216 patches; got 28 rows"),
    "of very many frames": (torch.tensor([[FAR, 2, 2]]), "describes 4398046511104 patches; got 28 rows"),
    "a product that wraps to 28": (torch.tensor([[2**62 + 7, 2, 2]]), "patches; got 28 rows"),
    "of endless digits": ([[1, 10**5000, 2]], "each of 64 bits; got .*an integer of 16610 bits"),
    "unsigned beyond 64 bits": (np.array([[1, 2**63 + 2, 2]], np.uint64), "each of 64 bits"),
    "complex": (torch.ones(1, 3, dtype=torch.complex64), "rows of three integers"),
    "not a number": ([[1, float("nan"), 2]], "rows of three integers .*nan"),
    "negative twice": (torch.tensor([[1, -2, -14]]), "at least 1 frame"),
    "zero": (torch.tensor([[0, 4, 8]]), "at least 1 frame"),
    "odd": ([[1, 4, 7]], "multiples of the merge size 2"),
    "one row": (torch.tensor([1, 4, 7]), "rows of three integers"),
    "very wide": (torch.ones(1, 1).long().expand(1, FAR), "rows of three integers .*Tensor of"),
    "very many": (torch.ones(1, 1).long().expand(FAR, 3), "describes 1099511627776 items"),
    "lists of wide tensors": ([torch.ones(1).long().expand(FAR)], "rows of three integers"),
    "rows of hostile objects": ([Raises()], "rows of three integers .*an object of Raises"),
    "on the meta device": (torch.ones(1, 3, device="meta").long(), "rows of three integers"),
    "sparse": (torch.ones(1, 3).long().to_sparse(), "rows of three integers"),
    "text": ("1, 4, 7", "rows of three integers .*'1, 4, 7'"),
    "an iterator": (count(), "rows of three integers"),
    "a list in itself": (ENDLESS, "rows of three integers"),
    "none": ([], "describes 0 patches; got 28 rows"),
}
for label, (value, message) in GRIDS.items():
    add(f"grids are {label}", QWEN, {"image_grid_thw": value}, f"image_grid_thw:? .*{message}|^{message}")
for label in ("larger than pixels", "very many", "missing"):
    add(f"grids are {label}", (QWEN25, GLM, KIMI_K25), {"image_grid_thw": GRIDS[label][0]}, "image_grid_thw")
for label, value in {
    "a product that wraps": torch.tensor([[2**62, 2**62]]),
    "of three columns": [[1, 4, 7]],
    "very many": torch.ones(1, 1).long().expand(FAR, 2),
    "None": None,
}.items():
    add(f"sizes are {label}", KIMI_VL, {"image_grid_hws": value}, "image_grid_hws")
add("a clip too long", KIMI_K25, {"image_grid_thw": [[7, 2, 2]]}, "at most 4 frames per clip")
VIDEO = [[1, 4, 4]]
ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "videos without grids": (
        {"pixel_values_videos": torch.zeros(28, 24)},
        "video_grid_thw: expected the grids of pixel_values_videos; got None",
    ),
    "videos without pixels": (
        {"video_grid_thw": [[FAR, 2, 2]]},
        "pixel_values_videos: |video_grid_thw|a batch",
    ),
    "more rows": ({"pixel_values": torch.zeros(29, 96)}, "pixel_values: .* 28 patches; got 29"),
    "rows of videos that make up for one another": (
        {
            "pixel_values": torch.zeros(32, 96),
            "pixel_values_videos": torch.zeros(12, 96),
            "video_grid_thw": VIDEO,
        },
        "pixel_values: image_grid_thw describes 28 patches; got 32",
    ),
    "videos of another width": (
        {"pixel_values_videos": torch.zeros(16, 3, 16, 16), "video_grid_thw": VIDEO},
        r"pixel_values_videos: expected \(patches, 96\)",
    ),
}
for label, (values, message) in ROWS.items():
    add(label, QWEN, values, f"^{message}")

# Tiles and their counts.
COUNTS: dict[str, Any] = {
    "too many": [2, 2**40],
    "of endless digits": [10**5000],
    "negative": [-1, 4],
    "floats": [1.5, 1.5],
    "complex": torch.ones(3, dtype=torch.complex64),
    "very many": torch.ones(1).long().expand(FAR),
    "an iterator": count(),
    "nested lists": NESTED,
    "a hostile object": Raises(),
}
STEP3_NAMES = "num_patches|patch_pixel_values|pixel_values"
for label, value in COUNTS.items():
    add(f"counts are {label}", INTERN, {"num_patches": value}, "^pixel_values: expected tile counts")
    add(f"counts are {label}", STEP3, {"num_patches": value}, STEP3_NAMES)
for tower, name in ((DEEPSEEK, "images_spatial_crop"), (STEP3, "num_patches"), (STEP3, "patch_pixel_values")):
    add(f"{name} missing", tower, {name: None}, f"^{name}: .*got None")
add("too many crops", DEEPSEEK, {"images_spatial_crop": [[2**40, 2**40], [1, 1]]}, "images_spatial_crop")
add("very many crops", DEEPSEEK, {"images_spatial_crop": COUNTS["very many"]}, "images_spatial_crop")
add("crops are NumPy", DEEPSEEK, {"images_crop": np.zeros(3)}, "^images_crop: expected a tensor")
for value, message in (
    (torch.tensor([[2**40, 2**40]]), "^pixel_values: expected tile counts"),
    (torch.ones(1, 1).long().expand(FAR, 2), "^aspect_ratios: expected one per image"),
    ("1:2", "^aspect_ratios: expected rows of two integers"),
):
    add(f"refused by {message}", LLAMA, {"num_patches": None, "aspect_ratios": value}, message)
add("videos", LLAMA, {"pixel_values_videos": torch.zeros(1)}, "^pixel_values_videos: .*images only")
for label, value in {
    "NumPy": np.zeros((2, 3, 16, 16)),
    "without data": torch.zeros(1, 1, 1, 1, 1).expand(FAR, 2, 3, 16, 16),
    "without counts": torch.zeros(2, 3, 16, 16),
    "of another size": torch.zeros(1, 2, 3, 8, 8),
}.items():
    add(f"videos are {label}", INTERN, {"pixel_values_videos": value}, "^pixel_values_videos: ")

# Towers that know nothing of this library.
for label, lengths in {"negative": [-3], "beyond 64 bits": [2**70], "a boolean": [True]}.items():
    add(f"lengths are {label}", MOCK, {"lengths": lengths}, "PackedModel reads item 0 as one of")
add("lengths are a number", MOCK, {"lengths": 3}, "PackedModel does not read .*TypeError")


# --- what becomes of them


def hostile(request: dict[str, Any], tower: str, change: Callable[[dict[str, Any]], Any]) -> Any:
    """The request with the change; where the tower packs patches, it has 28 rows of them in one image."""
    if tower in PACKED:
        grid = [[2, 14]] if tower == KIMI_VL else [[1, 2, 14]]
        shape = request["pixel_values"].shape[1:]
        request = {"pixel_values": torch.zeros(28, *shape), next(k for k in request if "grid" in k): grid}
    return change(request)


@pytest.mark.parametrize("label", CASES)
def test_vllm_58122_found_f_it_is_refused_by_name_and_the_manager_goes_on(label: str) -> None:
    tower, change, message = CASES[label]
    manager, expected = manager_of(tower), expected_items(tower)
    request = hostile(good_request(tower), tower, change)
    before = manager.stats()
    with idle(manager):
        assert_refused(lambda: manager.execute(request), message)
        if not label.endswith("no pixels"):  # a plan does without
            assert_refused(lambda: manager.plan(request), message)
    assert manager.stats() == before
    assert_equal_items(manager.execute(good_request(tower)), expected)


def test_who_sends_bad_inputs_waits_for_nobody_and_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = manager_of(QWEN)
    request = hostile(good_request(QWEN), QWEN, lambda good: {**good, "image_grid_thw": [[FAR, 2, 2]]})
    forward = manager.tower.encoder_eager_forward

    def forward_meanwhile(*args: Any, **kwargs: Any) -> Any:
        error = ThreadPoolExecutor(1).submit(manager.execute, request).exception(60)
        assert isinstance(error, InputError)
        return forward(*args, **kwargs)

    monkeypatch.setattr(manager.tower, "encoder_eager_forward", forward_meanwhile)
    manager.execute(good_request(QWEN))


@pytest.mark.parametrize("tower", PACKED)
def test_a_plan_by_grids_alone_counts_without_making(tower: str) -> None:
    """Pixels, which else say how large grids may be, are missing; so nothing of the grids' size is made."""
    manager = manager_of(tower)
    key, grid = "image_grid_thw", [4 if tower == KIMI_K25 else 1 << 20, 16, 16]
    if tower == KIMI_VL:
        key, grid = "image_grid_hws", [1 << 14, 1 << 14]
    allocations = Allocations()
    with idle(manager), allocations:
        tracemalloc.start()
        plan = manager.plan({key: [grid]})
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert plan.num_items == 1
    assert max(peak, allocations.num_bytes) < 10 * MEBIBYTE
    with pytest.raises(InputError, match=r"patches; a batch has 2147483647 at most|at most 4 frames"):
        manager.plan({key: [[FAR] * len(grid)]})


OWN_FORWARD = {
    "larger than pixels": lambda x, g: (x, g * 2),
    "very many": lambda x, g: (x, g[:1].expand(FAR, -1)),
    "complex": lambda x, g: (x, g + 0j),
    "a list": lambda x, g: (x, g.tolist()),
    "None": lambda x, g: (x, None),
    "of NumPy patches": lambda x, g: (x.numpy(), g),
    "of patches of another width": lambda x, g: (x.flatten(1)[:, 1:], g),
}


@pytest.mark.parametrize("label", OWN_FORWARD)
@pytest.mark.parametrize("tower", PACKED)
def test_the_towers_own_forward_refuses_alike(label: str, tower: str) -> None:
    wrapped = manager_of(tower).tower
    patches, grids = wrapped.example_inputs()
    given = OWN_FORWARD[label](patches, grids)
    names = "|".join(wrapped.input_names)
    with idle(manager_of(tower)):
        assert_refused(lambda: wrapped(*given), f"^({names}): ")
    assert wrapped(patches, grids) is not None


@pytest.mark.parametrize("value", [np.zeros((1, 3, 16, 16)), None])
@pytest.mark.parametrize("tower", [INTERN, LLAMA, STEP3])
def test_the_own_forward_of_towers_of_tiles_refuses_too(value: Any, tower: str) -> None:
    assert_refused(lambda: manager_of(tower).tower(value), "^pixel_values: expected")


def test_behind_the_compiler_grids_are_compared_before_metadata_are_made(
    fresh_dynamo: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapped = SmallAdapter()
    compiled = torch.compile(
        wrapped, backend="encoder_cg", options={"token_budgets": [4, 16], "piece_compiler": "eager"}
    )
    x, grid = torch.randn(16, FEATURES), torch.tensor([[1, 4, 4]])
    computed: list[int] = []
    kept = wrapped.kept_metadata

    def counted(grids: Any) -> Any:
        computed.append(len(grids))
        return kept(grids)

    monkeypatch.setattr(wrapped, "kept_metadata", counted)
    with torch.no_grad():
        expected = compiled(x, grid)
        # No mode that counts allocations: Dynamo does not compile under one.
        for bad in ([[1, 4096, 4096]], [[FAR, 2, 2]], [[2**62 + 4, 2, 2]], [[1, 4, 4]] * 5):
            with pytest.raises(InputError, match=r"^grid_thw: describes .* got 16 rows"):
                compiled(x, torch.tensor(bad))
            assert computed == [1]
        for bad_x in (x + 0j, x[:, 1:], x.numpy()):
            with pytest.raises(InputError, match=r"^hidden_states: expected"):
                compiled(bad_x, grid)
        torch.testing.assert_close(compiled(x, grid), expected)
