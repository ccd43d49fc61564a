"""An algorithm of another distribution: its settings in `init` and `check`, a head by it, and errors that name it."""

import queue
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner, Result

import protofleet
from aggregator.algorithms import registry
from aggregator.cli import cli
from aggregator.config.schema import task_type
from aggregator.config.task_file import load_task
from aggregator.job_processes import JobEnded, JobEvent, JobRunner
from aggregator.storage.blobs import FolderBlobs
from aggregator.training.jobs import CompileJob
from aggregator.training.trainer import finished, start
from protocol.errors import ConfigError
from protofleet.cli import cli as protofleet_cli
from tests.support.graphs.backbones import tiny_backbone
from tests.support.messages.jobs import head_job
from tests.support.messages.submissions import submission

MODULE = '''
    import dataclasses
    from typing import Annotated, ClassVar

    from msgspec import Meta

    from aggregator.algorithms.algorithm import OneShot, RoundAlgorithm
    from aggregator.algorithms.fedncm import FedNCM
    from aggregator.algorithms.fedproto import FedProto
    from aggregator.algorithms.fedtc.head import Dense


    class Flat(FedNCM, frozen=True, kw_only=True, forbid_unknown_fields=True):
        """`[flat]`: the nearest mean, less certain."""

        name: ClassVar[str] = "flat"

        factor: Annotated[float, Meta(gt=0, le=1)] = 0.5
        """Multiplies the logits. It changes no prediction."""

        def train(self, data, training, **others):
            head = super().train(data, training, **others)
            (layer,) = head.layers
            return dataclasses.replace(head, layers=(Dense(self.factor * layer.weight, self.factor * layer.bias),))


    class Pulled(FedProto, frozen=True, kw_only=True, forbid_unknown_fields=True):
        name: ClassVar[str] = "pulled"

        pull: float = 2.0


    class Quorum(FedNCM, frozen=True, kw_only=True, forbid_unknown_fields=True):
        name: ClassVar[str] = "quorum"


    class Needy(FedNCM, frozen=True, kw_only=True, forbid_unknown_fields=True):
        name: ClassVar[str] = "needy"

        factor: float
'''
ENTRY_POINTS = {
    "acme-heads": {
        "flat": "acme_heads:Flat", "pulled": "acme_heads:Pulled", "quorum": "acme_heads:Quorum",
        "needy": "acme_heads:Needy", "other": "acme_heads:Flat", "function": "acme_heads:Annotated",
        "absent": "acme_heads:Absent", "fedtc": "acme_heads:Flat", "twice": "acme_heads:Flat",
    },
    "broken-heads": {"broken": "broken_heads:Broken", "twice": "broken_heads:Broken"},
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Two distributions on the path, as pip installs them, and a working directory with a backbone."""
    packages = tmp_path / "packages"
    for name, entries in ENTRY_POINTS.items():
        (info := packages / f"{name.replace('-', '_')}-1.2.dist-info").mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
        lines = (f"{entry} = {target}\n" for entry, target in entries.items())
        (info / "entry_points.txt").write_text(f"[{registry.GROUP}]\n{''.join(lines)}")
    (packages / "acme_heads.py").write_text(dedent(MODULE))
    (packages / "broken_heads.py").write_text("raise RuntimeError('no moon')\n")
    (tmp_path / "tiny.onnx").write_bytes(tiny_backbone())
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(packages)
    monkeypatch.setenv("PYTHONPATH", str(packages), prepend=":")
    _forget()
    yield tmp_path
    for module in ("acme_heads", "broken_heads"):
        sys.modules.pop(module, None)
    _forget()


def _forget() -> None:
    registry.installed.cache_clear()
    task_type.cache_clear()


def _init(algorithm: str) -> Result:
    arguments = ["init", "--class", "cat", "--class", "dog", "--backbone", "tiny.onnx"]
    return CliRunner().invoke(cli, [*arguments, "--algorithm", algorithm])


def _write(folder: Path, text: str) -> Path:
    (path := folder / "own.toml").write_text(f'classes = ["cat"]\nbackbones = ["tiny.onnx"]\n{text}\n')
    return path


def test_its_settings_are_written_and_checked(folder: Path) -> None:
    done = _init("flat")
    assert done.exit_code == 0, done.output
    text = (folder / "task.toml").read_text()
    assert "\n[flat]\n# factor = 0.5   # Multiplies the logits\n" in text
    assert "[fedpcl]" not in text
    task, _ = load_task(_write(folder, 'algorithm = "flat"\n[flat]\nfactor = 0.25'))
    assert msgspec.to_builtins(task.method) == {"factor": 0.25}
    for setting, error in (
        ("factor = 2", r"own\.toml:5: `flat\.factor`: Expected `float` <= 1\.0"),
        ("factr = 1", r"own\.toml:5: `flat\.factr`: unknown setting; did you mean `factor`"),
    ):
        with pytest.raises(ConfigError, match=error):
            load_task(_write(folder, f'algorithm = "flat"\n[flat]\n{setting}'))
    with pytest.raises(
        ConfigError, match=r"`training\.epochs`: algorithm = \"flat\" does not use this setting"
    ):
        load_task(_write(folder, 'algorithm = "flat"\n[training]\nepochs = 3'))


@pytest.mark.usefixtures("folder")
def test_a_training_uses_it_with_its_settings(tmp_path: Path) -> None:
    """The training is a process of its own, which finds the distribution by itself."""
    weights = []
    for algorithm, settings in (("fedncm", {}), ("flat", {"factor": 0.25})):
        events: queue.SimpleQueue[JobEvent] = queue.SimpleQueue()
        blobs, folder = FolderBlobs(tmp_path / "blobs"), tmp_path / algorithm
        job = head_job(blobs, submission(), algorithm=algorithm, settings=settings)
        start(JobRunner(events.put), job, folder, blobs=blobs.location, timeout_s=300)
        while not isinstance(ended := events.get(timeout=300), JobEnded):
            pass
        assert finished(ended).result is not None, finished(ended).reason
        weights.append((folder / job.name / "head.onnx").read_bytes())
    assert len(weights[0]) == len(weights[1])
    assert weights[0] != weights[1]


def test_a_job_of_rounds_has_its_settings(folder: Path) -> None:
    task, _ = load_task(_write(folder, 'algorithm = "pulled"\n[pulled]\npull = 3.0\nrounds = 7'))
    job = CompileJob(
        algorithm=task.algorithm,
        settings=msgspec.to_builtins(task.method),
        feature_size=4,
        num_classes=1,
        seed=0,
    )
    read = msgspec.json.decode(msgspec.json.encode(job), type=CompileJob)
    assert read.method == task.learning
    assert msgspec.to_builtins(read.method)["pull"] == 3.0


@pytest.mark.usefixtures("folder")
def test_it_is_simulated_by_its_name() -> None:
    random = np.random.default_rng(0)
    labels = np.arange(60) % 3
    features = (random.normal(size=(60, 6)) + 4 * np.eye(6)[labels]).astype(np.float32)
    data = protofleet.Dataset(features=features, labels=labels, classes=("a", "b", "c"))
    made = protofleet.simulate(data, devices=3, partition="iid", algorithms=("flat", "fedncm"))
    flat, whole = made.results
    assert (flat.algorithm, flat.accuracy) == ("flat", whole.accuracy)
    (option,) = [each for each in protofleet_cli.commands["simulate"].params if each.name == "algorithms"]
    assert option.type.convert("flat", option, None) == "flat"


@pytest.mark.parametrize(
    ("name", "error"),
    [
        (
            "broken",
            "cannot use algorithm 'broken' of broken-heads 1.2: RuntimeError: no moon; update that package",
        ),
        (
            "absent",
            "'absent' of acme-heads 1.2: AttributeError: module 'acme_heads' has no attribute 'Absent'",
        ),
        ("function", "'function' of acme-heads 1.2: expected a subclass of OneShot or RoundAlgorithm, got"),
        ("other", "'other' of acme-heads 1.2: its class has the name 'flat', and its entry point 'other'"),
        ("needy", "'needy' of acme-heads 1.2: expected a default for each setting, and factor has none"),
        ("quorum", "'quorum' of acme-heads 1.2: a task file cannot have a table of that name"),
        ("twice", "algorithm 'twice' is in several packages, acme-heads 1.2 and broken-heads 1.2: uninstall"),
        ("nowhere", "no algorithm 'nowhere': expected one of fedtc, statistics"),
    ],
)
def test_an_unusable_one_is_an_error_that_names_its_package(folder: Path, name: str, error: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_task(_write(folder, f'algorithm = "{name}"'))
    assert str(raised.value).startswith(f"{folder / 'own.toml'}:3: `algorithm`: ")
    assert error in str(raised.value)


def test_others_are_not_imported_and_do_not_precede_those_of_this_package(folder: Path) -> None:
    done = _init("fedtc")
    assert done.exit_code == 0, done.output
    assert "fedtc is protofleet's, not that of acme-heads 1.2, which needs another name" in done.output
    assert type(load_task(folder / "task.toml")[0].method) is registry.ALGORITHMS["fedtc"]
    assert {"acme_heads", "broken_heads"}.isdisjoint(sys.modules)
