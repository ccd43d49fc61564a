"""`python -m research sum-costs`: bytes and seconds of secure sums, of both operators, for many devices."""

import os
import resource
import tempfile
import time
from pathlib import Path

import click
import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from aggregator.intake.validation import read_message
from benchmarks.data.features import load_features
from benchmarks.data.images import NAMES
from benchmarks.options import repeated
from benchmarks.report import Table, json_option, write_json
from protocol.statistics.integer_rows import triangle_size
from protocol.statistics.noisy_sums import released_values
from protocol.statistics.row_sums import RowSums
from protocol.statistics.second_moment import encode as pack
from protocol.statistics.secure_sums import open_values, sealed_mask, sealed_values, submission_context
from protocol.storage.blobstore import BlobStore
from protocol.wire.arrays import to_tensor
from protocol.wire.codec import digest_of, encode
from protocol.wire.messages import MaskedSubmission, Privacy, SealedMask, Submission, SumRequest
from research.privacy.noisy_sums import BACKBONE, SIZE, map_of_photographs
from sums_operator.checks import Policy
from sums_operator.service import Operator
from sums_operator.state import OperatorState, make_operator, make_task, read_keys

COLUMNS = {
    "devices": ">8,", "upload kB": ">10.1f", "of unmasked": ">12.4f", "request kB": ">11.1f", "reply kB": ">9.1f",
    "device s": ">9.3f", "aggregator s": ">13.2f", "second operator s": ">18.2f", "peak MB": ">8.0f",
}  # fmt: skip

PACKED_COLUMNS = {"images": ">8,", "packed kB": ">10.1f", "masked kB": ">10.1f", "ratio": ">7.2f"}

COST = Privacy(epsilon=1.0, total_epsilon=1.0, delta=1e-5, releases=1)


@click.command("sum-costs")
@repeated("--devices", type=int, default=(10, 1000, 10_000))
@click.option("--classes", type=int, default=10, show_default=True)
@click.option("--size", type=int, default=371, show_default=True, help="D, the length of a row.")
@click.option(
    "--data", type=click.Choice(NAMES), help="Compare also with packed sums of this data set, without noise."
)
@json_option
def command(
    *, devices: tuple[int, ...], classes: int, size: int, data: str | None, json_file: Path | None
) -> None:
    """Measure what a list costs: the device's mask, the aggregator's sum of masked values, the second operator's sum.

    The devices are simulated: masked values are made and sealed one after the other, and opened and added as the
    aggregator does before the request. It reads each submission from the page cache.
    """
    table, runs = Table(COLUMNS, title=f"{classes} classes, {size} values, one process each"), []
    values = released_values(classes=classes, size=size)
    parts = [
        np.zeros(classes, np.int32), np.zeros((classes, size), np.int32),
        np.zeros(triangle_size(size), np.int32),
    ]  # fmt: skip
    for number in devices:
        with tempfile.TemporaryDirectory() as folder:
            row = _measured(Path(folder), parts, number, sum(values.values()))
        table.row(number, *row.values())
        runs.append({"devices": number, **row})
    tables = [table, *([_packed(data, size, upload_kb=runs[0]["upload kB"])] if data else [])]
    write_json(json_file, "sum-costs", tables=tables, runs=runs)


def _packed(name: str, size: int, *, upload_kb: float) -> Table:
    """Return the table of a device's packed sums, which `statistics` uploads without noise, beside its masked ones."""
    table = Table(PACKED_COLUMNS, title=f"{name}, {BACKBONE}, one device")
    data = load_features(name, backbone=BACKBONE, image_size=SIZE, at_most=10_000)
    how = map_of_photographs(size)
    for images in (200, 1000, 10_000):
        sums = RowSums(size)
        rows, labels = how.rows(data.train[:images]), data.train_labels[:images]
        for label in range(data.classes):
            sums.add(label, rows[labels == label])
        present, counts, class_sums, triangle = sums.result()
        packed = encode(
            Submission(
                task=bytes(32),
                sequence=1,
                prototypes=to_tensor(class_sums),
                labels=to_tensor(present),
                counts=to_tensor(counts),
                images=images,
                tensors={"second_moment": pack(triangle, counts, class_sums)},
            )
        )
        table.row(images, len(packed) / 1e3, upload_kb, 1e3 * upload_kb / len(packed))
    return table


def _measured(folder: Path, parts: list[np.ndarray], number: int, values: int) -> dict[str, float]:
    make_operator(folder / "sums")
    blobs, stored = BlobStore(folder / "blobs"), b""
    keys, seal_key = read_keys(folder / "sums"), bytes.fromhex(make_task(folder / "sums", folder / "card"))
    own = X25519PrivateKey.generate()
    key, private = own.public_key().public_bytes_raw(), own.private_bytes_raw()
    total, submissions, seconds, added_s, upload = np.zeros(values, np.uint32), [], 0.0, 0.0, b""
    for index in range(number):
        device, seed = f"device-{index:06}", os.urandom(32)
        context = submission_context(fleet="f", task=bytes(32), device=device, sequence=1, values=values)
        start = time.perf_counter()
        hidden = sealed_values(parts, seed, key=key, context=context)
        mask = sealed_mask(
            seed, seal_key=seal_key, min_devices=2, signing_key=digest_of(device.encode()), context=context
        )
        seconds += time.perf_counter() - start
        submissions.append(MaskedSubmission(device=device, sequence=1, mask=mask))
        if not upload:
            stored = blobs.put(upload := _upload(hidden, mask))
        start = time.perf_counter()
        read_message(blobs.read(stored))
        total += open_values(hidden, private_key=private, context=context)
        added_s += time.perf_counter() - start
    request = encode(
        SumRequest(task=bytes(32), seal_key=seal_key, values=values, submissions=tuple(submissions))
    )
    state = OperatorState(folder / "sums")
    start = time.perf_counter()
    reply = Operator(keys, state, Policy("f")).answer(request)
    answered_s = time.perf_counter() - start
    state.close()
    return {
        "upload kB": len(upload) / 1e3,
        "of unmasked": len(upload) / len(_unmasked(parts)),
        "request kB": len(request) / 1e3,
        "reply kB": len(encode(reply)) / 1e3,
        "device s": seconds / number,
        "aggregator s": added_s,
        "second operator s": answered_s,
        "peak MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def _upload(sealed: bytes, mask: SealedMask) -> bytes:
    """Return an encoded submission of masked values."""
    none = to_tensor(np.zeros(0, np.uint8))
    return encode(
        Submission(
            task=bytes(32),
            sequence=1,
            prototypes=to_tensor(np.zeros((0, SIZE), np.int32)),
            labels=none,
            counts=none,
            images=0,
            tensors={"sealed": to_tensor(np.frombuffer(sealed, np.uint8))},
            privacy=COST,
            mask=mask,
        )
    )


def _unmasked(parts: list[np.ndarray]) -> bytes:
    """Return an encoded submission of counts, class sums and second moment."""
    counts, sums, triangle = map(to_tensor, parts)
    classes = len(parts[0])
    return encode(
        Submission(
            task=bytes(32),
            sequence=1,
            prototypes=sums,
            labels=to_tensor(np.arange(classes, dtype=np.uint16)),
            counts=to_tensor(np.ones(classes, np.uint8)),
            images=classes,
            tensors={"counts": counts, "second_moment": triangle},
            privacy=COST,
        )
    )
