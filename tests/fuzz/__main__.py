"""Fuzz: `python -m tests.fuzz [TARGET]... [--runs N] [--merge]`; `make fuzz` is this with all targets.

Each target runs in its own process, from the inputs in `tests/fuzz/corpus` and those of earlier runs in `build/fuzz`.
`--merge` minimizes all of them into `tests/fuzz/corpus`.
"""

import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

import click

from tests.fuzz.targets import TARGETS

CORPUS = Path(__file__).parent / "corpus"
BUILD = Path("build/fuzz")
TIMEOUT_S = 10
"""Of one input."""
MAX_KEPT = 32
"""Inputs of a target that are committed."""
RSS_LIMIT_MB = 1024


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(list(TARGETS)))
@click.option(
    "--runs", type=int, default=10_000_000, show_default=True, help="Executions of all targets together."
)
@click.option(
    "--merge", is_flag=True, help="Do not fuzz; keep the inputs that add coverage in tests/fuzz/corpus."
)
@click.option("--logs", type=click.Path(path_type=Path), default=BUILD / "logs", show_default=True)
def main(names: tuple[str, ...], *, runs: int, merge: bool, logs: Path) -> None:
    """Fuzz targets, guided by coverage; exit 1 on a finding."""
    chosen = names or tuple(TARGETS)
    if merge:
        for name in chosen:
            _merge(name)
        return
    logs.mkdir(parents=True, exist_ok=True)
    shares = {name: TARGETS[name].share / sum(TARGETS[other].share for other in chosen) for name in chosen}
    click.echo("| target | executions | seconds | edges | features | inputs kept | peak RSS, MB | findings |")
    click.echo("|---|---:|---:|---:|---:|---:|---:|---:|")
    failed = [name for name in chosen if not _fuzz(name, runs=round(runs * shares[name]), logs=logs)]
    if failed:
        sys.exit(f"findings in {', '.join(failed)}: the inputs are in {BUILD}, the errors in {logs}")


def _fuzz(name: str, *, runs: int, logs: Path) -> bool:
    """Run a target and print its row; returns whether there was no finding."""
    begun_s = time.monotonic()
    log = logs / f"{name}.log"
    options = [f"-runs={runs}", f"-timeout={TIMEOUT_S}", f"-rss_limit_mb={RSS_LIMIT_MB}"]
    options += [f"-max_len={TARGETS[name].max_bytes}", f"-artifact_prefix={BUILD / name}-"]
    options += ["-print_final_stats=1"]
    with log.open("w") as file:
        good = engine(name, options, [_working(name)], log=file) == 0
    text = log.read_text(errors="replace")
    covered = re.findall(r"cov: (\d+) ft: (\d+) corp: (\d+)/", text)[-1:] or [("?", "?", "?")]
    done = re.search(r"stat::number_of_executed_units: (\d+)", text)
    peak = re.search(r"stat::peak_rss_mb: +(\d+)", text)
    cells = (
        *(name, f"{int(done[1]):,}" if done else "?", f"{time.monotonic() - begun_s:.0f}"),
        *(*covered[0], peak[1] if peak else "?", "0" if good else "1"),
    )
    click.echo("| " + " | ".join(cells) + " |")
    return good


def engine(name: str, options: list[str], folders: list[Path], *, log: IO[str] | None) -> int:
    """Run a target in libFuzzer; returns its exit status."""
    BUILD.mkdir(parents=True, exist_ok=True)
    program = (BUILD / f"{name}.sh").resolve()
    program.write_text(
        f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m tests.fuzz.engine {name} "$0" "$@"\n'
    )
    program.chmod(0o755)
    command = [str(program), *options, *map(str, folders)]
    return subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode


def _working(name: str) -> Path:
    """Return the folder of a target's inputs, with its seeds and corpus."""
    folder = BUILD / name
    folder.mkdir(parents=True, exist_ok=True)
    known = [path.read_bytes() for path in sorted((CORPUS / name).glob("*"))]
    for number, data in enumerate([*TARGETS[name].seeds(), *known]):
        (folder / f"known-{number:03d}").write_bytes(data)
    return folder


def _merge(name: str) -> None:
    """Replace a target's corpus by the fewest inputs with the same coverage."""
    corpus, working = CORPUS / name, _working(name)
    with tempfile.TemporaryDirectory(dir=BUILD) as kept:
        options = ["-merge=1", f"-max_len={TARGETS[name].max_bytes}"]
        if engine(name, options, [Path(kept), working], log=None):
            sys.exit(f"{name} could not be merged")
        corpus.mkdir(parents=True, exist_ok=True)
        for old in corpus.iterdir():
            old.unlink()
        by_size = sorted(Path(kept).iterdir(), key=lambda path: (path.stat().st_size, path.name))
        for new in by_size[-MAX_KEPT:]:
            (corpus / new.name[:12]).write_bytes(new.read_bytes())
    click.echo(f"{name}: {len(list(corpus.iterdir()))} inputs")


if __name__ == "__main__":
    main()
