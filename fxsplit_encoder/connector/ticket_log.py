"""One line of JSON for every ticket that ends."""

from __future__ import annotations

import json
import logging
from typing import Any

from fxsplit_encoder.connector.books.ticket import Ticket

logger = logging.getLogger(__name__)


class TicketLog:
    """Logs what became of tickets, at level INFO.

    Args:
        is_on: whether it logs at all.
    """

    def __init__(self, is_on: bool) -> None:
        self._is_on = is_on

    def write(self, ticket: Ticket) -> None:
        """Log a ticket that has ended."""
        if self._is_on and logger.isEnabledFor(logging.INFO):
            logger.info("%s", json.dumps(describe(ticket)))


def describe(ticket: Ticket) -> dict[str, Any]:
    """What is logged of a ticket, as plain values."""
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
