"""The task file: what the fleet works on, read from TOML; a wrong one is refused with the line and the reason."""

import difflib
import re
import tomllib
import unicodedata
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from aggregator.rounds import Settings
from protocol.errors import ConfigError
from protocol.messages import MAX_CLASSES, ClassName, Name, Natural
from protocol.metadata import BackboneMetadata, backbone_metadata

_TABLE = re.compile(r"\s*\[([\w.\"' \t-]+)\]")
_KEY = re.compile(r"\s*([\w.\"' \t-]+?)\s*=")


class Client(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[client]`: what every device is told about making prototypes."""

    alpha: Annotated[float, Meta(gt=0, le=1)] = 0.99
    batch_size: Annotated[int, Meta(ge=1, le=65535)] = 5
    min_images: Annotated[int, Meta(ge=1, le=65535)] = 2
    seed: Natural = 0


class Training(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[training]`: how the aggregator makes a head. What is not set is the recipe's own."""

    recipe: Literal["default", "paper"] = "default"
    restore: bool | None = None
    epochs: Annotated[int, Meta(ge=1, le=100_000)] | None = None
    device: Annotated[str, Meta(pattern=r"^(auto|cpu|cuda(:\d+)?)\Z")] = "auto"
    seed: Natural = 0


class TaskFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file."""

    classes: Annotated[tuple[ClassName, ...], Meta(min_length=1, max_length=MAX_CLASSES)]
    backbones: Annotated[tuple[str, ...], Meta(min_length=1, max_length=1)]
    """Paths of ONNX files, from the task file's own folder."""
    fleet: Name = "default"
    algorithm: Literal["fedtc"] = "fedtc"
    quorum: Annotated[int, Meta(ge=1)] = 1
    deadline_s: Annotated[float, Meta(gt=0, le=1e9)] = 600.0
    retrain_after: Annotated[int, Meta(ge=1)] = 1
    max_submission_mb: Annotated[float, Meta(gt=0, le=2048)] = 64.0
    devices: Annotated[tuple[Name, ...], Meta(min_length=1)] | None = None
    """The only devices that may take part; left out, any may."""
    client: Client = Client()
    training: Training = Training()

    @property
    def settings(self) -> Settings:
        """What the round logic needs of it."""
        return Settings(quorum=self.quorum, deadline_s=self.deadline_s, retrain_after=self.retrain_after)


def load_task(path: Path) -> tuple[TaskFile, Path]:
    """Read a task file; returns it with the path of its backbone.

    Raises:
        ConfigError: it cannot be read, or is wrong: the message names the line and what to write instead.
    """
    try:
        text = path.read_text(encoding="utf-8")
        task = msgspec.convert(tomllib.loads(text), TaskFile)
    except OSError as error:
        raise ConfigError(f"cannot read the task file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: expected UTF-8 text: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: {error}") from error
    except msgspec.ValidationError as error:
        raise ConfigError(_explain(path, text, str(error))) from error
    if problem := _wrong_names(task.classes):
        raise ConfigError(f"{path}:{_line_of(text, (), 'classes')}: {problem}")
    if task.client.min_images > task.client.batch_size:
        line = _line_of(text, ("client",), "min_images")
        raise ConfigError(
            f"{path}:{line}: min_images ({task.client.min_images}) must not exceed batch_size "
            f"({task.client.batch_size}): no prototype would be large enough"
        )
    backbone = path.parent / task.backbones[0]
    if not backbone.is_file():
        line = _line_of(text, (), "backbones")
        raise ConfigError(
            f"{path}:{line}: no backbone at {backbone}; make one with: export-backbone MODEL --out {backbone.parent}"
        )
    return task, backbone


def _wrong_names(classes: Sequence[str]) -> str:
    """What is wrong with the class names; they are folders' names and lie in lists of pictures."""
    repeated = [
        name
        for name, times in Counter(unicodedata.normalize("NFC", name) for name in classes).items()
        if times > 1
    ]
    if repeated:
        return f"classes named twice: {', '.join(sorted(repeated))}"
    odd = [
        name for name in classes if name != name.strip() or any(unicodedata.category(c) == "Cc" for c in name)
    ]
    if odd:
        return f"class {odd[0]!r} begins or ends with a space, or holds a line break or another control character"
    return ""


def read_backbone(path: Path) -> BackboneMetadata:
    """What a backbone file says of itself.

    Raises:
        ConfigError: it is no ONNX file.
        BackboneMismatch: it is not one that `export-backbone` wrote.
    """
    import onnx
    from google.protobuf.message import DecodeError

    try:
        model = onnx.load(path, load_external_data=False)
    except (OSError, DecodeError) as error:
        raise ConfigError(f"cannot read the backbone {path}: {error}") from error
    return backbone_metadata({entry.key: entry.value for entry in model.metadata_props})


def _explain(path: Path, text: str, error: str) -> str:
    """A validation error with its line, and the closest known name for an unknown one."""
    problem, _, where = error.partition(" - at ")
    tables = tuple(re.findall(r"\.([A-Za-z_]\w*)", where))
    field = re.search(r"field `(\w+)`", problem)
    if field and "unknown" in problem:
        known = {"client": Client, "training": Training}.get(".".join(tables), TaskFile).__struct_fields__
        close = difflib.get_close_matches(field[1], known, n=1)
        hint = f"; did you mean `{close[0]}`?" if close else f"; known: {', '.join(known)}"
        return f"{path}:{_line_of(text, tables, field[1])}: unknown setting `{field[1]}`{hint}"
    if field:
        return f"{path}:{_line_of(text, tables, None)}: `{field[1]}` is missing"
    key = ".".join(tables)
    return f"{path}:{_line_of(text, tables[:-1], tables[-1] if tables else None)}: `{key}`: {problem}"


def _line_of(text: str, tables: tuple[str, ...], key: str | None) -> int:
    """The line on which a table's key stands, or the table itself, or else what is nearest around it."""
    wanted = (*tables, key) if key else tables
    table: tuple[str, ...] = ()
    found = 1
    for number, line in enumerate(text.splitlines(), start=1):
        if match := _TABLE.match(line):
            name = table = _parts(match[1])
        elif match := _KEY.match(line):
            name = (*table, *_parts(match[1]))
        else:
            continue
        if name == wanted:
            return number
        if name == wanted[: len(name)]:
            found = number
    return found


def _parts(dotted: str) -> tuple[str, ...]:
    return tuple(part.strip(" \t\"'") for part in dotted.split("."))
