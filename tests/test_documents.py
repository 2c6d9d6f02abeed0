"""What README, docs/ and CONTRIBUTING.md promise a reader: code that runs, links that lead somewhere."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fxsplit_encoder as fx
from fxsplit_encoder import connector
from fxsplit_encoder.planning.plan import MissReason
from tests.document_checkpoints import infer_few_budgets, load_stand_ins

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
PAGES = sorted(set((ROOT / "docs").glob("*.md")) - {ROOT / "docs" / "index.md"})
DOCUMENTS = [README, CONTRIBUTING, ROOT / "CHANGELOG.md", *PAGES]
MOST_LINES_OF_THE_README = 90
MOST_WORDS_OF_A_PARAGRAPH = 120
FIRST_LINES = 10


def names(paths: list[Path]) -> list[str]:
    return [path.stem for path in paths]


def text_of(document: Path) -> str:
    return document.read_text(encoding="utf-8")


def prose_of(document: Path) -> str:
    """Without blocks of code, in which brackets are no links."""
    return re.sub(r"```.*?```", "", text_of(document), flags=re.DOTALL)


@pytest.fixture
def pasted(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fresh_dynamo: None,
    capsys: pytest.CaptureFixture[str],
) -> Any:
    """What is left of the README's blocks, pasted one after another; checkpoints are tiny and random."""
    load_stand_ins(monkeypatch)
    infer_few_budgets(monkeypatch)
    monkeypatch.chdir(ROOT)
    blocks = re.findall(r"```python\n(.*?)```", text_of(README), re.DOTALL)
    file = tmp_path / "pasted.py"  # a file, since Dynamo reads sources
    file.write_text("".join(blocks), encoding="utf-8")
    names = runpy.run_path(str(file))
    return SimpleNamespace(**names, printed=capsys.readouterr().out)


def test_the_code_of_the_readme_runs_as_pasted(pasted: Any) -> None:
    expected = pasted.model.generate(**pasted.inputs, max_new_tokens=64)  # restored at the end of the page
    assert pasted.processor.batch_decode(expected)[0] in pasted.printed.splitlines()
    assert "1 items: 1 hit" in pasted.printed
    assert "1 items: 1 hit" in str(pasted.manager.stats())
    with torch.no_grad():
        eager = pasted.visual(pasted.pixels, pasted.grid)
    torch.testing.assert_close(pasted.features.pooler_output, eager.pooler_output)
    packed = torch.cat([eager.pooler_output, *eager.deepstack_features], dim=1)
    torch.testing.assert_close(pasted.embedding_of_cat, packed)


def test_the_readme_is_short() -> None:
    assert len(text_of(README).splitlines()) <= MOST_LINES_OF_THE_README


def test_the_claim_of_the_readme_is_what_its_table_shows() -> None:
    text = text_of(README)
    claim = re.search(r"\*\*.*?([\d.]+) times as fast as in a CUDA graph", text)
    (row,) = [line for line in text.splitlines() if line.startswith("| 1x224 ")]
    header = next(line for line in text.splitlines() if line.startswith("| images "))
    columns = [cell.strip() for cell in header.split("|")]
    cells = dict(zip(columns, [cell.strip() for cell in row.split("|")], strict=True))
    graph = float(cells["eager model in one CUDA graph"])
    assert claim is not None
    assert claim[1] == f"{graph / float(cells['ours']):.2f}"


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_a_page_says_first_what_it_is_for(page: Path) -> None:
    title, blank, first, *_ = text_of(page).splitlines()
    assert title.startswith("# ")
    assert blank == ""
    assert first.startswith(("For ", "To "))


@pytest.mark.parametrize("page", [page for page in PAGES if page.stem != "glossary"], ids=lambda p: p.stem)
def test_a_page_has_a_block_in_its_first_lines(page: Path) -> None:
    assert re.search(r"^ *```", "\n".join(text_of(page).splitlines()[:FIRST_LINES]), re.MULTILINE)


def test_every_reason_for_a_miss_is_on_a_page_of_what_to_do() -> None:
    text = text_of(ROOT / "docs" / "troubleshooting.md") + text_of(ROOT / "docs" / "hugging_face.md")
    assert [reason for reason in MissReason if f"`{reason}`" not in text] == []


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_paragraphs_are_short(page: Path) -> None:
    paragraphs = re.split(
        r"\n\n|\n(?=[-*|]|\d+\. )",
        re.sub(r"<!-- table: .*?<!-- end -->", "", prose_of(page), flags=re.DOTALL),
    )
    assert [text for text in paragraphs if len(text.split()) > MOST_WORDS_OF_A_PARAGRAPH] == []


def test_the_index_leads_to_every_page() -> None:
    tree = re.findall(
        r"^```{toctree}\n(.*?)```$", text_of(ROOT / "docs" / "index.md"), re.DOTALL | re.MULTILINE
    )
    listed = [name for part in tree for name in part.splitlines() if name and not name.startswith(":")]
    assert sorted(listed) == sorted([*names(PAGES), "reference/index"])


@pytest.mark.parametrize("document", DOCUMENTS, ids=names(DOCUMENTS))
def test_links_lead_to_files_and_sections(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose_of(document)):
        if "://" in target:
            continue
        path, _, section = target.partition("#")
        file = document.parent / path if path else document
        assert file.exists(), target
        titles = re.findall(r"^#+ (.*)$", prose_of(file), re.MULTILINE) if section else []
        assert not section or section in [anchor(title) for title in titles], target


def anchor(title: str) -> str:
    """A section's name in links, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def test_the_architecture_names_every_room_and_its_table_what_there_is() -> None:
    package, text = ROOT / "fxsplit_encoder", text_of(ROOT / "docs" / "architecture.md")
    rooms = {path.parent.name for path in package.glob("*/__init__.py")}
    assert set(re.findall(r"^  (\w+)/ ", text, re.MULTILINE)) == rooms
    for row in re.findall(r"^\| .+? \| (.*`.*) \|$", text, re.MULTILINE):
        paths = [package / name for name in re.findall(r"`([\w/]+/[\w.]*)`", row)]
        files = [file for path in paths for file in (path.rglob("*.py") if path.is_dir() else [path])]
        code = "".join(map(text_of, files))
        assert [name for name in re.findall(r"`(\w+)`", row) if name not in code] == []


def test_the_files_that_contributing_names_exist() -> None:
    paths = re.findall(r"`([\w/]+/[\w.]*)`", text_of(CONTRIBUTING))
    assert len(paths) > 20
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_reference_has_every_public_name() -> None:
    pages = "\n".join(page.read_text("utf-8") for page in (ROOT / "docs" / "reference").glob("*.md"))
    listed = re.findall(r"^\.\. auto(?:class|function):: (\w+)$", pages, re.MULTILINE)
    errors = [name for name in fx.__all__ if name in vars(fx.errors)]  # a page takes the whole module
    assert sorted([*listed, *errors]) == sorted(fx.__all__)


def test_the_reference_has_every_name_of_the_connector() -> None:
    page = text_of(ROOT / "docs" / "reference" / "connector.md")
    listed = re.findall(r"^\.\. auto\w+:: fxsplit_encoder\.connector\.(?:\w+\.)?(\w+)$", page, re.MULTILINE)
    assert sorted(listed) == sorted(connector.__all__)
