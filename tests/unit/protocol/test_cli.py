"""Exit codes, configuration files and logging of all programs."""

import json
import logging
import math
import os
import re
import signal
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import click
import pytest

from protocol.cli import config_option, read_secret, run, start_logging, verbose_option
from protocol.errors import ConfigError, pip_command
from protocol.log import event
from protocol.service_manager import stop_on_terminate

log = logging.getLogger(__name__)

PROGRAM = """\
from tests.unit.protocol.test_cli import main
if __name__ == "__main__":
    main()
"""


FAILURES: dict[str, Exception] = {
    "disk": OSError(5, "Input/output error", "/state/blobs"),
    "memory": MemoryError(),
    "library": ImportError("failed to map segment from shared object", path="/lib/rpds.so"),
    "threads": RuntimeError("can't start new thread"),
    "watchdog": RuntimeError("unable to start watchdog thread"),
    "missing": ModuleNotFoundError("No module named 'torch.nn'", name="torch.nn"),
    "own": ModuleNotFoundError("No module named 'protocol.gone'", name="protocol.gone"),
    "bug": ZeroDivisionError("a bug"),
}


NO_THREAD = "error: cannot start a thread: raise the number of threads or the memory that the system allows\n"
SETTINGS = "known: batch_size, broker, fail, log_format, verbose, wait"


@click.command()
@config_option
@click.option("--broker", default="localhost", envvar="PROTOFLEET_BROKER")
@click.option("--batch-size", type=int, default=5)
@click.option("--fail", type=click.Choice([*FAILURES, "expected", "hostile", "usage", "exit", "interrupt"]))
@click.option("--wait", is_flag=True)
@verbose_option
def _command(*, broker: str, batch_size: int, fail: str | None, wait: bool, verbose: bool) -> int | None:
    """Show settings, or fail in some way."""
    if fail is not None and fail in FAILURES:
        raise FAILURES[fail]
    match fail:
        case "expected":
            raise ConfigError("the folder is empty: put images in it")
        case "hostile":
            raise ConfigError("\x1b[31mred\nand more")
        case "usage":
            raise click.UsageError("one of the two, please")
        case "interrupt":
            raise KeyboardInterrupt
        case "exit":
            return 3
    click.echo(f"{broker} {batch_size}")
    if wait:
        start_logging(verbose=verbose)
        stop_on_terminate()
        log.info("ready")
        log.debug("not asked for")
        click.echo("waiting")
        signal.pause()
    return None


def main() -> None:
    """Run the command as a program does."""
    run(_command, program="example", extras="example,cpu")


def _exit_code(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["example", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    assert isinstance(caught.value.code, int)
    return caught.value.code


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ([], 0, ""),
        (["--help"], 0, ""),
        (["--fail", "expected"], 1, "error: the folder is empty: put images in it\n"),
        (["--fail", "hostile"], 1, "error: \\x1b[31mred\\nand more\n"),
        (["--fail", "missing"], 1, f"error: torch is not installed: {pip_command('example,cpu')}\n"),
        (["--fail", "disk"], 1, "error: cannot use /state/blobs: Input/output error\n"),
        (
            ["--fail", "memory"],
            1,
            "error: out of memory: stop other programs, or raise the limit of this one\n",
        ),
        (
            ["--fail", "library"],
            1,
            "error: cannot load /lib/rpds.so: failed to map segment from shared object\n",
        ),
        (["--fail", "threads"], 1, NO_THREAD),
        (["--fail", "watchdog"], 1, NO_THREAD),
        (["--fail", "usage"], 2, "Error: one of the two, please\n"),
        (["--batch-size", "many"], 2, "'--batch-size': 'many' is not a valid integer.\n"),
        (["--unknown"], 2, "Error: No such option '--unknown'.\n"),
        (["--fail", "interrupt"], 130, "interrupted\n"),
        (["--fail", "exit"], 3, ""),
    ],
)
def test_exit_codes(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    said: str,
) -> None:
    assert _exit_code(monkeypatch, *arguments) == code
    output = capsys.readouterr()
    assert output.err.endswith(said)
    assert "Traceback" not in output.err
    assert bool(output.out) == (code == 0)
    if code == 1:
        assert output.err == said


def test_config_file_gives_defaults(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def shown(*arguments: str) -> str:
        assert _exit_code(monkeypatch, *arguments) == 0
        return capsys.readouterr().out

    for key in ("batch-size", "batch_size"):
        config = tmp_path / f"{key}.toml"
        config.write_text(f'broker = "file"\n{key} = 7\n', encoding="utf-8-sig")  # as on Windows
        assert shown("--config", str(config)) == "file 7\n"
    monkeypatch.setenv("PROTOFLEET_CONFIG", str(config))
    assert shown() == "file 7\n"
    monkeypatch.setenv("PROTOFLEET_BROKER", "environment")
    assert shown() == "environment 7\n"
    assert shown("--broker", "option") == "option 7\n"


def test_byte_order_mark_is_no_part_of_a_password(tmp_path: Path) -> None:
    """Editors of Windows write one."""
    file = tmp_path / "password.txt"
    file.write_text("secret\n", encoding="utf-8-sig")
    assert read_secret(file, what="password") == "secret"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"broker = x", "Invalid value (at line 1, column 10)"),
        (b"brokr = 'x'", f"unknown setting 'brokr'; {SETTINGS}"),
        (b"config = 'other.toml'", f"unknown setting 'config'; {SETTINGS}"),
        (b"batch_size = 'many'", "'many' is not a valid integer"),
        (b"\xff\xfe", "can't decode byte"),
        (b"broker = " + b"[" * 10_000, "maximum recursion depth exceeded"),
        (None, "settings.toml"),
    ],
)
def test_invalid_config_file_is_a_usage_error(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    text: bytes | None,
    reason: str,
) -> None:
    config = tmp_path / "settings.toml"
    if text is not None:
        config.write_bytes(text)
    assert _exit_code(monkeypatch, "--config", str(config)) == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0), (signal.SIGHUP, 0)])
def test_signal_sets_exit_code_and_log_goes_to_stderr(number: signal.Signals, code: int) -> None:
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip("the tests run under nohup")
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "--wait"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None
        while "waiting" not in program.stdout.readline():
            assert program.poll() is None
        program.send_signal(number)
        _, errors = program.communicate(timeout=120)
    assert program.returncode == code
    start = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d INFO [\w.]+ "
    assert re.fullmatch(f"{start}ready\n" + (f"\n?{start}interrupted\n" if code else ""), errors)


def test_log_lines_escape_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    start_logging(verbose=False)
    log = logging.getLogger("test")
    log.warning("%s says: %s", "shed-1", "\x1b[2J\r\n12:00:00 all is well\x9b8m \u202e Käfer \U0001f98a")
    try:
        raise ConfigError("below")
    except ConfigError:
        log.exception("then")
    first, second, *trace = capsys.readouterr().err.splitlines()
    said = r"\x1b[2J\r\n12:00:00 all is well\x9b8m \u202e Käfer 🦊"
    assert first[20:] == f"WARNING test shed-1 says: {said}"
    assert second[20:] == "ERROR test then"
    assert trace[0].startswith("Traceback")


def test_log_lines_can_be_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With an event's fields, exceptions, and the error that ends the program; as an option or in the environment."""
    monkeypatch.setenv("PROTOFLEET_LOG_FORMAT", "json")
    start_logging(verbose=False)
    log = logging.getLogger("test")
    fields = {"path": Path("a b"), "size_bytes": 3, "share": 0.25, "digest": b"\xff"}
    event(log, logging.WARNING, "image omitted", **fields, none=None)
    log.info("%s is %s", "\x1b[2J\n", math.nan)
    try:
        raise ConfigError("below")
    except ConfigError:
        log.exception("then")
    monkeypatch.setattr(sys, "argv", ["example", "--fail", "expected", "--log-format", "json"])
    with pytest.raises(SystemExit):
        main()
    first, second, third, last = map(json.loads, capsys.readouterr().err.splitlines())
    times = {line.pop("time") for line in (first, second, third, last)}
    assert all(datetime.fromisoformat(time).tzinfo is not None for time in times)
    shown = {**fields, "path": "a b", "digest": "ff"}
    assert first == {"level": "WARNING", "logger": "test", "message": "image omitted", **shown}
    assert second["message"] == "\x1b[2J\n is nan"
    assert (third["message"], third["traceback"].startswith("Traceback")) == ("then", True)
    assert (last["level"], last["message"]) == ("ERROR", "the folder is empty: put images in it")


def test_log_format_is_an_option_for_subprocesses_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In a configuration file as well."""
    monkeypatch.setenv("PROTOFLEET_LOG_FORMAT", "text")
    _command.make_context("example", ["--log-format", "json"])
    assert os.environ["PROTOFLEET_LOG_FORMAT"] == "json"
    monkeypatch.delenv("PROTOFLEET_LOG_FORMAT")
    (tmp_path / "settings.toml").write_text('log-format = "json"\n')
    _command.make_context("example", ["--config", str(tmp_path / "settings.toml")])
    assert os.environ["PROTOFLEET_LOG_FORMAT"] == "json"
    monkeypatch.delenv("PROTOFLEET_LOG_FORMAT")


def test_verbose_excludes_debug_lines_of_libraries(capsys: pytest.CaptureFixture[str]) -> None:
    start_logging(verbose=True)
    logging.getLogger("PIL.TiffImagePlugin").debug("tag: GPSInfo - value: 52.5 N")
    logging.getLogger("edge_client.service.device").debug("ours")
    start_logging(verbose=False)
    logging.getLogger("edge_client.service.device").debug("no more")
    assert [line[20:] for line in capsys.readouterr().err.splitlines()] == [
        "DEBUG edge_client.service.device ours"
    ]


@pytest.mark.parametrize(
    ("module", "words", "expected"),
    [
        ("edge_client.cli", "edge-client do", "plain,doctor"),
        ("aggregator.cli", "aggregator status --j", "plain,--json"),
    ],
)
def test_shell_completion(module: str, words: str, expected: str) -> None:
    """Of commands and options, as docs/cli.md describes it."""
    variable = f"_{words.split(maxsplit=1)[0].upper().replace('-', '_')}_COMPLETE"
    number = str(len(words.split()) - 1)
    environment = {**os.environ, variable: "bash_complete", "COMP_WORDS": words, "COMP_CWORD": number}
    done = subprocess.run(
        [sys.executable, "-m", module], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == [expected], done.stderr


def test_broken_pipe_exits_without_traceback() -> None:
    read, write = os.pipe()
    os.close(read)
    program = subprocess.run(
        [sys.executable, "-c", PROGRAM], stdout=write, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(write)
    assert program.returncode == 1
    assert program.stderr == ""
