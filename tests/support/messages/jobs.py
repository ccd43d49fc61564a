"""Trainings of a head on submissions that are stored for them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from aggregator.algorithms.algorithm import Training
from aggregator.intake.validation import Expectation
from aggregator.job_processes import JobEnded, JobOrder
from aggregator.storage.blobs import Blobs
from aggregator.training.jobs import HeadJob, StatisticsJob, Workspace
from protocol.wire.codec import encode
from protocol.wire.messages import Submission, TaskManifest
from tests.support.messages.statistics import FEATURE_MAP
from tests.support.messages.submissions import FEATURE_SIZE, MANIFEST


class NoJobs:
    """Takes jobs, and runs none."""

    folder: Path | None = None
    ended: JobEnded | None = None

    def start(self, order: JobOrder) -> None:
        pass

    def stop(self) -> None:
        pass


def workspace(blobs: Blobs, folder: Path) -> Workspace:
    """Return a workspace in a folder, which is created."""
    folder.mkdir(parents=True, exist_ok=True)
    return Workspace(blobs, folder, lambda _: None)


def head_job(blobs: Blobs, *sent: Submission, manifest: TaskManifest = MANIFEST, **changes: Any) -> HeadJob:
    """Return the training of head 1 on the submissions of the devices dev0, dev1 and so on."""
    job = HeadJob(
        version=1,
        task=blobs.put(encode(manifest)).hex(),
        members={f"dev{number}": blobs.put(encode(each)).hex() for number, each in enumerate(sent)},
        feature_size=FEATURE_SIZE,
        training=Training(device="cpu"),
    )
    return msgspec.structs.replace(job, **changes)


def statistics_job(
    blobs: Blobs, sent: Mapping[str, Submission], expectation: Expectation, **changes: Any
) -> StatisticsJob:
    """Return the training of head 1 on the statistics of these devices."""
    job = StatisticsJob(
        version=1,
        task=blobs.put(encode(expectation.manifest)).hex(),
        members={device: blobs.put(encode(each)).hex() for device, each in sent.items()},
        feature_size=FEATURE_MAP.feature_size,
        random_features=FEATURE_MAP.random_features,
        seed=FEATURE_MAP.seed,
    )
    return msgspec.structs.replace(job, **changes)
