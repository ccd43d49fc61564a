"""The job that calibrates a head.

It reads the head's file, calibrates its confidence and sets its novelty threshold. The same counts make the same bytes.
"""

import numpy as np

from aggregator.algorithms.confidence import fit_map
from aggregator.algorithms.novelty import novelty_threshold
from aggregator.graphs.calibrated_head import max_difference, with_calibration
from aggregator.storage.heads import CALIBRATED_FROM
from aggregator.training.head_job import MAX_ONNX_DIFFERENCE, random_features
from aggregator.training.jobs import CalibrationJob, Result, Workspace, write_head
from protocol.errors import ProtofleetError


def run(job: CalibrationJob, workspace: Workspace) -> Result:
    """Fit the map, verify the head with it, and write it.

    Raises:
        ProtofleetError: the head cannot be calibrated, or ONNX Runtime computes something else.
    """
    manifest, before = job.manifest(workspace.blobs), workspace.blobs.read(bytes.fromhex(job.head))
    images = np.array(job.images)
    confidence = fit_map(np.array(job.correct), images, classes=len(manifest.classes))
    figures = {CALIBRATED_FROM: float(job.version - 1), "calibration_images": float(images.sum())}
    threshold = novelty_threshold(np.array(job.novelty)) if any(job.novelty) else None
    head = with_calibration(
        before, confidence, version=job.version, figures=figures, novelty_threshold=threshold
    )
    difference = max_difference(before, head, confidence, random_features(job.feature_size))
    if not difference <= MAX_ONNX_DIFFERENCE:
        raise ProtofleetError(
            f"the calibrated head in ONNX Runtime differs by {difference:.3g}, more than {MAX_ONNX_DIFFERENCE}"
        )
    write_head(head, manifest, workspace)
    return Result(metrics={**figures, "onnx_max_difference": difference})
