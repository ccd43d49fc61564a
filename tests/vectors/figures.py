"""Vectors of figures: the outlier filter, groups, prototypes in bytes, canary ranks and bins of confidence."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_client.privacy.image_groups import more_needed, pack, regroup
from edge_client.prototypes.outlier_filter import closest_features
from edge_client.prototypes.prototype_averaging import average
from edge_client.store.image_group_record import Partition
from protocol.statistics.confidence import confidence_bins, novelty_bins
from protocol.wire.canary_rank import canary_rank
from protocol.wire.principal_prototypes import PrincipalPrototypes
from protocol.wire.quantization import dequantize, dequantized_block, principal_fields, quantize, range_of


def features(images: int, size: int, *, seed: int, spread: float = 0.5) -> NDArray[np.float32]:
    """Return numbers that look like features, float32 (images, size), of few digits."""
    values = [((at + 1) * (seed + 3) * 2654435761 >> 9) % 2001 - 1000 for at in range(images * size)]
    noise = np.array(values, np.float64).reshape(images, size) * spread / 1000
    return np.round(noise + 1 + np.arange(size) % 3, 3).astype(np.float32)


def outlier_filter() -> dict[str, Any]:
    """Return classes of features, and which of them are kept."""
    tied = features(6, 4, seed=2)
    tied[[1, 4]] = tied[0]
    zeros = features(5, 4, seed=3)
    zeros[2] = 0
    far = features(20, 8, seed=4, spread=0.2)
    far[[3, 11]] *= -1
    opposite = np.array([[1, 0], [-1, 0], [0, 2], [0, -2]], np.float32)
    single = np.array([[3, 4, 0]], np.float32)
    cases: list[tuple[str, NDArray[np.float32], float]] = [
        ("two outliers of 20", far, 0.9),
        ("all are kept", far, 1.0),
        ("0.99 of 20, rounded up, are 20", far, 0.99),
        ("one is kept", far, 0.001),
        ("0.07 of 100 are 7, not 8 as in double precision", features(100, 2, seed=5), 0.07),
        ("equal scores: the earlier ones", tied, 0.5),
        ("a feature of zeros has the score 0", zeros, 0.6),
        ("a mean of zeros: all scores are 0", opposite, 0.5),
        ("one image", single, 0.5),
        ("large and small features", far * np.float32(1e6), 0.8),
        (
            "two lengths: only the direction counts",
            far * np.linspace(1, 90, 20, dtype=np.float32)[:, None],
            0.8,
        ),
    ]
    return {
        "about": "`features` of one class, float32 (n, L): `kept` is true for those that the filter keeps.",
        "cases": [
            {
                "name": name,
                "alpha": alpha,
                "features": values.tolist(),
                "kept": _kept(values, alpha),
            }
            for name, values, alpha in cases
        ],
    }


def _kept(values: NDArray[np.float32], alpha: float) -> list[bool]:
    kept: list[bool] = closest_features(lambda: [values], alpha=alpha).tolist()
    return kept


def prototypes() -> dict[str, Any]:
    """Return groups of images, averages of features, and prototypes as bytes."""
    return {
        "about": "`groups`: the sizes of a class's groups after each step has added images; `waiting` images are in "
        "none. `packed`: the sizes of prototypes of groups of these sizes, in their order. `averages`: features, "
        "float32 (n, L), with the number of each one's prototype, give prototypes, float16 (m, L), and counts. "
        "`quantized`: prototypes, float16 (m, L), as `prototypes`, u1 (m, L), and `range`, f2 (2, L); an aggregator "
        "reads `restored`, float32 (m, L). `principal`: the same with a coarse range and a block; a client without "
        "blocks needs none of it.",
        "groups": [
            _groups("5 images of 5", [5]),
            _groups("4 wait", [4, 1]),
            _groups("the remainder joins the last group", [13]),
            _groups("later images wait until they fill a group", [7, 3, 1, 1, 9]),
            _groups("one group of min_images, then of batch_size", [2, 1, 1, 4, 5], min_images=3),
            _groups("a larger min_images", [7, 1, 9], batch_size=5, min_images=8),
            _groups("single images", [3, 1], batch_size=1, min_images=1),
        ],
        "packed": [
            {
                "groups": sizes,
                "batch_size": batch_size,
                "prototypes": [len(each) for each in pack(_keys(sizes), batch_size=batch_size)],
            }
            for sizes, batch_size in (
                ([5, 6], 5),
                ([5, 6], 8),
                ([5, 6, 5, 5], 8),
                ([3], 5),
                ([3, 5], 5),
                ([], 5),
            )
        ],
        "averages": [
            _average("one prototype", features(5, 4, seed=6), [0] * 5),
            _average(
                "three prototypes, in any order",
                features(12, 6, seed=7),
                [0, 1, 2, 2, 1, 0, 0, 1, 2, 1, 0, 1],
            ),
            _average(
                "rounded to float32, then to float16", features(3, 3, seed=8) / np.float32(3), [0, 0, 0]
            ),
            # 1 + 2^-11 is halfway between two numbers of float16; float32 drops what lies above it.
            _average("rounded twice", np.array([[1 + 2**-11], [1 + 2**-11 + 2**-23]], np.float32), [0, 0]),
            _average("large values", np.array([[65000, 1e-7], [65000, -1e-7]], np.float32), [0, 0]),
        ],
        "quantized": [
            _quantized("a range for each feature", features(7, 5, seed=9)),
            _quantized("one prototype: all integers are 0", features(1, 4, seed=10)),
            _quantized("a feature of one value", np.array([[1, 5], [1, 6], [1, 7]], np.float32)),
            _quantized("ties: to even", np.array([[0], [0.5], [1.5], [2.5], [255]], np.float32)),
            _quantized(
                "the largest and the smallest numbers", np.array([[65504, 2**-24], [-65504, 0]], np.float32)
            ),
            _quantized("negative", -features(6, 3, seed=11)),
        ],
        "principal": [_principal("a block", 3), _principal("a block alone", 0)],
    }


def _keys(sizes: Sequence[int]) -> list[frozenset[bytes]]:
    return [frozenset(f"{number}-{at}".encode() for at in range(size)) for number, size in enumerate(sizes)]


def _groups(name: str, added: Sequence[int], *, batch_size: int = 5, min_images: int = 5) -> dict[str, Any]:
    partition, present, steps = Partition(), frozenset[bytes](), []
    size = {"batch_size": max(batch_size, min_images), "min_images": min_images}
    for step, images in enumerate(added):
        present |= {f"{step:02}-{at:03}".encode() for at in range(images)}
        new = sorted(present - partition.number_of.keys())
        partition = regroup(partition, present, new, **size, rng=np.random.default_rng(step))
        left = sorted(present - partition.number_of.keys())
        steps.append(
            {
                "added": images,
                "groups": sorted(len(each.images) for each in partition.groups.values()),
                "waiting": len(left),
                "more_needed": more_needed(partition, present, left, **size) if left else 0,
            }
        )
    return {"name": name, "batch_size": batch_size, "min_images": min_images, "steps": steps}


def _average(name: str, values: NDArray[np.float32], numbers: Sequence[int]) -> dict[str, Any]:
    means, counts = average(lambda: [values], np.array(numbers, np.intp))
    return {
        "name": name,
        "features": values.tolist(),
        "numbers": list(numbers),
        "prototypes": means.astype(np.float16).tolist(),
        "counts": counts.tolist(),
    }


def _quantized(name: str, values: NDArray[np.float32]) -> dict[str, Any]:
    halves = values.astype(np.float16)
    integers, limits = quantize(halves)
    return {
        "name": name,
        "values": halves.tolist(),
        "prototypes": integers.tolist(),
        "range": limits.tolist(),
        "range_bytes": limits.astype("<f2").tobytes().hex(),
        "restored": dequantize(integers, limits).tolist(),
    }


def _principal(name: str, batches: int) -> dict[str, Any]:
    values = features(batches, 4, seed=12).astype(np.float16)
    rows = features(5, 4, seed=14) - np.float32(1.5)
    block = PrincipalPrototypes(
        means=features(2, 4, seed=13),
        labels=np.array([0, 2]),
        counts=np.array([24, 300]),
        rows=rows,
        diagonal=np.array([0, 0.5, 9, 2], np.float32),
    )
    fields = principal_fields(values, block)
    limits = range_of(fields["tensors"])
    restored = dequantized_block(fields["block"], limits, classes=3, least=5)
    return {
        "name": name,
        "values": values.tolist(),
        "block": {each: getattr(block, each).tolist() for each in block.__dataclass_fields__},
        "fields": fields,
        "restored": {
            "range": limits.tolist(),
            **{each: getattr(restored, each).tolist() for each in ("means", "rows", "diagonal")},
        },
    }


def canary() -> dict[str, Any]:
    """Return the ranks of devices for versions of heads."""
    limit = 2**32 // 5
    names = ("door-cam", "shed-1", "phone-1", "a", "x" * 64)
    ranks = [(name, version, canary_rank(name, version)) for name in names for version in (1, 2, 3, 2**40)]
    return {
        "about": "A device is a canary of a version if its rank is below `canary_rank_limit`.",
        "canary_rank_limit": limit,
        "ranks": [
            {"device": name, "version": version, "rank": rank, "is_canary": rank < limit}
            for name, version, rank in ranks
        ],
    }


def confidence() -> dict[str, Any]:
    """Return the bins of probabilities and of novelty."""
    rows = [[p, 1 - p] for p in (0.5, 0.51, 0.6, 0.7, 0.88, 0.95, 0.99, 0.999, 0.9999999, 1.0)]
    rows += [[0.34, 0.33, 0.33], [0.2] * 5, [0.01] * 100, [1e-3, 0.998, 1e-3], [0.0, 1.0, 0.0], [1.0, 1e-45]]
    singles = [np.array([row], np.float32) for row in rows]
    novelty = np.array([0, 0.03, 0.03125, 0.2, 0.5, 0.96875, 0.97, 1, 1.2, 2, -1e-7], np.float32)
    return {
        "about": "`probabilities` are float32 (C). The bin of none of them depends on the rounding of the logarithm.",
        "bins": 32,
        "confidence": [
            {"probabilities": row[0].tolist(), "bin": int(confidence_bins(row)[0])} for row in singles
        ],
        "novelty": [
            {"novelty": float(value), "bin": int(place)}
            for value, place in zip(novelty, novelty_bins(novelty), strict=True)
        ],
    }
