"""A short `make fuzz`: the corpus and some mutations of it, through every target."""

import importlib.util
import itertools
from collections.abc import Iterator
from pathlib import Path
from random import Random

import msgspec
import numpy as np
import pytest

from aggregator.intake import validation
from protocol.wire.messages import TaskManifest, Tensor
from tests.fuzz import messages
from tests.fuzz.__main__ import CORPUS, engine
from tests.fuzz.target import ExcessiveAllocation, Target, measure
from tests.fuzz.targets import PLANTED, TARGETS
from tests.support.messages.every_type import SAMPLES

each_target = pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
RUNS = 400


def known(target: Target) -> list[bytes]:
    """Return the seeds and the corpus of a target."""
    files = sorted((CORPUS / target.name).glob("*"))
    return [*target.seeds(), *(file.read_bytes() for file in files)]


def mutations(target: Target) -> Iterator[bytes]:
    """Yield mutations of known inputs without end, always the same ones."""
    random, inputs = Random(0), known(target)
    for number in itertools.count():
        data = random.choice(inputs)
        if target.mutate is not None and number % 4:
            data = target.mutate(data, random)
        else:
            at = random.randrange(len(data) + 1)
            data = data[:at] + random.randbytes(random.randrange(4)) + data[at + random.randrange(4) :]
        yield data[: target.max_bytes]


def search(target: Target, *, runs: int) -> None:
    for data in itertools.islice(mutations(target), runs):
        target.one_input(data)


@each_target
def test_corpus_stays_within_bounds(target: Target) -> None:
    for data in (b"", *known(target)):
        target.one_input(data)  # so that cached allocations do not count for an input
        measure(target, data)


@each_target
def test_mutated_corpus_raises_nothing(target: Target) -> None:
    search(target, runs=RUNS if target.share >= 1 else RUNS // 10)


def test_corpus_is_small() -> None:
    files = [path for path in CORPUS.rglob("*") if path.is_file()]
    assert {path.parent.name for path in files} == TARGETS.keys() - {"enrollment"}
    assert len(files) < 300
    assert sum(path.stat().st_size for path in files) < 500_000


def test_planted_tensor_fault_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(tensor: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
        return np.frombuffer(tensor.data, dtype="<" + tensor.dtype).reshape(tensor.shape)

    monkeypatch.setattr(validation, "to_array", careless)
    with pytest.raises(ValueError, match=r"cannot reshape|multiple of element size"):
        search(TARGETS["uploaded"], runs=20_000)


def test_planted_bound_fault_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = SAMPLES[1]
    assert isinstance(sample, TaskManifest)
    monkeypatch.setattr(
        messages, "decode", lambda *_, **__: msgspec.structs.replace(sample, alpha=float("nan"))
    )
    with pytest.raises(AssertionError):
        messages.decode_any(b"\x01")


def test_excessive_allocation_is_found() -> None:
    with pytest.raises(ExcessiveAllocation, match="made it allocate 67108"):
        measure(PLANTED["allocate"], b"\x93")


@pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None, reason="atheris is not installed: make fuzz does"
)
@pytest.mark.parametrize(
    ("name", "message"),
    [("crash", "IndexError"), ("hang", "timeout"), ("allocate", "ExcessiveAllocation")],
)
def test_libfuzzer_finds_planted_faults(name: str, message: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    left = tmp_path / "left"
    left.mkdir()
    with log.open("w") as file:
        assert engine(
            name, ["-runs=2000000", "-timeout=2", "-seed=1", f"-artifact_prefix={left}/"], [], log=file
        )
    assert message in log.read_text(errors="replace")
    (found,) = left.iterdir()
    assert found.read_bytes()[:1] == b"\x93"
