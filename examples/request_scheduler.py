"""A scheduler's view of the connector: requests by id, embeddings for the prefill, holds until it is done.

scheduler = RequestScheduler(connector, model.get_input_embeddings())
ticket = scheduler.submit(EncodeRequest("r1", items, placeholders))  # knows its token counts
ready, failed = scheduler.poll()                                     # in every step of the engine
embeddings = scheduler.embeddings("r1", "cuda")                      # (tokens, width), media in place
scheduler.prefilled("r1")                                            # the key-value cache has them
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fxsplit_encoder.connector import Connector, EncodeRequest, Ticket
from fxsplit_encoder.errors import ConnectorError


class RequestScheduler:
    """Keeps the tickets of a connector by request id.

    Args:
        connector: does the work; it is not closed with this.
        embed: token ids (tokens,) to embeddings (tokens, width), such as an `nn.Embedding`.
    """

    def __init__(self, connector: Connector, embed: Callable[[Tensor], Tensor]) -> None:
        self.connector = connector
        self._embed = embed
        self._tickets: dict[str, Ticket] = {}

    def submit(self, request: EncodeRequest) -> Ticket:
        """Submit a request whose placeholders are a `PositionMap` of its prompt."""
        self._tickets[request.id] = ticket = self.connector.submit(request)
        return ticket

    def poll(self) -> tuple[list[str], dict[str, ConnectorError | None]]:
        """The ids of requests that have become ready, and of those that failed, with the reason."""
        step = self.connector.step()
        failed = {ticket.request.id: ticket.error for ticket in step.unavailable}
        for name in failed:
            self._tickets.pop(name, None)
        return [ticket.request.id for ticket in step.ready], failed

    def embeddings(self, request_id: str, device: torch.device | str) -> Tensor:
        """The prompt's embeddings (tokens, width), with the rows of its media in place."""
        ticket = self._tickets[request_id]
        prompt: Any = ticket.request.placeholders
        ids = torch.from_numpy(prompt.token_ids(ticket.token_counts)).to(device, non_blocking=True)
        with torch.no_grad():
            embeddings = self._embed(ids)
        self.connector.merge(ticket, (0, len(ids)), embeddings)
        return embeddings

    def prefilled(self, request_id: str, *, keep: bool = False) -> None:
        """Release the features of a request; `keep` leaves them in the cache for a further turn."""
        self.connector.release(self._tickets.pop(request_id), keep=keep)
