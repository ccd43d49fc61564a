"""Backbones, and the blocks of each, compared on labeled images before there is a fleet."""

import functools
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx

from aggregator.algorithms.algorithm import OneShot
from aggregator.algorithms.registry import ALGORITHMS as REGISTERED
from export.block_files import block_tensors, cut, fastest_seconds
from protocol.errors import ConfigError
from protocol.models.onnx_metadata import BackboneMetadata
from protofleet.features import load_backbones
from protofleet.packages import needed_packages
from protofleet.simulation.candidates import Candidate, list_candidates
from protofleet.simulation.cross_validation import (
    LOGISTIC,
    NEAREST_MEAN,
    Estimate,
    Evaluation,
    cross_validate,
    split,
)
from protofleet.simulation.dataset import Dataset, load_dataset
from protofleet.simulation.partitions import parse_partition
from protofleet.simulation.simulate import FEDTC, ONE_SHOT, STATISTICS, require_distinct, unsuitable

DRAWN = (FEDTC, STATISTICS)
"""Algorithms of which the one that is not compared is evaluated on the recommended features."""

Load = Callable[..., Dataset]
"""Returns the features by backbones of at most `per_class` images of each class."""


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
    """

    data: Dataset
    backbones: Mapping[Path, BackboneMetadata]
    rows: tuple[Row, ...]
    algorithm: str
    best: Row
    recommended: Row
    first_draw: Mapping[str, Evaluation]


@needed_packages("compare")
def compare(
    images: str | os.PathLike[str] | Load,
    files: Sequence[str | os.PathLike[str]],
    *,
    layers: Sequence[Sequence[str]] = (),
    per_class: int = 100,
    algorithms: Sequence[str | OneShot] = (FEDTC,),
    devices: int = 10,
    partition: str = "dirichlet:0.3",
    folds: int = 5,
    draws: int = 2,
    seed: int = 0,
    on_step: Callable[[str, int, int], None] = lambda _step, _done, _total: None,
) -> Comparison:
    """Cross-validate features of labeled images by several classifiers, and recommend some of them.

    Args:
        images: a folder or a CSV file as for `load_dataset`, or a function that loads its features.
        files: backbones, as `export-backbone` wrote them.
        layers: selections of blocks in place of the usual ones, as in `export-backbone --layers`.
        per_class: images of each class that are used, at most.
        algorithms: one-shot algorithms by name or as instances, registered or not; the first one's accuracy decides.
        devices: among which the images are dealt out.
        partition: as for `simulate`.
        folds: parts of the images, each of which is held out once.
        draws: divisions of the images into folds and among devices.
        seed: of the divisions.
        on_step: called with the name of a step, how much of it is done, and of how much.

    Raises:
        ConfigError: there are too few images, no such blocks or algorithms, or an argument is out of range.
        BackboneMismatch: a file is no backbone.
    """
    wanted = [_one_shot(each) for each in algorithms]
    require_distinct([each.name for each in wanted])
    division, paths = parse_partition(partition), list(map(Path, files))
    load = images if callable(images) else functools.partial(load_dataset, images)
    opened = dict(zip(paths, load_backbones(paths), strict=True))
    backbones = {file: each.metadata for file, each in opened.items()}
    candidates = list_candidates(list(backbones.values()), layers)
    data = load(list(opened.values()), per_class=per_class)
    splits = split(data.labels, folds=folds, draws=draws, seed=seed)
    left_out = [_one_shot(name) for name in DRAWN if name not in {each.name for each in wanted}]
    total = len(candidates) * len(splits) + folds * bool(left_out)
    steps = itertools.count(1)

    evaluate = functools.partial(
        cross_validate,
        devices=devices,
        partition=division,
        on_split=lambda: on_step("accuracy", next(steps), total),
    )
    methods: tuple[str | OneShot, ...] = (NEAREST_MEAN, LOGISTIC, *wanted)
    rows = tuple(
        Row(candidate=candidate, evaluations=evaluate(candidate.of(data), splits, methods), cost=cost)
        for candidate, cost in zip(candidates, measure_costs(backbones, candidates), strict=True)
    )
    best, recommended = choose(rows, wanted[0].name)
    left_out = [
        each for each in left_out if not unsuitable([each], features=len(recommended.candidate.columns))
    ]
    others = [wanted[0], *left_out] if left_out else []
    first_draw = evaluate(recommended.candidate.of(data), splits[:folds], others) if others else {}
    return Comparison(
        data=data,
        backbones=backbones,
        rows=rows,
        algorithm=wanted[0].name,
        best=best,
        recommended=recommended,
        first_draw=first_draw,
    )


def _one_shot(algorithm: str | OneShot) -> OneShot:
    found = REGISTERED[algorithm]() if algorithm in ONE_SHOT else algorithm
    if not isinstance(found, OneShot):
        raise ConfigError(f"expected one-shot algorithms out of {', '.join(ONE_SHOT)}, got {algorithm!r}")
    return found


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
