"""The task file: what is taken, and that a wrong one is refused with its line and the reason."""

from pathlib import Path

import pytest

from aggregator.algorithms.fedpcl import FedPCL
from aggregator.algorithms.fpl import FPL
from aggregator.config.task_file import Client, Rounds, Training, load_task, read_backbone
from aggregator.coordination.rollout import Settings as RolloutSettings
from aggregator.coordination.rounds import Settings
from aggregator.tasks.manifests import perturbation_of, task_manifest
from protocol.errors import BackboneMismatch, ConfigError
from protocol.wire.messages import BlobRef, DifferentialPrivacy, Perturbation
from tests.support.graphs import tiny_backbone

LEAST = 'classes = ["cat", "dog"]\nbackbones = ["tiny.onnx"]\n'
"""Two lines: what is added begins on the third."""


PRIVATE = "[privacy]\nepsilon = 2\nclip_norm = 9\nmax_epsilon = 8\n"
"""Four lines: all that differential privacy needs."""


def _write(folder: Path, text: str) -> Path:
    (folder / "tiny.onnx").write_bytes(b"a backbone")
    path = folder / "task.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_least_there_can_be(tmp_path: Path) -> None:
    """Classes and a backbone; the rest has defaults, and the backbone lies beside the file."""
    task, backbones = load_task(_write(tmp_path, LEAST))
    assert backbones == [tmp_path / "tiny.onnx"]
    assert task.classes == ("cat", "dog")
    assert (task.fleet, task.algorithm, task.devices) == ("default", "fedtc", None)
    assert task.settings == Settings(quorum=1, deadline_s=600.0, retrain_after=1)
    assert task.rollout_settings == RolloutSettings(canary_fraction=0.0, margin=0.02, canary_timeout_s=600.0)
    assert task.client == Client(alpha=0.99, batch_size=5, min_images=2, seed=0)
    assert task.training == Training(recipe="default", restore=None, epochs=None, device="auto", seed=0)
    assert task.learning is None


def test_everything_that_can_be_set(tmp_path: Path) -> None:
    """Every setting reaches the task."""
    text = """
# a comment with classes = 3
fleet = "barn-7"
algorithm = "fedtc"
classes = [
    "cat",
    "Großer Käfer",
]
backbones = ["tiny.onnx"]
quorum = 10
deadline_s = 60
retrain_after = 3
max_submission_mb = 1.5
devices = ["a", "b"]
[client]
alpha = 0.9
batch_size = 7
min_images = 1
seed = 3
[training]
recipe = "paper"
restore = false
epochs = 20
device = "cuda:1"
seed = 4
[rollout]
canary = 0.25
margin = 0
patience_s = 60
[privacy]
perturb = "images"
noise = "laplace"
scale = 0.05
shrink = 0.1
"""
    task, _ = load_task(_write(tmp_path, text))
    assert task.fleet == "barn-7"
    assert task.classes == ("cat", "Großer Käfer")
    assert task.settings == Settings(quorum=10, deadline_s=60.0, retrain_after=3)
    assert task.max_submission_mb == 1.5
    assert task.devices == ("a", "b")
    assert task.client == Client(alpha=0.9, batch_size=7, min_images=1, seed=3)
    assert task.training == Training(recipe="paper", restore=False, epochs=20, device="cuda:1", seed=4)
    assert task.rollout_settings == RolloutSettings(canary_fraction=0.25, margin=0.0, canary_timeout_s=60.0)
    assert perturbation_of(task.privacy) == Perturbation(on="images", noise="laplace", scale=0.05, shrink=0.1)


def test_rounds_have_defaults(tmp_path: Path) -> None:
    """An algorithm's name is all that is needed: the rest did best in benchmarks, or fits a small fleet."""
    task, _ = load_task(_write(tmp_path, LEAST + 'algorithm = "fpl"'))
    assert task.learning == FPL()
    assert task.rounds == Rounds(grace_s=5.0, min_devices=1, staleness=1)
    assert task.settings == Settings(quorum=1, deadline_s=600.0, grace_s=5.0, staleness=1, rounds=40)
    task, _ = load_task(_write(tmp_path, LEAST + 'algorithm = "fedpcl"'))
    assert task.learning == FedPCL()


def test_everything_that_can_be_set_of_rounds(tmp_path: Path) -> None:
    """Every setting reaches the round logic or the algorithm; several backbones are read in their order."""
    (tmp_path / "other.onnx").write_bytes(b"another")
    text = """
algorithm = "fedpcl"
classes = ["cat", "dog"]
backbones = ["tiny.onnx", "other.onnx"]
quorum = 4
deadline_s = 60
devices = ["a", "b", "c"]
[client]
min_images = 7
seed = 3
[rounds]
grace_s = 0
min_devices = 2
staleness = 3
[fedpcl]
rounds = 9
tau = 0.5
"""
    task, backbones = load_task(_write(tmp_path, text))
    assert backbones == [tmp_path / "tiny.onnx", tmp_path / "other.onnx"]
    assert task.learning == FedPCL(rounds=9, tau=0.5)
    assert task.client == Client(min_images=7, seed=3)
    assert task.settings == Settings(
        quorum=4,
        deadline_s=60.0,
        grace_s=0.0,
        min_devices=2,
        staleness=3,
        rounds=9,
        devices=frozenset("abc"),
    )


def test_a_private_task_filters_no_outliers(tmp_path: Path) -> None:
    """Its alpha becomes 1 by itself, and may be written so; the noise is what epsilon and delta need."""
    for more in ("", "[client]\nalpha = 1"):
        task, _ = load_task(_write(tmp_path, LEAST + PRIVATE + more))
        manifest = task_manifest(task, [BlobRef(digest=bytes(32), size_bytes=1, name="tiny.onnx")])
        assert manifest.alpha == 1
        assert manifest.differential_privacy == DifferentialPrivacy(
            clip_norm=9.0, noise_multiplier=1.994, delta=1e-5, max_epsilon=8.0
        )


WRONG: dict[str, tuple[str, int, str]] = {
    "unknown setting": ("quorom = 3", 3, "unknown setting `quorom`; did you mean `quorum`?"),
    "nothing like it": ("zzz = 3", 3, "unknown setting `zzz`; known: classes, backbones, fleet"),
    "unknown table": ("\n[trainings]", 4, "unknown setting `trainings`; did you mean `training`?"),
    "unknown in a table": ("[client]\n# x\nalfa = 1", 5, "unknown setting `alfa`; did you mean `alpha`?"),
    "wrong type": ('quorum = "ten"', 3, "`quorum`: Expected `int`, got `str`"),
    "table for a value": ("[quorum]", 3, "`quorum`: Expected `int`, got `object`"),
    "value for a table": ("client = 3", 3, "`client`: Expected `object`, got `int`"),
    "no device": ("quorum = 0", 3, "`quorum`: Expected `int` >= 1"),
    "no time": ("deadline_s = 0", 3, "`deadline_s`: Expected `float` > 0.0"),
    "not a time": ("deadline_s = nan", 3, "`deadline_s`: Expected `float`"),
    "endless": ("deadline_s = inf", 3, "`deadline_s`: Expected `float` <= "),
    "no room": ("max_submission_mb = -1", 3, "`max_submission_mb`: Expected `float` > 0.0"),
    "fleet with a slash": ('fleet = "a/b"', 3, "`fleet`: Expected `str` matching"),
    "fleet with a line break": ('fleet = "a\\n"', 3, "`fleet`: Expected `str` matching"),
    "device with a space": ('devices = ["a", "b c"]', 3, "`devices`: Expected `str` matching"),
    "no devices": ("devices = []", 3, "`devices`: Expected `array` of length >= 1"),
    "unknown noise": (
        '[privacy]\nperturb = "features"',
        4,
        "`privacy.perturb`: Invalid enum value 'features'; expected 'prototypes' or 'images'",
    ),
    "noise of no size": ('[privacy]\nperturb = "images"', 4, "`perturb` wants to know how much noise: set"),
    "a size of no noise": ("[privacy]\nscale = 0.1", 4, "`privacy.scale` says nothing without `perturb`"),
    "no deviation": (
        '[privacy]\nperturb = "images"\nscale = 0',
        5,
        "`privacy.scale`: Expected `float` > 0",
    ),
    "nothing is left": ('[privacy]\nperturb = "images"\nscale = 1\nshrink = 1', 6, "`privacy.shrink`"),
    "a budget of nothing": (
        "[privacy]\nmax_epsilon = 8",
        4,
        "`privacy.max_epsilon` says nothing without `epsilon`",
    ),
    "nothing is clipped": ("[privacy]\nepsilon = 2\nmax_epsilon = 8", 4, "set `clip_norm`"),
    "no budget": (
        "[privacy]\nepsilon = 2\nclip_norm = 9",
        4,
        "`epsilon` is of one submission: set `max_epsilon`",
    ),
    "a budget that is spent at once": (
        "[privacy]\nepsilon = 2\nclip_norm = 9\nmax_epsilon = 1",
        6,
        "max_epsilon (1) is less than epsilon (2): no device could upload anything",
    ),
    "an epsilon that bounds nothing": (
        "[privacy]\nepsilon = 21",
        4,
        "`privacy.epsilon`: Expected `float` <= 20",
    ),
    "a delta that promises nothing": (
        "[privacy]\ndelta = 0.1",
        4,
        "`privacy.delta`: Expected `float` <= 0.001",
    ),
    "two kinds of noise": (
        PRIVATE + 'perturb = "images"\nscale = 1',
        7,
        "perturbation and differential privacy exclude each other: take one",
    ),
    "outliers of a private task": (
        PRIVATE + "[client]\nalpha = 0.99",
        8,
        "with differential privacy alpha must be 1: which outliers are left out hangs on other images",
    ),
    "rounds of a private task": (
        'algorithm = "fedpcl"\n' + PRIVATE,
        5,
        'algorithm = "fedpcl" learns a projection from a device\'s own images, so that what one of them changes has',
    ),
    "half of what leaves perturbed": (
        'algorithm = "fpl"\n[privacy]\nscale = 0.1\nperturb = "prototypes"',
        6,
        'algorithm = "fpl" uploads parameters beside prototypes, which would be as they are',
    ),
    "a table of another algorithm": (
        'algorithm = "fpl"\n[fedpcl]\nrounds = 3',
        4,
        '`fedpcl` says nothing to algorithm = "fpl": leave it out',
    ),
    "a table of an algorithm that was not chosen": ("[fpl]", 3, '`fpl` says nothing to algorithm = "fedtc"'),
    "rounds of what has none": (
        "\n[rounds]\nstaleness = 2",
        4,
        '`rounds` says nothing to algorithm = "fedtc"',
    ),
    "training where devices train": (
        'algorithm = "fedpcl"\n[training]\nseed = 2',
        4,
        '`training` says nothing to algorithm = "fedpcl"',
    ),
    "retraining of rounds": (
        'algorithm = "fpl"\nretrain_after = 2',
        4,
        "`retrain_after` says nothing to",
    ),
    "batches of prototypes in rounds": (
        'algorithm = "fpl"\n[client]\nseed = 1\nbatch_size = 2',
        6,
        "`client.batch_size` says nothing to",
    ),
    "more at least than a quorum": (
        'algorithm = "fpl"\nquorum = 2\n[rounds]\nmin_devices = 3',
        6,
        "min_devices (3) must not exceed quorum (2)",
    ),
    "more at least than there are": (
        'algorithm = "fpl"\nquorum = 3\ndevices = ["a", "b"]\n[rounds]\nmin_devices = 3',
        7,
        "min_devices (3) is more than there are devices (2): no round would ever close",
    ),
    "unknown in an algorithm's table": (
        'algorithm = "fpl"\n[fpl]\nround = 3',
        5,
        "unknown setting `round`; did you mean `rounds`?",
    ),
    "a canary share of more than all": (
        "[rollout]\ncanary = 1.5",
        4,
        "`rollout.canary`: Expected `float` <= 1.0",
    ),
    "no patience": ("[rollout]\npatience_s = 0", 4, "`rollout.patience_s`: Expected `float` > 0.0"),
    "unknown in the rollout": (
        "[rollout]\ncanaries = 2",
        4,
        "unknown setting `canaries`; did you mean `canary`?",
    ),
    "no grace": ('algorithm = "fpl"\nrounds.grace_s = -1', 4, "`rounds.grace_s`: Expected `float` >= 0.0"),
    "unknown algorithm": (
        'algorithm = "fedavg"',
        3,
        "'fedavg'; expected 'fedtc' or 'fedpcl' or 'fpl'",
    ),
    "alpha past 1": ("[client]\nseed = 1\nalpha = 1.5", 5, "`client.alpha`: Expected `float` <= 1.0"),
    "alpha in an inline table": ("\nclient = { alpha = 0.0 }", 4, "`client.alpha`: Expected `float` > 0.0"),
    "alpha with a dot": ("\n\nclient.alpha = -1", 5, "`client.alpha`: Expected `float` > 0.0"),
    "minimum past the batch": (
        "[client]\nmin_images = 6",
        4,
        "min_images (6) must not exceed batch_size (5)",
    ),
    "batch below the minimum": (
        "[client]\nbatch_size = 1",
        3,
        "min_images (2) must not exceed batch_size (1)",
    ),
    "unknown recipe": (
        '[training]\nrecipe = "best"',
        4,
        "`training.recipe`: Invalid enum value 'best'; expected 'default' or",
    ),
    "unknown device": ('[training]\ndevice = "tpu"', 4, "`training.device`: Expected `str` matching"),
    "same key in another table": (
        "[client]\nseed = 1\n[training]\nseed = -1",
        6,
        "`training.seed`: Expected `int` >= 0",
    ),
}


@pytest.mark.parametrize(("added", "line", "reason"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_setting_is_refused_with_its_line(tmp_path: Path, added: str, line: int, reason: str) -> None:
    """The message begins with file and line, then says what was expected and what came."""
    path = _write(tmp_path, LEAST + added + "\n")
    with pytest.raises(ConfigError) as caught:
        load_task(path)
    assert str(caught.value).startswith(f"{path}:{line}: ")
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('backbones = ["tiny.onnx"]', ":1: `classes` is missing"),
        ('classes = ["a"]', ":1: `backbones` is missing"),
        ('# x\nclasses = []\nbackbones = ["tiny.onnx"]', ":2: `classes`: Expected `array` of length >= 1"),
        ('classes = ["a", ""]\nbackbones = ["tiny.onnx"]', ":1: `classes`: Expected `str` of length >= 1"),
        ('classes = ["a", 1]\nbackbones = ["tiny.onnx"]', ":1: `classes`: Expected `str`, got `int`"),
        ('classes = ["b", "a", "b", "a"]\nbackbones = ["tiny.onnx"]', ":1: classes named twice: a, b"),
        ('classes = ["\u00e9", "e\u0301"]\nbackbones = ["tiny.onnx"]', ":1: classes named twice: \u00e9"),
        ('classes = ["a", "b "]\nbackbones = ["tiny.onnx"]', ":1: class 'b ' begins or ends with a space"),
        ('classes = ["a\\nb"]\nbackbones = ["tiny.onnx"]', ":1: class 'a\\nb' begins or ends with"),
        ('classes = ["a"]\n\nbackbones = []', ":3: `backbones`: Expected `array` of length >= 1"),
        (
            f'classes = ["a"]\nbackbones = {["tiny.onnx"] * 17}',
            ":2: `backbones`: Expected `array` of length <= 16",
        ),
        (
            'classes = ["a"]\nbackbones = ["tiny.onnx", "other.onnx"]',
            ":2: no backbone at {folder}/other.onnx; make",
        ),
        (
            'classes = ["a"]\nbackbones = ["tiny.onnx", "./tiny.onnx"]',
            ":2: a backbone named twice adds nothing: leave one out",
        ),
        (
            'classes = ["a"]\nbackbones = ["none.onnx"]',
            ":2: no backbone at {folder}/none.onnx; make one with: export-",
        ),
        ('classes = ["a"]\nbackbones = ["."]', ":2: no backbone at "),
        ("classes = [\n", ": Invalid value (at end of document)"),
        ("quorum = 1\nquorum = 2\n", ": Cannot overwrite a value (at line 2, column 11)"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    """What is missing, doubled, empty or no TOML at all is named with its place."""
    path = _write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_task(path)
    assert str(caught.value).startswith(f"{path}{reason.format(folder=tmp_path)}")


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    """Not there, a folder, no text, or nested without end."""
    with pytest.raises(ConfigError, match=r"cannot read the task file .*none.toml: No such file"):
        load_task(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="Is a directory"):
        load_task(tmp_path)
    (tmp_path / "task.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="expected UTF-8 text"):
        load_task(tmp_path / "task.toml")
    with pytest.raises(ConfigError, match="recursion"):
        load_task(_write(tmp_path, "classes = " + "[" * 10_000))


def test_a_backbone_says_what_it_is(tmp_path: Path) -> None:
    """Its metadata is read from the file."""
    path = tmp_path / "tiny.onnx"
    path.write_bytes(tiny_backbone(feature_size=12))
    assert read_backbone(path).feature_size == 12


def test_a_backbone_that_is_none(tmp_path: Path) -> None:
    """Noise is no ONNX file, and somebody else's ONNX file is no backbone of ours."""
    path = tmp_path / "tiny.onnx"
    path.write_bytes(b"\xff" * 100)
    with pytest.raises(ConfigError, match="cannot read the backbone"):
        read_backbone(path)
    path.write_bytes(b"")
    with pytest.raises(BackboneMismatch, match="export-backbone"):
        read_backbone(path)
