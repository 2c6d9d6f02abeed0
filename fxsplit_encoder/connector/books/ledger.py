"""Who has reserved how many bytes of what, to the byte."""

from __future__ import annotations

from collections.abc import Hashable, Iterator


class Ledger:
    """Accounts with limits, each of whose bytes has an owner.

    Not locked: its callers hold the connector's lock.
    """

    def __init__(self) -> None:
        self._limits: dict[str, int | None] = {}
        self._used: dict[str, int] = {}
        self._owned: dict[str, dict[Hashable, int]] = {}
        self.peaks: dict[str, int] = {}
        """The most bytes that each account had."""

    def open(self, account: str, limit: int | None) -> None:
        """Add an account of so many bytes, None: of any number; one that is open already stays as it is."""
        if account not in self._limits:
            self._limits[account], self._used[account], self._owned[account] = limit, 0, {}
            self.peaks[account] = 0

    def accounts(self) -> list[str]:
        """The names of all accounts."""
        return list(self._limits)

    def limit(self, account: str) -> int | None:
        """Bytes that the account may have."""
        return self._limits[account]

    def used(self, account: str) -> int:
        """Bytes that are reserved."""
        return self._used[account]

    def free(self, account: str) -> int:
        """Bytes that may still be reserved; of an account without a limit a very large number."""
        limit = self._limits[account]
        return 2**63 if limit is None else limit - self._used[account]

    def owned(self, account: str, owner: Hashable) -> int:
        """Bytes of one owner."""
        return self._owned[account].get(owner, 0)

    def owners(self, account: str) -> Iterator[tuple[Hashable, int]]:
        """Every owner with its bytes."""
        return iter(self._owned[account].items())

    def reserve(self, account: str, owner: Hashable, num_bytes: int) -> bool:
        """Give an owner so many bytes more; False, and nothing changes, where the limit does not allow it."""
        assert num_bytes >= 0
        if num_bytes > self.free(account):
            return False
        self._change(account, owner, num_bytes)
        return True

    def release(self, account: str, owner: Hashable, num_bytes: int | None = None) -> int:
        """Take so many bytes, None: all, from an owner; how many that were."""
        owned = self.owned(account, owner)
        num_bytes = owned if num_bytes is None else num_bytes
        assert 0 <= num_bytes <= owned, f"{account}: {owner} has {owned} bytes, not {num_bytes}"
        self._change(account, owner, -num_bytes)
        return num_bytes

    def move(self, account: str, owner: Hashable, heir: Hashable, num_bytes: int | None = None) -> None:
        """Give another owner so many bytes, None: all, of one."""
        moved = self.release(account, owner, num_bytes)
        self._change(account, heir, moved)

    def _change(self, account: str, owner: Hashable, num_bytes: int) -> None:
        owned = self._owned[account]
        if left := owned.get(owner, 0) + num_bytes:
            owned[owner] = left
        else:
            owned.pop(owner, None)
        self._used[account] += num_bytes
        self.peaks[account] = max(self.peaks[account], self._used[account])

    def problems(self) -> list[str]:
        """What does not add up; empty: nothing."""
        wrong = []
        for account, owned in self._owned.items():
            if sum(owned.values()) != self._used[account]:
                wrong.append(f"{account}: owners have {sum(owned.values())}, used are {self._used[account]}")
            if any(num_bytes <= 0 for num_bytes in owned.values()):
                wrong.append(f"{account}: an owner has no bytes")
            limit = self._limits[account]
            if limit is not None and self.peaks[account] > limit:
                wrong.append(f"{account}: {self.peaks[account]} of {limit} bytes were reserved")
        return wrong
