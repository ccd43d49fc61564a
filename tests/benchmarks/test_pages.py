import json
import re
import shlex
import subprocess
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from benchmarks import report
from benchmarks.__main__ import cli as benchmarks
from benchmarks.pages import ROOT, command, fill, read_results
from benchmarks.report import Plot, Table, json_option, write_json
from protocol.errors import ConfigError
from research.__main__ import cli as research

RUNS = [{"seed": 0, "seconds": [0.2, 0.3]}, {"seed": 1, "seconds": [0.4]}]
PAGE = "# Speed\n\n<!-- benchmark speed -->\n<!-- end of speed -->\n\nText.\n"


@click.command()
@json_option
def speed(*, json_file: Path | None) -> None:
    table = Table({"program": "<10", "seconds": ">9.2f", "ratio": ">8.1f"}, title="Start")
    table.row("ours", 0.254, None)
    table.row("theirs", 4.0, 15.7)
    plot = Plot(title="Start", x="devices", y="s", series={"ours": [(1, 2.0), (10, 3.0)]}, log=("x",))
    write_json(json_file, "speed", tables=[table], plots=[plot], runs={"ours": RUNS})


@pytest.fixture
def results(tmp_path: Path) -> Path:
    folder = tmp_path / "results"
    folder.mkdir()
    done = CliRunner().invoke(speed, ["--json", str(folder / "speed.json")], catch_exceptions=False)
    assert done.exit_code == 0
    return folder


def test_no_result_is_stored_of_a_checkout_with_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused before the measurement. Other files are written, and changes of documents and results are none."""
    monkeypatch.setattr(report, "ROOT", tmp_path)
    stored, source = tmp_path / report.RESULTS / "speed.json", tmp_path / "source.py"
    stored.parent.mkdir(parents=True)
    for file in (stored, source, tmp_path / "README.md"):
        file.write_text("1")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "a"]):
        subprocess.run([*git, *arguments], check=True)
    (tmp_path / "README.md").write_text("2")
    for _ in range(2):  # the second time the result itself has changed
        assert CliRunner().invoke(speed, ["--json", str(stored)]).exit_code == 0
    assert not json.loads(stored.read_text())["commit"].endswith("-dirty")
    source.write_text("2")
    refused = CliRunner().invoke(speed, ["--json", str(stored)])
    assert "commit the changes first, or write the results to a file outside" in str(refused.exception)
    assert not refused.output
    assert CliRunner().invoke(speed, ["--json", str(tmp_path / "speed.json")]).exit_code == 0


def test_a_page_has_the_stored_tables_and_plots(tmp_path: Path, results: Path) -> None:
    docs = tmp_path / "docs"
    (docs / "images").mkdir(parents=True)
    page = docs / "speed.md"
    page.write_text(PAGE)
    arguments = ["--results", str(results), "--docs", str(docs)]

    assert CliRunner().invoke(command, arguments, catch_exceptions=False).output == f"wrote {page}\n"

    text = page.read_text()
    assert (
        "Start:\n\n| program | seconds | ratio |\n|---|---|---|\n| ours | 0.25 |  |\n| theirs | 4.00 | 15.7 |\n"
        in text
    )
    assert "![Start](images/benchmark-speed.svg)\n<!-- end of speed -->\n\nText.\n" in text
    image = (docs / "images" / "benchmark-speed.svg").read_bytes()
    assert CliRunner().invoke(command, arguments, catch_exceptions=False).output == ""
    assert (docs / "images" / "benchmark-speed.svg").read_bytes() == image


def test_results_name_the_machine_and_keep_every_run(results: Path) -> None:
    """A row of a table is one line of the file, and so is a run."""
    text = (results / "speed.json").read_text()
    report = json.loads(text)

    assert report["runs"] == {"ours": RUNS}
    lines = [line.strip().removesuffix(",") for line in text.splitlines()]
    assert {json.dumps(each) for each in [*report["tables"][0]["rows"], *RUNS]} <= {*lines}
    assert {"processor", "cores", "python", "torch"} <= report["machine"].keys()
    assert report["command"].startswith("python -m benchmarks")


def test_a_page_that_names_unknown_results_is_refused(results: Path) -> None:
    with pytest.raises(ConfigError, match="no results of memory"):
        fill("<!-- benchmark memory -->\n<!-- end of memory -->\n", read_results(results))


def test_the_documents_have_the_stored_results() -> None:
    """All of them: what no page has is not stored."""
    reports, named = read_results(ROOT / "benchmarks" / "results"), set[str]()
    for page in (*(ROOT / "docs").glob("**/*.md"), *(ROOT / "benchmarks" / "reports").glob("*.md")):
        text = page.read_text()
        assert fill(text, reports) == text, f"{page} is out of date: python -m benchmarks report"
        named.update(re.findall("<!-- benchmark (.*) -->", text))
    assert named == reports.keys()


COMMANDS = sorted(
    {
        line
        for page in (*(ROOT / "docs").glob("**/*.md"), *(ROOT / "benchmarks" / "reports").glob("*.md"))
        for line in re.findall(
            r"^(python -m (?:benchmarks|research) .*)$", page.read_text().replace("\\\n", " "), re.MULTILINE
        )
    }
)


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_of_pages_have_options_that_exist(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PROTOFLEET_STORE", "postgresql://")
    monkeypatch.setattr(report, "commit", lambda: "")
    program, *words = shlex.split(line.replace("...", ""))[2:]
    command: click.Command = {"benchmarks": benchmarks, "research": research}[program]
    while isinstance(command, click.Group):
        name, *words = words
        found = command.get_command(click.Context(command, info_name=name), name)
        assert found is not None, line
        command = found
    command.make_context(command.name, words).close()
