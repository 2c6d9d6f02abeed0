"""Captures of other states: which are found, and which leave first."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from fxsplit_encoder._torch.structure import Structure
from fxsplit_encoder.runtime import states
from fxsplit_encoder.runtime.states import OtherStates

CPU = torch.device("cpu")


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LayerNorm(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)  # type: ignore[no-any-return]


@dataclass(eq=False)
class Captures:
    """Captures of a tower as it is when they are made."""

    tower: nn.Module
    num_bytes: int = 10
    derived_bytes: int = 0
    structure: Structure | None = field(init=False)
    checks: int = 0

    def __post_init__(self) -> None:
        self.structure = Structure(self.tower)

    def may_return(self) -> bool:
        assert self.structure is not None
        return self.structure.may_return()

    def outdate_weights(self) -> None:
        self.checks += 1


def of(tower: Tower, eps: float, num_bytes: int = 10) -> Captures:
    tower.layer.eps = eps
    return Captures(tower, num_bytes - 5, derived_bytes=5)


@pytest.fixture
def released() -> list[Captures]:
    return []


def test_merges_outdate_what_was_made_of_the_weights(released: list[Captures]) -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=2, init_lora_weights=False, target_modules=["linear"])
    tower = peft.inject_adapter_in_model(lora, nn.Sequential(OrderedDict(linear=nn.Linear(2, 2)))).eval()
    others, unmerged = OtherStates(released.append, None), Captures(tower)
    others.put(unmerged)
    tower.linear.merge()
    merged = Captures(tower)
    assert others.find(merged) is merged and not unmerged.checks
    tower.linear.unmerge()
    assert others.find(merged) is unmerged
    others.put(merged, unmerged)
    assert (merged.checks, unmerged.checks, [*others]) == (1, 1, [merged])
    others.put(unmerged, merged)
    assert (merged.checks, unmerged.checks, [*others]) == (1, 1, [unmerged])


@pytest.mark.parametrize(("max_bytes", "left"), [(None, 3), (70, 3), (69, 2), (49, 1), (39, 0)])
def test_there_is_room_for_as_much_as_the_largest(
    max_bytes: int | None, left: int, released: list[Captures]
) -> None:
    tower, others = Tower(), OtherStates(released.append, max_bytes)
    made = [of(tower, float(n), num_bytes) for n, num_bytes in enumerate((20, 10, 20))]
    for each in made:
        others.put(each)
    assert others.num_bytes == 50
    others.make_room(CPU)
    assert [*others] == made[3 - left :]
    assert released == made[: 3 - left]


def test_the_device_has_to_have_room(released: list[Captures], monkeypatch: pytest.MonkeyPatch) -> None:
    tower, others = Tower(), OtherStates(released.append, None)
    for n in range(3):
        others.put(of(tower, float(n)))
    monkeypatch.setattr(states, "free_bytes", lambda device: 10 * len(released))
    others.make_room(CPU)
    assert len(released) == 1


def test_what_cannot_come_back_is_released(released: list[Captures]) -> None:
    tower, others = Tower(), OtherStates(released.append, None)
    before = of(tower, 1.0)
    others.put(before)
    tower.layer = nn.LayerNorm(2)
    assert others.find(before) is None
    now = of(tower, 1.0)
    assert others.find(now) is now and released == [before]
    others.put(now)
    others.make_room(CPU)
    assert (released, [*others]) == ([before], [now])
    others.clear()
    assert released == [before, now]
