from __future__ import annotations

import pytest

from fxsplit_encoder.connector.books.storage import Ledger


@pytest.fixture
def ledger() -> Ledger:
    ledger = Ledger()
    ledger.open("host", 100)
    return ledger


def test_a_reservation_beyond_the_limit_changes_nothing(ledger: Ledger) -> None:
    assert ledger.reserve("host", "a", 60)
    assert not ledger.reserve("host", "b", 41)
    assert (ledger.used("host"), ledger.free("host"), ledger.owned("host", "b")) == (60, 40, 0)
    assert ledger.reserve("host", "b", 40)
    assert ledger.problems() == []


def test_an_owner_may_have_several_reservations(ledger: Ledger) -> None:
    assert ledger.reserve("host", "a", 10) and ledger.reserve("host", "a", 20)
    assert ledger.release("host", "a", 5) == 5
    assert ledger.release("host", "a") == 25
    assert ledger.release("host", "a") == 0
    assert dict(ledger.owners("host")) == {}


def test_bytes_move_between_owners_and_the_peak_stays(ledger: Ledger) -> None:
    ledger.reserve("host", "a", 70)
    ledger.move("host", "a", "b", 30)
    assert dict(ledger.owners("host")) == {"a": 40, "b": 30}
    ledger.move("host", "a", "b")
    assert dict(ledger.owners("host")) == {"b": 70}
    ledger.release("host", "b")
    assert ledger.peaks["host"] == 70


def test_nobody_gives_back_what_he_has_not(ledger: Ledger) -> None:
    ledger.reserve("host", "a", 10)
    with pytest.raises(AssertionError, match="has 10 bytes, not 11"):
        ledger.release("host", "a", 11)


def test_an_account_without_a_limit_takes_all(ledger: Ledger) -> None:
    ledger.open("inputs", None)
    assert ledger.reserve("inputs", "a", 1 << 50)
    ledger.open("inputs", 1)  # it is open already
    assert ledger.limit("inputs") is None
    assert ledger.accounts() == ["host", "inputs"]


def test_books_that_were_tampered_with_do_not_add_up(ledger: Ledger) -> None:
    ledger.reserve("host", "a", 10)
    ledger._owned["host"]["b"] = 5
    assert ledger.problems() == ["host: owners have 15, used are 10"]
    ledger._owned["host"]["b"] = 0
    assert ledger.problems() == ["host: an owner has no bytes"]
    ledger.peaks["host"] = 101
    assert "host: 101 of 100 bytes were reserved" in ledger.problems()
