"""Installs heads: checks and evaluates them, and puts the evaluation into the outbox."""

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence

import msgspec

from edge_client.agent.events import HeadInstalled, InstallHead, RefuseHead
from edge_client.agent.state import head_key
from edge_client.agent.upload_item import UploadItem
from edge_client.inference import Head, open_installed
from edge_client.privacy.policy import HEAD_REFUSED, is_private
from edge_client.runtime.backbone import Backbone
from edge_client.storage.stored_values import Heads, HeadTrial, InstalledHead
from edge_client.submission.evaluation import evaluate_head
from edge_client.submission.features import Workspace
from edge_client.submission.prepared_submission import FoundImages
from edge_client.submission.round_submission import RoundTraining
from edge_client.training.local_round import feature_size
from protocol.errors import ConfigError, GraphRefused, ProtofleetError, StateError
from protocol.log import event
from protocol.wire.codec import encode
from protocol.wire.messages import Evaluation

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
            StateError: the disk fails.
        """
        key = head_key(install.head)
        try:
            with self._counting_crashes(key):
                return HeadInstalled(key, self._install(install, should_stop))
        except StateError:
            raise
        except ProtofleetError as error:
            return self.refuse(RefuseHead(install.task, install.manifest, install.head, str(error)))

    def refuse(self, refuse: RefuseHead) -> HeadInstalled:
        """Put a report that a head is not used into the outbox."""
        zeros = (0,) * len(refuse.manifest.classes)
        evaluation = Evaluation(
            task=refuse.task,
            head_version=refuse.head.version,
            correct=zeros,
            incorrect=zeros,
            problem=HEAD_REFUSED if is_private(refuse.manifest) else refuse.reason[:256],
        )
        key = head_key(refuse.head)
        report = self._store.outbox.keep("evaluation", encode(evaluation), task=refuse.task, about=key.hex())
        reason = f"head {refuse.head.version} refused, the previous head stays in use: {refuse.reason}"
        return HeadInstalled(key, report, reason)

    @contextlib.contextmanager
    def _counting_crashes(self, key: bytes) -> Iterator[None]:
        """Record that a head is on trial, so that one that crashes the program is not tried at every start.

        Raises:
            GraphRefused: the program ended in each of the last trials.
        """
        last = self._store.get(HeadTrial)
        attempts = last.attempts + 1 if last.head == key else 1
        self._store.set(HeadTrial(key, attempts))
        try:
            if attempts > MAX_CRASHES:
                raise GraphRefused(f"the program ended {MAX_CRASHES} times while testing it")
            yield
        finally:
            self._store.set(HeadTrial())

    def _install(self, install: InstallHead, should_stop: Callable[[], bool]) -> UploadItem:
        reference = install.head
        installed, previous = self._describe(install, should_stop), self._previous_head(install)
        backbones = [] if reference.tensors else self._workspace.backbones(install.manifest)
        evaluation = evaluate_head(
            open_installed(self._store.blobs, installed, backbones),
            task=install.task,
            manifest=install.manifest,
            version=reference.version,
            local=self._workspace.local,
            cache=self._workspace.cache,
            previous=self._open_previous(previous, backbones),
        )
        correct, total = sum(evaluation.correct), sum(evaluation.correct) + sum(evaluation.incorrect)
        installed = msgspec.structs.replace(installed, correct=correct, total=total)
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
            canary=True if install.as_canary else None,
        )
        return report

    def _previous_head(self, install: InstallHead) -> InstalledHead | None:
        """Return the task's head in use before this one; this one may be in use already."""
        heads, key = self._store.get(Heads), head_key(install.head)
        candidates = filter(None, (heads.installed, heads.previous))
        return next((head for head in candidates if head.task == install.task and head.key != key), None)

    def _open_previous(self, previous: InstalledHead | None, backbones: Sequence[Backbone]) -> Head | None:
        try:
            return open_installed(self._store.blobs, previous, backbones) if previous else None
        except ProtofleetError as error:
            event(log, logging.WARNING, "no comparison with the previous head", error=error)
            return None

    def _describe(self, install: InstallHead, should_stop: Callable[[], bool]) -> InstalledHead:
        """Return the stored description of a head, with the local model to which it is bound."""
        manifest, reference = install.manifest, install.head
        local_model, size = b"", 0
        if reference.tensors is not None:
            size = feature_size(manifest, self._store.blobs)
            local_model = self._previous_local_model(install) or self._rounds.local_model_digest(install.task)
            if not local_model:
                found = self._find_images(install, should_stop)
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

    def _previous_local_model(self, install: InstallHead) -> bytes:
        """Return the local model of the previous head if the device goes back to it; empty if it is gone."""
        previous = self._store.get(Heads).previous
        if previous is None or previous.key != head_key(install.head):
            return b""
        return previous.local_model if previous.local_model in self._store.blobs else b""

    def _find_images(self, install: InstallHead, should_stop: Callable[[], bool]) -> FoundImages:
        """Return the images of a device that trained in no round; it may have none."""
        try:
            return self._workspace.extract(install.manifest, should_stop)
        except ConfigError as error:
            event(log, logging.WARNING, "no image to fit the head to", error=error)
            return FoundImages((), ())
