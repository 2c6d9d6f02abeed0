"""What was read of a request is taken for another only where reading that would say the same."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fxsplit_encoder as fx
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.towers import packed
from fxsplit_encoder.towers.qwen_vl import Qwen3VLTower

from .tiny_packed import qwen3_vl


@pytest.fixture(scope="module")
def tower() -> Any:
    return fx.wrap(qwen3_vl())


def request_of(tower: Any, grids: Any, rows: int = 24, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    return {"pixel_values": torch.zeros(rows, tower.patch_features, dtype=dtype), "image_grid_thw": grids}


def told(tower: Any, mm_kwargs: dict[str, Any]) -> object:
    """What a tower says of a request, or of what is wrong with it."""
    try:
        described, patches, _ = tower.read_request(mm_kwargs, planned=True)
    except InputError as error:
        return str(error)
    return described.grids, described.num_images, described.missing, [id(part) for part in patches]


UNKNOWN = "second_per_grid_ts"
FORMS: dict[str, Any] = {
    "tensor": torch.tensor,
    "int32": lambda rows: torch.tensor(rows, dtype=torch.int32),
    "float": lambda rows: torch.tensor(rows, dtype=torch.float32),
    "array": lambda rows: torch.tensor(rows).numpy(),
    "tuples": lambda rows: [tuple(row) for row in rows],
    "lists": lambda rows: [list(row) for row in rows],
    "floats": lambda rows: [tuple(map(float, row)) for row in rows],
    "flags": lambda rows: [(row[0] == 1, *row[1:]) for row in rows],
    "flat": lambda rows: torch.tensor(rows).flatten(),
    "wide": lambda rows: torch.tensor([[*row, 1] for row in rows]),
}
sides = st.sampled_from([0, 2, 3, 4, 6])
grids = st.lists(st.tuples(st.integers(0, 2), sides, sides), min_size=1, max_size=3)
requests = st.fixed_dictionaries(
    {
        "rows": grids,
        "form": st.sampled_from(sorted(FORMS)),
        "dtype": st.sampled_from([torch.float32, torch.bfloat16, torch.bool]),
        "patches": st.sampled_from(
            ["right", "one more", "none", "missing", "two parts", "narrow", "empty list"]
        ),
        "is_video": st.booleans(),
        "other": st.sampled_from([None, "image_embeds", UNKNOWN]),
    }
)


def made(tower: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """A request, which may have any mistake."""
    count = sum(t * h * w for t, h, w in asked["rows"]) + (asked["patches"] == "one more")
    features = tower.patch_features - (asked["patches"] == "narrow")
    pixels: Any = torch.zeros(0 if asked["patches"] == "none" else count, features, dtype=asked["dtype"])
    if asked["patches"] == "two parts":
        pixels = [pixels[: count // 3], pixels[count // 3 :]]
    if asked["patches"] == "empty list":
        pixels = []
    names = (
        ("pixel_values_videos", "video_grid_thw") if asked["is_video"] else ("pixel_values", "image_grid_thw")
    )
    given = {
        names[0]: None if asked["patches"] == "missing" else pixels,
        names[1]: FORMS[asked["form"]](asked["rows"]),
    }
    return {**given, **({} if asked["other"] is None else {asked["other"]: torch.zeros(1)})}


@settings(max_examples=150, deadline=None)
@given(st.lists(requests, min_size=1, max_size=4))
def test_what_is_looked_up_is_what_reading_says(tower: Any, asked: list[dict[str, Any]]) -> None:
    for mm_kwargs in [made(tower, each) for each in (*asked, *asked)]:
        # A request with an input that the key of a request does not know is read.
        assert told(tower, mm_kwargs) == told(tower, {**mm_kwargs, UNKNOWN: torch.zeros(1)})


@pytest.mark.parametrize("form", ["tensor", "tuples", "lists"])
def test_grids_that_are_changed_in_place_are_noticed(tower: Any, form: str) -> None:
    inputs = request_of(tower, FORMS[form]([(1, 4, 6)]))
    assert tower.item_grids(inputs) == ((1, 4, 6),)
    inputs["image_grid_thw"][0] = torch.tensor([1, 6, 4]) if form == "tensor" else (1, 6, 4)
    assert tower.item_grids(inputs) == ((1, 6, 4),)
    inputs["image_grid_thw"][0] = torch.tensor([1, 6, 6]) if form == "tensor" else (1, 6, 6)
    with pytest.raises(InputError, match="describes 36 patches; got 24 rows"):
        tower.item_grids(inputs)


def test_the_same_items_are_described_by_the_same_object(tower: Any) -> None:
    one, other = (request_of(tower, torch.tensor([[1, 4, 6]])) for _ in range(2))
    described = tower.described_items(one)
    assert described is not None
    assert tower.described_items(other) is described
    for unlike in (
        request_of(tower, torch.tensor([[1, 6, 4]])),
        request_of(tower, torch.tensor([[1, 2, 6], [1, 2, 6]])),
        {"pixel_values_videos": one["pixel_values"], "video_grid_thw": one["image_grid_thw"]},
        {"image_grid_thw": one["image_grid_thw"]},
    ):
        assert tower.described_items(unlike) not in (described, None)


def test_what_nobody_looked_at_has_to_be_read(tower: Any) -> None:
    inputs = request_of(tower, torch.tensor([[1, 4, 6]]))
    assert tower.described_items({**inputs, UNKNOWN: [1.0]}) is None
    many = packed.MOST_ITEMS + 1
    assert tower.described_items(request_of(tower, torch.tensor([[1, 2, 2]] * many), 4 * many)) is None
    parameter = {**inputs, "pixel_values": torch.nn.Parameter(inputs["pixel_values"])}
    assert tower.described_items(parameter) is None
    assert tower.item_grids(parameter) == ((1, 4, 6),)


def test_an_adapter_with_item_methods_of_its_own_is_asked() -> None:
    class Counting(Qwen3VLTower):
        def item_segments(self, mm_kwargs: dict[str, Any]) -> list[int]:
            return [int(mm_kwargs["pixel_values"][0, 0])]

    tower = Counting(qwen3_vl())
    assert tower.described_items(request_of(tower, torch.tensor([[1, 4, 6]]))) is None


def test_a_copy_knows_of_none(tower: Any) -> None:
    inputs = request_of(tower, torch.tensor([[1, 4, 6]]))
    described = tower.described_items(inputs)
    for copied in (copy.deepcopy(tower), pickle.loads(pickle.dumps(tower))):
        assert copied.described_items(inputs) not in (described, None)
    assert tower.described_items(inputs) is described
