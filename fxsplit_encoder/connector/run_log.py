"""One line of JSON for every ticket that ends, to the log and to a file; and such a file read again.

    {"event": "ticket", "request": "r17", "state": "released", "ready_s": 0.031, ...}
    {"event": "stats", "submitted": 1, ...}

The file's last line holds the statistics of the whole run. A run that was killed has none.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from fxsplit_encoder.connector.books.ticket import Ticket
from fxsplit_encoder.connector.statistics import ConnectorStats
from fxsplit_encoder.errors import InputError

logger = logging.getLogger(__name__)

_SHOWN_CHARACTERS = 60


class RunLog:
    """Logs what became of tickets, at level INFO. Threads may write at the same time.

    Args:
        is_on: whether it logs; a file is written in any case.
    """

    def __init__(self, is_on: bool) -> None:
        self._is_on = is_on
        self._lock = threading.Lock()
        self._file: TextIO | None = None

    def open(self, path: str | os.PathLike[str]) -> None:
        """Appends every line to a file too, from now on. Each goes to the operating system at once.

        Raises:
            InputError: it cannot be opened.
        """
        try:
            file = open(path, "a", encoding="utf-8", buffering=1)
        except OSError as error:
            raise InputError(f"{os.fspath(path)}: cannot be written: {error.strerror}") from None
        with self._lock:
            before, self._file = self._file, file
        if before is not None:
            _close(before)

    def write(self, ticket: Ticket) -> None:
        """Log a ticket that has ended."""
        if not self._is_on and self._file is None:
            return
        line = json.dumps(describe(ticket))
        if self._is_on:
            logger.info("%s", line)
        self._append(line)

    def close(self, stats: ConnectorStats) -> None:
        """Ends the file, if there is one, with the statistics of the run."""
        self._append(json.dumps({"event": "stats", **stats.as_dict()}))
        with self._lock:
            file, self._file = self._file, None
        if file is not None:
            _close(file)

    def _append(self, line: str) -> None:
        with self._lock:
            if self._file is None:
                return
            try:
                self._file.write(f"{line}\n")
                return
            except OSError as error:  # such as a full disk: whoever told of a ticket is not to blame
                logger.warning("%s: cannot be written, and ends here: %s", self._file.name, error)
            file, self._file = self._file, None
        _close(file)


def _close(file: TextIO) -> None:
    with contextlib.suppress(OSError):  # of lines that could not be written: that was said
        file.close()


def describe(ticket: Ticket) -> dict[str, Any]:
    """What is logged of a ticket, as plain values; seconds."""
    ready_s = None if ticket.ready_at is None else round(ticket.ready_at - ticket.submitted_at, 6)
    return {
        "event": "ticket",
        "request": ticket.request.id,
        "ticket": ticket.number,
        "state": str(ticket.state),
        "items": len(ticket.items),
        "tokens": sum(item.num_tokens for item in ticket.items),
        "modalities": sorted({item.media.modality for item in ticket.items}),
        "shared_items": ticket.num_hits,
        "ready_s": ready_s,
        "queue_s": round(ticket.queue_seconds, 6),
        "encode_s": round(ticket.encode_seconds, 6),
        "text_only": ticket.text_only,
        "recounted": ticket.epoch,
        "error": None if ticket.error is None else ticket.error.kind,
    }


@dataclass(frozen=True)
class RecordedRun:
    """What a file holds."""

    tickets: tuple[Mapping[str, Any], ...]
    """In the order in which they ended, as `describe` makes them."""
    stats: ConnectorStats | None
    """Of the last run; None: it did not end by itself."""


def read_run(path: str | os.PathLike[str]) -> RecordedRun:
    """A file that `Connector.record` wrote.

    Raises:
        InputError: it cannot be read, or a line is not one of its lines: which, and what it holds.
    """
    tickets, stats = [], None
    for number, line in enumerate(_lines(path), start=1):
        try:
            event = json.loads(line)
            if event["event"] == "stats":
                stats = ConnectorStats.from_dict(event)
            elif event["event"] == "ticket":
                tickets.append(event)
                stats = None  # another run was appended
            else:
                raise ValueError
        except (ValueError, TypeError, KeyError):
            raise InputError(
                f"{os.fspath(path)}, line {number}: expected an event of a connector's run; got "
                f"{line[:_SHOWN_CHARACTERS]!r}"
            ) from None
    return RecordedRun(tuple(tickets), stats)


def is_run(path: str | os.PathLike[str]) -> bool:
    """Whether a file begins as one that `Connector.record` wrote."""
    first = next(iter(_lines(path)), "")
    return first.startswith('{"event":')


def _lines(path: str | os.PathLike[str]) -> list[str]:
    try:
        return [line for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise InputError(f"{os.fspath(path)}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{os.fspath(path)}: expected UTF-8 text; got {error}") from None
