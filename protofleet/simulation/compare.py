"""Backbones, and the blocks of each, compared on labeled images before there is a fleet."""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx

from edge_client.runtime.backbone import Backbone
from export.block_files import block_tensors, cut, fastest_seconds
from protocol.models.onnx_metadata import BackboneMetadata
from protofleet.features import load_backbones
from protofleet.simulation.candidates import Candidate, list_candidates
from protofleet.simulation.cross_validation import (
    LOGISTIC,
    NEAREST_MEAN,
    Estimate,
    Evaluation,
    cross_validate,
    split,
)
from protofleet.simulation.dataset import Dataset
from protofleet.simulation.normalization import Finding, check_normalization
from protofleet.simulation.partitions import parse_partition
from protofleet.simulation.simulate import FEDTC, STATISTICS

ALGORITHMS = (FEDTC, STATISTICS)

CHECKED_PER_CLASS = 50
"""Images of each class, at most, on which another normalization is tried."""


Load = Callable[..., Dataset]
"""Returns the features by backbones of at most `per_class` images of each class; `step` names a progress bar."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a device needs for a candidate's features.

    Attributes:
        backbone_bytes: size of the backbones' files if they end with the last block that is used.
        milliseconds: processor time of one thread on this machine for one image, the least of several runs.
    """

    backbone_bytes: int
    milliseconds: float


@dataclass(frozen=True, kw_only=True)
class Row:
    """A candidate's evaluations, by classifier, and its cost."""

    candidate: Candidate
    evaluations: Mapping[str, Evaluation]
    cost: Cost

    def accuracy(self, classifier: str) -> Estimate:
        """Return the accuracy of a classifier."""
        return self.evaluations[classifier].accuracy


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Candidates, of which one is recommended.

    Attributes:
        data: the images' features by all backbones.
        backbones: the files.
        rows: one for each candidate.
        algorithm: the one whose accuracy decides.
        best: the row with the greatest accuracy.
        recommended: the cheapest row within one standard error of it.
        first_draw: evaluations of the recommended features on the first draw's folds, by `algorithm` and by those that
            take too long for all candidates; empty if there are none.
        findings: normalizations of pixels that are more accurate than the backbones' own.
    """

    data: Dataset
    backbones: Mapping[Path, BackboneMetadata]
    rows: tuple[Row, ...]
    algorithm: str
    best: Row
    recommended: Row
    first_draw: Mapping[str, Evaluation]
    findings: tuple[Finding, ...]


def compare(
    load: Load,
    files: Sequence[Path],
    *,
    layers: Sequence[Sequence[str]],
    per_class: int,
    algorithms: Sequence[str],
    devices: int,
    partition: str,
    folds: int,
    draws: int,
    seed: int,
    on_step: Callable[[str, int, int], None],
) -> Comparison:
    """Cross-validate features of labeled images by several classifiers, and recommend some of them.

    `layers` are selections of blocks in place of the usual ones, `algorithms` some of ALGORITHMS, of which the first
    one's accuracy decides. `on_step` is called with the name of a step, how much of it is done, and of how much. The
    rest is as for `load_dataset`, `simulate` and `split`.

    Raises:
        ConfigError: there are too few images, no such blocks, or an argument is out of range.
        BackboneMismatch: a file is no backbone.
    """
    division = parse_partition(partition)
    opened = dict(zip(files, load_backbones(list(files)), strict=True))
    backbones = {file: each.metadata for file, each in opened.items()}
    candidates = list_candidates(list(backbones.values()), layers)
    data = load(list(opened.values()), step="features", per_class=per_class)
    splits = split(data.labels, folds=folds, draws=draws, seed=seed)
    left_out = [each for each in ALGORITHMS if each not in algorithms]
    total = len(candidates) * len(splits) + folds * bool(left_out)
    steps = itertools.count(1)

    evaluate = functools.partial(
        cross_validate,
        devices=devices,
        partition=division,
        on_split=lambda: on_step("accuracy", next(steps), total),
    )
    methods = (NEAREST_MEAN, LOGISTIC, *algorithms)
    rows = tuple(
        Row(candidate=candidate, evaluations=evaluate(candidate.of(data), splits, methods), cost=cost)
        for candidate, cost in zip(candidates, measure_costs(backbones, candidates), strict=True)
    )
    best, recommended = choose(rows, algorithms[0])
    others = [algorithms[0], *left_out] if left_out else []
    first_draw = evaluate(recommended.candidate.of(data), splits[:folds], others) if others else {}
    return Comparison(
        data=data,
        backbones=backbones,
        rows=rows,
        algorithm=algorithms[0],
        best=best,
        recommended=recommended,
        first_draw=first_draw,
        findings=tuple(_findings(load, opened, per_class=min(per_class, CHECKED_PER_CLASS), folds=folds)),
    )


def _findings(
    load: Load, backbones: Mapping[Path, Backbone], *, per_class: int, folds: int
) -> Iterator[Finding]:
    for file, backbone in backbones.items():
        few = functools.partial(load, step=f"checking {file.name}", per_class=per_class)
        yield from check_normalization(file, backbone, load=few, folds=folds)


def choose(rows: Sequence[Row], algorithm: str) -> tuple[Row, Row]:
    """Return the most accurate row, and the cheapest one that is within one standard error of it.

    The error is that of the difference on the same folds; the cheapest has the fewest bytes to upload, then the least
    time. The greatest of many accuracies is in part luck, and costs more (Breiman et al., "Classification and
    regression trees", 1984, section 3.4.3).
    """
    best = max(rows, key=lambda row: row.accuracy(algorithm).mean)
    behind = [best.accuracy(algorithm).minus(row.accuracy(algorithm)) for row in rows]
    as_good = [row for row, each in zip(rows, behind, strict=True) if each.mean <= each.error]
    return best, min(as_good, key=lambda row: (row.evaluations[algorithm].up_bytes, row.cost.milliseconds))


def measure_costs(backbones: Mapping[Path, BackboneMetadata], candidates: Sequence[Candidate]) -> list[Cost]:
    """Return the cost of each candidate, of files that are cut after its blocks."""
    costs = dict[tuple[int, tuple[str, ...]], Cost]()
    for number, (path, metadata) in enumerate(backbones.items()):
        wanted = sorted({part for candidate in candidates for part in candidate.parts if part[0] == number})
        model = onnx.load(path)
        tensors = dict(
            zip((block.name for block in metadata.blocks or ()), block_tensors(model), strict=False)
        )
        files = [
            cut(model, [tensors[name] for name in blocks])
            if blocks and len(tensors) == len(metadata.blocks or ())
            else path.read_bytes()
            for _, blocks in wanted
        ]
        spec = metadata.preprocessing
        times = fastest_seconds(files, (spec.height, spec.width))
        for part, file, seconds in zip(wanted, files, times, strict=True):
            costs[part] = Cost(backbone_bytes=len(file), milliseconds=1e3 * seconds)
    return [
        Cost(
            backbone_bytes=sum(costs[part].backbone_bytes for part in candidate.parts),
            milliseconds=sum(costs[part].milliseconds for part in candidate.parts),
        )
        for candidate in candidates
    ]
