"""GPU memory between processes, played on a CPU: which events are recorded and waited for, and when.

`tests/gpu/test_encoder_process.py` runs it between two processes on a GPU.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from msgspec.structs import replace

from fxsplit_encoder.connector.transport.cuda import CudaTransport
from fxsplit_encoder.connector.transport.host_and_device import HostAndDevice
from fxsplit_encoder.connector.transport.layout import TensorLayout
from fxsplit_encoder.connector.transport.shared_memory import SharedMemoryTransport
from fxsplit_encoder.errors import InputError, TransportError, TransportFullError
from tests.connector.resources import eventually, nothing_left

from .ends import shared_memory_ends

MAX_BYTES = 1 << 16
CPU = torch.device("cpu")


class PlayedDevices:
    """One GPU for two ends: what they do to it is written down."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.pending: set[str] = set()
        """Events that have not passed yet."""
        self.memories: dict[bytes, torch.Tensor] = {}
        self.numbers = itertools.count()

    def share(self, memory: torch.Tensor) -> list[Any]:
        self.memories[b"memory"] = memory
        return [b"memory", memory.numel(), True]

    def open(self, values: list[Any], device: torch.device) -> torch.Tensor:
        if values[0] not in self.memories:
            raise RuntimeError("invalid handle")
        return self.memories[values[0]]

    def uuid(self, device: torch.device) -> str:
        return "GPU-0"

    def named(self, uuid: str) -> torch.device | None:
        return CPU if uuid == "GPU-0" else None

    def new_event(self, device: torch.device) -> PlayedEvent:
        return PlayedEvent(self.log, f"e{next(self.numbers)}", self.pending)

    def open_event(self, handle: bytes, device: torch.device) -> PlayedEvent:
        self.log.append(f"open {handle.decode()}")
        if not handle:
            raise RuntimeError("invalid event")
        return PlayedEvent(self.log, handle.decode(), self.pending)


class PlayedEvent:
    def __init__(self, log: list[str], name: str, pending: set[str]) -> None:
        self.log = log
        self.name = name
        self.pending = pending

    def record(self) -> None:
        self.log.append(f"record {self.name}")

    def ipc_handle(self) -> bytes:
        return self.name.encode()

    def query(self) -> bool:
        return self.name not in self.pending

    def wait(self) -> None:
        assert self.query(), "a stream that waits for a process that is killed is lost"
        self.log.append(f"wait {self.name}")

    def synchronize(self) -> None:
        self.log.append(f"synchronize {self.name}")


class Ends(NamedTuple):
    writer: CudaTransport
    reader: CudaTransport
    hosts: tuple[SharedMemoryTransport, SharedMemoryTransport]
    devices: PlayedDevices

    def log(self) -> list[str]:
        """What was done since it was asked last."""
        lines = list(self.devices.log)
        self.devices.log.clear()
        return lines


@pytest.fixture
def ends() -> Iterator[Ends]:
    with nothing_left():
        devices, hosts = PlayedDevices(), shared_memory_ends(MAX_BYTES)
        writer = CudaTransport(hosts[0], MAX_BYTES, CPU, devices)
        reader = CudaTransport(hosts[1], devices=devices)
        reader.adopt(writer.describe())
        yield Ends(writer, reader, hosts, devices)
        for end in (reader, writer, *hosts):
            end.close()
        devices.memories.clear()


def test_a_reader_waits_for_the_writer_and_is_done_before_it_releases(ends: Ends) -> None:
    handle = ends.writer.put(
        b"k", {"x": torch.arange(6).view(2, 3), "y": torch.ones(3).bfloat16()}, {"t": (1,)}
    )
    assert ends.log() == ["record e0"]
    payload = ends.reader.get(handle)
    assert ends.log() == ["open e0", "wait e0", "record e1", "synchronize e1"]
    assert payload.buffers["x"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert payload.buffers["y"].dtype == torch.bfloat16
    assert payload.meta == {"t": (1,)}
    ends.reader.release(handle)
    assert eventually(lambda: ends.writer.held_bytes == 0)
    assert ends.log() == ["synchronize e0"]


def test_a_reader_waits_on_the_host_and_not_for_a_process_that_is_gone(ends: Ends) -> None:
    handle = ends.writer.put(b"", {"x": torch.ones(3)})
    ends.devices.pending.add("e0")
    later = threading.Timer(0.02, ends.devices.pending.clear)
    later.start()
    assert ends.reader.get(handle).buffers["x"].sum() == 3
    later.join()
    ends.devices.pending.add("e0")
    gone = threading.Timer(0.02, ends.hosts[1].refuse)
    gone.start()
    with pytest.raises(TransportError, match="ended before"):
        ends.reader.get(handle)
    gone.join()
    ends.devices.pending.clear()
    assert ends.reader.get(handle).buffers["x"].sum() == 3, "what it had computed before can be read"


def test_events_are_used_again_and_opened_once(ends: Ends) -> None:
    for _ in range(5):
        handle = ends.writer.put(b"", {"x": torch.ones(3)})
        ends.reader.get(handle)
        ends.reader.release(handle)
        assert eventually(lambda: ends.writer.held_bytes == 0)
    assert sum(line.startswith("open") for line in ends.log()) == 1
    handles = [ends.writer.put(b"", {"x": torch.ones(3)}) for _ in range(3)]
    assert len({handle.event for handle in handles}) == 3


def test_memory_is_free_only_once_what_filled_it_is_over(ends: Ends) -> None:
    handle = ends.writer.put(b"", {"x": torch.ones(3)})
    ends.log()
    ends.writer.release(handle)
    ends.writer.release(handle)
    assert ends.log() == ["synchronize e0"]


def test_the_bound_holds_and_a_failed_put_holds_nothing(ends: Ends) -> None:
    large = torch.zeros(MAX_BYTES - 64, dtype=torch.uint8)
    handle = ends.writer.put(b"", {"x": large})
    with pytest.raises(TransportFullError):
        ends.writer.put(b"", {"x": large})
    ends.writer.release(handle)
    with pytest.raises(InputError, match="max_bytes"):
        ends.writer.put(b"", {"x": torch.zeros(MAX_BYTES + 1, dtype=torch.uint8)})
    with pytest.raises(InputError, match=r"meta\.thing"):
        ends.writer.put(b"", {"x": large}, {"thing": object()})
    assert ends.writer.held_bytes == 0
    assert ends.writer.put(b"", {}).num_bytes == 0


def test_an_end_without_memory_only_reads(ends: Ends) -> None:
    assert (ends.writer.may_put, ends.reader.may_put) == (True, False)
    with pytest.raises(TransportError, match="no memory"):
        ends.reader.put(b"", {"x": torch.ones(1)})


@pytest.mark.parametrize(
    "change",
    [
        {"owner": "another"},
        {"offset": -64},
        {"offset": 1 << 40},
        {"event": b""},
        {"tensors": (TensorLayout("x", "float32", (1 << 20,), 0),)},
    ],
    ids=str,
)
def test_a_handle_that_leads_elsewhere_reads_nothing(ends: Ends, change: dict[str, Any]) -> None:
    handle = ends.writer.put(b"", {"x": torch.ones(4)})
    with pytest.raises(TransportError):
        ends.reader.get(dataclasses.replace(handle, **change))


def test_its_owner_knows_what_was_released(ends: Ends) -> None:
    handle = ends.writer.put(b"", {"x": torch.ones(4)})
    assert ends.writer.get(handle).buffers["x"].sum() == 4
    ends.writer.release(handle)
    with pytest.raises(TransportError, match="released"):
        ends.writer.get(handle)


def test_memory_that_cannot_be_opened_is_an_error(ends: Ends) -> None:
    described = ends.writer.describe()
    for changed, words in (
        (replace(described, uuid="GPU-1"), "CUDA_VISIBLE_DEVICES"),
        (replace(described, share=[b"other"]), "cannot be opened"),
        (replace(described, num_bytes=3), "expected 3 bytes"),
    ):
        with pytest.raises(TransportError, match=words):
            CudaTransport(ends.hosts[1], devices=ends.devices).adopt(changed)


def test_a_device_without_memory_is_an_error_of_the_caller(ends: Ends) -> None:
    with pytest.raises(InputError, match="device_bytes"):
        CudaTransport(ends.hosts[0], MAX_BYTES, torch.device("cuda:0"))
    with pytest.raises(InputError, match="device_bytes"):
        CudaTransport(ends.hosts[0], 1 << 60, CPU)


def test_closed_ends_hold_nothing(ends: Ends) -> None:
    handle = ends.writer.put(b"", {"x": torch.ones(4)})
    for end in (ends.reader, ends.writer):
        end.close()
        end.close()
        with pytest.raises(TransportError):
            end.get(handle)
        end.release(handle)
    assert ends.writer.held_bytes == 0


class OnDevice(torch.Tensor):
    """A tensor that says that it lies on a GPU."""

    is_cuda = True


def test_tensors_go_where_they_are(ends: Ends) -> None:
    writer = HostAndDevice(ends.hosts[0], ends.writer)
    reader = HostAndDevice(ends.hosts[1], ends.reader)
    on_device = torch.ones(3).as_subclass(OnDevice)
    handles = [writer.put(b"", {"x": tensor}) for tensor in (on_device, torch.full((3,), 2.0))]
    assert [handle.owner for handle in handles] == [ends.writer.owner, ends.hosts[0].owner]
    assert [reader.get(handle).buffers["x"].sum().item() for handle in handles] == [3, 6]
    assert writer.held_bytes == ends.writer.held_bytes + ends.hosts[0].held_bytes > 0
    for handle in handles:
        reader.release(handle)
    assert eventually(lambda: writer.held_bytes == 0)
    assert reader.put(b"", {"x": on_device}).owner == ends.hosts[1].owner  # it has no memory of a GPU
