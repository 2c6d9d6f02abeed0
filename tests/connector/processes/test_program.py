from __future__ import annotations

import atexit
import os
import stat
import sys
import threading
from pathlib import Path

import pytest

from fxsplit_encoder.connector.processes.encoder_process import RuntimeDirectory, default_root, reap
from fxsplit_encoder.connector.processes.program import EncoderProgram, ProcessOptions, launch
from fxsplit_encoder.errors import InputError
from tests.connector.resources import num_descriptors

from .conftest import quiet_fork


def test_a_program_is_found_by_name() -> None:
    assert EncoderProgram("os.path:join").resolve() is __import__("os").path.join


@pytest.mark.parametrize(
    "factory", ["", "os", "os:", ":join", "os:path.join", "os:nothing", "no_such.module:x", "os:sep"]
)
def test_a_name_that_leads_nowhere_is_an_error(factory: str) -> None:
    with pytest.raises(InputError, match="factory"):
        EncoderProgram(factory).resolve()


def test_what_a_module_lacks_itself_is_its_own_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needing.py").write_text("import something_absent", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="something_absent"):
        EncoderProgram("needing:make").resolve()


def test_the_command_line_says_all() -> None:
    options = ProcessOptions(max_bytes=5, kept_bytes=4, checksums=True)
    words = options.command_line(Path("/run/x"), 9)
    assert " ".join(words).startswith("--control /run/x --descriptor 9 --parent ")
    assert " ".join(words).endswith("--max-bytes 5 --kept-bytes 4 --checksums")


def test_a_process_gets_our_path_its_variables_and_one_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = tmp_path / "seen"
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\necho "$@ $PYTHONPATH $EXTRA" > {seen}\nls /proc/self/fd >> {seen}\n', "utf-8"
    )
    python.chmod(0o755)
    with open("/dev/null", "rb") as file:
        launch(
            ["--x"], file.fileno(), ProcessOptions(executable=str(python), environment={"EXTRA": "1"})
        ).wait()
        words, *descriptors = seen.read_text("utf-8").split("\n")
        assert words.split()[:3] == ["-P", "-m", "fxsplit_encoder.connector.processes.child"]
        assert words.endswith(" 1")
        assert str(file.fileno()) in descriptors
        monkeypatch.setattr(sys, "executable", str(python))
        monkeypatch.setattr(sys, "path", ["", "/somewhere"])
        launch(["--x"], file.fileno(), ProcessOptions()).wait()
    assert f"{Path.cwd()}:/somewhere" in seen.read_text("utf-8")


def test_a_python_that_is_not_there_is_an_error() -> None:
    with pytest.raises(InputError, match="cannot be started"):
        launch([], 0, ProcessOptions(executable="/nowhere/python"))


def test_a_directory_is_private_and_goes_when_it_is_closed(short_path: Path) -> None:
    before = num_descriptors()
    directory = RuntimeDirectory(short_path)
    for path in (directory.path, directory.path.parent):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    directory.socket_path("control").touch()
    directory.close()
    directory.close()
    assert not directory.path.exists()
    assert num_descriptors() == before


def test_one_that_is_forgotten_goes_too(short_path: Path) -> None:
    path = RuntimeDirectory(short_path).path
    assert not path.exists()


def test_those_of_the_living_stay_and_those_of_the_dead_go(short_path: Path) -> None:
    living = RuntimeDirectory(short_path)
    base = living.path.parent
    for name in ("dead", "dead_too"):
        (base / name).mkdir()
        (base / name / "control").touch()
    assert reap(base) == 2
    assert list(base.iterdir()) == [living.path]
    (base / "dead").mkdir()
    other = RuntimeDirectory(short_path)
    assert {*base.iterdir()} == {living.path, other.path}
    living.close()
    other.close()


def test_a_fork_does_not_remove_its_parents(short_path: Path) -> None:
    directory = RuntimeDirectory(short_path)
    pid = quiet_fork()
    if pid == 0:
        directory.close()
        os._exit(0)
    os.waitpid(pid, 0)
    assert directory.path.exists()
    directory.close()


def test_many_at_once_do_not_take_each_others(short_path: Path) -> None:
    made: list[RuntimeDirectory] = []

    def make() -> None:
        for _ in range(20):
            made.append(RuntimeDirectory(short_path))

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({directory.path for directory in made if directory.path.exists()}) == 80
    for directory in made:
        directory.close()


@pytest.mark.parametrize("what", ["open", "link", "file"])
def test_what_others_could_enter_is_refused(short_path: Path, what: str) -> None:
    base = short_path / f"fxsplit-encoder-{os.getuid()}"
    if what == "open":
        base.mkdir()
        base.chmod(0o770)
    elif what == "link":
        (short_path / "elsewhere").mkdir(mode=0o700)
        base.symlink_to(short_path / "elsewhere")
    else:
        base.touch(mode=0o700)
    with pytest.raises(InputError, match="of this user alone"):
        RuntimeDirectory(short_path)


def test_a_root_that_is_missing_or_too_deep_is_an_error(short_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be made"):
        RuntimeDirectory(short_path / "absent")
    deep = short_path / ("x" * 80)
    deep.mkdir()
    with pytest.raises(InputError, match="shorter path"):
        RuntimeDirectory(deep).socket_path("control")


def test_the_root_is_the_users_runtime_directory(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_path))
    assert default_root() == short_path
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_path / "absent"))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("TMPDIR", str(short_path))
    assert default_root() == short_path


def test_it_goes_when_the_interpreter_ends(short_path: Path) -> None:
    pid = quiet_fork()
    if pid == 0:
        kept = RuntimeDirectory(short_path)
        kept.path.joinpath("control").touch()
        atexit._run_exitfuncs()
        os._exit(0)
    os.waitpid(pid, 0)
    assert list(short_path.glob("*/*")) == []
