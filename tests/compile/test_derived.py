import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from fxsplit_encoder.compile.derived import DerivedParameters, Recipe

from ..instructions import instructions


def scaled(tensor: Tensor, factor: float) -> Tensor:
    return tensor * factor


def total(one: Tensor, other: Tensor) -> Tensor:
    return one + other


RECIPES = {3: Recipe(functools.partial(scaled, factor=2.0), (0,)), 4: Recipe(total, (3, 1))}


@pytest.fixture
def parameters() -> list[Any]:
    return [torch.ones(2, 3), torch.full((2, 3), 10.0), None, None, None]


@pytest.fixture
def derived(parameters: list[Any]) -> DerivedParameters:
    """Of two recipes, filled."""
    made = DerivedParameters(RECIPES)
    made.fill(parameters)
    return made


def test_what_only_others_are_derived_from_is_not_kept(parameters: list[Any]) -> None:
    made: list[float] = []

    def noted(tensor: Tensor, factor: float) -> Tensor:
        made.append(factor)
        return tensor * factor

    doubled = Recipe(functools.partial(noted, factor=2.0), (0,))
    tripled = Recipe(functools.partial(noted, factor=3.0), (1,))
    recipes = {
        3: Recipe(total, (1, tripled)),
        4: Recipe(total, (doubled, 0)),
        8: Recipe(functools.partial(noted, factor=5.0), (doubled,)),
    }
    slots = [*parameters, *[None] * 4]
    derived = DerivedParameters(recipes)
    for offset in (0, 1):
        for _ in range(3):  # of the same parameters once
            derived.fill(list(slots))
            derived.refresh()
        derived.fill(slots)
        assert [slot is None for slot in slots] == [False, False, True, False, False, True, True, True, False]
        for slot, value in ((3, 40.0), (4, 3.0 + 3 * offset), (8, 10.0 + 10 * offset)):
            assert torch.equal(slots[slot], torch.full((2, 3), value))
        assert derived.num_bytes == 3 * 6 * 4
        assert made == [3.0, 2.0, 2.0, 5.0] * (offset + 1)
        parameters[0].add_(1)


def test_with_its_stamp_the_last_parameters_are_asked_for_their_versions(
    parameters: list[Any], derived: DerivedParameters
) -> None:
    stamp = derived.stamp
    assert not derived.refresh(stamp) and derived.stamp is stamp
    parameters[0].mul_(3)
    assert derived.refresh(stamp)
    assert torch.equal(parameters[3], torch.full((2, 3), 6.0)) and derived.stamp is not stamp


def test_sources_that_were_let_go_are_read_again(parameters: list[Any]) -> None:
    """Others of as many versions may lie in their memory by then."""
    derived = DerivedParameters(RECIPES)
    derived.fill(parameters)
    stamp = derived.stamp
    derived.let_go()
    derived.fill(parameters)
    assert derived.stamp is not stamp


def test_what_could_not_be_computed_is_computed_by_the_next_run(parameters: list[Any]) -> None:
    has_memory = True

    def make(tensor: Tensor) -> Tensor:
        if not has_memory:
            raise torch.OutOfMemoryError("none left")
        return tensor * 2

    derived = DerivedParameters({3: Recipe(make, (0,))})
    derived.fill(parameters)
    parameters[0] = torch.full((2, 3), 7.0)  # elsewhere, and of the same version
    has_memory = False
    with pytest.raises(torch.OutOfMemoryError):
        derived.fill(parameters)
    has_memory = True
    derived.fill(parameters)
    assert torch.equal(parameters[3], torch.full((2, 3), 14.0))


@pytest.mark.parametrize("grad_mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_change_in_place_is_seen_at_the_same_address(parameters: list[Any], grad_mode: Any) -> None:
    derived = DerivedParameters(RECIPES)
    with grad_mode():
        derived.fill(parameters)
        addresses = [t.data_ptr() for t in parameters[3:]]
        parameters[0].add_(1)
        derived.refresh()
    assert torch.equal(parameters[4], torch.full((2, 3), 14.0))
    parameters[1].zero_()
    derived.refresh()
    assert torch.equal(parameters[4], torch.full((2, 3), 4.0))
    assert [t.data_ptr() for t in parameters[3:]] == addresses


def test_what_comes_from_inference_tensors_is_computed_at_every_run(
    parameters: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    with torch.inference_mode():
        parameters[0] = torch.ones(2, 3)
    derived = DerivedParameters(RECIPES)
    for value in (1.0, 5.0):
        with torch.inference_mode():
            parameters[0].fill_(value)
        derived.fill(parameters)
        assert torch.equal(parameters[3], torch.full((2, 3), 2 * value))
    (record,) = caplog.records
    assert "under torch.no_grad()" in record.getMessage()


def test_a_write_without_a_version_is_followed_and_said_once(
    parameters: list[Any], derived: DerivedParameters, caplog: pytest.LogCaptureFixture
) -> None:
    for value in (4.0, 5.0):
        stamp, address = derived.stamp, parameters[4].data_ptr()
        parameters[1].data.fill_(value)
        assert not derived.refresh()
        derived.follow_writes()
        assert torch.equal(parameters[4], torch.full((2, 3), 2 + value))
        assert (derived.stamp is not stamp, parameters[4].data_ptr()) == (True, address)
    (record,) = caplog.records
    assert "written through `.data`" in record.getMessage()
    caplog.clear()
    parameters[1].mul_(3)  # seen by its version, as a rule
    derived.follow_writes()
    assert torch.equal(parameters[4], torch.full((2, 3), 17.0))
    assert not caplog.records


def test_what_is_outdated_is_computed_by_the_next_run(parameters: list[Any]) -> None:
    made: list[None] = []
    derived = DerivedParameters({3: Recipe(lambda tensor: made.append(None) or tensor * 2, (0,))})
    derived.fill(parameters)
    derived.outdate()
    for _ in range(2):
        derived.follow_writes()
    assert len(made) == 2
    copied = copy.deepcopy(derived)
    copied.fill([torch.full((2, 3), 4.0), None, None, None])
    assert len(made) == 3


def test_looking_runs_no_python_for_each_parameter() -> None:
    few, many = (instructions(_derived_parameters(count).refresh) for count in (1, 200))
    assert few == many < 100


def _derived_parameters(count: int) -> DerivedParameters:
    derived = DerivedParameters({count + n: Recipe(torch.clone, (n,)) for n in range(count)})
    derived.fill([torch.ones(1) for _ in range(count)] + [None] * count)
    return derived


def test_a_stamp_of_other_parameters_does_not_hold(parameters: list[Any], derived: DerivedParameters) -> None:
    stamp, first = derived.stamp, parameters[0].data
    parameters[0].data = torch.full((2, 3), 5.0)
    derived.fill(list(parameters))
    parameters[0].data = first
    assert derived.refresh(stamp)
    assert torch.equal(parameters[4], torch.full((2, 3), 12.0))
