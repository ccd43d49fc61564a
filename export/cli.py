"""The command `export-backbone`."""

import ast
import json
import logging
import time
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from protocol.cli import config_option, examples, require_packages, run, start_logging, verbose_option
from protocol.errors import RuntimeMissing
from protocol.models.onnx_metadata import BackboneMetadata
from protocol.storage.blobstore import state_errors

if TYPE_CHECKING:
    from export.backbones import Backbone
    from export.to_onnx import Candidate, Conversion, Exported

NEEDED = ("torch", "timm", "onnx", "onnxscript", "safetensors", "sklearn", "onnxruntime")
EXTRAS = "export,cpu"
"""Packages that the program needs, and the extras that install them."""

_CHOSEN = ("weights", "pretrained", "random", "image_size", "mean", "std", "crop_pct")
"""Options of the network and of its preprocessing, which are fields of `Choice`."""


def _three(
    _context: click.Context, parameter: click.Parameter, value: str | None
) -> tuple[float, ...] | None:
    if value is None:
        return None
    try:
        numbers = tuple(float(part) for part in value.split(","))
    except ValueError:
        numbers = ()
    is_zero = parameter.name == "std" and 0 in numbers
    if len(numbers) != 3 or is_zero or not all(0 <= number <= 1 for number in numbers):
        raise click.BadParameter(
            f"expected three numbers for pixels scaled to 0..1, such as 0.5,0.5,0.5, got {value!r}"
        )
    return numbers


def _names(_context: click.Context, _parameter: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    if value is None:
        return None
    names = tuple(dict.fromkeys(name.strip() for name in value.split(",")))
    if not all(names):
        raise click.BadParameter(f"expected names between commas, got {value!r}")
    return names


def _keywords(values: tuple[str, ...]) -> dict[str, Any]:
    """Parse NAME=VALUE, with the value as a Python literal or else as text."""
    keywords: dict[str, Any] = {}
    for value in values:
        key, equals, text = value.partition("=")
        if not equals or not key.isidentifier():
            raise click.BadParameter(f"expected NAME=VALUE, got {value!r}")
        try:
            keywords[key] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            keywords[key] = text
    return keywords


@click.command(
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=examples(
        "export-backbone mobilenetv3_small_100 --pretrained --out backbones",
        "export-backbone --list 'vit*'",
        "export-backbone --from-onnx net.onnx --output embedding --mean 0.5,0.5,0.5 --std 0.5,0.5,0.5",
    ),
)
@click.argument("model", required=False)
@config_option
@click.option("--list", "pattern", metavar="PATTERN", help="Print timm's models that match, and exit.")
@click.option(
    "--module",
    metavar="PACKAGE:FUNCTION",
    help="Export the network that a function returns, in place of timm's MODEL; --image-size, --mean and --std are "
    "required unless the network has timm's attribute pretrained_cfg.",
)
@click.option(
    "--from-onnx",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Make a backbone of another program's ONNX file; --mean and --std are required, and --image-size unless the "
    "file fixes it, or timm's config.json beside the file has them.",
)
@click.option("--input", "image", metavar="NAME", help="The file's input for images  [default: the only one]")
@click.option(
    "--output",
    "feature",
    metavar="NAME",
    help="The tensor of features in the file  [default: the only output]",
)
@click.option("--pool", is_flag=True, help="Average --output over the positions of the image.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(),
    show_default=True,
    help="Folder for MODEL-SIZE.onnx; -LAYERS and -int8 or -float16 are appended to SIZE with these options.",
)
@click.option(
    "--weights",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Weights: safetensors, or a PyTorch checkpoint with weights only.",
)
@click.option("--pretrained", is_flag=True, help="Download timm's weights from the hub.")
@click.option("--random", is_flag=True, help="Use random weights, for tests.")
@click.option(
    "--model-kwargs",
    "keywords",
    multiple=True,
    metavar="NAME=VALUE",
    callback=lambda _context, _parameter, values: _keywords(values),
    help="Passed to timm, such as pad_type=same; may be repeated.",
)
@click.option(
    "--image-size",
    type=click.IntRange(min=8),
    help="Edge of the square input in pixels  [default: the model's]",
)
@click.option(
    "--mean", metavar="R,G,B", callback=_three, help="Mean of pixels scaled to 0..1  [default: the model's]"
)
@click.option("--std", metavar="R,G,B", callback=_three, help="Standard deviation, likewise.")
@click.option(
    "--crop-pct", type=click.FloatRange(0.1, 1), help="Fraction inside the crop  [default: the model's]"
)
@click.option(
    "--layers",
    metavar="LAYER,...",
    callback=_names,
    help="Blocks whose pooled outputs are the features: last (the network's own feature), residual (each width's last "
    "residual sum), depthwise (the last three depthwise activations of different widths), all, the name of a module, "
    "or cN (the last depthwise activation of N channels)  [default: depthwise; last,residual of a network without; "
    "last with --module]",
)
@click.option(
    "--list-layers",
    is_flag=True,
    help="Print the blocks that --layers=all takes with what each costs, and exit.",
)
@click.option(
    "--precision",
    type=click.Choice(["float32", "int8", "float16"]),
    default="float32",
    show_default=True,
    help="int8 for processors, a quarter of the download: --images is required; float16 for GPUs, half the download.",
)
@click.option(
    "--images",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of images, of which up to 100 are compared with the source. --precision int8 needs images such as "
    "those of the devices, and holds one in five out for the comparison  [default: two of scikit-learn's]",
)
@click.option(
    "--float-layer",
    "float_layers",
    multiple=True,
    metavar="NAME",
    help="Layer that --precision int8 keeps in float32; may be repeated.",
)
@click.option(
    "--min-cosine",
    type=click.FloatRange(-1, 1),
    help="Least cosine of a feature against the source  [default: 0.8 of int8, 0.999 of float16]",
)
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0),
    default=1e-3,
    show_default=True,
    help="Maximum relative error against the source.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the summary, or the list, as JSON.")
@verbose_option
@click.version_option(package_name="protofleet")
def cli(*, model: str | None, pattern: str | None, as_json: bool, verbose: bool, **options: Any) -> None:
    """Export a pretrained backbone to an ONNX file for devices: a MODEL of timm, or one of another source."""
    _check_source(model=model, pattern=pattern, **options)
    converted = {name: options.pop(name) for name in ("precision", "float_layers", "min_cosine")}
    _check_options(**converted, **options)
    require_packages(*NEEDED, extras=EXTRAS)
    _require_torchvision()
    start_logging(verbose=verbose)
    for name in ("timm", "huggingface_hub", "httpx", "httpx2"):  # their retries; the final error is logged
        logging.getLogger(name).setLevel(logging.INFO if verbose else logging.ERROR)
    if pattern is not None:
        from export.backbones import list_models

        names = list_models(pattern)
        click.echo(json.dumps(names, indent=2) if as_json else "\n".join(names))
        return
    if options.pop("list_layers"):
        rows = _list_layers(model, **options)
        click.echo(json.dumps(rows, indent=2) if as_json else _table(rows))
        return
    suffix = "" if converted["precision"] == "float32" else f"-{converted['precision']}"
    convert = _conversion(**converted, images=options["images"])
    summary = _export(model, convert=convert, suffix=suffix, **options)
    click.echo(json.dumps(summary, indent=2) if as_json else _describe(summary))


def _check_source(
    *,
    model: str | None,
    pattern: str | None,
    module: str | None,
    from_onnx: Path | None,
    layers: tuple[str, ...] | None,
    list_layers: bool,
    **options: Any,
) -> None:
    """Raise UsageError unless there is one network, and its options are of it."""
    if sum(source is not None for source in (model, pattern, module, from_onnx)) != 1:
        raise click.UsageError(
            "give a MODEL, --module PACKAGE:FUNCTION or --from-onnx FILE, or search for a MODEL with --list PATTERN"
        )
    timm_only = ("weights", "pretrained", "random", "keywords")
    if (module or from_onnx) and (given := [name for name in timm_only if options[name]]):
        option = "model-kwargs" if given[0] == "keywords" else given[0]
        raise click.UsageError(
            f"--{option} is for a MODEL of timm: --module and --from-onnx have their weights"
        )
    if from_onnx is not None and (layers or list_layers):
        raise click.UsageError("--layers needs PyTorch: name a tensor of the file with --output")
    if from_onnx is None and (options["image"] or options["feature"] or options["pool"]):
        raise click.UsageError("--input, --output and --pool are for --from-onnx")


def _check_options(
    *,
    precision: str,
    float_layers: tuple[str, ...],
    min_cosine: float | None,
    images: Path | None,
    list_layers: bool,
    **_others: Any,
) -> None:
    """Raise UsageError for options that need others, or exclude them."""
    for is_wrong, problem in (
        (precision == "int8" and images is None, "--precision int8 needs --images DIRECTORY"),
        (
            list_layers and precision != "float32",
            "--list-layers shows layers of float32: leave out --precision",
        ),
        (float_layers and precision != "int8", "--float-layer needs --precision int8"),
        (
            min_cosine is not None and precision == "float32",
            "--min-cosine needs --precision int8 or float16",
        ),
    ):
        if is_wrong:
            raise click.UsageError(problem)


def _conversion(
    *,
    precision: str,
    float_layers: tuple[str, ...],
    min_cosine: float | None,
    images: Path | None,
) -> "Conversion | None":
    """Return what makes the file of the float32 graph."""
    least = {} if min_cosine is None else {"min_cosine": min_cosine}
    if precision == "int8" and images:
        from export.int8 import Int8

        return Int8(images, float_layers, **least).convert
    if precision == "float16":
        from export.float16 import Float16

        return Float16(images, **least).convert
    return None


def _require_torchvision() -> None:
    """Check that timm can be imported; raises RuntimeMissing if its torchvision was built for another torch."""
    try:
        import timm  # noqa: F401
    except (OSError, RuntimeError) as error:
        torch, torchvision = (version(name) for name in ("torch", "torchvision"))
        raise RuntimeMissing(
            f"torchvision {torchvision} was not built for torch {torch} ({error}): install both from one index, "
            "without CUDA by `pip install --force-reinstall torch torchvision --index-url "
            "https://download.pytorch.org/whl/cpu`"
        ) from error


def _export(
    model: str | None,
    *,
    out: Path,
    images: Path | None,
    tolerance: float,
    convert: "Conversion | None",
    suffix: str,
    **chosen: Any,
) -> dict[str, Any]:
    """Export a backbone, and return the summary."""
    from export.parity import compared_photos
    from export.to_onnx import write_compared

    started = time.monotonic()
    with state_errors(out):
        out.mkdir(parents=True, exist_ok=True)
    candidate = _of_torch(model, **chosen) if chosen["from_onnx"] is None else _of_file(**chosen)
    click.echo(f"{'converting and ' if convert else ''}comparing with {candidate.source} ...", err=True)
    layers = f"-{'+'.join(chosen['layers'])}" if chosen["layers"] else ""
    exported = write_compared(
        candidate,
        path=out / _file_name(candidate.metadata, layers + suffix),
        photos=compared_photos(images),
        tolerance=tolerance,
        convert=convert,
    )
    found = {"source": candidate.source, "preprocessing": candidate.settings, "assumed": candidate.assumed}
    return _summary(exported) | found | {"seconds": round(time.monotonic() - started, 1)}


def _of_torch(model: str | None, **chosen: Any) -> "Candidate":
    from export.parity import timm_reference
    from export.to_onnx import Candidate, to_onnx

    backbone = _load(model, **chosen)
    settings, assumed = backbone.settings, backbone.assumed
    if model is None:
        _warn_of_assumed(
            chosen["module"], settings, assumed, give="--crop-pct, or the attribute pretrained_cfg"
        )
    else:
        padded = "--image-size, --crop-pct, --mean, --std, --model-kwargs pad_type=same, or a config.json beside it"
        _warn_of_assumed(
            f"{chosen['weights']}", settings, assumed, give=padded, as_for=f", as for timm's {model}"
        )
    click.echo("exporting ...", err=True)
    file = to_onnx(backbone.module, backbone.metadata)
    reference = timm_reference(backbone.module, backbone.config)
    return Candidate(file, backbone.metadata, reference, "PyTorch", settings, assumed)


def _of_file(
    *, from_onnx: Path, image: str | None, feature: str | None, pool: bool, **chosen: Any
) -> "Candidate":
    from export.backbones import Choice
    from export.foreign_graph import load_graph

    choice = Choice("", **{name: chosen[name] for name in _CHOSEN})
    candidate = load_graph(from_onnx, choice, image=image, feature=feature, pool=pool)
    give = "--crop-pct, or a config.json beside it"
    _warn_of_assumed(str(from_onnx), candidate.settings, candidate.assumed, give=give)
    return candidate


def _warn_of_assumed(
    source: str, settings: Mapping[str, Any], assumed: Iterable[str], *, give: str, as_for: str = ""
) -> None:
    if text := _settings({name: settings[name] for name in assumed}):
        click.echo(
            f"warning: {source} does not record how its images were preprocessed; assumed{as_for}: {text}. Others lose "
            f"accuracy, which the comparison does not show: give {give}",
            err=True,
        )


def _load(
    model: str | None,
    *,
    module: str | None,
    layers: tuple[str, ...] | None,
    keywords: dict[str, Any],
    **options: Any,
) -> "Backbone":
    """Return the network with its weights and layers, by default those of `select_default`, and `last` of a module."""
    from export.backbones import Choice, load_backbone
    from export.layers import select_default, select_layers
    from export.own_module import load_module

    click.echo(f"loading {model or module} ...", err=True)
    chosen = {name: options[name] for name in _CHOSEN}
    if module is not None:
        backbone, layers = load_module(module, Choice("", **chosen)), layers or ("last",)
    else:
        backbone = load_backbone(Choice(str(model), model_kwargs=keywords, **chosen))
    if layers is None:
        backbone = select_default(backbone)
        if not backbone.metadata.blocks:
            click.echo(f"{model} has no block for --layers depthwise or residual: using last", err=True)
    elif layers != ("last",):
        backbone = select_layers(backbone, layers)
    return backbone


def _list_layers(model: str | None, **chosen: Any) -> list[dict[str, Any]]:
    from export.layers import list_layers

    backbone = _load(model, **chosen | {"layers": ("last",)})
    click.echo("exporting every block and measuring ...", err=True)
    return list_layers(backbone)


def _table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'block':<16}{'width':>6}{'resolution':>12}{'MB':>8}{'time':>8}"]
    for row in rows:
        resolution = "x".join(map(str, row["resolution"])) or "-"
        lines.append(
            f"{row['name']:<16}{row['width']:>6}{resolution:>12}{row['size_bytes'] / 1e6:>8.2f}"
            f"{row['time_share']:>8.0%}"
        )
    return "\n".join(lines)


def _file_name(metadata: BackboneMetadata, options: str) -> str:
    spec = metadata.preprocessing
    size = "x".join(map(str, dict.fromkeys((spec.height, spec.width))))
    return f"{metadata.model}-{size}{options}.onnx"


def _summary(exported: "Exported") -> dict[str, Any]:
    metadata = exported.metadata
    return {
        "path": str(exported.path),
        "sha256": exported.sha256,
        "size_bytes": exported.size_bytes,
        "model": metadata.model,
        "feature_size": metadata.feature_size,
        "blocks": msgspec.to_builtins(metadata.blocks or ()),
        "image_size": [metadata.preprocessing.height, metadata.preprocessing.width],
        "precision": metadata.precision,
        "weights": metadata.weights,
        "weights_sha256": metadata.weights_sha256,
        "parity": msgspec.to_builtins(metadata.parity),
    }


def _settings(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())


def _describe(summary: dict[str, Any]) -> str:
    parity = summary["parity"]
    height, width = summary["image_size"]
    blocks = ", ".join(f"{block['name']} ({block['width']})" for block in summary["blocks"])
    return (
        f"{summary['path']}\n"
        f"  {summary['size_bytes'] / 1e6:.1f} MB, images of {height}x{width} to "
        f"{summary['feature_size']} features{' of ' * bool(blocks)}{blocks}\n"
        f"  {_settings(summary['preprocessing'])}\n"
        f"  sha256 {summary['sha256']}\n"
        f"  {summary['precision']}, against {summary['source']} on {parity['images']} photographs: "
        f"worst cosine {parity['cosine']:.12f}, worst relative error {parity['relative_error']:.1e}"
    )


def main() -> None:
    """Run the console script."""
    run(cli, program="export-backbone", extras=EXTRAS)


if __name__ == "__main__":
    main()
