"""`capture(wait=False)`: served at once and rightly at every moment; at the end as `capture()` leaves it."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import gc
import logging
import os
import pickle
import random
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, cast
from unittest import mock

import pytest
import torch
from torch import nn

import fxsplit_encoder as fx
from fxsplit_encoder.capture.pool import GraphPool
from fxsplit_encoder.child_process import Child
from fxsplit_encoder.compile.program import BoundProgram
from fxsplit_encoder.errors import InputError
from fxsplit_encoder.manager import background as background_module
from fxsplit_encoder.manager import compile_process
from fxsplit_encoder.manager.background import BackgroundCapture
from fxsplit_encoder.manager.compile_process import REQUEST, CompileRequest, CompileWorker, dump_tower
from fxsplit_encoder.manager.generation import Generation, first_of
from fxsplit_encoder.manager.path import EncoderPath
from fxsplit_encoder.manager.turns import Turns
from fxsplit_encoder.runtime.statistics import CaptureProgress, least
from tests.towers.tiny_towers import TINY

from ..waiting import wait_until
from .mock_towers import PackedModel, SplitModel, UntraceableModel, alone, batch

pytestmark = pytest.mark.usefixtures("traced_once")

CONFIG = fx.EncoderConfig(token_budgets=(4, 6, 8, 12, 16), max_items_per_batch=4, piece_compiler="eager")


class Work(NamedTuple):
    """That of a `capture(wait=False)`."""

    background: BackgroundCapture
    target: Generation
    first: Generation
    turns: Turns


begun_work: list[Work] = []
"""Of the test that runs."""


@pytest.fixture(autouse=True)
def noted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    init = BackgroundCapture.__init__

    def note(
        self: BackgroundCapture, target: Generation, planned: Any, first: Any, turns: Any, *a: Any
    ) -> None:
        init(self, target, planned, first, turns, *a)
        begun_work.append(Work(self, target, first, turns))

    monkeypatch.setattr(BackgroundCapture, "__init__", note)
    yield
    begun_work.clear()


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """The work begins when a test asks for it."""
    monkeypatch.setattr(BackgroundCapture, "start", lambda self: None)


def manager_of(tower: Any = None, config: fx.EncoderConfig = CONFIG) -> fx.EncoderCudaGraphManager:
    return fx.EncoderCudaGraphManager(SplitModel() if tower is None else tower, config, log_interval=0)


def captured(tower: Any = None, config: fx.EncoderConfig = CONFIG) -> fx.EncoderCudaGraphManager:
    manager = manager_of(tower, config)
    manager.capture()
    return manager


def begun(tower: Any = None, config: fx.EncoderConfig = CONFIG) -> fx.EncoderCudaGraphManager:
    """A manager whose first captures serve, and whose work has begun."""
    manager = manager_of(tower, config)
    manager.capture(wait=False)
    return manager


def do_work(between: Callable[[], object]) -> None:
    """The work on this thread; what comes in between is done whenever it gives up the turn."""
    step, errors = Turns.step, list[Exception]()

    @contextlib.contextmanager
    def step_and_between(*args: Any, **kwargs: Any) -> Iterator[None]:
        has_begun = False
        try:
            with step(*args, **kwargs):
                has_begun = True
                yield
        finally:
            if has_begun:
                try:
                    contextvars.Context().run(between)  # as on a thread of its own
                except Exception as error:
                    errors.append(error)

    with mock.patch.object(Turns, "step", step_and_between):
        begun_work[-1].background.run()
    for error in errors:
        raise error


def finish(manager: fx.EncoderCudaGraphManager) -> None:
    """All of the work, with a request whenever it gives up the turn."""
    do_work(lambda: assert_right(manager, 3, 5))


def assert_right(manager: fx.EncoderCudaGraphManager, *lengths: int) -> None:
    inputs = batch(*lengths)
    torch.testing.assert_close(manager.execute(inputs), alone(manager.tower, inputs))


def modes(manager: fx.EncoderCudaGraphManager) -> dict[str, dict[int, str]]:
    return {
        name: {budget: graph.mode for budget, graph in graphs.items()}
        for name, graphs in manager.budget_graphs.items()
    }


def state(manager: fx.EncoderCudaGraphManager) -> Any:
    """What `capture` decides."""
    paths = manager.paths_by_key
    return (
        modes(manager),
        {key: (path.ladder.no_graph_needed, path.ladder.dropped, path.notes) for key, path in paths.items()},
        {key: (path.costs.replay, path.costs.measured, path.measured) for key, path in paths.items()},
        {key: path.program is not None for key, path in paths.items()},
        manager.is_captured(),
    )


@functools.cache
def usual_state() -> Any:
    return state(captured())


def phase(manager: fx.EncoderCudaGraphManager) -> str:
    progress = manager.stats().progress
    assert progress is not None
    return progress.phase


def wait_for_end(manager: fx.EncoderCudaGraphManager) -> CaptureProgress:
    assert manager.wait_captured(60)
    progress = manager.stats().progress
    assert progress is not None and progress.is_over
    return progress


# --- piece by piece


def test_it_serves_at_once_and_rightly_after_each_piece(by_hand: None) -> None:
    manager, told = manager_of(), list[tuple[int, int]]()
    manager.capture(lambda done, total: told.append((done, total)), wait=False)
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert manager.is_captured() and manager.programs == {"default": None}
    assert modes(manager) == {"default": dict.fromkeys((4, 6, 12, 16), "breakable")}
    seen = []

    def serve() -> None:
        assert_right(manager, 3, 5)
        assert_right(manager, 13)
        seen.append((phase(manager), manager.programs["default"] is not None))

    do_work(serve)
    assert seen.pop() == ("done", True)
    assert_right(manager, 3, 5)
    assert all(not compiled for _, compiled in seen), "what serves changes at the end, and at once"
    captures = [each for each, _ in seen][-5:]
    assert captures == ["capturing"] * 5 and seen[0][0] == "tracing"
    stats = manager.stats()
    assert stats.as_dict()["progress"]["phase"] == "done" and "captures: done 5 of 5" in str(stats)
    assert state(manager) == usual_state()
    (how,) = manager.reports
    assert how.startswith("path default: compiled on a thread beside the requests: only what Inductor")
    hits = manager.stats()
    assert (hits.hits, hits.misses) == (3 * (len(seen) + 1) + 2, {})


def test_what_waits_for_the_end(tmp_path: Any) -> None:
    manager = begun()
    manager.capture()
    assert phase(manager) == "done" and state(manager) == usual_state()
    before = manager.paths["default"].captured.copy()
    manager.capture(wait=False)
    assert manager.paths["default"].captured == before
    assert manager.save_start(tmp_path / "a.start") > 0


@pytest.mark.parametrize(
    "changes", [{"mode": "breakable"}, {"compile": False, "piece_compiler": "auto"}, {"enabled": False}]
)
def test_where_nothing_compiles_all_is_done_at_once(changes: dict[str, Any]) -> None:
    config = CONFIG.replace(**changes)
    manager = begun(config=config)
    assert manager.stats().progress is None and manager.wait_captured()
    assert state(manager) == state(captured(config=config))
    assert_right(manager, 3, 5)


@pytest.mark.parametrize(
    ("tower", "changes"),
    [
        (SplitModel, {"mode": "none"}),
        (SplitModel, {"mode": "exact"}),
        (SplitModel, {"packing": "greedy"}),
        (UntraceableModel, {}),
        (PackedModel, {}),
    ],
)
def test_other_settings_and_towers_end_as_without(tower: Any, changes: dict[str, Any], by_hand: None) -> None:
    config = CONFIG.replace(**changes)
    manager, other = begun(tower(), config), captured(tower(), config)
    finish(manager)
    assert state(manager) == state(other)
    assert manager.reports[1:] == other.reports


def test_a_start_from_a_file(tmp_path: Any, by_hand: None) -> None:
    path = tmp_path / "a.start"
    captured().save_start(path)
    manager = begun(config=CONFIG.replace(start_file=path))
    assert manager.paths["default"].expected is None, "what serves first was never measured"
    begun_work[-1].background.run()
    assert manager.paths["default"].expected is not None


@pytest.mark.parametrize("is_right", [True, False])
def test_what_a_restored_program_builds_at_its_first_run_holds_up_nobody(
    is_right: bool, by_hand: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tower = SplitModel()
    program = captured(tower).paths["default"].program
    manager = begun(tower)
    for path in begun_work[-1].target.compiled_paths:
        path.saved = cast("Any", "a program")
    monkeypatch.setattr("fxsplit_encoder.compile.saved.restore_program", lambda *_: program)
    own, in_a_step = BoundProgram.__call__, list[bool]()

    def watched(bound: BoundProgram, *given: Any) -> Any:
        in_a_step.append(begun_work[-1].turns.owner is not None)
        if not is_right and len(in_a_step) == 1:
            raise RuntimeError("it cannot run")
        return own(bound, *given)

    monkeypatch.setattr(BoundProgram, "__call__", watched)
    finish(manager)
    assert in_a_step[: 1 + is_right] == [False, True][: 1 + is_right]
    assert phase(manager) == "done"
    assert (manager.paths["default"].program is program) == is_right
    assert_right(manager, 3, 5)


@pytest.mark.parametrize("setting", ["data_parallel", "invariant"])
def test_some_captures_are_waited_for(setting: str) -> None:
    manager = manager_of()
    manager.config = manager.config.replace(**{setting: True})
    with pytest.raises(fx.InputError, match=f"wait: expected True with {setting}"):
        manager.capture(wait=False)
    assert not manager.is_captured()


def test_first_captures_give_way_where_memory_is_short(
    by_hand: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = begun()
    request, released = EncoderPath.request, []
    monkeypatch.setattr(begun_work[-1].first, "clear", lambda: released.append(True))

    def short(self: EncoderPath, tokens: int, shared: Any) -> Any:
        if self.program is not None and tokens == 12 and not released:
            raise torch.OutOfMemoryError("none left")
        return request(self, tokens, shared)

    monkeypatch.setattr(EncoderPath, "request", short)
    finish(manager)
    assert released == [True] and sorted(manager.budget_graphs["default"]) == [4, 6, 8, 12, 16]
    assert "too little memory for both" in manager.reports[-1]
    assert not manager.paths["default"].notes


def test_the_first_are_few_of_every_path() -> None:
    config = CONFIG.replace(token_budgets=tuple(range(4, 40)))
    planned = manager_of(config=config).planned_captures()
    assert [each.key.budget for each in first_of(planned).captures] == [4, 16, 27, 39]
    one = manager_of(config=CONFIG.replace(token_budgets=(4,))).planned_captures()
    assert first_of(one) == one


# --- what goes wrong


def test_a_failure_is_said_and_what_serves_goes_on(by_hand: None, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = begun()
    before = modes(manager)

    def fail(self: Any, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no more")

    with monkeypatch.context() as patched:
        patched.setattr(EncoderPath, "trace", fail)
        finish(manager)
    assert phase(manager) == "failed" and "failed: RuntimeError: no more" in str(manager.stats())
    assert "go on serving: RuntimeError: no more" in manager.reports[-1]
    assert modes(manager) == before
    assert_right(manager, 3, 5)
    manager.capture()
    assert state(manager) == usual_state()
    assert manager.stats().progress is None and not manager.reports, "what failed is done"


def test_clear_in_the_middle(by_hand: None) -> None:
    manager = begun()
    for number in range(8):
        left = iter(range(number))

        def clear(left: Iterator[int] = left) -> None:
            if next(left, None) is None:
                manager.clear()

        clear()
        do_work(clear)
        assert phase(manager) == "stopped" and not manager.is_captured() and manager.num_bytes == 0
        assert_right(manager, 3, 5)
        manager.capture(wait=False)
        assert len(begun_work) == number + 2
    finish(manager)
    assert state(manager) == usual_state()


# --- threads


@pytest.fixture
def handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captures are made while whoever asked waits, as on a device."""
    begin = BackgroundCapture.start

    def start(self: BackgroundCapture) -> None:
        self.work.is_handed_over = True
        begin(self)

    monkeypatch.setattr(BackgroundCapture, "start", start)


def test_on_a_device_who_asks_waits_for_a_capture(handed_over: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """No other thread may wait for the device while a graph is captured, as whoever asks does some time."""
    is_asking, while_asking = False, list[bool]()
    begin = GraphPool.capturing

    def spied(self: GraphPool, *args: Any) -> Any:
        if begun_work:  # after the first captures
            while_asking.append(is_asking)
        return begin(self, *args)

    def ask() -> None:
        nonlocal is_asking
        is_asking = True
        assert_right(manager, 3, 5)
        is_asking = False

    monkeypatch.setattr(GraphPool, "capturing", spied)
    manager = begun()
    turns = begun_work[-1].turns
    wait_until(lambda: turns.is_wanted and phase(manager) == "capturing")
    time.sleep(0.1)
    assert not while_asking and turns.is_wanted, "nobody asks"
    while phase(manager) == "capturing":
        ask()
        time.sleep(0.002)
    assert len(while_asking) >= 5 and all(while_asking)
    assert wait_for_end(manager).phase == "done" and state(manager) == usual_state()


@pytest.mark.parametrize("by_waiting", [True, False])
def test_captures_that_nobody_asks_for(by_waiting: bool, handed_over: None) -> None:
    """They are made while somebody waits for them, or given up with the manager."""
    manager = begun()
    if by_waiting:
        assert not manager.wait_captured(0)
        assert wait_for_end(manager).phase == "done" and state(manager) == usual_state()
        return
    wait_until(lambda: begun_work[-1].turns.is_wanted)
    manager.clear()
    begun_work[-1].background.end()
    assert phase(manager) == "stopped"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("fxsplit")]
    assert_right(manager, 3, 5)


def test_requests_of_several_threads_meanwhile() -> None:
    manager = manager_of()
    expected = {n: alone(manager.tower, batch(n, 16 - n)) for n in range(1, 16)}
    stop = threading.Event()

    def serve(number: int) -> int:
        source, served = random.Random(number), 0
        with torch.inference_mode(number == 1):
            while not stop.is_set():
                n = source.randint(1, 15)
                torch.testing.assert_close(manager.execute(batch(n, 16 - n)), expected[n])
                served += 2
        return served

    with ThreadPoolExecutor(3) as pool:
        serving = [pool.submit(serve, number) for number in range(3)]
        try:
            for _ in range(2):
                manager.capture(wait=False)
                assert wait_for_end(manager).phase == "done"
                manager.clear()
        finally:
            stop.set()
    served = [each.result() for each in serving]
    assert all(served) and manager.stats().items == sum(served), "none is lost or served twice"


def test_garbage_ends_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    tracing, trace = threading.Event(), EncoderPath.trace

    def slow(self: EncoderPath, *args: Any, **kwargs: Any) -> Any:
        tracing.set()
        time.sleep(0.2)
        return trace(self, *args, **kwargs)

    monkeypatch.setattr(EncoderPath, "trace", slow)
    manager = begun()
    assert tracing.wait(60)
    background = begun_work[-1].background
    (thread,) = [each for each in threading.enumerate() if each.name == "fxsplit-capture"]
    gone = weakref.ref(manager)
    del manager
    gc.collect()
    assert gone() is None
    thread.join(60)
    assert not thread.is_alive() and background.progress.phase == "stopped"


# --- in another process


class Sleeps(SplitModel):
    """One that another process is long in making."""

    def __reduce__(self) -> Any:
        return time.sleep, (600,)


class Raises(SplitModel):
    def __setstate__(self, state: Any) -> None:
        if "compile_process" in sys.argv[0]:  # in the other process
            raise RuntimeError("not here")
        super().__setstate__(state)


@pytest.fixture
def elsewhere(by_hand: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[CompileWorker]]:
    """The processes that were started, though nothing is for Inductor."""
    started: list[CompileWorker] = []
    start = CompileWorker.__init__

    def remember(self: CompileWorker, generation: Any) -> None:
        start(self, generation)
        started.append(self)

    monkeypatch.setattr(background_module, "check_elsewhere", lambda generation: None)
    monkeypatch.setattr(CompileWorker, "__init__", remember)
    yield started
    for worker in started:
        assert not worker.path.exists()
        with pytest.raises(ProcessLookupError):
            os.kill(worker.pid, 0)


def test_a_tower_that_another_process_cannot_make(elsewhere: list[CompileWorker]) -> None:
    class Local(SplitModel):
        pass

    for tower, why in (
        (Local(), "it cannot be pickled"),
        (Raises(), "cannot make it: RuntimeError: not here"),
    ):
        manager = begun(tower)
        finish(manager)
        assert phase(manager) == "done" and why in manager.reports[0]
        assert manager.programs["default"] is not None
    assert len(elsewhere) == 1


@pytest.mark.parametrize("ended_by", ["kill", "clear"])
def test_a_process_that_ends_too_soon(ended_by: str, elsewhere: list[CompileWorker]) -> None:
    manager = begun(Sleeps())

    def end() -> None:
        (worker,) = elsewhere
        if worker.path.exists():
            assert worker.path.stat().st_mode & 0o777 == 0o700
            os.kill(worker.pid, 9) if ended_by == "kill" else manager.clear()

    do_work(end)
    if ended_by == "kill":
        assert "the process that compiled ended with status -9" in manager.reports[-1]
    assert phase(manager) == ("failed" if ended_by == "kill" else "stopped")
    assert_right(manager, 3, 5)


@pytest.mark.parametrize("gone", ["its pipe", "the process"])
def test_the_other_process_ends_with_this_one(gone: str, tmp_path: Path) -> None:
    (tmp_path / REQUEST).write_bytes(dump_tower(Sleeps()))
    parent = os.getpid() if gone == "its pipe" else 1
    other = Child(compile_process.__name__, (str(tmp_path), str(parent)))
    if gone == "its pipe":
        other.ask_no_more()
    wait_until(lambda: other.status is not None)
    assert other.status == 4
    other.close()


@pytest.mark.slow
def test_kernels_that_another_process_does_not_build(
    elsewhere: list[CompileWorker], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What it compiled before counts; what it cannot save is compiled here."""
    (tmp_path / "builds_otherwise.py").write_text(
        "import os, runpy, sys\nimport fxsplit_encoder.manager.compile_process as own\n"
        "def build(*_): raise MemoryError('not for two')\n"
        "own.build_kernels = build\nsys.exit(own.main(own.Path(sys.argv[1]), int(sys.argv[2])))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(compile_process, "_MODULE", "builds_otherwise")
    manager = begun()
    finish(manager)
    assert phase(manager) == "done"
    compiled, built = sorted(manager.reports, key=lambda note: "kernels" in note)
    assert compiled == "path default: compiled again in this process: a piece is not in Inductor's cache"
    said = "the process that compiled ended with status 1: MemoryError: not for two"
    assert f"kernels are built beside the requests: {said}" in built
    assert state(manager) == usual_state()
    assert_right(manager, 3, 5)


def test_what_another_process_finds_not_to_compile(elsewhere: list[CompileWorker]) -> None:
    manager = begun(UntraceableModel())
    finish(manager)
    assert len(elsewhere) == 1 and phase(manager) == "done"
    assert state(manager) == state(captured(UntraceableModel()))
    assert manager.reports == captured(UntraceableModel()).reports


@pytest.mark.slow
def test_another_process_compiles_and_this_one_traces_nothing(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, by_hand: None, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    config = CONFIG.replace(piece_compiler="inductor", token_budgets=(4, 16))
    manager = begun(config=config)
    counts = torch._dynamo.utils.counters["stats"]
    before = counts["unique_graphs"]
    with caplog.at_level(logging.WARNING, "fxsplit_encoder"):
        finish(manager)
    assert counts["unique_graphs"] == before
    assert not caplog.records and not manager.reports and phase(manager) == "done"
    assert_right(manager, 3, 5)
    assert modes(manager) == {"default": {4: "full", 16: "full"}}


def test_the_least_of_several_encoders_is_told() -> None:
    known = [CaptureProgress("done"), None, CaptureProgress("capturing", 3, 16), CaptureProgress("failed")]
    assert least(known) == known[2]
    assert least(known[:2]) == known[0] and least([known[0], known[3]]) == known[3]
    assert least([None]) is None
    assert str(CaptureProgress("capturing", 3, 16, 2.04)) == "capturing 3 of 16, 2.0 s"


# --- what the process that compiles for another one finds there


_CHILD = """
import sys
from pathlib import Path
import torch
from fxsplit_encoder.manager.compile_process import load_request

request = load_request(Path(sys.argv[1]))
inputs = request.tower.prepare_encoder_cudagraph_capture_inputs(16, 4, 0, request.device, request.dtype)
print(tuple(request.tower.encoder_cudagraph_forward(inputs.values).shape))
"""


def test_a_tower_runs_where_nobody_wrapped_it(tmp_path: Path) -> None:
    """A tower of transformers asks by name for attention that is registered where one is wrapped."""
    tower = fx.wrap(TINY["Qwen3VLVisionModel"].make())
    nothing: Any = None
    request = CompileRequest(tower, nothing, torch.float32, nothing, torch.device("cpu"))
    (tmp_path / REQUEST).write_bytes(dump_tower(request))
    command = [sys.executable, "-c", _CHILD, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    inputs = tower.prepare_encoder_cudagraph_capture_inputs(
        16, 4, 0, torch.device("cpu"), torch.float32
    ).values
    assert done.stdout.strip() == str(tuple(tower.encoder_cudagraph_forward(inputs).shape))


def described(module: nn.Module) -> Any:
    """The classes of its modules, and what its tensors look like."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    return (
        [(name, type(each)) for name, each in module.named_modules()],
        [(name, each.shape, each.stride(), each.dtype) for name, each in tensors],
    )


@pytest.mark.parametrize("name", TINY)
def test_every_tower_can_be_sent(name: str) -> None:
    tower = fx.wrap(TINY[name].make())
    made = pickle.loads(dump_tower(tower))
    assert described(made) == described(tower)
    weights = {name: tensor for name, tensor in made.named_parameters() if tensor.nbytes > 4096}
    assert not any(tensor.any() for tensor in weights.values())


def test_what_tensors_look_like_stays_and_small_values_too() -> None:
    module = nn.Module()
    module.weight = nn.Parameter(torch.ones(64, 64).t(), requires_grad=False)
    module.tied = module.weight
    module.register_buffer("table", torch.arange(6).view(2, 3))
    made = pickle.loads(dump_tower(module))
    assert made.weight is made.tied and isinstance(made.weight, nn.Parameter)
    assert made.weight.stride() == (1, 64) and not made.weight.requires_grad and not made.weight.any()
    torch.testing.assert_close(made.table, module.table)


class Subclass(torch.Tensor):
    pass


def test_what_cannot_be_sent_is_said() -> None:
    for value, why in (
        (torch.ones(2).as_subclass(Subclass), "it holds a Subclass"),
        (torch.ones(2, 2).to_sparse(), "it holds a tensor of layout torch.sparse_coo"),
        (lambda: None, "it cannot be pickled"),
    ):
        with pytest.raises(InputError, match=why):
            dump_tower([value])
    own = type("Own", (), {"__module__": "__main__"})
    with pytest.raises(InputError, match="Own is defined in the script that was started"):
        dump_tower(own)
