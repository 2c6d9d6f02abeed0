"""Every block of code in docs/ runs, and every command there is one."""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml
from bench import parse
from prometheus_client import REGISTRY

import fxsplit_encoder as fx
from fxsplit_encoder.service.settings import ServiceSettings
from tests.document_checkpoints import infer_few_budgets, load_stand_ins
from tests.document_setups import LOADING, REPLACED, SETUPS, nothing, working_directory

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
LANGUAGES = {"python", "yaml", "sh", "text", "{csv-table}", "{eval-rst}", "{include}", "{toctree}"}


class Block(NamedTuple):
    page: str
    language: str
    code: str
    not_run: str | None
    """Why, where the page says so: `<!-- not run: it needs ... -->` before the block."""


def blocks_of(document: Path) -> list[Block]:
    pattern = r"(?:<!-- not run: (.*?) -->\s*)?^( *)```([^\n]+)\n(.*?)^\2```$"
    found = re.findall(pattern, document.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return [
        Block(document.stem, language.split()[0], textwrap.dedent(code), reason or None)
        for reason, _, language, code in found
    ]


BLOCKS = [block for document in DOCUMENTS for block in blocks_of(document)]
PAGES = sorted({block.page for block in BLOCKS if block.language == "python"} - {"README"})
COMMANDS = [
    (block.page, line.split("#")[0].strip())
    for block in BLOCKS
    if block.language == "sh" and block.not_run is None
    for line in block.code.replace("\\\n", " ").splitlines()
    if line.split("#")[0].strip()
]


def test_blocks_are_in_languages_that_are_tested() -> None:
    assert {block.language for block in BLOCKS} <= LANGUAGES


@pytest.fixture
def global_metrics(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Takes what a page registers with Prometheus' global registry out again."""
    collectors: list[Any] = []
    register = REGISTRY.register

    def recorded(collector: Any) -> None:
        register(collector)
        collectors.append(collector)

    monkeypatch.setattr(REGISTRY, "register", recorded)
    yield
    for collector in collectors:
        REGISTRY.unregister(collector)


@pytest.mark.usefixtures("fresh_dynamo", "global_metrics")
@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = [block for block in BLOCKS if (block.page, block.language) == (page, "python")]
    for block in blocks:
        compile(block.code, page, "exec")
    code = "\n".join(block.code for block in blocks if block.not_run is None)
    for written, run in REPLACED.get(page, {}).items():
        assert written in code
        code = code.replace(written, run)
    file = tmp_path / f"{page}.py"  # a file, since Dynamo reads sources
    file.write_text(code, encoding="utf-8")
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(working_directory(tmp_path))
    infer_few_budgets(monkeypatch)
    if page in LOADING:
        load_stand_ins(monkeypatch)
    try:
        runpy.run_path(str(file), SETUPS.get(page, nothing)())
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "yaml"], ids=lambda b: b.page)
def test_the_settings_of_a_page_are_settings(block: Block) -> None:
    settings = yaml.safe_load(block.code)
    if block.page == "serve":
        ServiceSettings(model="m", **settings)
    else:
        fx.EncoderConfig(**settings)


@pytest.mark.parametrize(("page", "command"), COMMANDS, ids=lambda value: str(value)[:40])
def test_the_commands_of_a_page_exist(page: str, command: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(working_directory(tmp_path))
    check_command(shlex.split(command))


def check_command(words: list[str]) -> None:
    program, *arguments = words
    if "=" in program:
        check_command(arguments)
    elif program == "make":
        assert re.search(rf"^{arguments[0]}:", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    elif program == "encoder-cg":
        check_verb(arguments)
    elif words[:2] == ["python", "benchmarks/bench.py"]:
        parse(words[2:])
    elif words[:2] == ["python", "benchmarks/fleet.py"]:
        subprocess.run([sys.executable, *words[1:]], cwd=ROOT, check=True)
    elif program == "python":
        assert words == ["python", "your_program.py"]
    elif program in ("pytest", "pip", "curl") or words[:2] == ["serve", "run"]:
        files = [word.partition("@")[2] or word for word in arguments if "://" not in word]
        assert all((ROOT / file).exists() for file in files if "/" in file)
    else:
        assert (ROOT / program).is_file(), f"no check for: {' '.join(words)}"


def check_verb(arguments: list[str]) -> None:
    """Its verb and options are those of the command; files are not looked for."""
    import typer

    from fxsplit_encoder.cli.main import app

    command: Any = typer.main.get_command(app)
    if arguments[0].startswith("-"):
        assert command.make_context("encoder-cg", arguments[:1], resilient_parsing=True)
        return
    verb = command.commands[arguments[0]]
    known = {option for parameter in verb.params for option in parameter.opts} | {"--help"}
    assert {word for word in arguments[1:] if word.startswith("-")} <= known
