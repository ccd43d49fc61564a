"""Features that a fleet could use: blocks of exported backbones, and pairs of backbones."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from protocol.errors import ConfigError
from protocol.models.onnx_metadata import BackboneMetadata
from protofleet.simulation.dataset import Dataset

LAST, RESIDUAL, DEPTHWISE = "last", "residual", "depthwise"

DEPTHWISE_PAIRS = 2
"""Pairs of neighboring depthwise blocks, the deepest ones, that are compared by default."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Features to compare: some blocks of one backbone or of several.

    Attributes:
        name: as a table shows it.
        parts: numbers of the backbones, each with the names of its blocks; none if it has one feature.
        columns: of these features among those of all backbones, (L,).
        widths: number of values of each backbone.
        layers: number of values of each layer; empty for one.
        normalized: True if the backbones have normalized them.
    """

    name: str
    parts: tuple[tuple[int, tuple[str, ...]], ...]
    columns: NDArray[np.int64]
    widths: tuple[int, ...]
    normalized: bool
    layers: tuple[int, ...] = ()

    def of(self, data: Dataset) -> Dataset:
        """Return a dataset of these features alone."""
        columns = data.features[:, self.columns]
        return replace(
            data, features=columns, widths=self.widths, layers=self.layers, normalized=self.normalized
        )


def list_candidates(
    backbones: Sequence[BackboneMetadata], layers: Sequence[Sequence[str]] = ()
) -> list[Candidate]:
    """Return the candidates that backbones offer, features of one before those of two; several are named B1, B2, ...

    Args:
        backbones: in the order of their features.
        layers: selections of blocks as in `export-backbone --layers`; by default the last layer, residual sums, deep
            depthwise blocks and combinations of these.

    Raises:
        ConfigError: no backbone has such blocks.
    """
    found, pairs = list[Candidate](), list[Candidate]()
    for number, backbone in enumerate(backbones):
        for choice in layers or _usual(backbone):
            if (blocks := _blocks(backbone, choice)) is not None:
                found.append(_candidate(backbones, choice, ((number, blocks),)))
    for first, second in itertools.combinations(range(len(backbones)), 2):
        one, other = backbones[first], backbones[second]
        if one.weights_sha256 == other.weights_sha256 or bool(one.blocks) != bool(other.blocks):
            continue  # one network at two sizes, or features on two scales
        for choice in layers or ([[LAST], [LAST, RESIDUAL], [DEPTHWISE]] if one.blocks else [[]]):
            mine, theirs = (_blocks(each, choice) for each in (one, other))
            if mine is not None and theirs is not None:
                pairs.append(_candidate(backbones, choice, ((first, mine), (second, theirs))))
    if not found:
        wanted = "; ".join(",".join(choice) for choice in layers)
        raise ConfigError(f"no backbone has all blocks of {wanted}: export it with --layers all")
    return found + pairs


def _usual(backbone: BackboneMetadata) -> list[list[str]]:
    """Return the selections of blocks that are compared by default, of those that a backbone has."""
    if not backbone.blocks:
        return [[]]
    names = [block.name for block in backbone.blocks]
    depthwise = [name for name in names if name[:1] == "c" and name[1:].isdigit()]
    pairs = list(itertools.pairwise(depthwise))[-DEPTHWISE_PAIRS:]
    choices = [[LAST], [RESIDUAL], [LAST, RESIDUAL], [DEPTHWISE]]
    choices += [[*before, *pair] for pair in pairs for before in ([], [RESIDUAL])]
    found = dict[tuple[str, ...], list[str]]()
    for choice in choices:
        if blocks := _blocks(backbone, choice):
            found.setdefault(blocks, choice)
    return list(found.values()) or [names]


def _blocks(backbone: BackboneMetadata, choice: Sequence[str]) -> tuple[str, ...] | None:
    """Return the names of the chosen blocks, in the file's order; None if the backbone has not all of them."""
    blocks = backbone.blocks or ()
    known = {block.name for block in blocks}
    groups = {
        RESIDUAL: {block.name for block in blocks if block.residual},
        DEPTHWISE: {block.name for block in blocks if block.depthwise},
    }
    wanted = {name for each in choice for name in groups.get(each) or {each}}
    if not wanted <= known:
        return None
    return tuple(block.name for block in blocks if block.name in wanted)


def _candidate(
    backbones: Sequence[BackboneMetadata],
    choice: Sequence[str],
    parts: tuple[tuple[int, tuple[str, ...]], ...],
) -> Candidate:
    names = [f"B{number + 1}" for number, _ in parts] if len(backbones) > 1 else []
    columns = [list(_columns(backbones, number, blocks)) for number, blocks in parts]
    return Candidate(
        name=" ".join(filter(None, ("+".join(names), "+".join(choice) or "whole feature"))),
        parts=parts,
        columns=np.concatenate(columns),
        widths=tuple(map(len, columns)),
        layers=tuple(width for number, blocks in parts for width in _widths(backbones[number], blocks)),
        normalized=all(blocks for _, blocks in parts),
    )


def _widths(backbone: BackboneMetadata, names: Sequence[str]) -> Iterator[int]:
    """Yield the number of values of each of a backbone's blocks with these names, or of its one feature."""
    if not names:
        yield backbone.feature_size
    yield from (block.width for block in backbone.blocks or () if block.name in names)


def _columns(backbones: Sequence[BackboneMetadata], number: int, names: Sequence[str]) -> Iterator[int]:
    """Yield the columns of a backbone's blocks, or of its one feature."""
    start = sum(each.feature_size for each in backbones[:number])
    if not names:
        yield from range(start, start + backbones[number].feature_size)
    for block in backbones[number].blocks or ():
        if block.name in names:
            yield from range(start, start + block.width)
        start += block.width
