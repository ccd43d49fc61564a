"""The command line of edge-client: precedence of options, enrollments, `status` and `predict`."""

import csv
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner, Result

from aggregator.security.enrollment import enroll
from aggregator.storage.open_store import open_store
from edge_client.cli import cli
from edge_client.cli.run import _print_json, _show_dry_run
from edge_client.config import Settings
from edge_client.core.state import StoredState
from edge_client.kinds.prepared_submission import PreparedSubmission
from edge_client.service import device
from edge_client.store.device_state import DeviceState
from edge_client.store.stored_values import (
    ClassReport,
    DeviceName,
    ExtractionProgress,
    Heads,
    InstalledHead,
    LeftOut,
    SubmissionReport,
)
from protocol import children
from protocol.children import launch
from protocol.enrollment import read_enrollment
from protocol.errors import ConfigError
from protocol.mqtt.reconnecting_session import BrokerAddress
from protocol.wire.principal_prototypes import PrincipalPrototypes
from protocol.wire.signing import public_key
from tests.docs.command_lines import parse
from tests.support.devices.device_bench import CONSTANT, HeadBench
from tests.support.devices.device_factory import image_file, write_images
from tests.support.devices.job_states import keep_item
from tests.support.graphs.backbones import tiny_backbone


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with the state of two devices, and a configuration file that names the first."""
    for name in ("one", "two"):
        DeviceState(tmp_path / name).set(DeviceName(name))
    (tmp_path / "settings.toml").write_text('state = "one"\n', encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PROTOFLEET_STATE", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "device"),
    [
        (["status", "--state", "one"], "one"),
        (["status", "--config", "settings.toml"], "one"),
        (["status", "--config", "settings.toml", "--state", "two"], "two"),
    ],
)
def test_the_state_is_that_of_an_option_or_of_the_file(here: Path, arguments: list[str], device: str) -> None:
    """The option takes precedence."""
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 0, (done.output, here)
    assert done.output.startswith(f"device     {device}, ")


SETTINGS = """\
broker = "broker.example"
fleet = "orchard"
username = "shed-1"
password-file = "password"
threads = 2
log-format = "text"

[privacy]
max-epsilon = 8
second_operator = "{key}"

[serve]
threads = 1
http = "0.0.0.0:8090"

[watch]
folder = "camera"
agree = "2/3"
username = "camera"

[dry-run]
json = true
"""


def _parsed(folder: Path, command: str, text: str = SETTINGS) -> dict[str, Any]:
    """Return the options of a command with a settings file."""
    (folder / "settings.toml").write_text(text.format(key="0A" * 32), encoding="utf-8")
    return parse(f"edge-client {command} --config {folder}/settings.toml").params


def test_a_table_has_the_options_of_its_command(tmp_path: Path) -> None:
    """Those outside of tables are of `run`, and of other commands with the same option."""
    service = _parsed(tmp_path, "run")
    assert (service["broker"], service["fleet"], service["threads"]) == ("broker.example", "orchard", 2)
    assert (service["max_epsilon"], service["second_operator"], service["min_devices"]) == (
        8,
        b"\n" * 32,
        None,
    )
    assert (service["serve"], service["watch"]) == (True, Path("camera"))
    assert _parsed(tmp_path, "dry-run")["as_json"]
    assert _parsed(tmp_path, "dry-run")["max_epsilon"] == 8
    assert _parsed(tmp_path, "predict photo.jpg")["threads"] == 2
    assert _parsed(tmp_path, "serve")["threads"] == 1
    assert _parsed(tmp_path, "serve --threads 3")["threads"] == 3
    watched = _parsed(tmp_path, "watch")
    assert (watched["folder"], watched["agree"], watched["fleet"]) == (Path("camera"), (2, 3), "orchard")
    assert (watched["username"], watched["password_file"]) == ("camera", None)  # of another broker
    assert (service["username"], service["password_file"]) == ("shed-1", Path("password"))


def test_programs_run_beside_the_service_if_the_file_has_their_tables(tmp_path: Path) -> None:
    for text, serve, watch in (
        ("", False, None),
        ("[serve]", True, None),
        ("[watch]\ntop = 1", False, None),
        ('[watch]\nfolder = "camera"', False, Path("camera")),
    ):
        params = _parsed(tmp_path, "run", text)
        assert (params["serve"], params["watch"]) == (serve, watch)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("thread = 2", ": unknown setting 'thread'; known: aggregator_key, backbone, batch_size, "),
        ("max-epsilon = 8", ": unknown setting 'max-epsilon'; put it into [privacy]"),
        ('prior = "none"', ": unknown setting 'prior'; put it into [predict] or [serve] or [watch]"),
        ("serve = true", ": [serve] is a table of settings, got True"),
        ("[server]", ": unknown table [server]; known: [adopt-spent], [cost], [doctor], [dry-run], "),
        ("[run]\nthreads = 2", ": unknown table [run]; known: [adopt-spent], [cost], "),
        ("[serve]\nhtpp = 1", ": [serve] unknown setting 'htpp'; known: enrollment, fleet, http, "),
        ("[serve]\nthreads = 0", ": [serve] threads: 0 is not in the range x>=1."),
        ('[watch]\nagree = "1/3"', ": [watch] agree: expected N/IMAGES with N more than half of them, "),
        ('[privacy]\nsecond-operator = "0a"', ": [privacy] second-operator: expected a public key, 64 hex"),
        ("[serve]\nhttp = [1]", ": [serve] http: expected one value, got [1]"),
        ("data = {a = 1}", ": data: expected one value, got {'a': 1}"),
        ("[serve]\nconfig = 'a'", ": [serve] unknown setting 'config'"),
    ],
)
@pytest.mark.parametrize("command", ["run", "status"])
def test_errors_of_a_settings_file_name_file_table_and_key(
    tmp_path: Path, command: str, text: str, problem: str
) -> None:
    """Whatever the command: a table of another one is checked, too."""
    (tmp_path / "settings.toml").write_text(text, encoding="utf-8")
    done = CliRunner().invoke(cli, [command, "--config", str(tmp_path / "settings.toml")])
    assert done.exit_code == 2
    assert f"{tmp_path}/settings.toml{problem}" in done.output


def test_help_fits_a_screen() -> None:
    """And no sentence in it is cut off."""
    output = CliRunner().invoke(cli, ["--help"]).output
    assert len(output.splitlines()) < 40
    assert output.count("...") == 1, "of the usage"


def test_options_before_a_command_are_refused(here: Path) -> None:
    done = CliRunner().invoke(cli, ["--config", str(here / "settings.toml"), "status"])
    assert done.exit_code == 2
    assert "unexpected argument 'status': options follow the name of a command" in done.output


def _status(*options: str) -> str:
    return CliRunner().invoke(cli, ["status", "--state", "one", *options]).output


def test_status_shows_whether_the_submission_was_received(here: Path) -> None:
    """If it was not, the status shows what prevents it."""
    state = DeviceState(here / "one")
    report = SubmissionReport(size_bytes=10)
    item = keep_item(state, b"submission", report)
    state.set(StoredState(problems={"upload": "the aggregator has no space"}))
    output = _status()
    assert "submission 10 bytes, not received yet" in output
    assert "problem    the aggregator has no space" in output
    state.outbox.receive(item.digest)
    state.set(StoredState())
    output = json.loads(_status("--json"))
    assert (output["submission"], output["received"], output["problem"]) == (item.digest.hex(), True, "")


@pytest.mark.parametrize(
    ("progress", "running", "shown"),
    [
        (ExtractionProgress(120, 300, 41.25), True, "120 of 300 images, 41.2 images/s, 0:00:05 left\n"),
        (ExtractionProgress(120, 300, 41.25), False, "120 of 300 images\n"),
        (ExtractionProgress(0, 300), True, "0 of 300 images\n"),
    ],
)
def test_status_shows_the_progress_of_features(
    here: Path, progress: ExtractionProgress, shown: str, *, running: bool
) -> None:
    state = DeviceState(here / "one", lock=running)
    state.set(progress)
    assert f"features   {shown}" in _status()
    output = json.loads(_status("--json"))
    assert output["extraction"]["done"] == progress.done
    state.set(ExtractionProgress())
    assert "features" not in _status()


def test_status_shows_the_key_that_a_device_has_made(here: Path) -> None:
    """For the second operator's list of devices; an enrolled device has made none."""
    state = DeviceState(here / "one")
    assert json.loads(_status("--json"))["key"] is None
    state.signing_key(bytes(32))
    assert "key  " not in _status()
    key = public_key(state.signing_key(None)).hex()
    assert f"key        {key}, without an enrollment\n" in _status()


def test_json_has_no_infinity(here: Path) -> None:
    """Strict parsers refuse NaN and Infinity."""
    DeviceState(here / "one").set(ExtractionProgress(0, 300, 5e-324))
    output = _status("--json")
    shown = msgspec.json.decode(output)
    assert (shown["extraction"]["total"], shown["extraction"]["left_s"]) == (300, None)


def test_status_shows_what_was_left_out(here: Path) -> None:
    unusable = tuple((f"/data/{number}.jpg", "the file is empty") for number in range(22))
    left_out = LeftOut(("'wasps' (did you mean 'wasp'?)",), {"suffix .heic": 12, "no suffix": 1}, unusable)
    DeviceState(here / "one").set(left_out)
    output = _status()
    assert "left out   'wasps' (did you mean 'wasp'?): no class of the task\n" in output
    assert "skipped    12 files: suffix .heic\nskipped    1 file: no suffix\n" in output
    assert output.count(".jpg: the file is empty\n") == 20
    assert "unusable   2 images more: see --json\n" in output
    shown = json.loads(_status("--json"))
    assert shown["unusable_images"] == [list(each) for each in unusable]
    assert shown["unknown_classes"] == list(left_out.unknown)
    assert shown["skipped_files"] == left_out.skipped


@pytest.mark.parametrize("several", [False, True])
def test_a_repeatable_option_takes_a_value_or_a_list_from_a_file(tmp_path: Path, *, several: bool) -> None:
    """Such an option is `backbone`."""
    file = tmp_path / "backbone.onnx"
    file.touch()
    value = f'["{file}", "{file}"]' if several else f'"{file}"'
    (tmp_path / "settings.toml").write_text(f"backbone = {value}\n")
    context = parse(f"edge-client run --config {tmp_path}/settings.toml")
    assert context.params["backbone"] == (file,) * (1 + several)


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ({}, "version 3"),
        ({"correct": 26, "total": 27}, "version 3, accuracy 96.3% (26/27)"),
        (
            {"correct": 16, "total": 20, "correct_with_prior": 18},
            "version 3, accuracy 80.0% (16/20), 90.0% with the place's prior",
        ),
        ({"task": b"a" * 32}, "version 3"),
        ({"task": b"b" * 32}, "version 3 of the earlier task 626262626262"),
    ],
    ids=[
        "not evaluated, as under differential privacy",
        "evaluated",
        "with its prior",
        "of the task",
        "of an earlier task",
    ],
)
def test_status_shows_the_head(here: Path, values: dict[str, Any], shown: str) -> None:
    installed = InstalledHead(head=b"", version=3, backbones=(), classes=(), **values)
    DeviceState(here / "one").set(Heads(installed), StoredState(task=b"a" * 32))
    assert f"head       {shown}\n" in _status()


def test_status_shows_blocks(here: Path) -> None:
    """It shows the form of each upload, the images that were moved since, and what was dissolved."""
    classes = (
        ClassReport("cat", 100, 20, (), in_blocks=80),
        ClassReport("dog", 12, 0, (6, 6), waiting=4, missing=1, unused=7),
        ClassReport("fox", 19, 0, (), missing=1, unused=19),
    )
    report = SubmissionReport(classes, size_bytes=9, directions=8, moved=3, dissolved=12)
    DeviceState(here / "one").set(report)
    assert [
        line for line in _status().splitlines() if line.startswith(("class", "block", "moved", "dissol"))
    ] == [
        "class      cat: 100 images, 20 held out, 80 in a block",
        "class      dog: 12 images, 0 held out, 2 prototypes; 4 waiting for 1 missing; 7 left out with their block",
        "class      fox: 19 images, 0 held out, 0 prototypes; 19 left out with their block, 1 missing",
        "block      80 images: 1 class mean and 8 directions",
        "moved      3 images of the block, counted in the class of an earlier upload",
        "dissolved  12 images in prototypes of dissolved blocks, or waiting",
    ]


def _cost(folder: Path, *backbones: Path) -> dict[str, Any]:
    given = [each for file in backbones for each in ("--backbone", str(file))]
    options = ["--json", "--data", str(folder / "data"), "--provider", "cpu"]
    done = CliRunner().invoke(cli, ["cost", *given, *options])
    assert done.exit_code == 0, done.output
    return dict(json.loads(done.stdout))


def test_cost_of_a_backbone_is_measured_without_a_fleet(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a broker nor a state directory is needed, and nothing is left behind."""
    monkeypatch.setattr(children, "launch", launch)  # the memory is that of a process
    write_images(here / "data", count=6)
    (here / "tiny.onnx").write_bytes(tiny_backbone())
    before = set(here.iterdir())
    cost = _cost(here, here / "tiny.onnx")
    assert cost["images"] == 12
    assert cost["seconds_per_image"] > 0
    assert 10 < cost["memory_mb"] < 100_000
    assert 0 < cost["upload_bytes"] < 2000
    assert set(here.iterdir()) == before
    shown = CliRunner().invoke(cli, ["cost", "--backbone", "tiny.onnx", "--data", "data"]).stdout
    assert re.fullmatch(r"\S+ s an image, of 12\n\d+ MB of memory\n[\d,]+ bytes to upload\n", shown)
    assert "pass --backbone FILE" in CliRunner().invoke(cli, ["cost"]).output


def test_cost_reads_a_list_as_a_device_does(here: Path) -> None:
    """Semicolons separate, too, and other encodings are an error."""
    write_images(here / "data", count=3)
    (here / "tiny.onnx").write_bytes(tiny_backbone())
    paths = sorted(path.relative_to(here) for path in (here / "data").rglob("*.png"))
    listed = here / "images.csv"
    listed.write_text("path;label\n" + "".join(f"{path};{path.parent.name}\n" for path in paths))
    options = ["cost", "--backbone", "tiny.onnx", "--data", "images.csv", "--json"]
    assert json.loads(CliRunner().invoke(cli, options).stdout)["images"] == len(paths) == 6
    listed.write_bytes(b"\xff\xfepath")
    with pytest.raises(ConfigError, match="cannot be read as a CSV file in UTF-8"):
        CliRunner().invoke(cli, options, catch_exceptions=False)


def test_cost_is_that_of_all_backbones_whatever_their_names(here: Path) -> None:
    write_images(here / "data", count=6)
    files = [here / "a" / "tiny.onnx", here / "b" / "tiny.onnx"]
    for number, file in enumerate(files):
        file.parent.mkdir()
        file.write_bytes(tiny_backbone(seed=number))
    assert _cost(here, *files)["upload_bytes"] > _cost(here, files[0])["upload_bytes"]


def test_a_dry_run_shows_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    """Classes in a block, and what is uploaded of them."""
    block = PrincipalPrototypes(
        means=np.zeros((1, 16), np.float32),
        labels=np.array([0]),
        counts=np.array([80]),
        rows=np.zeros((8, 16), np.float32),
        diagonal=np.zeros(16, np.float32),
    )
    classes = (ClassReport("cat", 100, 20, (), in_blocks=80), ClassReport("dog", 6, 0, (6,)))
    prototypes = np.zeros((1, 16), np.float16)
    numbers = np.ones(1, np.uint32)
    prepared = PreparedSubmission(
        prototypes, numbers, 6 * numbers, classes, (), block=block, moved=1, dissolved=60
    )
    _show_dry_run(prepared.shown(99))
    assert capsys.readouterr().out.splitlines() == [
        "cat: 100 images, 20 held out; 80 in a block",
        "dog: 6 images, 0 held out; 1 prototype of 6 images",
        "80 images in a block: 1 class mean and 8 directions of 16 values each",
        "1 image of the block would count in the class of an earlier upload",
        "dissolved blocks of 60 images: the groups that are whole are prototypes",
        "1 prototype of 16 values each: 99 bytes would be uploaded; nothing was uploaded",
    ]
    _print_json(prepared.shown(99))
    shown = json.loads(capsys.readouterr().out)
    assert (shown["size_bytes"], shown["directions"], shown["moved"], shown["privacy"]) == (99, 8, 1, None)
    assert [entry["name"] for entry in shown["classes"]] == ["cat", "dog"]
    only_block = PreparedSubmission(prototypes[:0], numbers[:0], numbers[:0], classes, (), block=block)
    _show_dry_run(only_block.shown(88))
    assert capsys.readouterr().out.splitlines()[-1] == "88 bytes would be uploaded; nothing was uploaded"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a device's enrollment, beside a data folder."""
    store = open_store(tmp_path / "aggregator")
    enroll(store, "shed-1", broker="broker.example", fleet="orchard", out=tmp_path / "shed-1")
    store.close()
    (tmp_path / "data" / "apple").mkdir(parents=True)
    return tmp_path / "shed-1"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """Return the settings with which the program was started."""
    settings: list[Settings] = []

    class Still:
        def __init__(self, chosen: Settings, _state: DeviceState, **_: Any) -> None:
            settings.append(chosen)

        def run(self) -> int:
            return 0

    monkeypatch.setattr(device, "Device", Still)
    return settings


def run(folder: Path, *arguments: str, **environment: str) -> None:
    """Start the program up to its settings; errors are raised."""
    options = ["--data", str(folder.parent / "data"), "--state", str(folder.parent / "state"), *arguments]
    done = CliRunner(env=environment).invoke(cli, options, standalone_mode=False)
    if done.exception is not None:
        raise done.exception


def test_an_enrollment_sets_everything(folder: Path, started: list[Settings]) -> None:
    """Device id, fleet, broker, certificates and keys, from the option or the environment."""
    run(folder, "--enrollment", str(folder))
    run(folder, PROTOFLEET_ENROLLMENT=str(folder))
    enrollment = read_enrollment(folder)
    for settings in started:
        assert settings.broker == (BrokerAddress("broker.example", 8883),)
        assert (settings.fleet, settings.device_id) == ("orchard", "shed-1")
        assert settings.access == enrollment.access
        assert settings.identity.signing_key == enrollment.signing_key
        assert settings.identity.aggregator_key == enrollment.aggregator_key
    assert len(started) == 2


def test_an_enrollment_names_the_fleet_of_a_state(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every command: as an option, in the environment, or in the settings of the service."""
    monkeypatch.setenv("XDG_STATE_HOME", str(folder.parent))
    DeviceState(folder.parent / "protofleet" / "orchard").set(DeviceName("shed-1"))
    (folder.parent / "settings.toml").write_text(f'enrollment = "{folder}"\n', encoding="utf-8")
    for options, environment in (
        (["--enrollment", str(folder)], {}),
        ([], {"PROTOFLEET_ENROLLMENT": str(folder)}),
        (["--config", str(folder.parent / "settings.toml")], {}),
    ):
        done = CliRunner(env=environment).invoke(cli, ["status", *options])
        assert done.output.startswith("device     shed-1, "), (done.output, done.exception)


def test_options_override_the_enrollment(folder: Path, started: list[Settings]) -> None:
    """Broker, authority, certificate, aggregator key and password."""
    files = ("--tls-ca", "other.crt", "--tls-cert", "a.crt", "--tls-key", "a.key")
    key = ("--aggregator-key", "0a" * 32)
    run(
        folder,
        "--enrollment",
        str(folder),
        "--broker",
        "10.0.0.1:1",
        *files,
        *key,
        "--username",
        "shed-1",
        PROTOFLEET_PASSWORD="secret",
    )
    (settings,) = started
    assert settings.broker == (BrokerAddress("10.0.0.1", 1),)
    access = settings.access
    assert (access.ca, access.certificate, access.key) == (Path("other.crt"), Path("a.crt"), Path("a.key"))
    assert (access.username, access.password, access.tls) == ("shed-1", "secret", True)
    assert settings.identity.aggregator_key == bytes([10] * 32)
    assert settings.identity.signing_key == read_enrollment(folder).signing_key


def test_other_names_than_the_enrolled_ones_are_refused(folder: Path, started: list[Settings]) -> None:
    """The default fleet is refused too if it is given; equal names are accepted."""
    for option, value in (("--device-id", "shed-2"), ("--fleet", "vineyard"), ("--fleet", "default")):
        with pytest.raises(ConfigError, match=f"omit {option}, or use the other enrollment"):
            run(folder, "--enrollment", str(folder), option, value)
    assert started == []
    run(folder, "--enrollment", str(folder), "--device-id", "shed-1", "--fleet", "orchard")
    assert len(started) == 1


@pytest.mark.usefixtures("started")
def test_secrets_readable_by_others_are_logged(folder: Path) -> None:
    """This holds for the certificate's key and the signing key."""
    options = ["--data", str(folder.parent / "data"), "--state", str(folder.parent / "state")]
    for name in ("device.key", "signing.key"):
        (folder / name).chmod(0o644)
        done = CliRunner().invoke(cli, [*options, "--enrollment", str(folder)])
        (folder / name).chmod(0o600)
        assert f"chmod 600 {folder / name}" in done.output
    assert "chmod" not in CliRunner().invoke(cli, [*options, "--enrollment", str(folder)]).output


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of images, notes and hidden files, in a folder that is the current one."""
    folder = tmp_path / "photos"
    for name in ("b.png", "a.jpg", "deep/er/c.png", ".hidden/d.png", "10%, of it.png"):
        image_file(folder / name)
    (folder / "notes.txt").write_text("no image")
    monkeypatch.chdir(tmp_path)
    return folder


def _predict(bench: HeadBench, *arguments: str, stdin: bytes | None = None) -> Result:
    options = ["--state", str(bench.store.folder), "--provider", "cpu", "--threads", "1"]
    return CliRunner().invoke(cli, ["predict", *arguments, *options], input=stdin)


@pytest.mark.parametrize(
    ("arguments", "stdin", "images"),
    [
        (["photos"], b"", ["photos/10%, of it.png", "photos/a.jpg", "photos/b.png", "photos/deep/er/c.png"]),
        (["photos/*.png"], b"", ["photos/10%, of it.png", "photos/b.png"]),
        (["photos/**/*.png"], b"", ["photos/10%, of it.png", "photos/b.png", "photos/deep/er/c.png"]),
        (["-"], b"photos/b.png\r\n\nphotos/deep\n", ["photos/b.png", "photos/deep/er/c.png"]),
        (["photos/b.png", "photos/a.jpg"], b"", ["photos/b.png", "photos/a.jpg"]),
    ],
)
def test_images_are_named_by_files_folders_patterns_and_stdin(
    bench: HeadBench, photos: Path, arguments: list[str], stdin: bytes, images: list[str]
) -> None:
    """Hidden files and files that are no images are left out of folders."""
    head = bench.head(1, CONSTANT["cat"])
    bench.install(head)
    done = _predict(bench, *arguments, "--json", stdin=stdin)
    assert done.exit_code == 0, (done.output, photos)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["image"] for line in lines] == images
    digests = head.head.digest.hex(), bench.task.hex()
    assert {(line["head_version"], line["head"], line["task"]) for line in lines} == {(1, *digests)}
    assert ("skipped: suffix .txt (1)" in done.stderr) == (arguments == ["photos"])


def test_csv_has_a_header_and_a_row_per_image(bench: HeadBench, photos: Path) -> None:
    """An unusable image is an error on stderr, and the exit status is 1."""
    bench.install(bench.head(3, CONSTANT["dog"]))
    (photos / "broken.png").write_bytes(b"no image")
    done = _predict(
        bench, "photos/b.png", "photos/broken.png", "photos/10%, of it.png", "--csv", "--top", "2"
    )
    assert done.exit_code == 1
    assert "error: photos/broken.png: " in done.stderr
    first, last = csv.DictReader(done.stdout.splitlines())
    header = "image,label_1,probability_1,label_2,probability_2,head_version,prior,answer,prior_reason"
    assert done.stdout.splitlines()[0] == header
    assert (first["image"], last["image"]) == ("photos/b.png", "photos/10%, of it.png")
    assert ({first["label_1"], first["label_2"]}, first["head_version"]) == ({"cat", "dog"}, "3")
    assert float(first["probability_1"]) > float(first["probability_2"]) > 0


def _line(done: Result) -> dict[str, Any]:
    assert done.exit_code == 0, done.output
    line: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return line


def test_many_alike_images_are_predicted_with_their_prior(bench: HeadBench, photos: Path) -> None:
    """On a device without labels; one image, or `--prior none`, gets the head's own probabilities."""
    bench.install(bench.head(1, CONSTANT["cat"] / 4))
    bench.store.set(SubmissionReport())
    for number in range(60):
        image_file(photos / f"{number}.png")
    plain = _line(_predict(bench, "photos", "--json", "--prior", "none"))
    with_prior = _line(_predict(bench, "photos", "--json"))
    best = plain["label"]
    assert (plain["prior"], "prior_shares" in plain) == ("none", False)
    assert (with_prior["prior"], with_prior["prior_reason"]) == ("images", "uneven classes")
    assert with_prior["prior_shares"][best] > 0.9
    assert with_prior["scores"][best] > plain["scores"][best]
    alone = _line(_predict(bench, "photos/b.png", "--json"))
    assert {name: alone[name] for name in ("prior", "scores")} == {
        name: plain[name] for name in ("prior", "scores")
    }
    assert alone["prior_reason"] == "no evidence of uneven classes"
    skipped, prior = _predict(bench, "photos").stderr.splitlines()
    assert skipped == "skipped: suffix .txt (1)"
    assert prior.startswith(f"prior: images (uneven classes)  {best} 9")
    rows = csv.DictReader(_predict(bench, "photos", "--csv").stdout.splitlines())
    assert {row["prior"] for row in rows} == {"images"}


def test_prior_of_labeled_images(bench: HeadBench, photos: Path) -> None:
    """Those of the submission: 20 of each class."""
    bench.install(bench.head(1, CONSTANT["cat"]))
    assert photos.is_dir()
    line = _line(_predict(bench, "photos/b.png", "--json", "--prior", "labels"))
    assert (line["prior"], line["prior_shares"]) == ("labels", {"cat": 0.5, "dog": 0.5})
    bench.store.set(SubmissionReport())
    done = _predict(bench, "photos/b.png", "--prior", "labels")
    assert "no labeled images" in f"{done.exception} {done.output}"


@pytest.mark.parametrize(
    ("images", "labels", "is_private", "prior", "reason"),
    [
        (1, "most probable", False, "labels", "fewer than 20 predictions"),
        (19, "other", False, "labels", "fewer than 20 predictions"),
        (20, "most probable", False, "labels", "likelier than no prior"),
        (20, "other", False, "none", "no likelier than no prior"),
        (1, "most probable", True, "none", "no evidence of uneven classes"),
    ],
)
def test_labels_prior_is_the_default_as_long_as_the_images_agree(
    bench: HeadBench, photos: Path, *, images: int, labels: str, is_private: bool, prior: str, reason: str
) -> None:  # fmt: skip
    """The whole folder counts; labels under differential privacy are used only by `--prior labels`."""
    bench.install(bench.head(1, CONSTANT["cat"] / 4))
    (photos / "some").mkdir()
    for number in range(images):
        image_file(photos / "some" / f"{number}.png")
    best, other = _line(_predict(bench, "photos/some", "--json", "--prior", "none"))["scores"]
    name, rest = (best, other) if labels == "most probable" else (other, best)
    shares = {name: 0.99, rest: 0.01} if prior == "labels" else None
    bench.store.set(SubmissionReport((ClassReport(name, 98, 0, (98,)),), is_private=is_private))
    done = _predict(bench, "photos/some", "--json")
    for text in done.stdout.splitlines():
        line = json.loads(text)
        assert (line["prior"], line["prior_reason"]) == (prior, reason)
        assert line.get("prior_shares") == shares
    assert f"prior: {prior} ({reason})" in _predict(bench, "photos/some").stderr
    asked = _line(_predict(bench, "photos/some", "--json", "--prior", "labels"))
    assert (asked["prior"], asked["prior_reason"]) == ("labels", "as requested")
