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
from fxsplit_encoder.compile.options import host_op
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.protocol import BudgetDeclaration
from fxsplit_encoder.towers import packed
from fxsplit_encoder.towers.packed import exact_metadata, vision_metadata
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


def test_of_too_many_requests_all_are_forgotten(tower: Any) -> None:
    def described(height: int) -> Any:
        row = torch.zeros(1, tower.patch_features)
        return tower.described_items(
            {"pixel_values": row.expand(2 * height, -1), "image_grid_thw": [(1, height, 2)]}
        )

    first = described(2)
    seen = [described(2 * number) is first and described(2) is first for number in range(1, 20)]
    assert seen == [True, *[False] * 18]
    assert described(2) is first
    for number in range(2, 1200):
        described(2 * number)
    assert described(2) not in (first, None)


# --- the op of metadata


GRIDS = [[[1, 4, 4]], [[1, 2, 2]] * 5, [[3, 4, 2], [1, 8, 6]]]


def batch(grids: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    grid = torch.tensor(grids)
    return torch.zeros(int(grid.prod(1).sum()), 4), grid


@pytest.mark.parametrize("grids", GRIDS, ids=str)
def test_the_fake_implementation_promises_what_the_op_makes(tower: Any, grids: list[list[int]]) -> None:
    pixels, grid = batch(grids)
    arguments = (pixels, grid, tower.registered_name)
    assert len(vision_metadata(*arguments)) == len(tower.metadata_columns) + 1
    torch.library.opcheck(vision_metadata, arguments, test_utils="test_faketensor")


def test_the_compiler_knows_the_op_as_a_host_op(tower: Any) -> None:
    pixels, grid = batch(GRIDS[2])
    op = host_op(vision_metadata)
    assert op is not None
    assert op.run is exact_metadata
    arguments = (pixels, grid, tower.registered_name)
    declared = op.budgets
    assert isinstance(declared, BudgetDeclaration)
    assert declared.rows_per_output_token(*arguments) == tower.rows_per_token == 4
    assert declared.budget_range(*arguments) == tower.get_encoder_cudagraph_budget_range(None)
    assert declared.segment_factors is not None
    assert list(declared.segment_factors(*arguments)) == [1, 1, 1, 1]


def test_metadata_of_a_batch_that_comes_again_is_kept(tower: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels, grid = torch.zeros(40, tower.patch_features), torch.tensor([[1, 4, 6], [1, 4, 4]])
    first = exact_metadata(pixels, grid, tower.registered_name)
    monkeypatch.setattr(tower, "metadata", None)  # nothing is computed again
    again = exact_metadata(pixels + 1, grid.clone(), tower.registered_name)
    assert all(a is b for a, b in zip(first, again, strict=True))
    with pytest.raises(TypeError):
        exact_metadata(pixels[:24], grid[:1], tower.registered_name)


def test_a_compiler_may_write_to_what_the_op_made(tower: Any) -> None:
    pixels, grid = batch([[1, 8, 6]])
    for tensor in vision_metadata(pixels, grid, tower.registered_name):
        tensor.fill_(77)
    for tensors in (vision_metadata, exact_metadata):
        assert not any((t == 77).any() for t in tensors(pixels, grid, tower.registered_name))
