"""When work that was given to a device is over."""

from __future__ import annotations

from typing import Protocol


class Event(Protocol):
    """A point of a stream, as `torch.cuda.Event`."""

    def query(self) -> bool:
        """Whether the device has passed it, or is lost: nothing uses memory on its account any more."""
        ...

    def has_succeeded(self) -> bool:
        """Whether the device has passed it, and not because it was lost."""
        ...

    def synchronize(self) -> None:
        """Blocks until the device has passed it.

        Raises:
            RuntimeError: the device was lost.
        """
        ...


class PassedEvent:
    """That of work which the calling thread has done itself."""

    def query(self) -> bool:
        """It is over."""
        return True

    def has_succeeded(self) -> bool:
        """It is over."""
        return True

    def synchronize(self) -> None:
        """Returns at once."""


PASSED = PassedEvent()
