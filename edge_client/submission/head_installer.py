"""Installs heads: checks them, evaluates them on held-out images, and puts the evaluation into the outbox."""

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from edge_client.agent.events import HeadInstalled, InstallHead
from edge_client.agent.state import UploadItem, head_key
from edge_client.data.extraction import Interrupted
from edge_client.data.holdout import held_out
from edge_client.data.images import find_images
from edge_client.inference import Head, evaluate, open_installed
from edge_client.privacy.policy import HEAD_REFUSED, is_private
from edge_client.runtime.backbone import Backbone
from edge_client.storage.stored_values import Heads, HeadTrial, InstalledHead
from edge_client.submission.image_features import FoundImages, Workspace, backbone_digests
from edge_client.submission.round_submission import RoundTraining
from edge_client.training.local_round import feature_size
from protocol.balanced_accuracy import balanced_accuracy
from protocol.cli import plain
from protocol.errors import ConfigError, GraphRefused, ProtofleetError, StateError
from protocol.log import event
from protocol.wire.codec import encode
from protocol.wire.messages import Evaluation, TaskManifest

log = logging.getLogger(__name__)

MAX_CRASHES = 3
"""Consecutive program ends during the trial of a head, after which the head is refused; power loss counts as well."""


class HeadInstaller:
    """Installs heads; a round's head is bound to the local model of `rounds`."""

    def __init__(self, workspace: Workspace, rounds: RoundTraining) -> None:
        self._workspace = workspace
        self._store = workspace.store
        self._rounds = rounds

    def install(self, install: InstallHead, should_stop: Callable[[], bool]) -> HeadInstalled:
        """Install and evaluate a head; a head that cannot be used is refused with a report.

        Raises:
            Interrupted: `should_stop` returned True.
            StateError: the disk fails.
        """
        key, problem = head_key(install.head), install.problem
        try:
            if not problem:
                # Not a part of the trial: a device that is stopped meanwhile has not tried the head.
                found = self._find_images(install, should_stop)
                with self._counting_crashes(key):
                    return HeadInstalled(key, self._install(install, found, should_stop))
        except StateError:
            raise
        except ProtofleetError as error:
            problem = plain(str(error))
        zeros = (0,) * len(install.manifest.classes)
        evaluation = Evaluation(
            task=install.task,
            head_version=install.head.version,
            correct=zeros,
            incorrect=zeros,
            problem=HEAD_REFUSED if is_private(install.manifest) else problem[:256],
        )
        report = self._store.outbox.keep("evaluation", encode(evaluation), task=install.task, about=key.hex())
        reason = f"head {install.head.version} refused, the previous head stays in use: {problem}"
        return HeadInstalled(key, report, reason)

    @contextlib.contextmanager
    def _counting_crashes(self, key: bytes) -> Iterator[None]:
        """Record that a head is on trial, so that one that crashes the program is not tried at every start."""
        last = self._store.get(HeadTrial)
        attempts = last.attempts + 1 if last.head == key else 1
        self._store.set(HeadTrial(key, attempts))
        try:
            if attempts > MAX_CRASHES:
                raise GraphRefused(f"the program ended {MAX_CRASHES} times while testing it")
            yield
        finally:
            self._store.set(HeadTrial())

    def _install(
        self, install: InstallHead, found: FoundImages, should_stop: Callable[[], bool]
    ) -> UploadItem:
        reference, heads = install.head, self._store.get(Heads)
        installed = self._describe(install, found)
        # The task's head in use before this one; this one may be in use already.
        before = filter(None, (heads.installed, heads.previous))
        previous = next(
            (head for head in before if head.task == install.task and head.key != installed.key), None
        )
        backbones = [] if reference.tensors else self._workspace.backbones(install.manifest)
        head = open_installed(self._store.blobs, installed, backbones)
        evaluation = evaluate_head(
            self._workspace,
            head,
            task=install.task,
            manifest=install.manifest,
            version=reference.version,
            previous=self._open_previous(previous, backbones),
            should_stop=should_stop,
        )
        correct, total = sum(evaluation.correct), sum(evaluation.correct) + sum(evaluation.incorrect)
        installed = msgspec.structs.replace(
            installed,
            correct=correct,
            total=total,
            balanced=_balanced(evaluation, head, install.manifest),
            known=len(head.known_classes),
        )
        report = self._store.outbox.keep(
            "evaluation",
            encode(evaluation),
            task=install.task,
            about=installed.key.hex(),
            facts=(Heads(installed, previous),),
        )
        event(
            log,
            logging.INFO,
            "head in use",
            head=reference.version,
            round=reference.round,
            accuracy=f"{correct / total:.1%} ({correct}/{total})" if total else None,
            over_all_classes=None if installed.balanced is None else f"{installed.balanced:.1%}",
            canary=True if install.as_canary else None,
        )
        return report

    def _open_previous(self, previous: InstalledHead | None, backbones: Sequence[Backbone]) -> Head | None:
        try:
            return open_installed(self._store.blobs, previous, backbones) if previous else None
        except ProtofleetError as error:
            event(log, logging.WARNING, "no comparison with the previous head", error=error)
            return None

    def _describe(self, install: InstallHead, found: FoundImages) -> InstalledHead:
        """Return the stored description of a head, with the local model to which it is bound."""
        manifest, reference = install.manifest, install.head
        local_model, size = b"", 0
        if reference.tensors is not None:
            size = feature_size(manifest, self._store.blobs)
            local_model = self._local_model(install)
            if not local_model:
                local_model = self._rounds.store_initial_model(manifest, reference.tensors, found)
        return InstalledHead(
            head=reference.head.digest,
            version=reference.version,
            task=install.task,
            backbones=tuple(blob.digest for blob in manifest.backbones),
            classes=manifest.classes,
            round=reference.round,
            tensors=reference.tensors.digest if reference.tensors else b"",
            local_model=local_model,
            feature_size=size,
        )

    def _local_model(self, install: InstallHead) -> bytes:
        """Return the digest of the local model to bind a round's head to; empty if the device trained in no round."""
        return self._previous_local_model(install) or self._rounds.local_model_digest(install.task)

    def _previous_local_model(self, install: InstallHead) -> bytes:
        """Return the local model of the previous head if the device goes back to it; empty if it is gone."""
        previous = self._store.get(Heads).previous
        if previous is None or previous.key != head_key(install.head):
            return b""
        return previous.local_model if previous.local_model in self._store.blobs else b""

    def _find_images(self, install: InstallHead, should_stop: Callable[[], bool]) -> FoundImages:
        """Return the images that a round's head is fitted to on a device that trained in no round, or none."""
        if install.head.tensors is not None and not self._local_model(install):
            try:
                return self._workspace.extract(install.manifest, should_stop)
            except ConfigError as error:
                event(log, logging.WARNING, "no image to fit the head to", error=error)
        return FoundImages((), ())


def evaluate_head(
    workspace: Workspace,
    head: Head,
    *,
    task: bytes,
    manifest: TaskManifest,
    version: int,
    previous: Head | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Evaluation:
    """Count correct and incorrect predictions per class on the held-out images, also of the previous head.

    Only images whose features are cached count. If the data folder does not match the task, none counts: that is no
    fault of the head. Under differential privacy none counts, because even a failure on an image is private.

    Raises:
        GraphRefused: the head fails on these images.
        Interrupted: `should_stop`, called before every run, returned True.
    """
    members = _held_out_images(workspace, manifest)

    def features(of_class: Sequence[str]) -> Iterator[NDArray[np.float32]]:
        for chunk in workspace.cache.chunks(of_class, *backbone_digests(manifest)):
            if should_stop():
                raise Interrupted("the evaluation was interrupted")
            yield chunk

    def count_correct(head: Head) -> tuple[int, ...]:
        return tuple(
            evaluate(head, features(of_class), label=label) for label, of_class in enumerate(members)
        )

    correct = count_correct(head)
    previous_correct: tuple[int, ...] = ()
    if previous is not None:
        with contextlib.suppress(GraphRefused):
            previous_correct = count_correct(previous)
    return Evaluation(
        task=task,
        head_version=version,
        correct=correct,
        incorrect=tuple(len(of_class) - count for of_class, count in zip(members, correct, strict=True)),
        previous_correct=previous_correct,
    )


def _balanced(evaluation: Evaluation, head: Head, manifest: TaskManifest) -> float | None:
    """Return a personal model's accuracy over all classes that the fleet knows; None if the model is the fleet's.

    No other device can evaluate it: classes of which this one has no held-out images count as not recognized.
    """
    if manifest.program is None or not manifest.program.persistent:
        return None
    return balanced_accuracy(evaluation.correct, evaluation.incorrect, head.known_classes)


def _held_out_images(workspace: Workspace, manifest: TaskManifest) -> list[list[str]]:
    """Return the identities of the images to evaluate on, by class."""
    members: list[list[str]] = [[] for _ in manifest.classes]
    if is_private(manifest):
        return members
    try:
        images = find_images(workspace.settings.data, manifest.classes)
    except ConfigError as error:
        event(log, logging.WARNING, "no image to evaluate the head on", error=error)
        return members
    known, kept = (
        workspace.cache.known(*backbone_digests(manifest)),
        held_out(images, workspace.settings.holdout),
    )
    for image in images:
        if image.identity in known and image.relative in kept:
            members[image.label].append(image.identity)
    return members
