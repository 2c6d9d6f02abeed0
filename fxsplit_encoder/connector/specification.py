"""The connector under the names of the OmniConnector's specification: a scheduler's interface by request
ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Protocol

import torch
from torch import Tensor

from fxsplit_encoder.connector.books.ticket import Ticket
from fxsplit_encoder.connector.connector import Connector
from fxsplit_encoder.connector.merge import MergedRows
from fxsplit_encoder.connector.positions import Integers, Placeholders
from fxsplit_encoder.connector.request import EncodeRequest
from fxsplit_encoder.connector.states import WAITING, Residence, State
from fxsplit_encoder.connector.statistics import ConnectorStats
from fxsplit_encoder.errors import ConnectorError, InputError
from fxsplit_encoder.messages import name_of

_MOST_REMEMBERED = 1024


class FeatureState(StrEnum):
    """The specification's states of a feature. Here they follow from `State`, residence and holds."""

    ENCODING = "encoding"
    ENCODED_CPU = "encoded_cpu"
    STAGED_GPU = "staged_gpu"
    MERGED = "merged"
    PREFILLED = "prefilled"
    DISCARDED = "discarded"


class Prompt(Placeholders, Protocol):
    """Placeholders that also know the prompt, as a `PositionMap` does."""

    def token_ids(self, token_counts: Sequence[int]) -> Integers:
        """The token at every position of the merged sequence."""
        ...


class OmniConnector:
    """A thin layer over a `Connector` that keeps its tickets by request id.

    Args:
        connector: does the work; it is not closed with this.
        embed: token ids (positions,) on any device to their embeddings (positions, width), such as an
            `nn.Embedding`.
    """

    def __init__(self, connector: Connector, embed: Callable[[Tensor], Tensor]) -> None:
        self.connector = connector
        self._embed = embed
        self._tickets: dict[str, Ticket] = {}
        self._merged: dict[str, MergedRows] = {}
        self._prefilled: dict[str, Ticket] = {}

    @property
    def waiting_for_encoding(self) -> list[str]:
        """Requests that are not ready yet."""
        return [name for name, ticket in self._tickets.items() if not ticket.is_settled]

    @property
    def ready_to_prefill(self) -> list[str]:
        """Requests that can be merged."""
        return [name for name, ticket in self._tickets.items() if ticket.state is State.READY]

    def on_new_request(self, request: EncodeRequest) -> Ticket:
        """Takes a request; its ticket has the token counts to reserve blocks for.

        Raises:
            InputError: a request of this id is not finished, or it has no prompt as placeholders.
            ConnectorFullError: too much is waiting.
        """
        if request.id in self._tickets:
            raise InputError(f"id: expected one that is not in use; got {name_of(request.id)} again")
        if not hasattr(request.placeholders, "token_ids"):
            raise InputError(
                f"placeholders: expected a PositionMap of request {name_of(request.id)}'s prompt"
            )
        ticket = self._tickets[request.id] = self.connector.submit(request)
        self._prefilled.pop(request.id, None)
        return ticket

    def poll(self) -> list[tuple[str, ConnectorError | None]]:
        """The requests that have become ready since the last call, some of them as text alone
        (`Ticket.text_only`), and those that have failed, with the reason: they are done.
        """
        step, told = self.connector.step(), []
        for ticket in (*step.ready, *step.unavailable):
            name = ticket.request.id
            if self._tickets.get(name) is ticket:
                told.append((name, ticket.error))
                if ticket.error is not None:
                    del self._tickets[name]
        return told

    def prepare_prefill_batch(
        self, request_ids: Sequence[str], device: torch.device | str
    ) -> tuple[list[Tensor], list[int]]:
        """The embeddings of whole prompts, with the rows of their media in place.

        Args:
            request_ids: of requests that are ready.
            device: where the embeddings are to lie.

        Returns:
            For every request (tokens, width), and how many tokens that are.

        Raises:
            InputError: a request is unknown or not ready.
        """
        merged = []
        for name in request_ids:
            ticket = self._ticket(name)
            prompt: Prompt = ticket.request.placeholders  # type: ignore[assignment]
            ids = torch.from_numpy(prompt.token_ids(ticket.token_counts)).to(device, non_blocking=True)
            with torch.no_grad():
                embeddings = self._embed(ids)
            self._merged[name] = self.connector.merge(ticket, (0, len(ids)), embeddings)
            merged.append(embeddings)
        return merged, [len(embeddings) for embeddings in merged]

    def deepstack(self, request_id: str) -> MergedRows:
        """Where the rows of media are in a prompt that was prepared, and their deepstack levels.

        Raises:
            InputError: it was not prepared, or is done.
        """
        if request_id not in self._merged:
            raise InputError(f"request {name_of(request_id)}: expected one that was prepared")
        return self._merged[request_id]

    def on_prefill_done(
        self, request_id: str, media_ids: Sequence[int] | None = None, cache: bool = False
    ) -> None:
        """The key-value cache has the request's media now.

        Args:
            request_id: of a request that was prepared.
            media_ids: the indices of items that are done; None: all.
            cache: whether their features are kept, on the host, until memory is needed: for beams, further
                turns and speculation. Otherwise they are freed, as soon as nobody else holds them.

        Raises:
            InputError: the request is unknown.
        """
        ticket = self._ticket(request_id)
        for item in range(len(ticket.items)) if media_ids is None else media_ids:
            self.connector.release(ticket, item, keep=cache)
        if ticket.is_text:
            self.connector.release(ticket)
        if ticket.state is not State.READY:
            self._prefilled[request_id] = self._tickets.pop(request_id)
            self._merged.pop(request_id, None)
            while len(self._prefilled) > _MOST_REMEMBERED:
                del self._prefilled[next(iter(self._prefilled))]

    def abort(self, request_id: str) -> None:
        """The request is of no interest any more; an unknown one is not either."""
        for tickets in (self._tickets, self._prefilled):
            if (ticket := tickets.pop(request_id, None)) is not None:
                self.connector.cancel(ticket)
        self._merged.pop(request_id, None)

    def feature_state(self, request_id: str, media_id: int) -> FeatureState:
        """The specification's state of one feature. Of requests that are done the latest are remembered; the
        features of others are taken for discarded.
        """
        ticket = self._tickets.get(request_id) or self._prefilled.get(request_id)
        if ticket is None:
            return FeatureState.DISCARDED
        item = ticket.items[media_id]
        if item.state in WAITING:
            return FeatureState.ENCODING
        if item.state is State.READY:
            if request_id in self._merged:
                return FeatureState.MERGED
            on_host = ticket.residence(media_id) is Residence.HOST
            return FeatureState.ENCODED_CPU if on_host else FeatureState.STAGED_GPU
        is_kept = item.state is State.RELEASED and self.connector.is_kept(ticket, media_id)
        return FeatureState.PREFILLED if is_kept else FeatureState.DISCARDED

    def get_stats(self) -> ConnectorStats:
        """The counts so far."""
        return self.connector.stats()

    def _ticket(self, request_id: str) -> Ticket:
        if request_id not in self._tickets:
            raise InputError(f"request {name_of(request_id)}: expected one that was taken and is not done")
        return self._tickets[request_id]
