"""The aggregator's command line: outcomes, errors, task files, the doctor, and what it needs installed."""

import json
import os
import re
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from aggregator.algorithms.registry import ALGORITHMS
from aggregator.cli import cli, task_file
from aggregator.config.task_file import load_task
from aggregator.messaging.manifest_signer import identity_of
from aggregator.storage.open_store import open_store
from edge_client.cli import cli as edge_client
from protocol.enrollment import read_enrollment
from protocol.errors import ConfigError
from protocol.mqtt.reconnecting_session import BrokerAddress
from protocol.storage.keyfile import read_key
from protocol.wire.messages import Released
from protocol.wire.signing import public_key
from sums_operator.state import make_operator, make_task, read_keys
from tests.support.fleets.aggregator_process import PROGRAM, run_aggregator, write_task
from tests.support.fleets.closed_fleet import FLEET, ClosedFleet, findings, statuses
from tests.support.graphs.backbones import tiny_backbone
from tests.support.graphs.hostile_graphs import loops_on_white
from tests.support.messages.submissions import SERVED
from tests.support.network.brokers import Mosquitto, free_address, needs_mosquitto


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["status", "--help"], ["--version"]])
def test_help_imports_no_large_package(arguments: list[str]) -> None:
    done = run_aggregator(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


def test_status_imports_no_large_package(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.facts.put(SERVED)
    store.close()
    done = run_aggregator("status", "--state", str(tmp_path), "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["fleet"] == SERVED.fleet
    assert "0 submissions" in run_aggregator("status", "--state", str(tmp_path)).stdout


def test_the_signing_key_is_replaced_by_one_of_a_root_key(tmp_path: Path) -> None:
    """With two commands, of which the first needs no state; status shows the new key."""
    store = open_store(tmp_path / "state")
    store.facts.put(SERVED)
    identity_of(store.folder)
    store.close()
    folders = [str(tmp_path / name) for name in ("root.key", "new", "state")]
    root, new, state = folders
    issued = run_aggregator("issue-key", "--root", root, "--fleet", SERVED.fleet, "--out", new)
    assert (issued.returncode, issued.stderr) == (0, "")
    rotated = run_aggregator("rotate-key", "--issued", new, "--state", state)
    assert (rotated.returncode, rotated.stderr) == (0, "")
    shown = run_aggregator("status", "--state", state).stdout
    assert public_key(identity_of(tmp_path / "state")).hex() in rotated.stdout
    for key in (identity_of(tmp_path / "state"), read_key(tmp_path / "root.key")):
        assert public_key(key).hex() in shown


TASK = ["--task", "{folder}/task.toml"]
STATE = ["--state", "{folder}/state"]
OUT = ["--out", "{folder}/out"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["status", "--state", "{folder}/none"], 1, "error: no aggregator state in {folder}/none"),
        (["run"], 2, "Missing option '--task'"),
        (["run", "--task", "{folder}/none.toml"], 1, "error: cannot read the task file {folder}/none.toml"),
        (["run", *TASK, "--embedded-broker", "--tls"], 2, "encryption nor passwords: use mosquitto"),
        (["run", *TASK, "--broker", "a:b:c"], 1, "error: expected the broker as HOST"),
        (["run", "--task", "{folder}/wrong.toml"], 1, "error: {folder}/wrong.toml:1: `x`: unknown setting"),
        (["run", *TASK, "--state", "{folder}/task.toml"], 2, "is a file"),
        (["run", *TASK, "--state", "{folder}/task.toml/x"], 1, "cannot use {folder}/task.toml/x: Not a directory"),
        (["enroll", "shed-1", *OUT, *STATE], 2, "no aggregator state in {folder}/state: give the"),
        (["enroll", "a", *OUT, "--key", "", *TASK, *STATE], 2, "expected 64 hex digits, got ''"),
        (["enroll", "a b", *OUT, *TASK, *STATE], 1, "error: invalid device name 'a b'"),
        (["enroll", "shed-1", *TASK, *STATE], 2, "expected DEVICE and --out DIR, or --link and --url URL"),
        (["enroll", "--link", *TASK, *STATE], 2, "--link needs --url, and neither --out nor --key"),
        (["enroll", "--link", "--url", "https://x", *OUT, *TASK, *STATE], 2, "neither --out nor --key"),
        (["enroll", "--link", "--url", "fleet.example", *TASK, *STATE], 1, "expected --url as https://HOST"),
        (["enroll", "shed-1", *OUT, "--broker", "a:b", *TASK, *STATE], 1, "error: expected the broker as HOST"),
        (["enroll-broker", "a:1", *OUT, *TASK, *STATE], 1, "without a port"),
        (["enroll-broker", *OUT, *STATE], 2, "Missing argument 'HOST...'"),
        (["revoke", "shed-1", *STATE], 1, "error: no aggregator state in"),
        (["rotate-key", *STATE], 1, "error: no aggregator state in"),
        (["issue-key", "--root", "{folder}/root", "--fleet", "a b", *OUT], 1, "error: invalid fleet name 'a b'"),
        (["reset-key", "shed-1", *STATE], 1, "error: no aggregator state in"),
        (["release", "shed-1", *STATE], 1, "error: no aggregator state in {folder}/state: give the --state"),
        (["rollback", *STATE], 1, "error: no aggregator state in"),
    ],
)  # fmt: skip
def test_error_is_one_line_and_creates_nothing(
    tmp_path: Path, arguments: list[str], code: int, message: str
) -> None:
    """Exit status 1 for an expected failure, 2 for a usage error; never a stack trace."""
    write_task(tmp_path)
    (tmp_path / "wrong.toml").write_text("x = 1\n")
    done = run_aggregator(*(argument.format(folder=tmp_path) for argument in arguments), program=PROGRAM)
    assert (done.returncode, done.stdout) == (code, "")
    assert message.format(folder=tmp_path) in done.stderr
    assert "Traceback" not in done.stderr
    if code == 1:
        assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()
    assert "--task" in arguments or not (tmp_path / "state").exists()


def test_a_password_without_encryption_is_logged(tmp_path: Path) -> None:
    """By `serve`, also if it cannot start."""
    (tmp_path / "password").write_text("secret\n")
    login = ("--username", "a", "--password-file", str(tmp_path / "password"), "--broker", "home.example")
    where = ("--task", str(tmp_path / "none.toml"), "--state", str(tmp_path / "state"), "--http", "off")
    done = run_aggregator("run", *login, *where, program=PROGRAM)
    assert done.returncode == 1
    assert "is sent to home.example:1883 without encryption" in done.stderr


def test_closing_a_fleet_step_by_step(tmp_path: Path) -> None:
    """Each command prints the next step; the task file is needed once, and closing is printed once."""
    write_task(tmp_path)
    state = ("--state", str(tmp_path / "state"))
    task = ("--task", str(tmp_path / "task.toml"))
    done = run_aggregator(
        *("enroll-broker", "broker.example", "10.0.0.1", "--out", str(tmp_path / "broker")), *state, *task
    )
    assert done.returncode == 0
    assert "/etc/mosquitto/protofleet" in done.stdout
    assert f"created the CA of fleet barn in {tmp_path}/state/identity" in done.stderr
    for number, closes in ((1, True), (2, False)):
        done = run_aggregator("enroll", f"shed-{number}", "--out", str(tmp_path / f"shed-{number}"), *state)
        assert (done.returncode, done.stderr) == (0, "")
        given = f"edge-client --enrollment {tmp_path}/shed-{number} --broker HOST[:PORT] --data IMAGES"
        assert given in done.stdout
        assert ("the fleet is now closed" in done.stdout) == closes
        assert read_enrollment(tmp_path / f"shed-{number}").device == f"shed-{number}"
    done = run_aggregator("revoke", "shed-1", *state)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"copy {tmp_path}/state/identity/revoked.crl" in done.stdout
    broker = ("--broker", "broker.example")
    done = run_aggregator("enroll", "shed-2", "--renew", "--out", str(tmp_path / "new"), *broker, *state)
    assert f"edge-client --enrollment {tmp_path}/new --data IMAGES" in done.stdout
    assert f"copy {tmp_path}/state/identity/revoked.crl" in done.stdout


def test_signing_key_stays_with_the_devices_owner(tmp_path: Path) -> None:
    """The aggregator gets its public key; the folder is complete once the owner has put the private one into it."""
    write_task(tmp_path)
    own, out = tmp_path / "own.key", tmp_path / "out"
    keys = {CliRunner().invoke(edge_client, ["make-key", str(own)]).output for _ in range(2)}
    (key,) = keys
    arguments = ("--key", key.strip(), "--out", str(out), "--task", str(tmp_path / "task.toml"))
    done = run_aggregator("enroll", "shed-1", *arguments, "--state", str(tmp_path / "state"))
    assert done.returncode == 0
    assert f"put the signing.key of this public key into {out}" in done.stdout
    assert not any(
        own.read_bytes() in file.read_bytes()
        for file in tmp_path.rglob("*")
        if file.is_file() and file != own
    )
    with pytest.raises(ConfigError, match=r"signing\.key"):
        read_enrollment(out)
    own.rename(out / "signing.key")
    assert public_key(read_enrollment(out).signing_key).hex() == key.strip()


def test_reset_key_deletes_pinned_key_once_and_keeps_the_spent_budget(tmp_path: Path) -> None:
    """The device with the new key is answered with the releases of the old one."""
    spent = (Released(2.0, 1, 3),)
    with closing(open_store(tmp_path)) as store:
        store.keys.pin("a", bytes(32), now_s=0.0)
        store.devices.merge_releases("a", spent)
        store.devices.raise_epsilon("a", 3.5)
    done = run_aggregator("reset-key", "a", "--state", str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "the next key used under the name a will be stored\n")
    with closing(open_store(tmp_path, read_only=True)) as store:
        assert store.keys.get("a") is None
    done = run_aggregator("reset-key", "a", "--state", str(tmp_path))
    assert done.returncode == 1
    assert "a has no key stored at first use" in done.stderr
    with closing(open_store(tmp_path)) as store:
        assert store.devices.merge_releases("a", ()) == (spent, 3)
        assert store.devices.epsilons() == {"a": 3.5}


@pytest.mark.skipif(os.getuid() != 0, reason="only root writes files that others cannot read")
def test_root_is_refused_in_another_users_state(tmp_path: Path) -> None:
    """Nothing is written, and the error names the user to run it as."""
    write_task(tmp_path)
    (tmp_path / "state").mkdir()
    os.chown(tmp_path / "state", 12345, -1)
    arguments = ("--out", str(tmp_path / "out"), "--task", str(tmp_path / "task.toml"))
    done = run_aggregator("enroll", "shed-1", *arguments, "--state", str(tmp_path / "state"))
    assert (done.returncode, list((tmp_path / "state").iterdir())) == (1, [])
    assert "belongs to #12345, who could not read files written by root" in done.stderr
    assert "sudo -u #12345" in done.stderr


DEPLOY = Path(__file__).parents[3] / "deploy"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder, with a backbone and folders of images."""
    (tmp_path / "tiny.onnx").write_bytes(tiny_backbone())
    for name in ("pear", "apple", ".cache"):
        (tmp_path / "images" / name).mkdir(parents=True)
    (tmp_path / "images" / "notes.txt").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _run(*arguments: str, answers: str | None = None) -> Result:
    return CliRunner().invoke(cli, arguments, input=answers)


@pytest.mark.parametrize("algorithm", tuple(ALGORITHMS))
def test_written_file_is_valid_with_and_without_its_comments(folder: Path, algorithm: str) -> None:
    """Its classes are the folders' names; the values in comments are the defaults."""
    given = ["--images", "images", "--class", 'a "b" ä', "--backbone", "tiny.onnx", "--quorum", "3"]
    done = _run("init", *given, "--algorithm", algorithm)
    assert done.exit_code == 0, done.output
    written, backbones = load_task(folder / "task.toml")
    assert written.classes == ('a "b" ä', "apple", "pear")
    assert (written.quorum, written.algorithm, backbones[0].name) == (3, algorithm, "tiny.onnx")
    text = (folder / "task.toml").read_text()
    assert (f"[{algorithm}]" in text) == bool(ALGORITHMS[algorithm].__struct_fields__)
    examples = "devices|restore|epochs|min_devices|max_devices|max_storage_mb|uploads_per_hour"
    with_defaults = re.sub(rf"(?m)^# (?!({examples}) = )(?=\w+ = )", "", text)
    (folder / "task.toml").write_text(with_defaults)
    assert load_task(folder / "task.toml")[0] == written


@pytest.mark.parametrize(
    ("algorithm", "file", "end"), [("fedtc", "task", None), ("fedpcl", "rounds", "[fedpcl]")]
)
def test_written_comments_are_those_of_the_examples(
    folder: Path, algorithm: str, file: str, end: str | None
) -> None:
    _run("init", "--class", "a", "--backbone", "tiny.onnx", "--algorithm", algorithm)
    text = "".join((folder / "task.toml").read_text().partition("# max_submission_mb")[1:])
    assert text.partition(end or "\0")[0].strip() in (DEPLOY / f"{file}.toml").read_text()


def test_questions_are_asked_on_a_terminal(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty answer is the default, which for the backbone is a file beside the task file."""
    monkeypatch.setattr(task_file, "_is_terminal", lambda: True)
    done = _run("init", "my.toml", "--quorum", "2", answers="orchard\nimages\n\nstatistics\n")
    assert done.exit_code == 0, done.output
    task, _ = load_task(folder / "my.toml")
    assert (task.fleet, task.classes, task.backbones) == ("orchard", ("apple", "pear"), ("tiny.onnx",))
    assert (task.algorithm, task.quorum) == ("statistics", 2)
    assert "devices need --fleet orchard" in done.output


@pytest.mark.parametrize(
    ("arguments", "code", "error"),
    [
        (["init"], 2, "missing --class or --images"),
        (["init", "--class", "a"], 2, "missing --backbone"),
        (["init", "--class", "a", "--backbone", "none.onnx"], 1, "run: aggregator check task.toml"),
        (["init", "--class", "a", "--backbone", "tiny.onnx", "--algorithm", "x"], 2, "expected one of fedtc"),
        (["init", "there.toml", "--class", "a", "--backbone", "tiny.onnx"], 1, "there.toml exists already"),
        (["init", "--images", "images/pear", "--backbone", "tiny.onnx"], 1, "no folder in images/pear"),
        (
            ["init", "--class", "a", "--backbone", "tiny.onnx", "--algorithm", "fedtc", "--private"],
            2,
            "needs statistics",
        ),
        (["init", "--class", "a", "--backbone", "tiny.onnx", "--second-operator", "o"], 2, "needs --private"),
        (["check", "there.toml"], 1, "there.toml:1: `backbones`: no file none.onnx"),
        (["check", "none.toml"], 1, "cannot read the task file none.toml"),
    ],
)
def test_error_says_what_to_do(folder: Path, arguments: list[str], code: int, error: str) -> None:
    (folder / "there.toml").write_text('backbones = ["none.onnx"]\nclasses = ["a"]\n')
    done = _run(*arguments)
    assert error in f"{done.output} {done.exception}"
    assert done.exit_code == code


def test_check_shows_what_a_task_defines(folder: Path) -> None:
    (folder / "task.toml").write_text('fleet = "orchard"\nbackbones = ["tiny.onnx"]\nclasses = ["a", "b"]\n')
    done = _run("check", "task.toml")
    assert done.exit_code == 0, done.output
    assert "fleet orchard, fedtc, 2 classes, 16 features" in done.output
    assert "quorum is 1" in done.output


def test_private_task_needs_files_of_two_parties(folder: Path) -> None:
    """The error names the command that makes each; then the task says what each party can see."""
    given = ("--class", "a", "--class", "b", "--backbone", "tiny.onnx", "--quorum", "5")
    done = _run("init", *given, "--private")
    assert "no file public.map: make it with `protofleet public-map`" in f"{done.output}{done.exception}"
    (folder / "public.map").touch()
    assert "`protofleet-sums new-task`" in str(_run("check", "task.toml").exception)
    (folder / "operator.toml").touch()
    assert "take the file that `protofleet-sums new-task` has written" in str(
        _run("check", "task.toml").exception
    )
    make_operator(folder / "sums")
    card = folder / "sums.toml"
    seal_key = make_task(folder / "sums", card)
    (folder / "task.toml").unlink()
    done = _run("init", *given, "--private", "--second-operator", str(card))
    assert done.exit_code == 0, done.output
    sign_key = read_keys(folder / "sums").public()["sign_key"]
    assert f"owners give --second-operator {sign_key} to edge-client" in done.output
    assert f"protofleet-sums end-task {seal_key[:16]}" in done.output
    assert "of a class: below that the head can miss it" in done.output
    assert "the second operator opens them, and sees no sum" in done.output
    assert "conditional: they hold only if the second operator is honest" in done.output
    assert "a local epsilon of 1.8 to both; limit: --max-local-epsilon" in done.output
    task, _ = load_task(folder / "task.toml")
    assert (task.algorithm, task.quorum) == ("statistics", 5)
    assert task.privacy.dp is not None
    assert task.privacy.sums is not None
    assert Path(task.privacy.sums.operator) == card
    assert (task.privacy.dp.epsilon, task.privacy.dp.max_epsilon) == (1.0, 4.0)
    assert (task.privacy.sums.min_devices, task.privacy.sums.honest) == (5, 3)


PERSON = 'unit = "person"\nimages_per_person = 10\nperson_level = 2\n'


@pytest.mark.parametrize(
    ("epsilon", "unit", "images", "words"),
    [
        ("1", "", 85, "epsilon is the privacy loss of one image, on one device"),
        ("8", "", 14, "a person on several images has a greater one"),
        ("1", PERSON, 845, "loss of one person, of whom at most 10 images count, on one device"),
        ("1", PERSON, 845, "or folder 2 of its path; images without a person all count"),
        (
            "1",
            PERSON,
            845,
            "the noise is that of 10 images: the same accuracy needs about 10 times the images",
        ),
    ],
)
def test_check_says_the_unit_and_warns_of_a_fleet_that_is_too_small_for_its_noise(
    folder: Path, epsilon: str, unit: str, images: int, words: str
) -> None:
    """With 10 devices and 100 images of each class, measured heads of epsilon 1 were at chance."""
    (folder / "m").touch()
    privacy = f"[privacy.dp]\nepsilon = {epsilon}\nmap = 'm'\nmax_epsilon = 9\n{unit}"
    task = 'backbones = ["tiny.onnx"]\nclasses = ["a", "b"]\nalgorithm = "statistics"\nquorum = 10\n'
    (folder / "task.toml").write_text(task + privacy)
    done = _run("check", "task.toml")
    assert done.exit_code == 0, done.output
    expected = (
        f"hides {images} images of a class: below that the head can miss it, and below about {10 * images} of"
    )
    assert expected in done.output
    assert words in done.output


def test_check_names_a_backbone_that_private_devices_refuse(folder: Path) -> None:
    """One whose time depends on images."""
    (folder / "m").touch()
    (folder / "loop.onnx").write_bytes(loops_on_white())
    task = 'classes = ["a", "b"]\nalgorithm = "statistics"\n[privacy.dp]\nepsilon = 1\nmap = "m"\nmax_epsilon = 9\n'
    for name, is_refused in (("tiny.onnx", False), ("loop.onnx", True)):
        (folder / "task.toml").write_text(f'backbones = ["{name}"]\n{task}')
        done = _run("check", "task.toml")
        assert done.exit_code == 0, done.output
        assert ("its work depends on images (" in done.output) == is_refused
        assert "owners give --upload-period-s to edge-client to hide it" in done.output


@pytest.fixture
def closed(tmp_path: Path, address: BrokerAddress) -> ClosedFleet:
    fleet = ClosedFleet(tmp_path, address)
    fleet.enroll("shed-1")
    return fleet


def _task(folder: Path) -> Path:
    path = write_task(folder)
    path.write_text(path.read_text().replace('fleet = "barn"', f'fleet = "{FLEET}"'))
    return path


def _options(**values: object) -> list[str]:
    return [part for name, value in values.items() for part in (f"--{name}", str(value))]


@needs_mosquitto
def test_all_is_well_in_a_closed_fleet(closed: ClosedFleet) -> None:
    given = [*_options(task=_task(closed.root), state=closed.state, broker=closed.broker), "--tls"]
    identity_of(closed.state)
    with closed.mosquitto():
        code, found = findings(cli, "doctor", *given)
    assert code == 0, found
    well = ("packages", "task", "state", "key", "broker", "login", "packets", "acl", "anonymous", "disk")
    assert {check: statuses(found)[check] for check in well} == dict.fromkeys(well, "ok"), found
    assert statuses(found)["tls"] == "warning"  # the broker's certificate is valid for 30 days
    assert public_key(identity_of(closed.state)).hex() in found["key"][0]["text"]
    text = closed.configuration().replace("allow_anonymous false", "allow_anonymous true")
    for line in (
        "require_certificate true",
        "use_identity_as_username true",
        "use_username_as_clientid true",
    ):
        text = text.replace(line, "")
    with closed.mosquitto(text):
        code, found = findings(cli, "doctor", *given)
    assert (code, statuses(found)["anonymous"]) == (1, "failed")


def test_faults_are_named(tmp_path: Path) -> None:
    """Each has its own line: a task file, a state directory, a broker, and a database without its fleet."""
    (tmp_path / "task.toml").write_text("x = 1\n")
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "device.sqlite").touch()
    given = _options(task=tmp_path / "task.toml", state=tmp_path / "state")
    code, found = findings(cli, "doctor", *given)
    assert code == 1
    expected = {"task": "failed", "state": "failed", "broker": "skipped"}
    assert {check: statuses(found)[check] for check in expected} == expected
    given = _options(task=write_task(tmp_path), state=tmp_path / "new", broker="127.0.0.1:9")
    code, found = findings(cli, "doctor", *given)
    assert (code, statuses(found)["broker"], statuses(found)["task"]) == (1, "failed", "ok")
    assert not (tmp_path / "new").exists()


@needs_mosquitto
def test_narrow_access_list_is_found(tmp_path: Path) -> None:
    options = "allow_anonymous true\nacl_file {folder}/acl"
    with Mosquitto(
        free_address(), tmp_path, options=options, access_list="topic read #\ntopic write pf/1/+/task"
    ) as broker:
        given = _options(task=write_task(tmp_path), state=tmp_path / "s", broker=broker.address)
        code, found = findings(cli, "doctor", *given)
    assert (code, statuses(found)["acl"]) == (1, "failed")
    assert "/task" not in found["acl"][0]["text"]
    assert "/d/protofleet-doctor/ack" in found["acl"][0]["text"]
