from __future__ import annotations

import pytest

from fxsplit_encoder.connector.states import TRANSITIONS, WAITING, State, check_transition


def test_every_state_has_a_row() -> None:
    assert set(TRANSITIONS) == set(State)


def test_nothing_follows_failure_and_cancellation() -> None:
    assert [state for state in State if not TRANSITIONS[state]] == [State.FAILED, State.CANCELLED]


def test_whatever_waits_may_fail_and_be_cancelled_and_become_ready() -> None:
    for state in WAITING:
        assert {State.FAILED, State.CANCELLED} <= TRANSITIONS[state]
        reached = {state}
        while new := {after for each in reached for after in TRANSITIONS[each]} - reached:
            reached |= new
        assert State.READY in reached


def test_what_is_ready_waits_again_only_once_it_was_released() -> None:
    assert TRANSITIONS[State.READY] == {State.RELEASED, State.CANCELLED, State.FAILED}


def test_other_changes_are_faults_of_ours() -> None:
    check_transition(State.NEW, State.QUEUED, "x")
    with pytest.raises(AssertionError, match="x: ready -> queued"):
        check_transition(State.READY, State.QUEUED, "x")
