"""The connector's pool over actors of a cluster: two of them, one of which is killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from fxsplit_encoder.connector import (
    Connector,
    ConnectorConfig,
    EncodeRequest,
    FakeProcessor,
    FeatureEncoder,
    MediaItem,
    PreparedItem,
    Ticket,
    WorkerStatus,
)
from fxsplit_encoder.errors import ConnectorError, ConnectorFullError, EncoderLostError, InputError
from fxsplit_encoder.models.connectors import checkpoint_connector
from fxsplit_encoder.service.ray import RayEncoder, RayOptions
from fxsplit_encoder.service.ray.connector import ray_connector
from fxsplit_encoder.service.ray.ray_encoder import HostTensor

from ...connector import scenes
from ...connector.scenes import image, request, rows_of, wait, wait_until
from ...models.checkpoints import save
from ..photographs import EXAMPLES, photograph
from .processes import named
from .remote_encoders import Telling, hanging_encoder, no_encoder, slow_encoder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PATIENCE_S = 300.0
"""How long an actor is waited for, which imports torch first, with others of a busy machine."""
ROWS = {"image": 32}
ON_CPU = RayOptions(num_gpus=0, num_cpus=1)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scenes, "PATIENCE_S", PATIENCE_S)


@pytest.fixture
def make(cluster: Any) -> Iterator[Callable[..., RayEncoder]]:
    made: list[RayEncoder] = []

    def one(factory: Callable[[], FeatureEncoder] = slow_encoder, **options: Any) -> RayEncoder:
        made.append(RayEncoder(factory, ROWS, RayOptions(**{"num_gpus": 0, **options})))
        return made[-1]

    yield one
    for encoder in made:
        encoder.close()


def item_of(name: str = "a", tokens: int = 2) -> PreparedItem:
    return FakeProcessor().prepare(image(name, tokens))


def connector(factory: Callable[[], FeatureEncoder] = slow_encoder, **settings: Any) -> Connector:
    encoders = [partial(RayEncoder, factory, ROWS, ON_CPU)] * 2
    each = Connector(FakeProcessor(), encoders, ConnectorConfig(timeout_s=PATIENCE_S, **settings))
    try:
        wait_until(lambda: set(each.workers().values()) == {WorkerStatus.RUNNING})
    except BaseException:
        each.close()  # or its actors are those of the next test
        raise
    return each


def test_an_actor_that_is_killed_loses_nothing_and_is_replaced(cluster: Any) -> None:
    refused = 0
    with connector(max_waiting_items=12, max_batch_items=3) as each:
        actors = named("ray::_Actor")
        assert len(actors) == 2
        media = [image(f"{number}", 1 + number % 7) for number in range(120)]
        tickets: list[Ticket] = []
        while len(tickets) < len(media):
            try:
                tickets.append(each.submit(request(media[len(tickets)])))
            except ConnectorFullError as error:
                assert error.retryable
                refused += 1
                time.sleep(0.01)
            if len(tickets) == 60 and len(actors) == 2:
                os.kill(actors.pop(), signal.SIGKILL)
        assert [wait(ticket) for ticket in tickets] == ["ready"] * 120
        for ticket, item in zip(tickets, media, strict=True):
            with each.read(ticket) as features:
                torch.testing.assert_close(features[0].rows, rows_of(item), rtol=0, atol=0)
        wait_until(lambda: set(each.workers().values()) == {WorkerStatus.RUNNING})
        stats = each.stats()
        assert (stats.lost_workers, stats.worker_restarts) == (1, 1)
        assert refused > 0
        assert each.audit() == []
    wait_until(lambda: not named("ray::_Actor"))


def test_a_bad_item_fails_alone_and_a_broken_device_ends_its_actor(cluster: Any) -> None:
    with connector(max_batch_items=8) as each:
        tickets = [each.submit(request(name)) for name in ("a", "bad", "b")]
        assert [wait(ticket) for ticket in tickets] == ["ready", "unavailable", "ready"]
        error = tickets[1].error
        assert isinstance(error, ConnectorError)
        assert (error.kind, error.retryable) == ("encoder", False)
        assert str(error).endswith("ValueError: bad pixels")
        assert each.stats().lost_workers == 0
        before = named("ray::_Actor")
        assert wait(each.submit(request("device"))) == "unavailable"  # it has cost two actors
        wait_until(lambda: set(each.workers().values()) == {WorkerStatus.RUNNING})
        assert each.stats().lost_workers == 2
        assert not set(before) & set(named("ray::_Actor"))
        assert wait(each.submit(request("c"))) == "ready"


def test_errors_keep_their_class_and_hung_actors_are_ended(make: Callable[..., RayEncoder]) -> None:
    with pytest.raises(InputError, match="of the test"):
        make(no_encoder).start()
    encoder = make()
    encoder.start()
    encoder.start()
    assert encoder.pid in named("ray::_Actor")
    with pytest.raises(ValueError, match="bad pixels"):
        encoder.encode([item_of("bad")])
    item = item_of("a", 3)
    assert torch.equal(encoder.encode([item])[0], rows_of(image("a", 3)))
    telling = make(Telling)
    telling.start()
    assert telling.encode([item])[0][0, :2].tolist() == [telling.pid, 1.0]  # on the thread that started
    telling.close()
    encoder.close()
    encoder.close()
    with pytest.raises(EncoderLostError, match="call start"):
        encoder.encode([item])
    hung = make(hanging_encoder, encode_timeout=0.5)
    hung.start()
    with pytest.raises(EncoderLostError, match=r"the actor \d+ did not encode within 0.5 s"):
        hung.encode([item])
    wait_until(lambda: not named("ray::_Actor"))


def test_what_the_cluster_does_not_have_is_said(make: Callable[..., RayEncoder], monkeypatch: Any) -> None:
    with pytest.raises(EncoderLostError, match=r"asks for 0 GPUs and 99 CPUs; free are 0 GPUs and [34] CPUs"):
        make(num_cpus=99, start_timeout=0.5).start()
    with pytest.raises(InputError, match="row_bytes: expected the encoder's"):
        RayEncoder(slow_encoder, {"image": 7}, ON_CPU).start()
    with pytest.raises(InputError, match="other options of Ray than max_restarts"):
        make(more={"max_restarts": 1})
    with pytest.raises(InputError, match="at least one"):
        ray_connector("nowhere", 0)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    with pytest.raises(InputError, match=r"call ray\.init\(\) first"):
        make().start()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (0, 3), (4, 3)])
def test_tensors_go_through_the_store_as_they_are(
    cluster: Any, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    sent = torch.randint(0, 2, shape).to(dtype)
    found = cluster.get(cluster.put(HostTensor.of(sent))).copy()
    assert (found.dtype, found.shape) == (dtype, sent.shape)
    assert torch.equal(found, sent)
    found.zero_()  # nobody else's
    strided = torch.arange(12.0).reshape(3, 4).T
    assert torch.equal(HostTensor.of(strided).copy(), strided)


def test_a_checkpoint_in_actors_gives_the_rows_of_one_in_this_process(cluster: Any, tmp_path: Path) -> None:
    checkpoint = save(tmp_path / "checkpoint", "qwen2_5_vl")[1]
    media = [photograph(path.stem, (56 + 28 * n, 84)) for n, path in enumerate(sorted(EXAMPLES.iterdir()))]
    there = ray_connector(checkpoint, 2, options=ON_CPU, settings=ConnectorConfig(timeout_s=PATIENCE_S))
    with there, checkpoint_connector(checkpoint, ["cpu"]) as here:
        items = [MediaItem("image", picture) for picture in media]
        tickets = [
            (there.submit(EncodeRequest("r", [item])), here.submit(EncodeRequest("r", [item])))
            for item in items
        ]
        for remote, local in tickets:
            assert {wait(remote), wait(local)} == {"ready"}
            assert remote.token_counts == local.token_counts
            with there.read(remote) as found, here.read(local) as expected:
                torch.testing.assert_close(found[0].rows, expected[0].rows, rtol=0, atol=1e-5)
                assert found[0].metadata.keys() == expected[0].metadata.keys()
