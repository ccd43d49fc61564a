"""Installs heads: checks them, evaluates them on held-out images, and puts the evaluation into the outbox."""

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import msgspec

from edge_client.core.events import HEAD_IN_USE, InstallHead
from edge_client.core.state import UploadItem, head_key
from edge_client.graphs.backbone import Backbone
from edge_client.graphs.onnx_model import isolated_models
from edge_client.heads.head import open_installed
from edge_client.heads.head_evaluation import (
    balanced,
    correct_answers,
    count_answers,
    evaluate_head,
    held_out_images,
)
from edge_client.kinds.image_features import FoundImages, Workspace
from edge_client.kinds.round_submission import local_model_digest, store_initial_model
from edge_client.privacy.policy import HEAD_REFUSED
from edge_client.store.job_folder import Installed, Line, Result
from edge_client.store.stored_values import Heads, InstalledHead, SubmissionReport
from edge_client.training.local_round import feature_size
from protocol.cli import plain
from protocol.errors import (
    ConfigError,
    CrashedBefore,
    GraphRefused,
    PrivacyRefused,
    ProtofleetError,
    StateError,
)
from protocol.log import event
from protocol.wire.codec import encode
from protocol.wire.messages import Evaluation

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Candidate:
    """A head that is to be tried, the task's open backbones, none in a task with rounds, and the held-out images."""

    described: InstalledHead
    backbones: Sequence[Backbone]
    members: Sequence[Sequence[str]]


class HeadInstaller:
    """Installs heads; a round's head is bound to the device's local model."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._store = workspace.store

    def install(self, install: InstallHead) -> Result:
        """Install and evaluate a head; a head that cannot be used is refused with a report.

        There is no report if this device cannot run any head of the task: it has no vote on this one.

        Raises:
            StateError: the disk fails, or has lost a file.
        """
        key, has_vote = head_key(install.head), False
        try:
            candidate = self._prepare(install)
            has_vote = True
            with self._graphs(install):
                return self._try(install, candidate)
        except StateError:
            raise
        except ProtofleetError as error:
            problem = plain(str(error))
            # A graph of the task that is bound to the head's tensors refuses those.
            has_vote |= isinstance(error, GraphRefused) and not isinstance(error, CrashedBefore)
        reason = f"head {install.head.version} refused, the previous head stays in use: {problem}"
        report = self._report(install, problem) if has_vote else None
        return Result(outcome=Installed(head=key, report=report, reason=reason))

    def _report(self, install: InstallHead, problem: str) -> UploadItem:
        zeros = (0,) * len(install.manifest.classes)
        evaluation = Evaluation(
            task=install.task,
            head_version=install.head.version,
            correct=zeros,
            incorrect=zeros,
            problem=HEAD_REFUSED if self._workspace.is_bounded(install.manifest) else problem[:256],
        )
        about = head_key(install.head).hex()
        return self._store.leave("evaluation", encode(evaluation), task=install.task, about=about)

    def _prepare(self, install: InstallHead) -> _Candidate:
        """Run what a head needs of the task: not a part of its trial, because it is no fault of the head."""
        with self._workspace.run_task(install.manifest, purpose="install"):
            found = self._find_images(install)
            with self._graphs(install):
                described = self._describe(install, found)
            installed = self._store.get(Heads).installed
            if installed is None or installed.backbones != described.backbones:
                # A head that works needs backbones that work, and loading one does not show that.
                self._workspace.try_backbones(install.manifest)
            backbones = [] if install.head.tensors else self._workspace.backbones(install.manifest)
        members = held_out_images(self._workspace, install.manifest)
        return _Candidate(described, backbones, members)

    def _graphs(self, install: InstallHead) -> AbstractContextManager[None]:
        """Return a context in which graphs run: where messages must not reveal images, apart from this process.

        Its memory has images, which a graph may read, and reveal by being refused.
        """
        return isolated_models() if self._workspace.is_bounded(install.manifest) else nullcontext()

    def _try(self, install: InstallHead, candidate: _Candidate) -> Result:
        reference, heads, installed = install.head, self._store.get(Heads), candidate.described
        # The head in use before this one, also of another task; this one may be in use already.
        before = filter(None, (heads.installed, heads.previous))
        previous = next((head for head in before if head.key != installed.key), None)
        with self._workspace.culprits.running(installed.key, what="the head"):
            head = open_installed(self._store.blobs, installed, candidate.backbones)
            evaluation = evaluate_head(
                self._workspace,
                head,
                task=install.task,
                manifest=install.manifest,
                version=reference.version,
                members=candidate.members,
                labels=self._store.get(SubmissionReport).labels,
            )
            correct = sum(evaluation.correct)
            total = correct + sum(evaluation.incorrect)
            with_prior = (
                None if evaluation.correct_with_prior is msgspec.UNSET else evaluation.correct_with_prior
            )
            installed = msgspec.structs.replace(
                installed,
                correct=correct,
                total=total,
                correct_with_prior=with_prior,
                balanced=balanced(evaluation, head, install.manifest),
                known=len(head.known_classes),
            )
        if previous is not None and previous.task == install.task:
            previous_correct = self._evaluate_previous(install, previous, candidate)
            evaluation = msgspec.structs.replace(evaluation, previous_correct=previous_correct)
        report = self._store.leave(
            "evaluation", encode(evaluation), task=install.task, about=installed.key.hex()
        )
        self._store.set(Heads(installed, previous))
        line = Line(
            log.name,
            logging.INFO,
            HEAD_IN_USE,
            {
                "head": reference.version,
                "round": reference.round,
                "accuracy": f"{correct / total:.1%} ({correct}/{total})" if total else None,
                "with_prior": f"{with_prior / total:.1%}" if with_prior is not None and total else None,
                "over_all_classes": None if installed.balanced is None else f"{installed.balanced:.1%}",
                "canary": True if install.as_canary else None,
            },
        )
        return Result(outcome=Installed(head=installed.key, report=report), line=line)

    def _evaluate_previous(
        self,
        install: InstallHead,
        previous: InstalledHead,
        candidate: _Candidate,
    ) -> tuple[int, ...]:
        """Return the correct predictions of the previous head per class; none if it has ended a job.

        It has its own trial: a previous head that fails is no obstacle to its successor.
        """
        try:
            with self._workspace.culprits.running(previous.key, what="the previous head", max_deaths=1):
                head = open_installed(self._store.blobs, previous, candidate.backbones)
                answers = count_answers(
                    self._workspace,
                    head,
                    install.manifest,
                    members=candidate.members,
                )
                return correct_answers(answers)
        except ProtofleetError as error:
            event(log, logging.WARNING, "no comparison with the previous head", error=error)
            return ()

    def _describe(self, install: InstallHead, found: FoundImages) -> InstalledHead:
        """Return the stored description of a head, with the local model to which it is bound."""
        manifest, reference = install.manifest, install.head
        local_model, size = b"", 0
        if reference.tensors is not None:
            size = feature_size(manifest, self._store.blobs)
            local_model = self._local_model(install)
            if not local_model:
                local_model = store_initial_model(self._workspace, manifest, reference.tensors, found)
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
        """Return the digest of the local model to bind a round's head to; empty if the device trained in no round.

        If the device goes back to the previous head, it is that one's, unless it is gone.
        """
        previous = self._store.get(Heads).previous
        goes_back = previous is not None and previous.key == head_key(install.head)
        if previous is not None and goes_back and previous.local_model in self._store.blobs:
            return previous.local_model
        return local_model_digest(self._store, install.task)

    def _find_images(self, install: InstallHead) -> FoundImages:
        """Return the images that a round's head is fitted to on a device that trained in no round, or none."""
        is_bounded = self._workspace.is_bounded(install.manifest)
        if install.head.tensors is not None and not is_bounded and not self._local_model(install):
            try:
                return self._workspace.extract(install.manifest)
            # Perturbation needs a secret, which this job has not.
            except (ConfigError, PrivacyRefused) as error:
                event(log, logging.WARNING, "no image to fit the head to", error=error)
        return FoundImages((), ())
