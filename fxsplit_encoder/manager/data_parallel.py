"""Data parallelism: every rank of a process group encodes its share of the items and returns all of them.

Every rank has the whole tower and calls `execute` with the same inputs. All compute the same assignment of
items to ranks, encode their own share, and exchange the rows (docs/data_parallel.md).
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fxsplit_encoder._torch.distributed import timeout_of
from fxsplit_encoder.errors import ConfigError, InputError, RankError
from fxsplit_encoder.manager.tower import read_item_specs, select_items, tower_part
from fxsplit_encoder.protocol import EncoderItemSpec, SupportsEncoderCudaGraph

# torch 2.13 renamed it, and warns of the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# The same on every rank, so that a position in it names a dtype.
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def assign_items(weights: Sequence[float], num_ranks: int) -> list[list[int]]:
    """Assigns items to ranks: the heaviest first, each to the rank that has the least so far. The heaviest
    rank carries at most 4/3 - 1/(3 num_ranks) of the best assignment (Graham 1969). Ties go to the first item
    and the lowest rank, so that all ranks find the same. Returns the items of every rank, ascending.
    """
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0.0] * num_ranks
    for index in sorted(range(len(weights)), key=lambda i: -weights[i]):
        rank = min(range(num_ranks), key=loads.__getitem__)
        shares[rank].append(index)
        loads[rank] += weights[index]
    return [sorted(share) for share in shares]


class _Header(NamedTuple):
    """Fixed-size message that each rank sends before any rows are exchanged."""

    failed: int = 1
    """1: this rank raises an error of its own; the other fields are undefined."""
    digest: int = 0
    """Of every item's size and rank."""
    num_items: int = 0
    """Of the whole request."""
    num_patches: int = 0
    """Of the whole request."""
    dtype: int = -1
    """Position in `_DTYPES`; -1: this rank has no items."""
    columns: int = 0
    """Of this rank's items."""
    rows: int = 0
    """Of this rank's items, all together."""
    as_declared: int = 1
    """1: each of this rank's items has the rows that its spec declares."""


class _Share(NamedTuple):
    specs: Sequence[EncoderItemSpec]
    """All items of the request."""
    assignment: list[list[int]]
    """The items of every rank."""
    items: list[Tensor]
    """This rank's items, (rows, columns) each."""


class DataParallel:
    """Shares the items of a batch among the ranks of a process group.

    Args:
        process_group: the ranks; None: the default group. Other users must call it in one order on all ranks.
        device: of the rows. The group must have a backend for it: NCCL for CUDA, gloo for a CPU.

    Raises:
        ConfigError: torch.distributed is not initialized, or this process is not in the group.
    """

    def __init__(self, process_group: dist.ProcessGroup | None, device: torch.device) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise ConfigError(
                "data_parallel: needs a process group; call torch.distributed.init_process_group before the "
                "manager is made, for example in a script that torchrun started"
            )
        self.rank = dist.get_rank(process_group)
        if self.rank < 0:
            raise ConfigError(
                "data_parallel: this process is not in the process group; pass a group that it is in"
            )
        group = process_group if process_group is not None else dist.group.WORLD
        assert group is not None
        self.group = group
        self.num_ranks = dist.get_world_size(process_group)
        self.device = device
        self.costs: Callable[[EncoderItemSpec], float] = lambda spec: spec.input_size
        """The weight of an item, the same on every rank: its patches, after `share_costs` milliseconds."""
        # Headers go from host to host: through the devices they would wait for what is being encoded.
        self._host_group = group
        if device.type != "cpu":
            ranks = dist.get_process_group_ranks(group)
            timeout = timeout_of(group, device)
            made = dist.new_group(ranks, timeout, backend="gloo", use_local_synchronization=True)
            assert isinstance(made, dist.ProcessGroup)
            self._host_group = made

    def share_costs(self, per_patch: float, per_pair: float) -> None:
        """Weighs items by rank 0's milliseconds of a patch and of an attending pair; all ranks call it."""
        shared = [(per_patch, per_pair)]
        if self.num_ranks > 1:
            first = dist.get_process_group_ranks(self.group)[0]
            dist.broadcast_object_list(shared, first, self._host_group)
        patch, pair = shared[0]
        # An item counts as one segment: how a video is cut into frames is not part of its spec.
        self.costs = lambda spec: patch * spec.input_size + pair * spec.input_size**2

    def check_same(self, what: str, values: Sequence[str]) -> None:
        """Raises ConfigError on every rank where values differ among ranks; every rank must call it."""
        digest = _hashed(values)
        digests = [row[0] for row in self._exchange([digest])] if self.num_ranks > 1 else [digest]
        if differing := [rank for rank, other in enumerate(digests) if other != digests[0]]:
            raise ConfigError(
                f"{what}: expected the same on every rank; rank {', '.join(map(str, differing))} differs "
                f"from rank 0; this one, rank {self.rank}, has: {'; '.join(values)}"
            )

    def execute(
        self,
        mm_kwargs: dict[str, Any],
        encode_local: Callable[[dict[str, Any]], list[Tensor]],
        tower: SupportsEncoderCudaGraph,
    ) -> list[Tensor]:
        """Encodes this rank's share by `encode_local`; returns all items, (rows, columns) each, in order and
        in memory of their own. Every rank must call it with the same inputs, in the same order.

        Raises:
            InputError: inputs, columns or dtypes differ among ranks (on all), or among this rank's own items.
            RankError: another rank failed, has ended, or did not answer in time.
        """
        if self.num_ranks == 1:
            return encode_local(mm_kwargs)
        header = _Header()
        try:
            specs = read_item_specs(tower, mm_kwargs)
            assignment = assign_items([*map(self.costs, specs)], self.num_ranks)
            own, items = assignment[self.rank], list[Tensor]()
            if own:
                everything = len(own) == len(specs)
                items = encode_local(mm_kwargs if everything else select_items(tower, mm_kwargs, own, 0)[0])
            share = _Share(specs, assignment, items)
            header = self._describe(share)
        finally:
            if header.failed:  # the others wait for it; this rank's own error is the one to raise
                with contextlib.suppress(RankError):
                    self._exchange(header)
        headers = [_Header(*row) for row in self._exchange(header)]
        _check_agreement(headers)
        return self._gather_items(share, headers)

    # --- this rank's share

    def _describe(self, share: _Share) -> _Header:
        own = share.assignment[self.rank]
        for index, item in zip(own, share.items, strict=True):
            if item.dim() != 2 or item.dtype not in _DTYPES:
                raise InputError(
                    f"item {index}: data_parallel exchanges items of (rows, columns) in one of "
                    f"{', '.join(map(str, _DTYPES))}; got {tuple(item.shape)} in {item.dtype}"
                )
        kinds = {(item.shape[1], item.dtype) for item in share.items}
        if len(kinds) > 1:
            raise InputError(
                "data_parallel exchanges items of one width and dtype; this rank's items have "
                + ", ".join(f"{columns} columns of {dtype}" for columns, dtype in sorted(kinds, key=str))
            )
        columns, dtype = next(iter(kinds), (0, None))
        rows = [item.shape[0] for item in share.items]
        sizes = [(s.input_size, s.output_tokens, sorted(s.path_output_tokens.items())) for s in share.specs]
        return _Header(
            failed=0,
            digest=_hashed((sizes, share.assignment)),
            num_items=len(share.specs),
            num_patches=sum(spec.input_size for spec in share.specs),
            dtype=-1 if dtype is None else _DTYPES.index(dtype),
            columns=columns,
            rows=sum(rows),
            as_declared=int(rows == [share.specs[index].output_tokens for index in own]),
        )

    # --- the others'

    def _gather_items(self, share: _Share, headers: Sequence[_Header]) -> list[Tensor]:
        counts = self._row_counts(share, headers)
        gathered = self._gather_rows(share.items, headers)
        results: dict[int, Tensor] = dict(zip(share.assignment[self.rank], share.items, strict=True))
        for rank, own in enumerate(share.assignment):
            if rank == self.rank:
                continue
            ends = itertools.accumulate(counts[rank])
            for index, count, end in zip(own, counts[rank], ends, strict=True):
                # A copy, so that a cache that keeps one image does not keep the batch alive.
                results[index] = gathered[rank, end - count : end].clone()
        return [results[index] for index in range(len(share.specs))]

    def _row_counts(self, share: _Share, headers: Sequence[_Header]) -> list[list[int]]:
        if all(header.as_declared for header in headers):
            return [[share.specs[index].output_tokens for index in own] for own in share.assignment]
        longest = max(map(len, share.assignment))
        rows = [item.shape[0] for item in share.items]
        exchanged = self._exchange(rows + [0] * (longest - len(rows)))
        return [row[: len(own)] for row, own in zip(exchanged, share.assignment, strict=True)]

    def _gather_rows(self, items: Sequence[Tensor], headers: Sequence[_Header]) -> Tensor:
        """(ranks, rows of the longest rank, columns): every rank's rows, then uninitialized memory."""
        longest = max(header.rows for header in headers)
        kind = next((header for header in headers if header.dtype >= 0), headers[0])
        shape = (self.num_ranks, longest, kind.columns)
        received = torch.empty(shape, dtype=_DTYPES[kind.dtype], device=self.device)
        if received.numel() > 0:
            sent = received.new_empty(shape[1:])
            if items:
                torch.cat(list(items), out=sent[: headers[self.rank].rows])
            self._all_gather(received, sent, self.group)
        return received

    def _exchange(self, values: Sequence[int]) -> list[list[int]]:
        sent = torch.tensor(values, dtype=torch.int64, device="cpu")
        received = sent.new_empty(self.num_ranks, len(values))
        self._all_gather(received, sent, self._host_group)
        rows: list[list[int]] = received.tolist()
        return rows

    def _all_gather(self, received: Tensor, sent: Tensor, group: dist.ProcessGroup) -> None:
        """Gathers `sent` of every rank; with NCCL the current stream waits, not the host."""
        try:
            # As bytes: nothing is computed, and not every backend knows every dtype.
            out, data = (tensor.view(-1).view(torch.uint8) for tensor in (received, sent))
            _all_gather(out, data, group=group)
        except RuntimeError as error:
            raise RankError(
                f"rank {self.rank} of {self.num_ranks} lost the others: one of them has ended, or did not "
                f"call execute within {timeout_of(self.group, self.device)}; see what it logged, then end "
                "all ranks and start them again; if ranks may be slower, give init_process_group or "
                "new_group a longer timeout"
            ) from error


def _hashed(values: Any) -> int:
    return int.from_bytes(hashlib.blake2b(repr(values).encode(), digest_size=8).digest(), signed=True)


def _check_agreement(headers: Sequence[_Header]) -> None:
    if failed := [rank for rank, header in enumerate(headers) if header.failed]:
        raise RankError(
            f"rank {', '.join(map(str, failed))} could not encode its share of the items, and raised the "
            "error that says why; no rank returned anything. The ranks are still in step: correct the cause "
            "and call execute on all of them again"
        )
    if len({header.digest for header in headers}) > 1:
        seen = "; ".join(
            f"rank {rank}: {header.num_items} items, {header.num_patches} patches"
            for rank, header in enumerate(headers)
        )
        raise InputError(
            "the ranks were given different inputs, or weigh them by different costs; pass the same to every "
            f"rank, in the same order of calls; got {seen}"
        )
    kinds = {(h.columns, _DTYPES[h.dtype]): rank for rank, h in enumerate(headers) if h.dtype >= 0}
    if len(kinds) > 1:
        seen = "; ".join(f"rank {rank}: {columns} of {dtype}" for (columns, dtype), rank in kinds.items())
        raise InputError(
            f"the ranks encoded items of different columns or dtypes; load the same tower on all; got {seen}"
        )


def agreement_of(
    tower: object, process_group: dist.ProcessGroup | None = None
) -> Callable[[bool], bool] | None:
    """Returns a vote among the ranks that share a tower's weights, which all of them must call; None: none
    do. Their forward has collectives, so they must capture the same, though times and free memory differ.

    Args:
        process_group: the ranks of a tower whose own code calls the collectives.
    """
    groups = [(group, mesh.device_type) for mesh in _meshes(tower) for group in mesh.get_all_groups()]
    if process_group is not None and dist.get_world_size(process_group) > 1:
        groups.append((process_group, "cuda" if dist.get_backend(process_group) == "nccl" else "cpu"))
    if not groups:
        return None

    def agree(ready: bool) -> bool:
        for group, device in groups:
            vote = torch.tensor([int(ready)], device=device)
            dist.all_reduce(vote, dist.ReduceOp.MIN, group)
            ready = bool(vote.item())
        return ready

    return agree


def why_not_compiled(tower: object) -> str:
    """Returns why a tower whose weights are shared by ranks is not compiled."""
    if _meshes(tower):
        return "captured without compiling: its parameters are sharded among ranks (DTensor)"
    return "captured without compiling: its weights are shared among the ranks of process_group"


def _meshes(tower: object) -> list[Any]:
    part = tower_part(tower)
    if part is None or not (dist.is_available() and dist.is_initialized()):
        return []
    from torch.distributed.tensor import DTensor

    meshes: list[Any] = []
    for parameter in part.parameters():
        if isinstance(parameter, DTensor) and parameter.device_mesh not in meshes:
            meshes.append(parameter.device_mesh)
    return meshes
