"""Preparing a task: backbones, layers, manifest and graphs; and the blobs that the aggregator keeps for it."""

import contextlib
import dataclasses
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import onnxruntime
import pytest
from msgspec.structs import replace

from aggregator.algorithms.algorithm import Training
from aggregator.algorithms.fedpcl import FedPCL
from aggregator.algorithms.statistics.feature_map import FINE_LEVELS, FeatureMap, selected
from aggregator.config.privacy import PrivacyBudget, PrivacySettings, SumsSettings
from aggregator.config.schema import Client, TaskFile
from aggregator.config.task_file import load_task
from aggregator.coordination.rollout_state import State, Trial
from aggregator.coordination.round_state import Entry
from aggregator.graphs.head_export import mapped
from aggregator.heads.next_head import job_of
from aggregator.security.seal_key import own_seal_key, public_seal_key
from aggregator.status.collect import collect_status
from aggregator.storage.blobs import FolderBlobs
from aggregator.storage.heads import HeadRecord
from aggregator.storage.open_store import open_store
from aggregator.storage.store import Store
from aggregator.storage.stored_values import CompiledGraphs
from aggregator.storage.submissions import SubmissionRecord
from aggregator.sums.stored_lists import PendingList, SumLists, put_sums
from aggregator.tasks import graph_cache
from aggregator.tasks.graph_cache import known_graphs
from aggregator.tasks.manifests import task_manifest
from aggregator.tasks.retention import (
    KEPT_S,
    delete_carried_submissions,
    delete_earlier_tasks,
    needed_blobs,
    served_blobs,
)
from aggregator.tasks.task_preparation import (
    Task,
    checked_backbone,
    continued,
    prepare_task,
    selected_columns,
)
from aggregator.training.head_job import run
from aggregator.training.jobs import CompileJob, HeadJob, Result
from aggregator.training.trainer import Finished
from edge_client.graphs.backbone import open_backbone
from protocol.errors import BackboneMismatch, ConfigError
from protocol.models.onnx_metadata import BackboneMetadata, Block, HeadMetadata, read_metadata, to_properties
from protocol.statistics.noisy_sums import epsilon_of_sums
from protocol.statistics.public_map import PublicMap
from protocol.wire.codec import digest_of, encode
from protocol.wire.messages import (
    BlobRef,
    DifferentialPrivacy,
    Perturbation,
    SecondOperator,
    Statistics,
    TaskManifest,
)
from sums_operator.state import make_operator, make_task
from tests.support.graphs.backbones import tiny_backbone, tiny_metadata
from tests.support.messages.heads import initial_state, plan_head
from tests.support.messages.jobs import head_job, workspace
from tests.support.messages.submissions import (
    FEATURE_SIZE,
    MANIFEST,
    ROUNDS_EXPECTATION,
    ROUNDS_TASK,
    SERVED,
    TASK,
    evaluation,
    submission,
)
from tests.support.messages.tasks import served_task
from tests.unit.aggregator.status.stores import rendered


@pytest.mark.parametrize("client", [Client(), Client(alpha=1.0)])
def test_manifest_of_private_task_has_alpha_1_and_noise(client: Client) -> None:
    """Alpha becomes 1; the noise multiplier is the smallest that epsilon and delta allow."""
    budget = PrivacyBudget(epsilon=2.0, map="m", max_epsilon=8.0)
    task = TaskFile(classes=("a",), backbones=("b",), client=client, privacy=PrivacySettings(dp=budget))
    statistics = Statistics(map=REFERENCE, size=256)
    manifest = task_manifest(task, [REFERENCE], statistics=statistics)
    assert (manifest.alpha, manifest.batch_size, manifest.min_images) == (1, 1, 1)
    noise = DifferentialPrivacy(noise_multiplier=1.996, delta=1e-5, max_epsilon=8.0)
    assert manifest.differential_privacy == noise
    assert epsilon_of_sums({1.996: 1}, delta=1e-5) <= 2 < epsilon_of_sums({1.995: 1}, delta=1e-5)


@pytest.mark.parametrize("count", [1, 3, 10])
def test_manifest_of_a_person_has_the_noise_of_a_persons_images(count: int) -> None:
    """The noise multiplier is for one image, the smallest that epsilon of a person allows."""
    budget = PrivacyBudget(
        epsilon=2.0, map="m", max_epsilon=8.0, unit="person", images_per_person=count, person_level=2
    )
    task = TaskFile(classes=("a",), backbones=("b",), privacy=PrivacySettings(dp=budget))
    noise = task_manifest(
        task, [REFERENCE], statistics=Statistics(map=REFERENCE, size=256)
    ).differential_privacy
    assert noise is not None
    assert (noise.images_per_person, noise.person_level) == (count, 2)
    assert noise.noise_multiplier == pytest.approx(1.996 * count, abs=0.001 * count)
    steps = round(1000 * noise.noise_multiplier)
    allowed, above = (epsilon_of_sums({each / 1000 / count: 1}, delta=1e-5) for each in (steps, steps - 1))
    assert allowed <= 2 < above


@pytest.mark.parametrize(
    ("classes", "size", "epsilon", "error"),
    [(4000, 4096, 2.0, "too many for a device"), (2000, 1280, 8.0, "8 is too much for 2000 classes")],
)
def test_noise_that_devices_refuse_is_no_task(classes: int, size: int, epsilon: float, error: str) -> None:
    budget = PrivacyBudget(epsilon=epsilon, map="m", max_epsilon=20.0)
    names = tuple(f"{number}" for number in range(classes))
    task = TaskFile(classes=names, backbones=("b",), privacy=PrivacySettings(dp=budget))
    with pytest.raises(ConfigError, match=error):
        task_manifest(task, [REFERENCE], statistics=Statistics(map=REFERENCE, size=size))


def test_card_of_a_second_operator_is_for_one_task(store: Store, tmp_path: Path) -> None:
    """The manifest has both keys to seal to; a key of an earlier task's list, or one that is not signed, is refused."""
    (tmp_path / "tiny.onnx").write_bytes(tiny_backbone(feature_size=12))
    (tmp_path / "public.map").write_bytes(
        PublicMap(np.zeros(12, np.float32), np.zeros((5, 12), np.float32)).to_bytes()
    )
    make_operator(tmp_path / "sums")
    seal_key = make_task(tmp_path / "sums", card := tmp_path / "card.toml")

    def prepared(epsilon: float) -> SecondOperator:
        budget = PrivacyBudget(epsilon=epsilon, map=str(tmp_path / "public.map"), max_epsilon=8.0)
        sums = SumsSettings(operator=str(card), min_devices=2)
        task = TaskFile(
            classes=("a", "b"),
            backbones=("tiny.onnx",),
            algorithm="statistics",
            privacy=PrivacySettings(dp=budget, sums=sums),
        )
        made = prepare_task(task, [tmp_path / "tiny.onnx"], store=store)
        assert made.manifest.second_operator is not None
        return made.manifest.second_operator

    first = prepared(2.0)
    assert first.seal_key.hex() == seal_key
    assert first.aggregator_key == public_seal_key(own_seal_key(store))
    assert prepared(3.0) == first, "no list was made"
    put_sums(store.facts, SumLists(bytes(32), seal_key=seal_key))
    with pytest.raises(ConfigError, match="an earlier task has this seal key"):
        prepared(2.0)
    text = card.read_text()
    make_task(tmp_path / "sums", card := tmp_path / "later.toml")
    assert prepared(2.0) != first
    card.write_text(text.replace(seal_key, "0" * 64))
    with pytest.raises(ConfigError, match="is not signed"):
        prepared(2.0)


def test_public_map_must_be_of_the_backbones(store: Store, tmp_path: Path) -> None:
    """Devices download the file itself."""
    (tmp_path / "tiny.onnx").write_bytes(tiny_backbone(feature_size=12))
    file = tmp_path / "public.map"
    budget = PrivacyBudget(epsilon=2.0, map=str(file), max_epsilon=8.0)
    task = TaskFile(
        classes=("a", "b"),
        backbones=("tiny.onnx",),
        algorithm="statistics",
        privacy=PrivacySettings(dp=budget),
    )

    def prepared() -> Task:
        return prepare_task(task, [tmp_path / "tiny.onnx"], store=store)

    with pytest.raises(ConfigError, match="protofleet public-map"):
        prepared()
    file.write_bytes(b"no map")
    with pytest.raises(ConfigError, match="expected a public map"):
        prepared()
    file.write_bytes(PublicMap(np.zeros(9, np.float32), np.zeros((5, 9), np.float32)).to_bytes())
    with pytest.raises(ConfigError, match="is one of 9 features, and the backbones have 12"):
        prepared()
    file.write_bytes(PublicMap(np.zeros(12, np.float32), np.zeros((5, 12), np.float32)).to_bytes())
    made = prepared()
    assert made.manifest.statistics is not None
    assert made.manifest.statistics.map.digest == digest_of(file.read_bytes())
    assert made.manifest.statistics.map.digest in made.blobs
    assert (made.expectation.prototype_size, made.feature_map, made.calibrates) == (5, None, False)


def _external(model: onnx.ModelProto) -> None:
    onnx.external_data_helper.convert_model_to_external_data(model, size_threshold=0)


def _foreign(model: onnx.ModelProto) -> None:
    model.opset_import.add(domain="com.microsoft", version=1)
    model.graph.node[-1].domain = "com.microsoft"


def _random(model: onnx.ModelProto) -> None:
    model.graph.node[-1].CopyFrom(
        onnx.helper.make_node("RandomNormal", [], ["feature"], shape=[1, 12])  # of one image
    )


def _infinite(model: onnx.ModelProto) -> None:
    white = next(each for each in model.graph.initializer if each.name == "white")
    white.CopyFrom(onnx.numpy_helper.from_array(np.array(np.nan, np.float32), "white"))


def _of_another_size(model: onnx.ModelProto) -> None:
    onnx.helper.set_model_props(model, to_properties(tiny_metadata(feature_size=13)))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (_external, "keeps tensors in other files"),
        (_foreign, "got some of 'com.microsoft'"),
        (_random, "random operator RandomNormal"),
        (
            _of_another_size,
            "must take image uint8 (any, 8, 8, 3) and give feature float32 (any, 13), but takes",
        ),
        (lambda model: model.ClearField("metadata_props"), "make one with export-backbone"),
        (lambda model: setattr(model.graph.node[-1], "op_type", "None"), "cannot load backbone.onnx: "),
        (_infinite, "gives NaN or infinity for every image"),
    ],
)
def test_backbones_that_devices_refuse(
    store: Store, tmp_path: Path, change: Callable[[onnx.ModelProto], object], problem: str
) -> None:
    """Before a task is served or called valid, and in the words of devices."""
    path, task = tmp_path / "backbone.onnx", TaskFile(classes=("a",), backbones=("backbone.onnx",))
    path.write_bytes(tiny_backbone(feature_size=12))
    assert checked_backbone(path).feature_size == 12
    model = onnx.load(path)
    change(model)
    onnx.save(model, path)
    with pytest.raises(BackboneMismatch, match=re.escape(problem)) as refused:
        checked_backbone(path)
    with pytest.raises(BackboneMismatch, match=re.escape(problem)):
        prepare_task(task, [path], store=store)
    assert list(store.blobs.digests()) == []
    if change is not _infinite:
        with pytest.raises(BackboneMismatch) as on_device:
            open_backbone(path)
        assert str(refused.value).startswith(str(on_device.value)[:60])


@pytest.mark.parametrize("data", [b"", b"no model"])
def test_file_that_is_no_backbone(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "backbone.onnx"
    path.write_bytes(data)
    with pytest.raises(BackboneMismatch, match=r"cannot load backbone\.onnx: "):
        checked_backbone(path)
    with pytest.raises(BackboneMismatch, match=r"cannot load none\.onnx: .*No such file"):
        checked_backbone(tmp_path / "none.onnx")


def test_backbone_is_run_once(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restart does not run what the store has."""
    path, task = tmp_path / "backbone.onnx", TaskFile(classes=("a",), backbones=("backbone.onnx",))
    path.write_bytes(tiny_backbone())
    prepare_task(task, [path], store=store)
    monkeypatch.delattr(onnxruntime, "InferenceSession")
    prepare_task(task, [path], store=store)


REFERENCE = BlobRef(digest=bytes(32), size_bytes=1, name="tiny.onnx")


def _manifest(classes: tuple[str, ...], **settings: Any) -> TaskManifest:
    return task_manifest(TaskFile(classes=classes, backbones=("b",), **settings), [REFERENCE])


def test_continued_task_names_all_earlier_ones(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """The newest first; a new name that resembles another one is pointed out."""
    first = _manifest(("ant", "bee"))
    one = store.blobs.put(encode(first))
    second = continued(_manifest(("ant", "bee", "wasp")), one, store)
    two = store.blobs.put(encode(second))
    third = continued(_manifest(("ant", "bee", "wasp", "bees")), two, store)
    assert (second.continues, third.continues) == ((one,), (two, one))
    assert [record.message for record in caplog.records] == [
        "similar names of classes: one may be meant new=bees known=bee"
    ]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"algorithm": "fedtc"}, {"algorithm": "fedncm"}),
        ({"algorithm": "fedncm"}, {"algorithm": "fedtc"}),
        ({"client": Client(prototypes="batches")}, {"algorithm": "fedncm"}),
        ({"client": Client(prototypes="batches")}, {}),
    ],
)
def test_continued_task_uses_the_same_submissions(
    store: Store, before: dict[str, Any], after: dict[str, Any]
) -> None:
    """By another algorithm, or beside blocks, which the earlier task did not take; no class is added."""
    earlier = store.blobs.put(encode(_manifest(("ant", "bee"), **before)))
    assert continued(_manifest(("ant", "bee"), **after), earlier, store).continues == (earlier,)


@pytest.mark.parametrize(
    ("algorithm", "settings", "prototypes"),
    [
        ("fedtc", {}, "auto"),
        ("fedncm", {}, "auto"),
        ("statistics", {}, msgspec.UNSET),
        ("fedpcl", {}, msgspec.UNSET),
        ("fedtc", {"client": Client(prototypes="batches")}, msgspec.UNSET),
        ("fedtc", {"training": Training(recipe="paper")}, msgspec.UNSET),
        (
            "fedtc",
            {"privacy": PrivacySettings(perturbation=Perturbation(on="prototypes", scale=0.1))},
            msgspec.UNSET,
        ),
    ],
)
def test_tasks_that_take_principal_prototypes(
    algorithm: str, settings: dict[str, Any], prototypes: object
) -> None:
    """Only those of algorithms that say so; all others get means of batches."""
    manifest = _manifest(("ant", "bee"), algorithm=algorithm, **settings)
    assert manifest.prototypes == prototypes


@pytest.mark.parametrize(
    ("classes", "settings", "error"),
    [
        (
            ("ant", "bee"),
            {"algorithm": "fedncm", "client": Client(prototypes="batches")},
            "prototypes must be",
        ),
        (("bee", "ant", "wasp"), {}, "removed or renamed classes are a new task"),
        (("ant", "bee"), {}, "further ones behind them"),
        (("ant",), {}, "further ones behind them"),
        (
            ("ant", "bee", "wasp"),
            {"client": Client(alpha=0.5, batch_size=7)},
            "alpha, batch_size must be those of the earlier task",
        ),
    ],
)
def test_task_that_continues_nothing_is_refused(
    store: Store, classes: tuple[str, ...], settings: dict[str, Any], error: str
) -> None:
    earlier = store.blobs.put(encode(_manifest(("ant", "bee"))))
    with pytest.raises(ConfigError, match=error):
        continued(_manifest(classes, **settings), earlier, store)


def test_earlier_task_must_be_in_the_state(store: Store) -> None:
    other = store.blobs.put(b"no manifest")
    for digest in (bytes(32), other):
        with pytest.raises(ConfigError, match="this state has no task"):
            continued(_manifest(("ant", "bee", "wasp")), digest, store)


FILE = TaskFile(classes=("a", "b"), backbones=("b",), algorithm="fedpcl")


def key(task: TaskFile = FILE) -> str:
    return graph_cache.graphs_key(task, 16)


def test_settings_sizes_and_version_of_the_algorithm_enter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Except for settings that no graph contains."""
    others = [
        FILE,
        replace(FILE, classes=("a", "b", "c")),
        replace(FILE, client=Client(seed=1)),
        replace(FILE, fedpcl=FedPCL(projection_size=8)),
        replace(FILE, algorithm="fpl"),
    ]
    assert len({key(task) for task in others}) == len(others)
    assert key(replace(FILE, fedpcl=FedPCL(rounds=7, epochs=3, batch_size=8))) == key()
    before, of_fpl = key(), key(replace(FILE, algorithm="fpl"))
    monkeypatch.setattr(FedPCL, "version", FedPCL.version + 1)
    assert key() != before
    assert key(replace(FILE, algorithm="fpl")) == of_fpl


def test_killed_export_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is repeated a few times with growing delays; one that fails by itself is not."""
    job = CompileJob(algorithm="fedpcl", settings={}, feature_size=16, num_classes=2, seed=0)
    store, waited = open_store(tmp_path), list[float]()
    monkeypatch.setattr(time, "sleep", waited.append)
    killed, made = Finished(None, "killed", is_killed=True), Finished(Result(metrics={}))

    def play(*outcomes: Finished) -> Result:
        left = list(outcomes)
        monkeypatch.setattr(graph_cache, "_run_once", lambda *_: left.pop(0))
        return graph_cache._run_job(job, store, timeout_s=60)

    assert play(killed, killed, made) == made.result
    assert waited == [10.0, 20.0]
    with pytest.raises(ConfigError, match="cannot export the graphs of fedpcl: killed"):
        play(*[killed] * 4)
    with pytest.raises(ConfigError, match="differs"):
        play(Finished(None, "a graph differs"))
    store.close()


def test_status_names_the_task_whose_graphs_are_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it shows the task before; no longer after an export that fails."""
    with contextlib.closing(open_store(tmp_path, lock=True)) as store:
        store.facts.put(SERVED)

        def export(*_: object, **__: object) -> Result:
            status = collect_status(store)
            assert (status.algorithm, status.preparing) == (SERVED.algorithm, "fedpcl")
            assert "a task with fedpcl: its graphs are exported" in rendered(status)
            raise ConfigError("cannot export")

        monkeypatch.setattr(graph_cache, "_run_job", export)
        with pytest.raises(ConfigError, match="cannot export"):
            graph_cache.cached_graphs(FILE, feature_size=16, store=store)
        assert collect_status(store).preparing == ""


def test_stored_graphs_are_not_exported_again(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    monkeypatch.delattr(graph_cache, "_run_job")
    with contextlib.closing(open_store(tmp_path / "state")) as store:
        assert prepare_task(*load_task(tmp_path / "task.toml"), store=store).first_tensors is not None


COLUMNS = ((1, 3), (5, 7))
WIDTHS = {"stem": 1, "c384": 2, "c576": 3, "last": 4}


def described(**widths: int) -> BackboneMetadata:
    blocks = tuple(Block(name=name, width=width) for name, width in widths.items())
    return msgspec.structs.replace(
        tiny_metadata(feature_size=sum(widths.values()) or 5), blocks=blocks or msgspec.UNSET
    )


@pytest.mark.parametrize(
    ("layers", "columns"),
    [
        ([], ()),
        (["c384"], ((1, 3), (11, 13))),
        (["c576", "c384"], ((1, 6), (11, 16))),  # neighbours are one range
        (["stem", "last"], ((0, 1), (6, 11), (16, 20))),
        (list(WIDTHS), ()),
    ],
)
def test_columns_are_those_of_the_layers_in_each_backbone(
    layers: list[str], columns: tuple[tuple[int, int], ...]
) -> None:
    two = {Path("a.onnx"): described(**WIDTHS), Path("b.onnx"): described(**WIDTHS)}
    assert selected_columns(layers, two) == columns


@pytest.mark.parametrize(
    ("layers", "second", "message"),
    [
        (["c9"], WIDTHS, "`layers`: no backbone has c9: they have c384, c576, last, stem"),
        (["last"], {"c7": 2}, "`layers`: b.onnx has none of them"),
        ([], {}, "b.onnx has no blocks, and another backbone has: export both with --layers"),
    ],
)
def test_layers_that_a_backbone_lacks_are_refused(
    layers: list[str], second: dict[str, int], message: str
) -> None:
    two = {Path("a.onnx"): described(**WIDTHS), Path("b.onnx"): described(**second)}
    with pytest.raises(ConfigError, match=message):
        selected_columns(layers, two)


@pytest.mark.parametrize("random_features", [0, 6])
def test_normalized_features_are_only_scaled_and_rounded(random_features: int) -> None:
    features = np.random.default_rng(0).normal(size=(50, 8)).astype(np.float32)
    feature_map = FeatureMap(8, random_features, 0, COLUMNS, normalized=True)
    rows = mapped(feature_map, features)
    assert rows.shape == (50, feature_map.size) == (50, 4 + random_features)
    expected = np.clip(np.rint(FINE_LEVELS * features[:, selected(COLUMNS, 8)]), -127, 127)
    np.testing.assert_array_equal(rows[:, :4], expected)


def test_columns_of_other_features_are_rooted_and_scaled_alone() -> None:
    features = np.random.default_rng(0).normal(size=(50, 8)).astype(np.float32)
    np.testing.assert_array_equal(
        mapped(FeatureMap(8, 6, 0, COLUMNS), features),
        mapped(FeatureMap(4, 6, 0), features[:, selected(COLUMNS, 8)]),
    )


def test_head_takes_all_features_and_uses_some(tmp_path: Path) -> None:
    """Prototypes of another length are refused; a column that is not used changes nothing."""
    size = FEATURE_SIZE + 3
    manifest = msgspec.structs.replace(MANIFEST, columns=((0, 2), (5, size)))
    sent = submission(task=digest_of(encode(manifest)), labels=(0, 1, 2) * 4)
    blobs = FolderBlobs(tmp_path / "blobs")
    job = head_job(blobs, sent, manifest=manifest, feature_size=size)
    result = run(job, workspace(blobs, tmp_path))
    assert result.metrics["onnx_max_difference"] < 1e-4
    session = onnxruntime.InferenceSession(tmp_path / "head.onnx")
    metadata = read_metadata(session.get_modelmeta().custom_metadata_map, HeadMetadata)
    assert metadata.feature_size == size
    features = np.random.default_rng(0).normal(size=(20, size)).astype(np.float32)
    other = features.copy()
    other[:, 2:5] = 100
    np.testing.assert_array_equal(*(session.run(None, {"feature": each})[0] for each in (features, other)))


@pytest.mark.parametrize(("layers", "widths"), [(None, (5, 4)), (("c384", "c8"), (2, 3))])
def test_training_gets_the_number_of_values_of_each_backbone(
    tmp_path: Path, layers: tuple[str, ...] | None, widths: tuple[int, ...]
) -> None:
    paths = [tmp_path / "a.onnx", tmp_path / "b.onnx"]
    for path, blocks in zip(paths, ({"stem": 3, "c384": 2}, {"c8": 3, "last": 1}), strict=True):
        model = onnx.load_from_string(tiny_backbone(feature_size=sum(blocks.values())))
        onnx.helper.set_model_props(model, to_properties(described(**blocks)))
        onnx.save(model, path)
    file = TaskFile(classes=("a", "b"), backbones=("a.onnx", "b.onnx"), layers=layers)
    with contextlib.closing(open_store(tmp_path / "state")) as store:
        task = prepare_task(file, paths, store=store)
        job = job_of(HeadRecord(task=task.digest, version=1), {}, task, store, tensors=None)
    assert isinstance(job, HeadJob)
    assert (job.feature_size, job.widths) == (9, widths)


ONE_SHOT = served_task()
FIRST = BlobRef(digest=b"f" * 32, size_bytes=1, name="tensors-0")
ROUNDS = served_task(ROUNDS_EXPECTATION, first_tensors=FIRST, algorithm="fpl")


def _row(device: str, *, number: int = 0) -> SubmissionRecord:
    return SubmissionRecord(device, Entry(1, f"{device}{number}".encode(), 0.0, number), 1, 1, 1, {0: 1})


def _head(task: bytes, version: int, *, tensors: bool) -> HeadRecord:
    blob = BlobRef(digest=bytes([version]) * 32, size_bytes=1, name="tensors") if tensors else None
    digest = b"graph" if tensors else f"head{version}".encode()
    file = b"file%d" % version if tensors else digest
    return HeadRecord(task=task, version=version, state="made", digest=digest, tensors=blob, file=file)


NAMED = {
    *(b"%s%d" % (name, number) for name in (b"a", b"b", b"file", b"head") for number in range(11)),
    *(b"r%d%d" % (number, number) for number in range(9)),
    *(bytes([version]) * 32 for version in range(11)),
    *(TASK, ROUNDS_TASK, FIRST.digest, b"g" * 32, b"graph", b"superseded", b"\x0a"),
}
"""Digests that the rows of `filled` name, or may name."""


def _needed(task: Task, store: Store) -> set[bytes]:
    named = NAMED | {head.members for head in store.heads.all_planned()}
    return needed_blobs(task, store, named)


@pytest.fixture
def filled(store: Store) -> Store:
    for version in (1, 2, 3):
        store.heads.put(_head(ROUNDS_TASK, version, tensors=True))
        store.heads.put(_head(TASK, version, tensors=False))
    for task in (ROUNDS_TASK, TASK):
        store.heads.put_rollout(task, initial_state([1, 2, 3]))
    for number in range(4):
        store.submissions.put(ROUNDS_TASK, _row(f"r{number}", number=number))
    for device in "ab":
        store.submissions.put(TASK, _row(device))
    graph = BlobRef(digest=b"g" * 32, size_bytes=1, name="init.onnx")
    store.facts.put(CompiledGraphs({"key": {"init": graph}}))
    return store


def test_blobs_that_rounds_need(filled: Store) -> None:
    """Submissions within the staleness, tensors and files of retained heads, graphs; everything of other tasks."""
    for version in range(4, 9):
        filled.heads.put(_head(ROUNDS_TASK, version, tensors=True))
    filled.heads.put_rollout(ROUNDS_TASK, State(newest=8, current=2, earlier=(1,), trial=Trial(3, 0.0)))
    for number in (7, 8):
        filled.submissions.put(ROUNDS_TASK, _row(f"r{number}", number=number))
    needed = _needed(ROUNDS, filled)
    assert {b"r77", b"r88"} <= needed
    assert not {b"r00", b"r11", b"r22", b"r33"} & needed
    assert {FIRST.digest, ROUNDS_TASK} <= needed
    for version in range(1, 9):
        assert bytes([version]) * 32 in needed
        assert b"file%d" % version in needed
    filled.heads.put_rollout(ROUNDS_TASK, State(newest=8, current=3, trial=None))
    needed = _needed(ROUNDS, filled)
    for version in range(1, 9):
        assert (bytes([version]) * 32 in needed) == (version >= 3)
        assert (b"file%d" % version in needed) == (version >= 3)
    assert {b"a0", b"b0", b"head1", b"head2", b"head3", b"g" * 32} <= needed


def test_without_rounds_every_device_counts(filled: Store) -> None:
    """Whatever the age of its submission; the blobs that a task with rounds would continue with are kept."""
    needed = _needed(ONE_SHOT, filled)
    assert {b"a0", b"b0", TASK, b"r00", b"r33", b"\x03" * 32, b"g" * 32} <= needed
    assert {b"\x01" * 32, b"\x02" * 32} <= needed


def test_last_heads_are_kept(filled: Store) -> None:
    """The last five, the current one and the one before it; likewise of other tasks."""
    for version in range(4, 11):
        filled.heads.put(_head(TASK, version, tensors=False))
    state = State(newest=10, current=2, earlier=(1, 4))
    filled.heads.put_rollout(TASK, state)
    kept = {f"head{version}".encode() for version in (2, 4, 6, 7, 8, 9, 10)}
    heads = {f"head{version}".encode() for version in range(1, 11)}
    assert _needed(ONE_SHOT, filled) & heads == kept
    assert _needed(ROUNDS, filled) & heads == kept
    assert served_blobs(ONE_SHOT, filled.heads.all(TASK), state) & heads == kept


def test_earlier_tasks_expire(filled: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Submissions, evaluations and graphs are deleted 30 days after another task has replaced theirs, not before.

    A task that is served again, or continued, starts anew.
    """
    now_s = 0.0
    monkeypatch.setattr(filled.clock, "now_s", lambda: now_s)
    filled.evaluations.put("a", evaluation(), digest=b"e", now_s=0.0)
    filled.facts.put(CompiledGraphs({**known_graphs(filled), "own": {"init": FIRST}}))
    put_sums(
        filled.facts,
        SumLists(TASK, pending=PendingList(members={"a": "0a"}, request="", requested_s=0.0, masked="")),
    )
    list(delete_earlier_tasks(ROUNDS, filled))
    now_s = 0.9 * KEPT_S
    list(delete_earlier_tasks(ROUNDS, filled))
    assert {TASK, b"a0", b"g" * 32} <= _needed(ROUNDS, filled)  # with its manifest, to be continued
    list(delete_earlier_tasks(ONE_SHOT, filled))
    now_s = 1.5 * KEPT_S
    list(delete_earlier_tasks(ROUNDS, filled))
    assert set(filled.submissions.all(TASK)) == {"a", "b"}
    assert set(known_graphs(filled)) == {"own"}  # one that no task has used since
    now_s = 2.5 * KEPT_S
    list(delete_earlier_tasks(_continuing(ROUNDS, TASK), filled))
    assert set(filled.submissions.all(TASK)) == {"a", "b"}
    list(delete_earlier_tasks(ROUNDS, filled))
    now_s = 3.5 * KEPT_S
    list(delete_earlier_tasks(ROUNDS, filled))
    assert filled.tasks() == {ROUNDS_TASK}
    assert not filled.evaluations.of_head(TASK, 1)
    assert not {TASK, b"a0", b"b0", b"\x0a", b"g" * 32} & _needed(ROUNDS, filled)


def _continuing(task: Task, earlier: bytes) -> Task:
    manifest = replace(task.manifest, continues=(earlier,))
    return dataclasses.replace(task, expectation=dataclasses.replace(task.expectation, manifest=manifest))


def test_members_of_a_pending_head_are_needed(filled: Store) -> None:
    planned = plan_head(filled, 4, task=ROUNDS_TASK, members={"x": b"superseded"})
    assert {b"superseded", planned.members} <= _needed(ROUNDS, filled)
    filled.heads.delete(ROUNDS_TASK, 4)
    assert not needed_blobs(ROUNDS, filled, {b"superseded", planned.members})


def test_served_blobs() -> None:
    heads = [_head(ROUNDS_TASK, version, tensors=True) for version in range(1, 9)]
    served = served_blobs(ROUNDS, heads, State(newest=8, current=2))
    assert {FIRST.digest, b"graph", b"\x02" * 32, b"\x08" * 32, bytes(32)} <= served
    assert not {b"\x01" * 32, b"\x03" * 32} & served
    assert served_blobs(ONE_SHOT, [], State()) == {bytes(32)}


def test_submission_of_an_earlier_round_without_its_blob_is_deleted(filled: Store) -> None:
    """It is deleted if it would count; one of the open round is requested instead."""
    filled.submissions.put(
        ROUNDS_TASK, dataclasses.replace(_row("here"), entry=Entry(1, filled.blobs.put(b"x"), 0.0, 2))
    )
    delete_carried_submissions(ROUNDS, filled, set(filled.blobs.digests()))
    assert sorted(filled.submissions.all(ROUNDS_TASK)) == ["here", "r0", "r1", "r3"]
    assert sorted(filled.submissions.all(TASK)) == ["a", "b"]
