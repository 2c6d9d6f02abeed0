"""Metadata of grids are kept for replays; what depends on weights is not, and nothing that is not known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxsplit_encoder._torch.staging import is_immutable
from fxsplit_encoder.integrations.vllm import known_grids
from fxsplit_encoder.integrations.vllm.known_grids import keep_metadata

Grids = list[tuple[int, int, int]]


class Tower(nn.Module):
    """One like Qwen3-VL's: rotary embeddings of grids, positions of a weight."""

    def __init__(self, **more: Any) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.tensor(3.0))
        self.prepared: list[Grids] = []
        self.more = more

    def fast_pos_embed_interpolate(self, grids: Grids) -> Tensor:
        return self.positions * torch.tensor([t * h * w for t, h, w in grids])

    def prepare_encoder_metadata(
        self, grids: Grids, *, max_batch_size: int | None = None
    ) -> dict[str, Tensor | None]:
        self.prepared.append(grids)
        rows = torch.tensor([t * h * w for t, h, w in grids])
        return {
            "pos_embeds": self.fast_pos_embed_interpolate(grids),
            "rotary_pos_emb_cos": rows.float().cos(),
            "cu_seqlens": torch.cat([rows, rows.new_zeros((max_batch_size or len(rows)) - len(rows))]),
            "sequence_lengths": None,
            **self.more,
        }


class OfGridsAlone(Tower):
    """One like Qwen2.5-VL's."""

    fast_pos_embed_interpolate: Any = None

    def prepare_encoder_metadata(
        self, grids: Grids, *, max_batch_size: int | None = None
    ) -> dict[str, Tensor | None]:
        self.prepared.append(grids)
        return self.of_grids(len(grids))

    def of_grids(self, number: int) -> dict[str, Tensor | None]:
        return {"window_index": torch.arange(number)}


class PositionsAtOnce(OfGridsAlone):
    """One whose positions nobody else can make anew."""

    def of_grids(self, number: int) -> dict[str, Tensor | None]:
        return {"pos_embeds": self.positions * number}


class Model(nn.Module):
    def __init__(self, tower: Tower) -> None:
        super().__init__()
        self.visual = tower

    def prepare_encoder_cudagraph_capture_inputs(self, grids: Grids) -> dict[str, Any]:
        return self.visual.prepare_encoder_metadata(grids, max_batch_size=4)

    def prepare_encoder_cudagraph_replay_buffers(self, grids: Grids, max_batch_size: int) -> dict[str, Any]:
        metadata = self.visual.prepare_encoder_metadata(grids, max_batch_size=max_batch_size)
        return metadata | {"pixel_values": torch.ones(1)}


def model_of(tower: Tower) -> tuple[Any, list[Grids]]:
    model = Model(tower)
    keep_metadata(model)
    return model, tower.prepared


def replay(model: Any, grids: Grids, size: int = 4) -> dict[str, Any]:
    with torch.no_grad():
        result: dict[str, Any] = model.prepare_encoder_cudagraph_replay_buffers(grids, size)
    return result


def assert_fresh(model: Any, grids: Grids, size: int = 4) -> None:
    """A replay gets what the class's own method makes now."""
    got = replay(model, grids, size)
    tower = model.visual
    with torch.no_grad():
        expected = type(tower).prepare_encoder_metadata(tower, grids, max_batch_size=size)
    tower.prepared.pop()
    assert list(got) == [*expected, "pixel_values"]
    for name, value in expected.items():
        assert (got[name] is None) if value is None else torch.equal(got[name], value)


def test_equal_grids_are_prepared_once_and_positions_follow_their_weight() -> None:
    model, prepared = model_of(Tower())
    for weight in (3.0, 5.0, -1.0):
        model.visual.positions.data.fill_(weight)  # as vLLM loads: no version tells
        for grids in ([(1, 2, 3)], [(1, 2, 3), (2, 4, 4)], [(1, 3, 2)]):
            assert_fresh(model, grids)
    assert len(prepared) == 3
    assert_fresh(model, [(1, 2, 3)], 5)
    assert len(prepared) == 4, "for other captures they are padded otherwise"


def test_what_is_kept_is_constant_and_the_dictionary_is_not_shared() -> None:
    model, _ = model_of(Tower())
    replay(model, [(1, 2, 3)])
    first = replay(model, [(1, 2, 3)])
    kept = first["cu_seqlens"]
    assert is_immutable(kept) and not is_immutable(first["pos_embeds"])
    first.clear()
    assert replay(model, [(1, 2, 3)])["cu_seqlens"] is kept


def test_a_capture_and_a_forward_get_tensors_of_their_own() -> None:
    model, prepared = model_of(Tower())
    replay(model, [(1, 2, 3)])
    for prepare in (
        model.prepare_encoder_cudagraph_capture_inputs,
        lambda grids: model.visual.prepare_encoder_metadata(grids, max_batch_size=4),
    ):
        prepare([(1, 2, 3)])["cu_seqlens"].zero_()
        assert_fresh(model, [(1, 2, 3)])
    assert len(prepared) == 3


@pytest.mark.parametrize(
    ("tower", "most_bytes", "times"),
    [
        *((OfGridsAlone(), 1 << 20, 1), (Tower(), 1 << 20, 1), (Tower(), 1, 3)),
        *((Tower(unknown=torch.ones(1)), 1 << 20, 3), (PositionsAtOnce(), 1 << 20, 3)),
    ],
)
def test_only_what_is_known_and_not_too_large_is_kept(
    tower: Tower, most_bytes: int, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_grids, "MOST_BYTES", most_bytes)
    model, prepared = model_of(tower)
    for weight in (1.0, 2.0, 3.0):
        model.visual.positions.data.fill_(weight)
        assert_fresh(model, [(1, 2, 3)])
    assert len(prepared) == times


@pytest.mark.parametrize("grids", [torch.tensor([[1, 2, 3]]), [torch.tensor([1, 2, 3])], [(1.0, 2.0, 3.0)]])
def test_grids_of_another_kind_are_passed_on(grids: Any) -> None:
    model, prepared = model_of(OfGridsAlone())
    for _ in range(2):
        replay(model, grids)
    assert len(prepared) == 2


@pytest.mark.parametrize(("limit", "value"), [("MOST_ENTRIES", 2), ("MOST_BYTES", 60)])
def test_little_is_kept(limit: str, value: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_grids, limit, value)
    model, prepared = model_of(Tower())
    for height in range(1, 6):
        assert_fresh(model, [(1, height, 2)])
        assert_fresh(model, [(1, height, 2)])
    assert len(prepared) == 5
    assert_fresh(model, [(1, 1, 2)])
    assert len(prepared) == 6


def test_once_is_enough_and_other_models_stay_as_they_are() -> None:
    model, _ = model_of(Tower())
    before = model.prepare_encoder_cudagraph_replay_buffers, model.visual.prepare_encoder_metadata
    keep_metadata(model)
    assert (model.prepare_encoder_cudagraph_replay_buffers, model.visual.prepare_encoder_metadata) == before
    other = nn.Linear(1, 1)
    keep_metadata(other)
    assert "prepare_encoder_cudagraph_replay_buffers" not in vars(other)
