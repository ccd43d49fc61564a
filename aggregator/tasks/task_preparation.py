"""Prepares a task: reads its backbones, exports its graphs, and stores the blobs that devices download."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from aggregator.algorithms.statistics.feature_map import FeatureMap
from aggregator.algorithms.tensors import pack_tensors
from aggregator.config.schema import TaskFile
from aggregator.ingest.validation import Expectation
from aggregator.storage.store import Store
from aggregator.tasks.graph_cache import cached_graphs
from aggregator.tasks.manifests import program_of, task_manifest
from protocol.errors import ConfigError
from protocol.models.onnx_metadata import BackboneMetadata, read_metadata
from protocol.wire.codec import encode
from protocol.wire.messages import MAX_MAPPED_SIZE, BlobRef, Statistics, TaskManifest


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

    @property
    def manifest(self) -> TaskManifest:
        """Published to the fleet."""
        return self.expectation.manifest

    @property
    def digest(self) -> bytes:
        """The sha256 of the encoded manifest, which identifies the task."""
        return self.expectation.task

    @property
    def blobs(self) -> set[bytes]:
        """Digests of the blobs that devices download for this task."""
        program = self.manifest.program
        graphs = () if program is None else (program.init, program.step, program.project, program.head)
        first = () if self.first_tensors is None else (self.first_tensors,)
        statistics = self.manifest.statistics
        maps = () if statistics is None else (statistics.map,)
        return {blob.digest for blob in (*self.manifest.backbones, *graphs, *first, *maps)}

    @property
    def feature_map(self) -> FeatureMap | None:
        """The map of features whose sums devices upload; None without statistics."""
        return feature_map_of(self.file, self.feature_size)


def prepare_task(file: TaskFile, backbones: Sequence[Path], *, store: Store) -> Task:
    """Store the blobs of a task: backbones, graphs and tensors for rounds, and the manifest.

    Raises:
        ConfigError: a backbone is no ONNX file, mapped features are too long, the graphs cannot be exported, or the
            manifest is too large.
        BackboneMismatch: a backbone was not written by `export-backbone`.
        StateError: the state directory cannot be written.
    """
    feature_size = sum(read_backbone(path).feature_size for path in backbones)
    references = [store.put_file(path) for path in backbones]
    learning = file.learning
    program, shapes, first = None, {}, None
    prototype_size = feature_size
    if learning is not None:
        graphs = cached_graphs(file, feature_size=feature_size, store=store)
        program = program_of(learning, graphs)
        prototype_size = learning.projection_size
        tensors = learning.first_tensors(
            feature_size=feature_size, num_classes=len(file.classes), seed=file.client.seed
        )
        shapes = {name: tensors[name].shape for name in learning.uploaded}
        first = store.put_blob(pack_tensors(tensors), "tensors-0")
    statistics = None
    if (feature_map := feature_map_of(file, feature_size)) is not None:
        statistics = _statistics(feature_map, store, num_classes=len(file.classes))
        prototype_size = statistics.size
    manifest = task_manifest(file, references, program=program, statistics=statistics)
    digest = store.blobs.put(encode(manifest))
    return Task(
        file=file,
        feature_size=feature_size,
        expectation=Expectation(
            *(digest, manifest, prototype_size, shapes),
            max_norm=math.inf if learning is None else learning.max_norm,
        ),
        first_tensors=first,
        backbone_files=tuple(backbones),
    )


def feature_map_of(file: TaskFile, feature_size: int) -> FeatureMap | None:
    """Return the map whose rows devices sum up or average; None for tasks without statistics."""
    if file.algorithm != "statistics":
        return None
    return FeatureMap(feature_size, file.statistics.features, file.client.seed)


def _statistics(feature_map: FeatureMap, store: Store, *, num_classes: int) -> Statistics:
    """Store the map that devices download."""
    from aggregator.graphs.head_export import map_to_onnx

    if feature_map.size > MAX_MAPPED_SIZE:
        given = f"{feature_map.feature_size} features of the backbones and {feature_map.random_features} random ones"
        raise ConfigError(
            f"{given} are more than {MAX_MAPPED_SIZE}: lower statistics.features, or use fewer backbones"
        )
    graph = map_to_onnx(feature_map, num_classes=num_classes)
    return Statistics(map=store.put_blob(graph, "map.onnx"), size=feature_map.size)


def read_backbone(path: Path) -> BackboneMetadata:
    """Return the metadata of a backbone file.

    Raises ConfigError if it is no ONNX file, and BackboneMismatch if `export-backbone` has not written it.
    """
    import onnx
    from google.protobuf.message import DecodeError

    try:
        model = onnx.load(path, load_external_data=False)
    except (OSError, DecodeError) as error:
        raise ConfigError(f"cannot read the backbone {path}: {error}") from error
    return read_metadata({entry.key: entry.value for entry in model.metadata_props}, BackboneMetadata)
