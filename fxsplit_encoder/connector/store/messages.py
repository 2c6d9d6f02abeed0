"""What a store and its readers say to each other. The store greets first, with its memory."""

from __future__ import annotations

from fxsplit_encoder.connector.transport.peer import Greeting, Released
from fxsplit_encoder.connector.transport.seam import Handle
from fxsplit_encoder.connector.transport.wire import Message

MOST_PACKET_BYTES = 1 << 16


class Introduction(Message, frozen=True):
    """A reader's first packet."""

    group: str
    """Readers of one engine have one name."""
    is_mapping: bool
    """Whether it is one of those that will read; others only ask, for those that read."""


class Find(Message, frozen=True):
    """Asks for a feature, and to hold it."""

    key: bytes


class Answer(Message, frozen=True):
    """To `Find`, in the order of the questions."""

    handle: Handle | None
    """None: the store has none."""
    num_mapping: int
    """Readers of the asker's group that have mapped the memory."""


FromReader = Introduction | Find | Released
FromStore = Greeting | Answer
