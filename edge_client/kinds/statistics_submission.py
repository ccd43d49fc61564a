"""Submissions of statistics: sums of the images' mapped features, or of groups of images (ADR 0029)."""

import contextlib
import logging
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from edge_client.core.events import BuildSubmission
from edge_client.graphs.program_graph import Graph, open_graph
from edge_client.kinds.image_features import FoundImages, Workspace, training_feature_keys
from edge_client.kinds.image_grouping import Grouping, ReleasedImages
from edge_client.kinds.prepared_submission import PreparedSubmission, class_reports
from edge_client.prototypes.statistics import group_rows, to_rows
from edge_client.training.trainer import project
from protocol.errors import GraphRefused
from protocol.log import event
from protocol.statistics import second_moment
from protocol.statistics.row_sums import RowSums
from protocol.wire.messages import Statistics, TaskManifest

log = logging.getLogger(__name__)


def make_sums(
    workspace: Workspace, build: BuildSubmission, found: FoundImages, grouping: Grouping
) -> PreparedSubmission:
    """Return class sums and second moment of the mapped features.

    Raises:
        NoPrototype: no class has enough images.
        GraphRefused: the map cannot be used, or its values are no integers in range.
        Diverged: the map gives NaN or infinity.
    """
    task, released = build.manifest, grouping.classes
    with contextlib.closing(_MappedFeatures(workspace, task, released)) as mapped:
        sums = RowSums(mapped.size)
        for label, each in enumerate(released):
            for rows in mapped.rows(each):
                sums.add(label, rows)
    reports = class_reports(task, found, released)
    labels, counts, class_sums, triangle = sums.result()
    warning = ""
    if (images := int(counts.sum())) < mapped.size:
        warning = (
            f"the sums of {images} images reveal features of single ones, as a feature has {mapped.size} values: add "
            "images, or a task with a larger batch_size"
        )
        event(log, logging.WARNING, "sums reveal features of single images", images=images, size=mapped.size)
    return PreparedSubmission(
        prototypes=class_sums,
        labels=labels,
        counts=counts,
        classes=reports,
        unusable=found.unusable,
        tensors={"second_moment": second_moment.encode(triangle, counts, class_sums)},
        form="class sum",
        warning=warning,
    )


def make_groups(
    workspace: Workspace, build: BuildSubmission, found: FoundImages, grouping: Grouping
) -> PreparedSubmission:
    """Return the rows of groups of images; raises as `make_sums`."""
    task, released = build.manifest, grouping.classes
    with contextlib.closing(_MappedFeatures(workspace, task, released)) as mapped:
        made = [
            group_rows(mapped.rows(each), np.array(each.prototypes, np.intp), size=mapped.size)
            for each in released
        ]
    sizes = [counts for _, counts in made]
    reports = class_reports(task, found, released, sizes)
    return PreparedSubmission(
        prototypes=np.concatenate([rows for rows, _ in made]),
        labels=np.repeat(np.arange(len(made), dtype=np.uint32), list(map(len, sizes))),
        counts=np.concatenate(sizes),
        classes=reports,
        unusable=found.unusable,
        form="group",
    )


class _MappedFeatures:
    """Rows of images: their features from the cache, mapped by the task's graph."""

    def __init__(self, workspace: Workspace, task: TaskManifest, released: Sequence[ReleasedImages]) -> None:
        if task.statistics is None:
            raise GraphRefused("the task has no map of features")
        self.size = task.statistics.size
        self._workspace, self._keys = workspace, training_feature_keys(task)
        self._done, self._images = 0, sum(len(each.images) for each in released)
        self._graph = _open_map(workspace, task, task.statistics)
        self._progress = workspace.progress("summing features")

    def close(self) -> None:
        """End the progress."""
        self._progress.close()

    def rows(self, released: ReleasedImages) -> Iterator[NDArray[np.int8]]:
        """Yield the rows of one class's images, int8 (any, D)."""
        identities = [image.identity for image in released.images]
        for features in self._workspace.cache.chunks(identities, *self._keys):
            yield to_rows(project(self._graph, features, state={}, tensors={}))
            self._done += len(features)
            self._progress.update(self._done, self._images)


def _open_map(workspace: Workspace, task: TaskManifest, wanted: Statistics) -> Graph:
    graph = open_graph(workspace.store.blobs.read(wanted.map.digest), role="project")
    size = sum(each.metadata.feature_size for each in workspace.backbones(task))
    expected, got = (size, wanted.size), (graph.metadata.feature_size, graph.metadata.projection_size)
    if got != expected:
        raise GraphRefused(
            f"expected a map of {expected[0]} features to {expected[1]} values, {wanted.map.name} is one of {got[0]} "
            f"to {got[1]}"
        )
    return graph
