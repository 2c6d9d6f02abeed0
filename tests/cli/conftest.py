"""Commands that are run here, and checkpoints of a tiny tower, which the tests of models make."""

from typer.testing import CliRunner, Result

from fxsplit_encoder.cli.main import app

from ..models.conftest import save_checkpoint, tiny_tower

__all__ = ["refuse", "run", "save_checkpoint", "succeed", "tiny_tower"]


def run(*arguments: object) -> Result:
    """What a command prints, and its exit code."""
    return CliRunner().invoke(app, [*map(str, arguments)])


def succeed(*arguments: object) -> Result:
    """The same of a command that has to succeed."""
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result


def refuse(message: str, *arguments: object) -> None:
    """A command has to fail with one line that holds this message."""
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("encoder-cg: error: ") and message in line
