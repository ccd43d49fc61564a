"""`aggregator init` and `aggregator check`: task files, written and checked."""

import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from aggregator.algorithms.registry import ALGORITHMS
from aggregator.cli import cli, task_file
from aggregator.config.task_file import load_task
from tests.support.graphs.backbones import tiny_backbone

DEPLOY = Path(__file__).parents[3] / "deploy"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder, with a backbone and folders of images."""
    (tmp_path / "tiny.onnx").write_bytes(tiny_backbone())
    for name in ("pear", "apple", ".cache"):
        (tmp_path / "images" / name).mkdir(parents=True)
    (tmp_path / "images" / "notes.txt").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _run(*arguments: str, answers: str | None = None) -> Result:
    return CliRunner().invoke(cli, arguments, input=answers)


@pytest.mark.parametrize("algorithm", tuple(ALGORITHMS))
def test_written_file_is_valid_with_and_without_its_comments(folder: Path, algorithm: str) -> None:
    """Its classes are the folders' names; the values in comments are the defaults."""
    given = ["--images", "images", "--class", 'a "b" ä', "--backbone", "tiny.onnx", "--quorum", "3"]
    done = _run("init", *given, "--algorithm", algorithm)
    assert done.exit_code == 0, done.output
    written, backbones = load_task(folder / "task.toml")
    assert written.classes == ('a "b" ä', "apple", "pear")
    assert (written.quorum, written.algorithm, backbones[0].name) == (3, algorithm, "tiny.onnx")
    text = (folder / "task.toml").read_text()
    assert (f"[{algorithm}]" in text) == bool(ALGORITHMS[algorithm].__struct_fields__)
    examples = "devices|restore|epochs|min_devices|max_devices|max_storage_mb|uploads_per_hour"
    with_defaults = re.sub(rf"(?m)^# (?!({examples}) = )(?=\w+ = )", "", text)
    (folder / "task.toml").write_text(with_defaults)
    assert load_task(folder / "task.toml")[0] == written


@pytest.mark.parametrize(
    ("algorithm", "file", "end"), [("fedtc", "task", None), ("fedpcl", "rounds", "[fedpcl]")]
)
def test_written_comments_are_those_of_the_examples(
    folder: Path, algorithm: str, file: str, end: str | None
) -> None:
    _run("init", "--class", "a", "--backbone", "tiny.onnx", "--algorithm", algorithm)
    text = "".join((folder / "task.toml").read_text().partition("# max_submission_mb")[1:])
    assert text.partition(end or "\0")[0].strip() in (DEPLOY / f"{file}.toml").read_text()


def test_questions_are_asked_on_a_terminal(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty answer is the default, which for the backbone is a file beside the task file."""
    monkeypatch.setattr(task_file, "_is_terminal", lambda: True)
    done = _run("init", "my.toml", "--quorum", "2", answers="orchard\nimages\n\nstatistics\n")
    assert done.exit_code == 0, done.output
    task, _ = load_task(folder / "my.toml")
    assert (task.fleet, task.classes, task.backbones) == ("orchard", ("apple", "pear"), ("tiny.onnx",))
    assert (task.algorithm, task.quorum) == ("statistics", 2)
    assert "devices need --fleet orchard" in done.output


@pytest.mark.parametrize(
    ("arguments", "code", "error"),
    [
        (["init"], 2, "missing --class or --images"),
        (["init", "--class", "a"], 2, "missing --backbone"),
        (["init", "--class", "a", "--backbone", "none.onnx"], 1, "run: aggregator check task.toml"),
        (["init", "--class", "a", "--backbone", "tiny.onnx", "--algorithm", "x"], 2, "expected one of fedtc"),
        (["init", "there.toml", "--class", "a", "--backbone", "tiny.onnx"], 1, "there.toml exists already"),
        (["init", "--images", "images/pear", "--backbone", "tiny.onnx"], 1, "no folder in images/pear"),
        (["check", "there.toml"], 1, "there.toml:1: `backbones`: no file none.onnx"),
        (["check", "none.toml"], 1, "cannot read the task file none.toml"),
    ],
)
def test_error_says_what_to_do(folder: Path, arguments: list[str], code: int, error: str) -> None:
    (folder / "there.toml").write_text('backbones = ["none.onnx"]\nclasses = ["a"]\n')
    done = _run(*arguments)
    assert error in f"{done.output} {done.exception}"
    assert done.exit_code == code


def test_check_shows_what_a_task_defines(folder: Path) -> None:
    (folder / "task.toml").write_text('fleet = "orchard"\nbackbones = ["tiny.onnx"]\nclasses = ["a", "b"]\n')
    done = _run("check", "task.toml")
    assert done.exit_code == 0, done.output
    assert "fleet orchard, fedtc, 2 classes, 16 features" in done.output
    assert "quorum is 1" in done.output
