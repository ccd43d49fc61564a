"""One training, as a process of its own: `python -m aggregator.training.train_head JOB.json`.

The daemon goes on taking submissions meanwhile, never imports torch, and gets the memory back. Progress goes
to stdout as one JSON object a line; the results are files in the job's folder.
"""

import dataclasses
from pathlib import Path

from aggregator.algorithms.fedtc import RECIPES, Recipe, train_head
from aggregator.config.schema import Training
from aggregator.graphs.fuse import fuse
from aggregator.graphs.head_export import head_to_onnx, max_abs_difference
from aggregator.ingest.validation import Expectation, Prototypes, check_submission, read_message
from aggregator.training.jobs import HeadJob, Result, run_as_program, say
from aggregator.training.outlier_detection import Judgment, judge
from aggregator.training.robust_training_set import withstanding
from protocol.errors import ProtofleetError
from protocol.metadata import HeadMetadata
from protocol.storage.blobstore import BlobStore, write_atomically
from protocol.wire.codec import decode
from protocol.wire.messages import MAX_MANIFEST_BYTES, Submission, TaskManifest

MAX_ONNX_DIFFERENCE = 1e-4


def recipe_of(training: Training, *, private: bool = False) -> Recipe:
    """The recipe that a task file asks for.

    Where prototypes are `private`, they bear noise, which restoring the variance of their images would multiply by
    the square root of their number: it is left out unless the file says otherwise.
    """
    recipe = RECIPES[training.recipe]
    restore = False if training.restore is None and private else training.restore
    if restore is not None:
        recipe = dataclasses.replace(recipe, restore=restore, mix=recipe.mix and restore)
    if training.epochs is not None:
        recipe = dataclasses.replace(recipe, epochs=training.epochs, min_steps=0)
    return recipe


def torch_device(wanted: str) -> str:
    """The device to train on; `auto` is CUDA where there is one.

    Raises:
        ProtofleetError: a CUDA device was asked for and there is none.
    """
    import torch

    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if wanted.startswith("cuda") and not torch.cuda.is_available():
        raise ProtofleetError(f'training.device is "{wanted}", but torch sees no CUDA device: use "auto"')
    return wanted


def run(job: HeadJob) -> Result:
    """Train a head, check it against torch, and write it, and fused with the backbone if there is only one.

    The same submissions make the same bytes: how long it took is told beside them.

    Raises:
        ProtofleetError: the data cannot be trained on, or the ONNX head differs from torch.
    """
    blobs = BlobStore(Path(job.blobs))
    task = bytes.fromhex(job.task)
    manifest = decode(blobs.read(task), TaskManifest, max_bytes=MAX_MANIFEST_BYTES)
    expectation = Expectation(task, manifest, job.feature_size)
    parts = {
        device: _prototypes(blobs.read(bytes.fromhex(digest)), expectation)
        for device, digest in job.members.items()
    }
    judgment = Judgment({})
    if job.robust.detect_outliers:
        judgment = judge(
            parts,
            classes=manifest.classes,
            threshold=job.robust.threshold,
            readmitted=job.readmitted,
        )
    data = withstanding(
        [part for name, part in parts.items() if name not in judgment.aside], by=job.robust.combine
    )
    device = torch_device(job.training.device)
    say({"device": device, "prototypes": len(data.labels)})
    trained = train_head(
        data.values,
        data.labels,
        data.counts,
        num_classes=len(manifest.classes),
        recipe=recipe_of(job.training, private=manifest.differential_privacy is not None),
        seed=job.training.seed,
        device=device,
        on_epoch=lambda epoch, epochs, loss: say({"epoch": epoch, "epochs": epochs, "loss": loss}),
    )
    figures = {
        "loss": trained.loss,
        "accuracy": trained.accuracy,
        "epochs": float(trained.epochs),
    }
    metadata = HeadMetadata(
        classes=manifest.classes,
        version=job.version,
        task=job.task,
        backbones=tuple(backbone.digest.hex() for backbone in manifest.backbones),
        feature_size=job.feature_size,
        training=figures,
    )
    head = head_to_onnx(trained.module, metadata=metadata)
    difference = max_abs_difference(trained.module, head, data.values[:256])
    if not difference <= MAX_ONNX_DIFFERENCE:
        raise ProtofleetError(
            f"the ONNX head differs from torch by {difference:.3g}, more than {MAX_ONNX_DIFFERENCE}: not published"
        )
    write_atomically(Path(job.folder) / "head.onnx", head)
    if len(manifest.backbones) == 1:
        model = fuse(blobs.read(manifest.backbones[0].digest), head)
        write_atomically(Path(job.folder) / "model.onnx", model)
    metrics = {**figures, "seconds": trained.seconds, "onnx_max_abs_diff": difference}
    return Result(
        prototypes=len(data.labels), metrics=metrics, aside=dict(judgment.aside), doubt=judgment.doubt
    )


def _prototypes(payload: bytes, expectation: Expectation) -> Prototypes:
    message = read_message(payload)
    if not isinstance(message, Submission):
        raise ProtofleetError("expected a stored submission, got an evaluation")
    return check_submission(message, expectation)


if __name__ == "__main__":
    run_as_program(HeadJob, run)
