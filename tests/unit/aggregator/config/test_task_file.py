"""Tests for reading task files: accepted settings, defaults, and errors with line, key and advice."""

from pathlib import Path

import pytest

from aggregator.algorithms.fedpcl import FedPCL
from aggregator.algorithms.fpl import FPL
from aggregator.algorithms.statistics.feature_map import Statistics
from aggregator.config.privacy import PrivacyBudget, PrivacySettings
from aggregator.config.schema import Client, Rounds
from aggregator.config.task_file import class_name_notes, load_task
from aggregator.coordination.round_state import Settings
from protocol.errors import ConfigError
from protocol.wire.messages import Perturbation

MINIMAL = 'classes = ["cat", "dog"]\nbackbones = ["tiny.onnx"]\n'
"""Two lines: what a test adds begins on the third."""
DP = "[privacy.dp]\nepsilon = 2\nmap = 'public.map'\nmax_epsilon = 8\n"
ROUNDS = 'algorithm = "fpl"\n'
STATISTICS = 'algorithm = "statistics"\n'


def _write(folder: Path, text: str) -> Path:
    (folder / "tiny.onnx").write_bytes(b"a backbone")
    (folder / "public.map").write_bytes(b"a map")
    path = folder / "task.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_classes_and_a_backbone_are_enough(tmp_path: Path) -> None:
    """The backbone's path is relative to the file; the page of the settings lists the defaults."""
    task, backbones = load_task(_write(tmp_path, MINIMAL))
    assert backbones == [tmp_path / "tiny.onnx"]
    assert (task.classes, task.learning) == (("cat", "dog"), None)
    assert task.settings == Settings(quorum=1, deadline_s=600.0, retrain_after=1)


def test_settings_are_read(tmp_path: Path) -> None:
    """Values, tables and nested tables reach the structs that use them."""
    text = """
# a comment with classes = 3
fleet = "barn-7"
classes = [
    "cat",
    "Großer Käfer",
]
backbones = ["tiny.onnx"]
quorum = 10
deadline_s = 60
retrain_after = 3
devices = ["a", "b"]
[client]
alpha = 0.9
[rollout]
margin = 0
[privacy.perturbation]
on = "images"
noise = "laplace"
scale = 0.05
shrink = 0.1
"""
    task, _ = load_task(_write(tmp_path, text))
    assert (task.fleet, task.classes) == ("barn-7", ("cat", "Großer Käfer"))
    assert task.settings == Settings(quorum=10, deadline_s=60.0, retrain_after=3)
    assert (task.devices, task.client, task.rollout.margin) == (("a", "b"), Client(alpha=0.9), 0)
    assert task.privacy == PrivacySettings(
        perturbation=Perturbation(on="images", noise="laplace", scale=0.05, shrink=0.1)
    )
    task, _ = load_task(_write(tmp_path, MINIMAL + STATISTICS + DP))
    public = str(tmp_path / "public.map")
    assert task.privacy.dp == PrivacyBudget(epsilon=2.0, delta=1e-5, map=public, max_epsilon=8.0)


@pytest.mark.parametrize(
    ("more", "expected"),
    [("quorum = 8", 3), ("quorum = 2", 2), ('quorum = 8\ndevices = ["a", "b"]', 2), ("", 1)],
)
def test_round_needs_three_devices_unless_told_otherwise(tmp_path: Path, more: str, expected: int) -> None:
    """At its deadline, too: what one or two send is not limited, so that one could replace the model alone."""
    task, _ = load_task(_write(tmp_path, MINIMAL + ROUNDS + more + "\n"))
    assert task.settings.min_devices == expected


def test_every_setting_of_rounds_is_read(tmp_path: Path) -> None:
    """Rounds have defaults, and settings for the round logic and for the algorithm."""
    task, _ = load_task(_write(tmp_path, MINIMAL + ROUNDS))
    assert (task.learning, task.rounds) == (FPL(), Rounds(grace_s=5.0, min_devices=None, staleness=1))
    assert task.settings == Settings(quorum=1, deadline_s=600.0, grace_s=5.0, staleness=1, rounds=40)
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
        quorum=4, deadline_s=60.0, grace_s=0.0, min_devices=2, staleness=3, rounds=9, devices=frozenset("abc")
    )


WRONG_SETTINGS: list[tuple[str, int, str]] = [
    # text after MINIMAL, line of the error, start of the message
    ("quorom = 3", 3, "`quorom`: unknown setting; did you mean `quorum`?"),
    ("\n[trainings]", 4, "`trainings`: unknown setting; did you mean `training`?"),
    ("[client]\n# x\nalfa = 1", 5, "`client.alfa`: unknown setting; did you mean `alpha`?"),
    ("[rollout]\ncanary = 2", 4, "`rollout.canary`: unknown setting; known: canary_fraction, min_canaries"),
    (ROUNDS + "[fpl]\nround = 3", 5, "`fpl.round`: unknown setting; did you mean `rounds`?"),
    (
        '[privacy.perturbation]\non = "images"\nscale = 1\nshrnk = 1',
        6,
        "`privacy.perturbation.shrnk`: unknown setting; did you mean `shrink`?",
    ),
    ('quorum = "ten"', 3, "`quorum`: Expected `int`, got `str`"),
    ("[quorum]", 3, "`quorum`: Expected `int`, got `object`"),
    ("client = 3", 3, "`client`: Expected `object`, got `int`"),
    ("quorum = 0", 3, "`quorum`: Expected `int` >= 1"),
    ("deadline_s = nan", 3, "`deadline_s`: Expected `float`"),
    ("deadline_s = inf", 3, "`deadline_s`: Expected `float` <= "),
    ('fleet = "a/b"', 3, "`fleet`: Expected `str` matching"),
    ('fleet = "a\\n"', 3, "`fleet`: Expected `str` matching"),
    ('devices = ["a", "b c"]', 3, "`devices`: Expected `str` matching"),
    ('algorithm = "fedavg"', 3, "`algorithm`: no algorithm 'fedavg': expected one of fedtc, statistics,"),
    ("[client]\nseed = 1\nalpha = 1.5", 5, "`client.alpha`: Expected `float` <= 1.0"),
    ("\nclient = { alpha = 0.0 }", 4, "`client.alpha`: Expected `float` > 0.0"),
    ("\n\nclient.alpha = -1", 5, "`client.alpha`: Expected `float` > 0.0"),
    ("[client]\nseed = 1\n[training]\nseed = -1", 6, "`training.seed`: Expected `int` >= 0"),
    ('[training]\ndevice = "tpu"', 4, "`training.device`: Expected `str` matching"),
    ('[privacy.perturbation]\non = "images"', 3, "`privacy.perturbation.scale`: missing: Standard"),
    ("[privacy.perturbation]\nscale = 0.1", 3, "`privacy.perturbation.on`: missing"),
    ("[privacy.dp]\nmax_epsilon = 8", 3, "`privacy.dp.epsilon`: missing"),
    ("[privacy.dp]\nepsilon = 2\nmax_epsilon = 8", 3, "`privacy.dp.map`: missing: Path of a file"),
    ("[privacy.dp]\nepsilon = 2\nmap = 'm'", 3, "`privacy.dp.max_epsilon`: missing: Privacy"),
    (
        STATISTICS + "[privacy.dp]\nepsilon = 2\nmap = 'm'\nmax_epsilon = 1",
        7,
        "`privacy.dp.max_epsilon`: 1 is less than epsilon (2): no device could upload anything",
    ),
    (
        DP + '[privacy.perturbation]\non = "images"\nscale = 1',
        7,
        "`privacy.perturbation`: excludes [privacy.dp]: remove one",
    ),
    (STATISTICS + DP.replace("public", "no"), 6, "`privacy.dp.map`: no file no.map: make it with `protofleet"),
    (
        STATISTICS + DP + 'unit = "person"',
        4,
        "`privacy.dp.images_per_person`: missing: images of one person that count at most",
    ),
    (STATISTICS + DP + "images_per_person = 3", 8, '`privacy.dp.images_per_person`: needs unit = "person"'),
    (STATISTICS + DP + "person_level = 2", 8, '`privacy.dp.person_level`: needs unit = "person"'),
    (STATISTICS + 'continues = "0123456789abcdef"\n' + DP, 4, "`continues`: "),
    *(
        (STATISTICS + DP + given, 9, f"`{name}`: [privacy.dp] does not use this setting: remove it")
        for name, given in (
            ("client.batch_size", "[client]\nbatch_size = 5"),
            ("statistics.features", "[statistics]\nfeatures = 8"),
            ("training.calibrate", "[training]\ncalibrate = false"),
        )
    ),
    (STATISTICS + DP + "[robust]\nmax_multiple = 1", 8, "`robust`: [privacy.dp] does not use"),
    *(
        (
            f'algorithm = "{name}"\n' + DP,
            4,
            f'`privacy.dp`: algorithm = "{name}" has no noise that bounds an image\'s influence on what its device',
        )
        for name in ("fedtc", "fedpcl", "hierarchical")
    ),
    (
        ROUNDS + '[privacy.perturbation]\nscale = 0.1\non = "prototypes"',
        6,
        '`privacy.perturbation.on`: algorithm = "fpl" uploads more than prototypes, which would stay unperturbed',
    ),
    (
        'algorithm = "hierarchical"\n[privacy.perturbation]\nscale = 0.1\non = "prototypes"',
        6,
        '`privacy.perturbation.on`: algorithm = "hierarchical" uploads more than prototypes',
    ),
    (ROUNDS + "[fedpcl]\nrounds = 3", 4, '`fedpcl`: algorithm = "fpl" does not use this setting: remove it'),
    ("[fpl]", 3, '`fpl`: algorithm = "fedtc" does not use'),
    ("\n[rounds]\nstaleness = 2", 4, '`rounds`: algorithm = "fedtc" does not use'),
    ("[training]\ngpus = 1", 4, '`training.gpus`: reserves GPUs of a Ray cluster: set engine = "ray", or remove'),
    (ROUNDS + "[training]\ntimeout_s = 9\nseed = 2", 6, '`training.seed`: algorithm = "fpl" does not use'),
    ('layers = ["c384"]\n' + ROUNDS, 3, '`layers`: algorithm = "fpl" does not use this setting'),
    (ROUNDS + "[robust]\ndetect_outliers = true", 5, '`robust.detect_outliers`: algorithm = "fpl" does not'),
    ("[robust]\nclip_multiple = 2", 4, '`robust.clip_multiple`: algorithm = "fedtc" does not use'),
    (ROUNDS + "retrain_after = 2", 4, '`retrain_after`: algorithm = "fpl" does not use'),
    (ROUNDS + "[client]\nseed = 1\nbatch_size = 2", 6, '`client.batch_size`: algorithm = "fpl" does not use'),
    (ROUNDS + "client.alpha = 0.5", 4, '`client.alpha`: algorithm = "fpl" does not use'),
    (ROUNDS + "quorum = 2\n[rounds]\nmin_devices = 3", 6, "`rounds.min_devices`: 3 is more than quorum (2)"),
    (
        ROUNDS + 'quorum = 3\ndevices = ["a", "b"]\n[rounds]\nmin_devices = 3',
        7,
        "`rounds.min_devices`: 3 is more than the 2 devices: no round would ever close",
    ),
    ("[client]\nmin_images = 6", 4, "`client.min_images`: 6 is more than client.batch_size (5)"),
    ("[client]\nbatch_size = 1", 3, "`client.min_images`: 2 is more than client.batch_size (1)"),
    ("[statistics]\nfeatures = 8", 3, '`statistics`: algorithm = "fedtc" does not use this setting'),
    (STATISTICS + "[client]\nalpha = 0.9", 5, "`client.alpha`: must be 1 with"),
    (STATISTICS + "[training]\nrecipe = 'paper'", 5, '`training.recipe`: algorithm = "statistics" does not use'),
    (STATISTICS + "[rounds]\nstaleness = 2", 4, '`rounds`: algorithm = "statistics" does not use'),
    (STATISTICS + "[fpl]\nrounds = 2", 4, '`fpl`: algorithm = "statistics" does not use'),
    (
        STATISTICS + '[privacy.perturbation]\non = "prototypes"\nscale = 1',
        5,
        '`privacy.perturbation.on`: algorithm = "statistics" uploads no prototypes',
    ),
]  # fmt: skip


@pytest.mark.parametrize(("added", "line", "message"), WRONG_SETTINGS)
def test_wrong_setting_is_an_error_with_line_and_key(
    tmp_path: Path, added: str, line: int, message: str
) -> None:
    """The message begins with file, line and the key's path."""
    path = _write(tmp_path, MINIMAL + added + "\n")
    with pytest.raises(ConfigError) as caught:
        load_task(path)
    assert str(caught.value).startswith(f"{path}:{line}: {message}")


@pytest.mark.parametrize(
    ("classes", "backbones", "message"),
    [
        (None, '["tiny.onnx"]', "1: `classes`: missing"),
        ('["a"]', None, "1: `backbones`: missing"),
        ("[]", '["tiny.onnx"]', "1: `classes`: Expected `array` of length >= 1"),
        ('["a", ""]', '["tiny.onnx"]', "1: `classes`: Expected `str` of length >= 1"),
        ('["a", 1]', '["tiny.onnx"]', "1: `classes`: Expected `str`, got `int`"),
        ('["b", "a", "b", "a"]', '["tiny.onnx"]', "1: `classes`: classes named twice: a, b"),
        ('["\u00e9", "e\u0301"]', '["tiny.onnx"]', "1: `classes`: classes named twice: \u00e9"),
        ('["a", "b "]', '["tiny.onnx"]', "1: `classes`: 'b ' begins or ends with a space"),
        ('["a\\nb"]', '["tiny.onnx"]', "1: `classes`: 'a\\nb' begins or ends with"),
        ('["a"]\n', "[]", "3: `backbones`: Expected `array` of length >= 1"),
        ('["a"]', str(["tiny.onnx"] * 17), "2: `backbones`: Expected `array` of length <= 16"),
        ('["a"]', '["tiny.onnx", "none.onnx"]', "2: `backbones`: no file {folder}/none.onnx: make it with `export-"),
        ('["a"]', '["."]', "2: `backbones`: no file "),
        ('["a"]', '["tiny.onnx", "./tiny.onnx"]', "2: `backbones`: a backbone is named twice: remove one"),
    ],
)  # fmt: skip
def test_wrong_classes_or_backbones_are_an_error(
    tmp_path: Path, classes: str | None, backbones: str | None, message: str
) -> None:
    """Missing, empty, repeated and unusable values of the two required keys."""
    lines = [f"classes = {classes}"] * (classes is not None) + [f"backbones = {backbones}"] * (
        backbones is not None
    )
    path = _write(tmp_path, "\n".join(lines))
    with pytest.raises(ConfigError) as caught:
        load_task(path)
    assert str(caught.value).startswith(f"{path}:{message.format(folder=tmp_path)}")


def test_unreadable_file_is_an_error(tmp_path: Path) -> None:
    """A missing file, a folder, other encodings, and text that is not TOML."""
    with pytest.raises(ConfigError, match=r"cannot read the task file .*none.toml: No such file"):
        load_task(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="Is a directory"):
        load_task(tmp_path)
    (tmp_path / "task.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="expected UTF-8 text"):
        load_task(tmp_path / "task.toml")
    for text, message in (
        ("classes = " + "[" * 10_000, "recursion"),
        ("classes = [\n", "Invalid value"),
        ("quorum = 1\nquorum = 2\n", r"Cannot overwrite a value \(at line 2, column 11\)"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_task(_write(tmp_path, text))


def test_settings_of_statistics_are_read(tmp_path: Path) -> None:
    task, _ = load_task(_write(tmp_path, MINIMAL + STATISTICS))
    assert (task.method, task.client.batch_size, task.learning) == (Statistics(), 5, None)
    more = "retrain_after = 2\n[statistics]\nfeatures = 0\n[client]\nbatch_size = 1\nmin_images = 1\n"
    task, _ = load_task(_write(tmp_path, MINIMAL + STATISTICS + more))
    assert (task.method, task.settings.retrain_after) == (Statistics(features=0), 2)


@pytest.mark.parametrize(
    ("classes", "notes"),
    [
        (("cat", "dog", "Großer Käfer", "v1.2", "console"), []),
        (("dog", "cat", "Dog", "CAT"), ["dog and Dog", "cat and CAT"]),
        (("Stra\u00dfe", "STRASSE"), ["Stra\u00dfe and STRASSE"]),
        (("cat", "a/b", ".."), ["no name of a folder on some or all devices: .., a/b"]),
        ((".hidden", "a:b", "cat.", "a\\b"), ["devices: .hidden, a:b, a\\b, cat."]),
        (("NUL", "com1", "con.x"), ["devices: NUL, com1, con.x"]),
        (("cat", "lost+found", "@eaDir"), ["devices: @eaDir, lost+found"]),
        (("unknown", "cat", "unsure"), ["image of no class: unknown, unsure"]),
    ],
)
def test_class_names_that_do_not_work_everywhere(classes: tuple[str, ...], notes: list[str]) -> None:
    """Two names of one folder where case does not count, names of no folder, and names of answers."""
    found = class_name_notes(classes)
    assert len(found) == len(notes)
    for note, part in zip(found, notes, strict=True):
        assert part in note


def test_byte_order_mark_is_ignored(tmp_path: Path) -> None:
    """Editors of Windows write one."""
    task, _ = load_task(_write(tmp_path, "\ufeff" + MINIMAL))
    assert task.classes == ("cat", "dog")
