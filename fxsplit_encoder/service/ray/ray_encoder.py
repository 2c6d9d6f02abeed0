"""Tensors in Ray's object store, of any dtype: as their bytes, which Ray neither pickles nor copies twice."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from ray import exceptions
from torch import Tensor

from fxsplit_encoder.connector.interfaces import FeatureEncoder, Modality, PreparedItem
from fxsplit_encoder.encode_queue.batch_thread import BatchThread
from fxsplit_encoder.errors import EncoderLostError, InputError


class HostTensor(NamedTuple):
    """A tensor's dtype, shape and bytes. Out of the object store they are read-only, and held there."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    data: NDArray[Any]

    @classmethod
    def of(cls, tensor: Tensor) -> HostTensor:
        """Of a tensor on any device; of a contiguous one in host memory, a view."""
        host = tensor.detach().cpu().contiguous()
        return cls(host.dtype, tuple(host.shape), host.reshape(-1).view(torch.uint8).numpy())

    def copy(self) -> Tensor:
        """The tensor in memory of its own, which keeps nothing in the store."""
        made = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        np.copyto(made.view(-1).view(torch.uint8).numpy(), self.data)
        return made


@dataclass(frozen=True)
class RayOptions:
    """Resources and timeouts of an actor."""

    num_gpus: float = 1.0
    """Two workers on a GPU, of half a one each, encode in turns: while one copies, the other computes."""
    num_cpus: float = 1.0
    more: Mapping[str, Any] = field(default_factory=dict)
    """Further options of `ray.remote`, such as accelerator_type, label_selector or runtime_env. Restarts are
    the connector's business: max_restarts and max_task_retries stay 0."""
    start_timeout: float = 1800.0
    """Seconds until the actor has a place in the cluster, and its encoder has loaded and captured."""
    encode_timeout: float | None = None
    """Seconds that one batch may take before the actor is taken for hung, and killed. None: any."""
    close_timeout: float = 10.0
    """Seconds that the actor has to end by itself before it is killed."""


class RayEncoder(FeatureEncoder):
    """Encodes in an actor that it starts and ends, a batch at a time; tensors cross by Ray's object store.
    One that dies, with its node or alone, is a lost worker of the connector.

    Args:
        make: makes the encoder, in the actor: a function that Ray can pickle.
        row_bytes: bytes of a feature's row by modality, for which the connector asks before it starts actors.
        options: of the actor.

    Raises:
        InputError: the options ask Ray to restart actors.
    """

    def __init__(
        self,
        make: Callable[[], FeatureEncoder],
        row_bytes: Mapping[Modality, int],
        options: RayOptions | None = None,
    ) -> None:
        self._make = make
        self._row_bytes = dict(row_bytes)
        self.options = options if options is not None else RayOptions()
        self._actor: Any = None
        self.pid: int | None = None
        """The actor's process, on its node; None before `start`."""
        own = sorted({"max_restarts", "max_task_retries", "num_gpus", "num_cpus"} & set(self.options.more))
        if own:
            raise InputError(f"more: expected other options of Ray than {', '.join(own)}")

    def start(self) -> None:
        """Start an actor and its encoder; if there is one, this does nothing.

        Raises:
            InputError: Ray is not connected, or the encoder's rows are not those that were declared.
            EncoderLostError: the actor ended, or was not ready in time.
            Exception: what making or starting the encoder raised, of its own class.
        """
        if self._actor is not None:
            return
        check_connection()
        options = self.options
        remote = ray.remote(max_restarts=0, num_gpus=options.num_gpus, num_cpus=options.num_cpus)(_Actor)
        self._actor = remote.options(**options.more).remote(self._make, self._row_bytes)
        with contextlib.ExitStack() as failed:
            failed.callback(self._end)
            self.pid = self._ask("start", options.start_timeout)
            failed.pop_all()

    def row_bytes(self, modality: Modality) -> int | None:
        """See `FeatureEncoder`; as declared."""
        return self._row_bytes.get(modality)

    def encode(self, items: Sequence[PreparedItem]) -> list[Tensor]:
        """Features (rows, width), one per item and in order, in host memory of their own.

        Raises:
            EncoderLostError: the actor is gone, or hung.
            Exception: what the encoder raised, of its own class.
        """
        if self._actor is None:
            raise EncoderLostError("no actor was started; call start")
        sent = [
            (
                replace(item, inputs={}, metadata=dict(item.metadata)),
                {name: HostTensor.of(tensor) for name, tensor in item.inputs.items()},
            )
            for item in items
        ]
        return [each.copy() for each in self._ask("encode", self.options.encode_timeout, sent)]

    def close(self) -> None:
        """End the actor; idempotent, and `start` may follow."""
        if self._actor is not None:
            with contextlib.suppress(Exception):  # it is ended anyway
                ray.get(self._actor.close.remote(), timeout=self.options.close_timeout)
            self._end()

    # --- the actor

    def _ask(self, method: str, timeout: float | None, *arguments: object) -> Any:
        try:
            return ray.get(getattr(self._actor, method).remote(*arguments), timeout=timeout)
        except exceptions.GetTimeoutError:
            raise self._lost(f"did not {method} within {timeout:g} s; {self._resources()}") from None
        except exceptions.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, BatchThread.FATAL):
                raise self._lost(f"can encode no more: {cause}") from cause
            if not isinstance(cause, Exception):
                raise
            cause.add_note(str(error))
            raise cause from None
        except (exceptions.ObjectStoreFullError, exceptions.OutOfDiskError):
            raise  # a smaller batch may pass
        except exceptions.RayError as error:
            raise self._lost(f"is lost: {error}") from None

    def _lost(self, reason: str) -> EncoderLostError:
        name = "the actor" if self.pid is None else f"the actor {self.pid}"
        self._end()
        return EncoderLostError(f"{name} {reason}")

    def _end(self) -> None:
        actor, self._actor = self._actor, None
        with contextlib.suppress(Exception):  # the cluster may be gone too
            ray.kill(actor)

    def _resources(self) -> str:
        asked = f"{self.options.num_gpus:g} GPUs and {self.options.num_cpus:g} CPUs"
        free = ray.available_resources()
        return f"it asks for {asked}; free are {free.get('GPU', 0):g} GPUs and {free.get('CPU', 0):g} CPUs"


def check_connection() -> None:
    """Raises InputError where Ray is not connected to a cluster: it would start one of its own accord."""
    if not ray.is_initialized():
        raise InputError("expected a connection to a cluster; call ray.init() first")


class _Actor:
    """In the actor's process. Ray calls an actor's methods on one thread, which therefore captures too."""

    def __init__(self, make: Callable[[], FeatureEncoder], row_bytes: Mapping[Modality, int]) -> None:
        self._make = make
        self._row_bytes = row_bytes
        self._encoder: FeatureEncoder | None = None

    def start(self) -> int:
        self._encoder = encoder = self._make()
        encoder.start()
        found = {modality: encoder.row_bytes(modality) for modality in self._row_bytes}
        if found != self._row_bytes:
            raise InputError(f"row_bytes: expected the encoder's {found}; got {dict(self._row_bytes)}")
        return os.getpid()

    def encode(self, sent: Sequence[tuple[PreparedItem, Mapping[str, HostTensor]]]) -> list[HostTensor]:
        assert self._encoder is not None
        items = [
            replace(item, inputs={name: tensor.copy() for name, tensor in inputs.items()})
            for item, inputs in sent
        ]
        features = self._encoder.encode(items)
        host = [feature.to("cpu", non_blocking=True) for feature in features]  # from a GPU into pinned memory
        if features and features[0].is_cuda:
            torch.cuda.synchronize(features[0].device)
        return [*map(HostTensor.of, host)]

    def close(self) -> None:
        if self._encoder is not None:
            self._encoder.close()
