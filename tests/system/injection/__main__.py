"""Injects a fault into every system call by which the programs use their files, one life at a time.

Device and aggregator join a small fleet, enroll, predict and show their status. After each fault the program is
started again, and must have lost nothing. Outcomes are appended to a file: the same command continues after an end.
"""

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import click
import msgspec

from protocol.cli import run
from protocol.errors import ProtofleetError
from protocol.service_manager import stop_on_terminate
from tests.support.network.brokers import mosquitto_program
from tests.system.injection.lives import Outcome
from tests.system.injection.programs import PROGRAMS, Calls, Programs, count_calls, plan, rows_of, run_all
from tests.system.injection.strace import Injection, unavailable
from tests.system.tables import markdown, with_total


class Record(msgspec.Struct):
    """One line of the file of outcomes."""

    injection: Injection
    outcome: Outcome


@click.command("injection")
@click.option("--lives", type=click.IntRange(min=1), help="Number of lives  [default: all]")
@click.option(
    "--program",
    "names",
    type=click.Choice(PROGRAMS),
    multiple=True,
    default=PROGRAMS,
    help="May be repeated.  [default: all]",
)
@click.option("--minutes", type=click.FloatRange(min=0), help="Start no life after this time.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the order.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("injections.jsonl"),
    show_default=True,
    help="File of outcomes; the table is written beside it, as .md and .json.",
)
@click.option(
    "--keep", type=click.Path(path_type=Path), help="Run in this folder, and leave failed lives there."
)
def injection(
    *,
    lives: int | None,
    names: tuple[str, ...],
    minutes: float | None,
    seed: int,
    out: Path,
    keep: Path | None,
) -> None:
    """Inject a fault into each system call of the programs; report lives after which something was lost."""
    stop_on_terminate()  # at the end, all processes are ended
    if reason := unavailable() or ("" if mosquitto_program() else "mosquitto is not installed"):
        raise ProtofleetError(reason)
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary, Programs(keep or Path(temporary)) as programs:
        calls = count_calls(programs, names)
        done = {record.injection: record.outcome for record in _read(out)}
        planned = plan(calls, seed=seed)[:lives]
        rest = [each for each in planned if each not in done]
        click.echo(f"{len(planned)} lives, {len(planned) - len(rest)} of them done before", err=True)
        until_s = time.monotonic() + minutes * 60 if minutes is not None else float("inf")
        _run(programs, rest, out, until_s=until_s)
    outcomes = {record.injection: record.outcome for record in _read(out)}
    _report(out, calls, {each: outcomes[each] for each in planned if each in outcomes})


def _run(programs: Programs, injections: list[Injection], out: Path, *, until_s: float) -> None:
    def in_time() -> Iterator[list[Injection]]:
        for start in range(0, len(injections), 40):
            if time.monotonic() < until_s:
                yield injections[start : start + 40]

    with (
        out.open("ab") as file,
        click.progressbar(length=len(injections), label="injecting", file=sys.stderr) as bar,
    ):
        for part in in_time():
            for each, outcome in run_all(programs, part):
                file.write(msgspec.json.encode(Record(each, outcome)) + b"\n")
                file.flush()
                bar.update(1)
                if outcome.violations:
                    click.echo(f"\n{each}: {'; '.join(outcome.violations)}", err=True)


def _read(out: Path) -> list[Record]:
    lines = out.read_bytes().splitlines() if out.exists() else []
    return [msgspec.json.decode(line, type=Record) for line in lines]


def _report(out: Path, calls: Calls, outcomes: dict[Injection, Outcome]) -> None:
    rows = rows_of(calls, outcomes.items())
    text = markdown("injections", with_total(rows))
    out.with_suffix(".md").write_text(text + "\n")
    out.with_suffix(".json").write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    click.echo(text)
    ended = sum(outcome.ended for outcome in outcomes.values())
    missed = sum(not outcome.injected for outcome in outcomes.values())
    submissions = sum(outcome.sent for outcome in outcomes.values())
    click.echo(
        f"\n{len(outcomes)} lives with {submissions} submissions; the program ended in {ended}; "
        f"in {missed} the call did not happen"
    )
    if failed := sum(bool(outcome.violations) for outcome in outcomes.values()):
        raise ProtofleetError(f"{failed} lives broke the invariant: see above and {out}")


if __name__ == "__main__":
    run(injection, program="python -m tests.system.injection")
