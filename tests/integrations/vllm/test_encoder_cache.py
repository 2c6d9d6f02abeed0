"""vLLM's interface of encoder cache connectors, by its recorded methods: each process of two engines."""

from __future__ import annotations

import importlib
import inspect
import pickle
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fxsplit_encoder.errors import ConfigError, InputError
from fxsplit_encoder.integrations.vllm import encoder_cache
from tests.connector.resources import eventually, nothing_left

from .fake_vllm import EC_BASE, VERSIONS, FakeVllm

MODULE = "fxsplit_encoder.integrations.vllm.ec_connector"
WIDTH = 4


@pytest.fixture(params=VERSIONS)
def vllm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FakeVllm:
    fake = FakeVllm(request.param, monkeypatch)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    monkeypatch.setitem(sys.modules, MODULE, importlib.import_module(MODULE))  # taken out afterwards
    return fake


@pytest.fixture
def make(vllm: FakeVllm) -> Iterator[Callable[..., Any]]:
    """`make(engine, kind, place)`: what vLLM makes in the scheduler or a worker of an engine."""
    made: list[Any] = []

    def connector(engine: str, kind: str, place: str, rank: int = 0, ranks: int = 1, **extra: Any) -> Any:
        settings = {"directory": f"{directory}/stores", "max_bytes": "64KiB", **extra}
        config = SimpleNamespace(
            ec_transfer_config=SimpleNamespace(
                ec_role=f"ec_{kind}", engine_id=engine, ec_connector_extra_config=settings
            ),
            parallel_config=SimpleNamespace(
                rank=rank, world_size=ranks, tensor_parallel_size=ranks, data_parallel_rank=0
            ),
            model_config=SimpleNamespace(dtype=torch.float32),
        )
        role = vllm.module(EC_BASE).ECConnectorRole[place.upper()]
        made.append(sys.modules[MODULE].FxsplitECConnector(config, role))
        return made[-1]

    with tempfile.TemporaryDirectory() as directory, nothing_left():  # sockets have short paths
        yield connector
        for each in reversed(made):
            each.shutdown()
            each.shutdown()


def rows(value: float, count: int = 3) -> torch.Tensor:
    return torch.full((count, WIDTH), value)


def request(*identifiers: str) -> Any:
    return SimpleNamespace(mm_features=[SimpleNamespace(identifier=each) for each in identifiers])


def schedule(scheduler: Any, asked: Any, new: bool = True) -> tuple[list[str], Any]:
    """What a step encodes, and what it tells the workers: as vLLM's scheduler goes over a request."""
    encoded = []
    for index, feature in enumerate(asked.mm_features):
        if not scheduler.has_cache_item(feature.identifier):
            encoded.append(feature.identifier)
        scheduler.update_state_after_alloc(asked, index)
    step = SimpleNamespace(scheduled_new_reqs=[asked] if new else [])
    return encoded, pickle.loads(pickle.dumps(scheduler.build_connector_meta(step)))


def work(workers: list[Any], caches: list[dict[str, torch.Tensor]], metadata: Any) -> Any:
    """A step of the workers; what the scheduler hears of it."""
    heard = None
    for worker, cache in zip(workers, caches, strict=True):
        worker.bind_connector_metadata(metadata)
        if worker.is_producer:
            worker.start_save_caches(encoder_cache=cache)
        if worker.is_consumer:
            worker.start_load_caches(cache)
        told = worker.build_connector_worker_meta()
        heard = told if heard is None else heard.aggregate(told)
    return SimpleNamespace(ec_connector_worker_meta=pickle.loads(pickle.dumps(heard)))


def test_its_methods_are_those_of_the_interface(vllm: FakeVllm) -> None:
    own = sys.modules[MODULE].FxsplitECConnector
    recorded = vllm.recorded["classes"][f"{EC_BASE}.ECConnectorBase"]
    public = {name: value for name, value in vars(own).items() if callable(value) and name[0] != "_"}
    assert public.keys() <= recorded.keys()
    for name, method in public.items():
        names = [each for each in inspect.signature(method).parameters]
        expected = [each.strip(" *") for each in recorded[name].strip("()").split(",")]
        assert names == expected, name


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_encoded_in_one_engine_is_loaded_in_another(make: Callable[..., Any], ranks: int) -> None:
    producers = [make("one", "producer", "worker", rank, ranks) for rank in range(ranks)]
    consumers = [make("other", "consumer", "worker", rank, ranks) for rank in range(ranks)]
    scheduler = make("other", "consumer", "scheduler", ranks=ranks)
    for producer in producers:
        producer.save_caches({"a": rows(1.0), "b": rows(2.0)}, "a")
    store = producers[0]._offered._store
    assert store.stats().puts == 1
    assert all(each._offered is None for each in producers[1:])  # the same rows

    assert eventually(lambda: scheduler.has_cache_item("a"))  # once each worker has the memory
    scheduler._found.counts.clear()
    asked = request("a", "b")
    encoded, metadata = schedule(scheduler, asked)
    assert encoded == ["b"]
    caches: list[dict[str, torch.Tensor]] = [{} for _ in consumers]
    heard = work(consumers, caches, metadata)
    for cache in caches:
        assert cache.keys() == {"a"}
        assert torch.equal(cache["a"], rows(1.0))
    assert store.stats().num_held == 1
    scheduler.update_connector_output(heard)
    assert eventually(lambda: store.stats().num_held == 0)
    assert scheduler.request_finished(asked) == (False, None)
    assert scheduler._found.num_held == 0
    assert scheduler._found.counts == {"loaded": 1, "encoded here": 1}
    assert all(each.build_connector_worker_meta() is None for each in consumers)


def test_memory_that_a_worker_has_not_mapped_does_not_count(make: Callable[..., Any]) -> None:
    producer = make("one", "producer", "worker")
    producer.save_caches({"a": rows(1.0)}, "a")
    scheduler = make("other", "consumer", "scheduler", ranks=2)
    make("other", "consumer", "worker", 0, 2)
    make("a third", "consumer", "worker", 0, 2)
    assert not scheduler.has_cache_item("a")
    assert scheduler._found.counts == {"not mapped by every worker": 1}
    assert eventually(lambda: producer._offered._store.stats().num_held == 0)


def test_what_a_request_found_and_did_not_need_is_let_go(make: Callable[..., Any]) -> None:
    producer = make("one", "producer", "worker")
    producer.save_caches({"a": rows(1.0)}, "a")
    make("other", "consumer", "worker")
    scheduler = make("other", "consumer", "scheduler")
    assert eventually(lambda: scheduler.has_cache_item("a"))
    assert scheduler.has_cache_item("a")
    assert producer._offered._store.stats().num_held == 1
    scheduler.request_finished(request("a"))
    assert eventually(lambda: producer._offered._store.stats().num_held == 0)


def test_what_was_given_up_is_offered_again(make: Callable[..., Any]) -> None:
    worker, scheduler = make("one", "producer", "worker"), make("one", "producer", "scheduler")
    assert not scheduler.has_cache_item("a")
    cache = {"a": rows(1.0, 200), **{f"{n}": rows(2.0, 1000) for n in range(8)}}
    for name in cache:
        worker.save_caches(cache, name)
    store = worker._offered._store
    key = encoder_cache.key_of("a", torch.float32)
    assert key not in store
    encoded, metadata = schedule(scheduler, request("a", "unknown"))
    assert encoded == ["a", "unknown"]  # of which the engine's own cache has the first
    assert metadata.offers == ("a", "unknown")
    work([worker], [cache], metadata)
    assert key in store
    assert schedule(scheduler, request("a"), new=False)[1].offers == ()


def test_an_engine_of_both_roles_loads_what_it_has_encoded(make: Callable[..., Any]) -> None:
    worker, scheduler = make("one", "both", "worker"), make("one", "both", "scheduler")
    worker.save_caches({"a": rows(1.0)}, "a")
    assert eventually(lambda: scheduler.has_cache_item("a"))
    encoded, metadata = schedule(scheduler, request("a"))
    cache: dict[str, torch.Tensor] = {}
    scheduler.update_connector_output(work([worker], [cache], metadata))
    assert (encoded, list(cache)) == ([], ["a"])
    assert scheduler._found.num_held == 0


def test_what_never_fits_is_said_once(make: Callable[..., Any], warnings_of_plugin: list[str]) -> None:
    encoder_cache.warn_once.__globals__["_said"].clear()
    producer = make("one", "producer", "worker")
    for _ in range(2):
        producer.save_caches({"a": rows(1.0, 1 << 16)}, "a")
    (warning,) = warnings_of_plugin
    assert "an encoded item is not offered" in warning


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"max_bytes": "much"}, "ec_connector_extra_config: max_bytes: not a size"),
        ({"dir": "/tmp"}, "ec_connector_extra_config: dir: .*directory, max_bytes"),
    ],
)
def test_settings_that_are_wrong_are_named(
    make: Callable[..., Any], extra: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make("one", "producer", "worker", **extra)


def test_a_directory_that_others_may_enter_is_refused(make: Callable[..., Any], tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(InputError, match="0700"):
        make("one", "consumer", "worker", directory=str(tmp_path))
