"""Prepares a task: reads its backbones, exports its graphs, and stores the blobs that devices download."""

import difflib
import itertools
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from aggregator.algorithms.algorithm import OneShot
from aggregator.algorithms.registry import find_algorithm
from aggregator.algorithms.statistics.feature_map import FeatureMap, selected
from aggregator.algorithms.tensors import pack_tensors
from aggregator.config.privacy import SumsSettings
from aggregator.config.schema import TaskFile
from aggregator.intake.validation import Expectation
from aggregator.security.seal_key import own_seal_key, public_seal_key
from aggregator.storage.store import Store
from aggregator.sums.stored_lists import has_list_of_another
from aggregator.tasks.graph_cache import cached_graphs
from aggregator.tasks.manifests import program_of, task_manifest
from protocol.errors import ConfigError, GraphRefused, MalformedMessage, StateError
from protocol.log import event
from protocol.models.backbone_file import check_backbone, read_backbone
from protocol.models.onnx_metadata import BackboneMetadata
from protocol.statistics.public_map import read_map
from protocol.storage.blobstore import file_digest
from protocol.wire.codec import decode, encode
from protocol.wire.messages import (
    MAX_BLOB_BYTES,
    MAX_CONTINUED,
    MAX_MANIFEST_BYTES,
    BlobRef,
    SecondOperator,
    Statistics,
    TaskManifest,
)
from protocol.wire.signing import is_own_seal_key

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task that is ready to be published."""

    file: TaskFile
    feature_size: int
    """L, the sum over all backbones."""
    expectation: Expectation
    first_tensors: BlobRef | None
    """The tensors of round 0; None without rounds."""
    backbone_files: tuple[Path, ...] = ()
    """The backbones as the task file names them."""
    feature_map: FeatureMap | None = None
    """The map of features whose sums devices upload; None without statistics, or with noise."""
    widths: tuple[int, ...] = ()
    """The number of features of each backbone that are used; without rounds and statistics."""

    @property
    def manifest(self) -> TaskManifest:
        return self.expectation.manifest

    @property
    def digest(self) -> bytes:
        """The sha256 of the encoded manifest, which identifies the task."""
        return self.expectation.task

    @property
    def calibrates(self) -> bool:
        """True if heads get a second version, by the evaluations of devices."""
        manifest = self.manifest
        has_evaluations = manifest.program is None and manifest.differential_privacy is None
        return self.file.training.calibrate and has_evaluations and len(manifest.classes) > 1

    @property
    def blobs(self) -> set[bytes]:
        """Digests of the blobs that devices download for this task."""
        program = self.manifest.program
        graphs = () if program is None else (program.init, program.step, program.project, program.head)
        first = () if self.first_tensors is None else (self.first_tensors,)
        statistics = self.manifest.statistics
        maps = () if statistics is None else (statistics.map,)
        return {blob.digest for blob in (*self.manifest.backbones, *graphs, *first, *maps)}


def prepare_task(file: TaskFile, backbones: Sequence[Path], *, store: Store) -> Task:
    """Store the blobs of a task file's task: backbones, graphs and tensors for rounds, and the manifest.

    Raises:
        ConfigError: mapped features are too long, the graphs cannot be exported, or the
            manifest is too large.
        BackboneMismatch: devices would refuse a backbone.
        StateError: the state directory cannot be written.
    """
    described = {path: checked_backbone(path, store) for path in backbones}
    feature_size = sum(each.feature_size for each in described.values())
    columns = selected_columns(file.layers or (), described)
    references = [store.put_file(path) for path in backbones]
    learning = file.learning
    program, shapes, first = None, {}, None
    prototype_size = len(selected(columns, feature_size))
    if learning is not None:
        graphs = cached_graphs(file, feature_size=feature_size, store=store)
        program = program_of(learning, graphs)
        prototype_size = learning.prototype_size(feature_size)
        tensors = learning.first_tensors(
            feature_size=feature_size, num_classes=len(file.classes), seed=file.client.seed
        )
        shapes = {name: tensors[name].shape for name in learning.uploaded}
        first = store.put_blob(pack_tensors(tensors), "tensors-0")
    statistics = (
        None
        if file.privacy.dp is None
        else _public_statistics(Path(file.privacy.dp.map), feature_size, store)
    )
    if statistics is not None and (sums := file.privacy.sums) is not None:
        operator = second_operator(sums, read_card(sums), own_seal_key(store))
        statistics = msgspec.structs.replace(statistics, second_operator=operator)
    normalized = all(each.blocks for each in described.values())
    feature_map = feature_map_of(file, feature_size, columns=columns, normalized=normalized)
    if feature_map is not None:
        statistics = _statistics(feature_map, store, num_classes=len(file.classes))
    if statistics is not None:
        prototype_size = statistics.size
    manifest = task_manifest(file, references, program=program, statistics=statistics, columns=columns)
    if file.continues is not None:
        manifest = continued(manifest, bytes.fromhex(file.continues), store)
    digest = store.blobs.put(encode(manifest))
    if manifest.second_operator is not None and has_list_of_another(
        store.facts, digest, manifest.second_operator.seal_key
    ):
        raise ConfigError(
            "`privacy.sums.operator`: an earlier task has this seal key: the second operator makes another with "
            "`protofleet-sums new-task`"
        )
    ends = np.cumsum([0, *(each.feature_size for each in described.values())])
    return Task(
        file=file,
        feature_size=feature_size,
        expectation=Expectation(
            *(digest, manifest, prototype_size, shapes),
            max_norm=math.inf if learning is None else learning.max_norm,
        ),
        first_tensors=first,
        backbone_files=tuple(backbones),
        feature_map=feature_map,
        widths=tuple(np.diff(np.searchsorted(selected(columns, feature_size), ends)).tolist()),
    )


def _both_use_blocks(before: str, after: str) -> bool:
    found = (find_algorithm(name) for name in (before, after))
    return all(issubclass(each, OneShot) and each.blocks for each in found)


MAY_CHANGE: Mapping[str, Callable[[Any, Any], bool]] = {
    "algorithm": _both_use_blocks,
    "prototypes": lambda before, _: before is msgspec.UNSET,
}
"""Fields of the manifest that a task may change that continues another, by their values in both: submissions to the
first fit the second, and devices upload the same to both or more."""


def continued(manifest: TaskManifest, earlier: bytes, store: Store) -> TaskManifest:
    """Return the manifest as one that continues an earlier task; classes with similar names are logged.

    Raises:
        ConfigError: this state has no such task, nothing differs, or more than added classes and MAY_CHANGE.
    """
    try:
        before = decode(store.blobs.read(earlier), TaskManifest, max_bytes=MAX_MANIFEST_BYTES)
    except (StateError, MalformedMessage) as error:
        raise ConfigError(f"`continues`: this state has no task {earlier.hex()}") from error
    if manifest.program is not None:
        raise ConfigError("`continues`: not for tasks with rounds")
    known, classes = before.classes, manifest.classes
    same = msgspec.structs.replace(before, classes=classes, continues=msgspec.UNSET)
    if manifest.statistics is not None and same.statistics is not None:  # its graph depends on the classes
        same = msgspec.structs.replace(same, statistics=manifest.statistics)
    if classes[: len(known)] != known or (len(classes) == len(known) and same == manifest):
        text = f"expected the {len(known)} classes of the earlier task, and further ones behind them"
        raise ConfigError(
            f"`continues`: {text}: removed or renamed classes are a new task, without `continues`"
        )
    values = ((name, getattr(same, name), getattr(manifest, name)) for name in manifest.__struct_fields__)
    fields = [
        name
        for name, old, new in values
        if old != new and not (name in MAY_CHANGE and MAY_CHANGE[name](old, new))
    ]
    if fields:
        raise ConfigError(
            f"`continues`: {', '.join(fields)} must be those of the earlier task: a new task has none"
        )
    for name in classes[len(known) :]:
        for close in difflib.get_close_matches(name, known, n=1):
            event(log, logging.WARNING, "similar names of classes: one may be meant", new=name, known=close)
    chain = (earlier, *(before.continues or ()))[:MAX_CONTINUED]
    return msgspec.structs.replace(manifest, continues=chain)


def selected_columns(
    layers: Collection[str], backbones: Mapping[Path, BackboneMetadata]
) -> tuple[tuple[int, int], ...]:
    """Return the ranges of the backbones' features, side by side, that belong to these blocks; empty for all.

    Raises:
        ConfigError: no backbone has one of the blocks, a backbone has none, or only some backbones have blocks.
    """
    blocks = {path: each.blocks or () for path, each in backbones.items()}
    names = {block.name for each in blocks.values() for block in each}
    if missing := sorted(set(layers) - names):
        known = f"they have {', '.join(sorted(names))}" if names else "export them with --layers"
        raise ConfigError(f"`layers`: no backbone has {', '.join(missing)}: {known}")
    for path, each in blocks.items():
        if names and not each:
            raise ConfigError(f"{path} has no blocks, and another backbone has: export both with --layers")
        if layers and not any(block.name in layers for block in each):
            raise ConfigError(
                f"`layers`: {path} has none of them: remove the backbone, or add one of its blocks"
            )
    ranges: list[tuple[int, int]] = []
    start = 0
    for block in itertools.chain.from_iterable(blocks.values()):
        end = start + block.width
        if block.name in layers:
            before = ranges.pop()[0] if ranges and ranges[-1][1] == start else start
            ranges.append((before, end))
        start = end
    return () if ranges == [(0, start)] else tuple(ranges)


def feature_map_of(
    file: TaskFile, feature_size: int, *, columns: tuple[tuple[int, int], ...] = (), normalized: bool = False
) -> FeatureMap | None:
    """Return the map whose rows devices sum up or average; None for tasks without statistics, or with noise.

    Raises ConfigError if its rows are too long.
    """
    method = file.method
    if not isinstance(method, OneShot) or file.privacy.dp is not None:
        return None
    found = method.feature_map(feature_size, seed=file.client.seed, columns=columns, normalized=normalized)
    if found is not None:
        found.check_size()
    return found


def _statistics(feature_map: FeatureMap, store: Store, *, num_classes: int) -> Statistics:
    from aggregator.graphs.head_export import map_to_onnx

    graph = map_to_onnx(feature_map, num_classes=num_classes)
    return Statistics(map=store.put_blob(graph, "map.onnx"), size=feature_map.size)


def _public_statistics(path: Path, feature_size: int, store: Store) -> Statistics:
    try:
        components = read_map(path.read_bytes()).components
    except (OSError, GraphRefused) as error:
        raise ConfigError(
            f"cannot read the public map {path}: {error}: make it with `protofleet public-map`"
        ) from error
    if components.shape[1] != feature_size:
        raise ConfigError(
            f"the public map {path} is one of {components.shape[1]} features, and the backbones have {feature_size}: "
            "make it of the same backbones with `protofleet public-map`"
        )
    return Statistics(map=store.put_file(path), size=len(components))


class OperatorCard(msgspec.Struct, frozen=True):
    """The second operator's file for one task: public keys and a signature, in hex."""

    format: int
    seal_key: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
    seal_key_signature: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{128}\Z")]
    sign_key: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]


def read_card(sums: SumsSettings) -> OperatorCard:
    """Return the second operator's card that a task file names; raises ConfigError if it cannot be read."""
    try:
        card = msgspec.toml.decode(Path(sums.operator).read_bytes(), type=OperatorCard)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot read {sums.operator}: {error}: take the file that `protofleet-sums new-task` has written"
        ) from error
    if card.format != 1:
        raise ConfigError(f"{sums.operator} has format {card.format}, expected 1: upgrade protofleet here")
    return card


def second_operator(sums: SumsSettings, card: OperatorCard, private_key: bytes) -> SecondOperator:
    """Return the second operator of a task; `private_key` is the aggregator's (X25519, 32 bytes).

    Raises:
        ConfigError: the seal key on the card is not signed by the operator that it names.
    """
    operator = SecondOperator(
        seal_key=bytes.fromhex(card.seal_key),
        seal_key_signature=bytes.fromhex(card.seal_key_signature),
        sign_key=bytes.fromhex(card.sign_key),
        aggregator_key=public_seal_key(private_key),
        min_devices=sums.min_devices,
        honest=sums.honest,
    )
    if not is_own_seal_key(operator):
        raise ConfigError(f"the seal key in {sums.operator} is not signed: take another file of the operator")
    return operator


def checked_backbone(path: Path, store: Store | None = None) -> BackboneMetadata:
    """Return the metadata of a backbone file, which is run on a few images unless a store has it already.

    Raises BackboneMismatch if devices would refuse it.
    """
    if store is not None and file_digest(path) in store.blobs:
        return read_backbone(path, max_bytes=MAX_BLOB_BYTES)
    return check_backbone(path, max_bytes=MAX_BLOB_BYTES)
