"""The `protofleet` program: fleets simulated on this machine."""

import contextlib
import functools
import importlib.util
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from aggregator.algorithms.algorithm import OneShot
from aggregator.algorithms.registry import ALGORITHMS, installed
from aggregator.config.training_packages import PACKAGES as TRAINING_PACKAGES
from protocol.cli import Commands, counted, examples, require_packages, run, say
from protocol.errors import ConfigError, RuntimeMissing
from protocol.wire.messages import MAX_MAPPED_SIZE

if TYPE_CHECKING:
    from protofleet.simulation.dataset import Dataset
    from protofleet.simulation.simulate import Simulation

Command = Callable[..., Any]

EXTRAS, COMPARE_EXTRAS = "aggregator,cpu", "aggregator,cpu,export"
"""Extras of the package that the program needs, and that `compare` needs."""

NO_FLEET = ("alone", "all-images")
"""What `simulate` compares the registered algorithms with."""

ONE_SHOT = tuple(name for name, kind in ALGORITHMS.items() if issubclass(kind, OneShot))
IN_ROUNDS = ALGORITHMS.keys() - set(ONE_SHOT)


class _AlgorithmName(click.Choice):  # type: ignore[type-arg]  # not generic in click 8.1
    """The name of an algorithm of this package, or of one that another package has installed."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if value in installed() else super().convert(value, param, ctx)


_EXAMPLE = "protofleet simulate photos --backbone backbone.onnx --devices 100 --partition dirichlet:0.1"

_COMPARE_EXAMPLE = (
    "export-backbone mobilenetv2_100 --pretrained --layers all --out backbones",
    "protofleet compare photos --backbone backbones/mobilenetv2_100-224-all.onnx --plot front.png",
)

_MAP_EXAMPLE = "protofleet public-map photographs --backbone backbone.onnx --out public.map"

COLUMNS = {
    "algorithm": "<16", "all images": ">12", "device mean": ">13", "worst 10 %": ">12", "uploads": ">9", "kB up": ">10",
    "kB down": ">10", "CPU s": ">9",
}  # fmt: skip


def _default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "protofleet"


_BACKBONES = click.option(
    "--backbone",
    "backbones",
    multiple=True,
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="ONNX file that `export-backbone` wrote; may be repeated.",
)
_FLEET = (
    click.option("--devices", type=click.IntRange(min=1), default=10, show_default=True),
    click.option(
        "--partition",
        default="dirichlet:0.3",
        show_default=True,
        help="iid, dirichlet:BETA (the smaller BETA, the more devices differ) or sharding:CLASSES_PER_DEVICE.",
    ),
    click.option(
        "--domains",
        is_flag=True,
        help="Each directory in DATA is a domain, such as a place or a camera; a device has images of one of them.",
    ),
)
_REST = (
    click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the division."),
    click.option(
        "--cache",
        type=click.Path(file_okay=False, path_type=Path),
        default=_default_cache,
        help="Directory that keeps the images' features for the next time  [default: ~/.cache/protofleet]",
    ),
    click.option("--json", "as_json", is_flag=True, help="Print JSON."),
)


def _with(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Return a decorator that adds options in their order."""
    return lambda command: functools.reduce(lambda made, option: option(made), reversed(options), command)


@click.group(
    cls=Commands, context_settings={"help_option_names": ["-h", "--help"]}, epilog=examples(_EXAMPLE)
)
@click.version_option(package_name="protofleet")
def cli() -> None:
    """Simulate a fleet on this machine, and choose its backbone, before there is one."""


@cli.command("simulate", epilog=examples(_EXAMPLE))
@click.argument("data", type=click.Path(path_type=Path))
@_with(_BACKBONES, *_FLEET)
@click.option(
    "--algorithm",
    "algorithms",
    multiple=True,
    type=_AlgorithmName((*ALGORITHMS, *NO_FLEET)),
    default=(*ONE_SHOT, *NO_FLEET),
    show_default=True,
    help="May be repeated. alone: each device without the fleet; all-images: training in one place.",
)
@click.option(
    "--held-out",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    default=0.2,
    show_default=True,
    help="Fraction of each class that no device gets, to evaluate heads on.",
)
@click.option(
    "--engine",
    type=click.Choice(["local", "ray"]),
    default="local",
    show_default=True,
    help="ray: devices are tasks of the Ray cluster at RAY_ADDRESS, or of one on this machine.",
)
@_with(*_REST)
def simulate_command(
    *,
    data: Path,
    backbones: tuple[Path, ...],
    domains: bool,
    algorithms: tuple[str, ...],
    cache: Path,
    as_json: bool,
    **fleet: Any,
) -> None:
    """Deal the images in DATA out to simulated devices, and show what each algorithm reaches.

    DATA is a directory with one subdirectory of images per class, or a CSV file with the columns path,label, as for
    `edge-client --data`. Devices and aggregator compute what real ones do, and encode the same messages.
    """
    require_packages("onnx", "onnxruntime", "scipy", extras=EXTRAS)
    if not IN_ROUNDS.isdisjoint(algorithms):
        require_packages(*TRAINING_PACKAGES, extras=f"{EXTRAS},train")
    from edge_client.progress_bar import Progress
    from protofleet.simulation.dataset import load_dataset
    from protofleet.simulation.simulate import AlgorithmResult, simulate, unsuitable

    bar = Progress("features")
    try:
        loaded = load_dataset(data, backbones, domains=domains, cache=cache, on_progress=bar.update)
    finally:
        bar.close()
    _report_unusable(loaded)
    skipped = unsuitable(algorithms, features=loaded.features.shape[1])
    running = [name for name in algorithms if name not in skipped]
    bar, steps = Progress("algorithms", estimates=False), enumerate((*running, ""))

    def advance(_: AlgorithmResult | None = None) -> None:
        done, name = next(steps)
        bar.update(done, len(running), name)

    advance()

    try:
        made = simulate(loaded, algorithms=algorithms, on_result=advance, **fleet)
    finally:
        bar.close()
    _print(made.as_dict() if as_json else describe(made))


@cli.command("compare", epilog=examples(*_COMPARE_EXAMPLE))
@click.argument("data", type=click.Path(path_type=Path))
@_with(_BACKBONES)
@click.option(
    "--layers",
    multiple=True,
    metavar="LAYER,...",
    help="Blocks to compare in place of the usual selections, as in `export-backbone --layers`; may be repeated.",
)
@_with(*_FLEET)
@click.option(
    "--algorithm",
    "algorithms",
    multiple=True,
    type=click.Choice(ONE_SHOT),
    default=("fedtc",),
    show_default=True,
    help="Of which the accuracy decides; others are shown beside it. statistics takes about ten times as long.",
)
@click.option(
    "--per-class",
    type=click.IntRange(min=2),
    default=100,
    show_default=True,
    help="Images of each class (of each domain) that are used, at most.",
)
@click.option(
    "--folds", type=click.IntRange(min=2), default=5, show_default=True,
    help="Parts of the images, each of which is held out once.",
)  # fmt: skip
@click.option(
    "--draws", type=click.IntRange(min=1), default=2, show_default=True,
    help="Divisions of the images into folds and among devices.",
)  # fmt: skip
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write a plot (PNG, SVG or PDF); needs matplotlib.",
)
@_with(*_REST)
def compare_command(
    *,
    data: Path,
    backbones: tuple[Path, ...],
    layers: tuple[str, ...],
    domains: bool,
    algorithms: tuple[str, ...],
    plot: Path | None,
    cache: Path,
    as_json: bool,
    **evaluation: Any,
) -> None:
    """Compare backbones, and blocks of each, on the labeled images in DATA, and recommend some of them.

    DATA is as for `simulate`. Of a file that `export-backbone --layers all` wrote, blocks are compared. Several
    backbones are compared with each other and in pairs. Another image size is another file. With the defaults and one
    backbone, it takes minutes.
    """
    require_packages("onnx", "onnxruntime", "scipy", "sklearn", extras=COMPARE_EXTRAS)
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise RuntimeMissing("matplotlib is not installed, which --plot needs: pip install matplotlib")
    from protofleet.simulation import comparison_report as report
    from protofleet.simulation.compare import compare
    from protofleet.simulation.dataset import load_dataset

    with _progress_of_steps() as update:
        progress = functools.partial(update, "features")
        made = compare(
            functools.partial(load_dataset, data, domains=domains, cache=cache, on_progress=progress),
            tuple(dict.fromkeys(backbones)),
            layers=[[name.strip() for name in each.split(",")] for each in layers],
            algorithms=tuple(dict.fromkeys(algorithms)),
            on_step=update,
            **evaluation,
        )
    _report_unusable(made.data)
    _print(report.as_dict(made) if as_json else report.lines(made))
    if plot is not None:
        try:
            report.draw(made, plot)
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot write {plot}: {error}") from error


@cli.command("public-map", epilog=examples(_MAP_EXAMPLE))
@click.argument("images", type=click.Path(exists=True, file_okay=False, path_type=Path))
@_with(_BACKBONES)
@click.option("--out", required=True, type=click.Path(dir_okay=False, path_type=Path), help="File to write.")
@click.option(
    "--size", type=click.IntRange(1, MAX_MAPPED_SIZE), default=256, show_default=True,
    help="Values that an image is reduced to. More suit larger fleets.",
)  # fmt: skip
def public_map_command(*, images: Path, backbones: tuple[Path, ...], out: Path, size: int) -> None:
    """Write the public map of `[privacy.dp]` from the images in the folder IMAGES and below it.

    They must be public: everybody who has the map may learn about them. Photographs of other things than the fleet's
    are enough, about a thousand of them.
    """
    require_packages("onnx", "onnxruntime", extras=EXTRAS)
    from edge_client.progress_bar import Progress
    from protocol.storage.blobstore import write_atomically
    from protofleet.public_map import public_map

    with contextlib.closing(Progress("features")) as bar:
        made, unusable = public_map(images, backbones, size=size, on_progress=bar.update)
    for path, reason in unusable:
        say(f"image left out: {path}: {reason}", err=True)
    write_atomically(out, made.to_bytes())
    say(f"wrote {out}: {len(made.center)} features to {size} values")


def _report_unusable(data: "Dataset") -> None:
    for path, reason in data.unusable:
        say(f"image left out: {path}: {reason}", err=True)


def _print(report: dict[str, Any] | list[str]) -> None:
    if isinstance(report, dict):
        click.echo(json.dumps(report, allow_nan=False))
    else:
        for line in report:
            say(line)


@contextlib.contextmanager
def _progress_of_steps() -> Iterator[Callable[[str, int, int], None]]:
    """Yield a function that shows a progress bar for each step, one after the other."""
    from edge_client.progress_bar import Progress

    bars = dict[str, Progress]()

    def update(step: str, done: int, total: int) -> None:
        if step not in bars:
            for bar in bars.values():
                bar.close()
        bars.setdefault(step, Progress(step)).update(done, total)

    try:
        yield update
    finally:
        for bar in bars.values():
            bar.close()


def describe(made: "Simulation") -> list[str]:
    """Return the lines of a simulation's report."""
    each = sorted(made.images.sum(axis=1).tolist())
    domains = len(set(made.domains))
    lines = [
        f"{counted(made.devices, 'device')}, {made.partition}, seed {made.seed}: {each[0]} to {each[-1]} images each, "
        f"median {each[len(each) // 2]}; {counted(len(made.classes), 'class', 'classes')}"
        + (f", {domains} domains" if domains > 1 else "")
        + f", {counted(made.held_out, 'held-out image')}",
        f"backbone: {made.backbone_bytes / 1e3:,.0f} kB, downloaded once by each device",
        "uploads, kB up and kB down: of one device, on average; CPU s: of all devices and the aggregator",
        "",
        "".join(f"{name:{spec}}" for name, spec in COLUMNS.items()),
    ]
    for result in made.results:
        cells = (
            result.algorithm,
            *(f"{100 * value:.1f} %" for value in (result.accuracy, result.device_mean, result.device_worst)),
            *(str(result.uploads), f"{result.up_bytes / 1e3:,.1f}", f"{result.down_bytes / 1e3:,.1f}"),
            f"{result.seconds:,.1f}",
        )
        lines.append("".join(f"{cell:{spec}}" for cell, spec in zip(cells, COLUMNS.values(), strict=True)))
    lines += [
        f"{result.algorithm}: {counted(len(result.quarantined), 'device')} quarantined as outliers: "
        + ", ".join(result.quarantined)
        for result in made.results
        if result.quarantined
    ]
    lines += [f"{name}: skipped: {reason}" for name, reason in made.skipped.items()]
    for result in made.results:
        if result.counting is not None:
            lines.append(
                f"{result.algorithm}: {result.counting.counted} of {result.counting.images} images count"
            )
            lines += [f"  {device and f'device {device} '}{text}" for device, text in result.counting.limited]
    return lines


def main() -> None:
    """Run the console script."""
    run(cli, program="protofleet", extras=EXTRAS)
