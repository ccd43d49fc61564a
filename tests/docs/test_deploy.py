"""The files in deploy/ do what their comments state, tested with their programs."""

import getpass
import re
import shutil
import subprocess
import sys
import threading
import tomllib
from pathlib import Path

import kubernetes_validate
import msgspec
import psutil
import pytest
import yaml

from aggregator.algorithms.algorithm import Training
from aggregator.algorithms.fedpcl import FedPCL
from aggregator.algorithms.registry import ALGORITHMS
from aggregator.algorithms.statistics.feature_map import Statistics
from aggregator.config.limits import Limits
from aggregator.config.privacy import PrivacyBudget, SumsSettings
from aggregator.config.schema import Client, Robust, Rounds, TaskFile
from aggregator.config.task_file import load_task
from aggregator.coordination.rollout_state import Settings
from aggregator.security.mosquitto_config import CONFIGURATION, access_list, own_configuration
from edge_client.cli import cli as edge_client
from protocol.mqtt.reconnecting_session import BrokerAddress
from protocol.wire.messages import MAX_SIGNED_BYTES, Perturbation
from tests.docs.command_lines import DEPLOY, parse, parse_in_image
from tests.support.fleets.fleet import wait_until
from tests.support.network.brokers import Mosquitto, mosquitto, needs_mosquitto
from tests.support.network.nats import nats_program, needs_nats
from tests.system.attacks.attacker_client import AttackerClient

ROOT = DEPLOY.parent


def mosquitto_options(folder: Path) -> str:
    """Return deploy/mosquitto.conf without its listener, with its database in a folder of the test."""
    text = (DEPLOY / "mosquitto.conf").read_text(encoding="utf-8")
    text = re.sub(r"(?m)^listener .*$", "", text)
    text = re.sub(r"(?m)^persistence_location .*$", f"persistence_location {folder}/", text)
    return f"{text}\nuser {getpass.getuser()}\n"


def receive(receiver: AttackerClient, *, messages: int) -> None:
    """Wait until a client has received so many messages."""
    wait_until(
        f"{messages} messages",
        lambda: len(receiver.received) == messages,
        diagnostics=lambda: str(len(receiver.received)),
    )


@needs_mosquitto
def test_retained_messages_outlive_the_broker(tmp_path: Path, address: BrokerAddress) -> None:
    """Mosquitto accepts a task of the largest size that the protocol allows, and sends it after a restart."""
    options = mosquitto_options(tmp_path)
    with mosquitto(address, tmp_path, options=options), AttackerClient(address) as sender:
        assert sender.publish("pf/1/orchard/task", bytes(MAX_SIGNED_BYTES), retain=True)
    with mosquitto(address, tmp_path, options=options), AttackerClient(address) as receiver:
        receiver.subscribe("pf/1/+/task")
        receive(receiver, messages=1)


@needs_mosquitto
def test_slow_subscriber_loses_nothing(tmp_path: Path, address: BrokerAddress) -> None:
    """More messages than mosquitto's default of 1000 wait for a subscriber that does not read meanwhile."""
    reads = threading.Event()
    with (
        mosquitto(address, tmp_path, options=mosquitto_options(tmp_path)),
        AttackerClient(address, on_message=lambda _: reads.wait(60)) as receiver,
        AttackerClient(address) as sender,
    ):
        receiver.subscribe("pf/1/orchard/d/+/up/+")
        sender.flood([("pf/1/orchard/d/shed-1/up/0", b"x")] * 3000)
        reads.set()
        receive(receiver, messages=3000)


@needs_mosquitto
def test_memory_of_a_client_that_does_not_read_is_bounded(tmp_path: Path, address: BrokerAddress) -> None:
    """The broker drops what is more than its queue, names the client in its log, and serves the others."""
    options = mosquitto_options(tmp_path)
    size, limit = 250_000, int(re.findall(r"(?m)^max_queued_bytes (\d+)", options)[0])
    reads = threading.Event()
    with (
        mosquitto(address, tmp_path, options=options) as broker,
        AttackerClient(address, on_message=lambda _: reads.wait(60)) as deaf,
        AttackerClient(address) as other,
    ):
        deaf.subscribe("pf/1/orchard/d/deaf/blk")
        # In flight, and one and a half times the queue.
        other.flood([("pf/1/orchard/d/deaf/blk", bytes(size))] * (256 + limit * 3 // 2 // size))
        assert psutil.Process(broker.pid).memory_info().rss < limit + 256 * size + 64 * 1024**2
        assert "Outgoing messages are being dropped for client auto-" in broker.log()
        other.subscribe("pf/1/orchard/task")
        other.publish("pf/1/orchard/task", b"x")
        receive(other, messages=1)
        reads.set()


def test_files_of_a_closed_fleet_are_what_enroll_broker_writes() -> None:
    """deploy/ shows what `aggregator enroll-broker` makes for the fleet "orchard"."""
    for name, text in (("mosquitto-tls.conf", CONFIGURATION), ("mosquitto.acl", access_list("orchard"))):
        assert (DEPLOY / name).read_text(encoding="utf-8") == text, name


def test_closed_and_open_brokers_have_the_same_limits() -> None:
    """Only listener, authentication and log differ."""
    settings = {
        name: dict(
            line.split(maxsplit=1)
            for line in (DEPLOY / name).read_text(encoding="utf-8").splitlines()
            if line and not line.startswith("#")
        )
        for name in ("mosquitto.conf", "mosquitto-tls.conf")
    }
    opened, closed = settings["mosquitto.conf"], settings["mosquitto-tls.conf"]
    assert opened["allow_anonymous"] == "true"
    assert closed["allow_anonymous"] == "false"
    differ = {"listener", "allow_anonymous", "log_dest", "log_type"}
    assert {key: value for key, value in opened.items() if key not in differ} == {
        key: closed[key] for key in opened if key not in differ
    }


def uncommented(file: Path) -> str:
    """Return a TOML file of deploy/ with its commented settings as settings."""
    return re.sub(r"(?m)^# (?=[\w-]+ = )", "", file.read_text(encoding="utf-8"))


ONLY_IN_ROUNDS = {"clip_multiple"}
"""Settings of a table that both kinds of tasks have."""


def task_in(folder: Path, text: str) -> TaskFile:
    """Load a task file, with empty files for its backbones."""
    for name in tomllib.loads(text)["backbones"]:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    (folder / "task.toml").write_text(text, encoding="utf-8")
    return load_task(folder / "task.toml")[0]


@pytest.mark.parametrize(
    ("name", "defaults"),
    [
        (
            "task.toml",
            {
                "client": Client(),
                "training": Training(),
                "rollout": Settings(),
                "robust": Robust(),
                "limits": Limits(),
            },
        ),
        ("rounds.toml", {"rounds": Rounds(), "rollout": Settings(), "fedpcl": FedPCL()}),
    ],
)
def test_task_files_name_every_setting_and_its_default(
    tmp_path: Path, name: str, defaults: dict[str, msgspec.Struct]
) -> None:
    """The aggregator accepts the file as it is and with its commented settings, whose values are the defaults."""
    file = DEPLOY / name
    text = file.read_text(encoding="utf-8")
    task = task_in(tmp_path, text)
    full, written = task_in(tmp_path, uncommented(file)), tomllib.loads(uncommented(file))
    commented = set(re.findall(r"(?m)^# (\w+) = ", text))
    for table, default in defaults.items():
        assert getattr(task, table) == default
        assert set(default.__struct_fields__) - ONLY_IN_ROUNDS == set(written[table])
        for setting in commented & set(written[table]):
            assert getattr(default, setting) in (None, getattr(getattr(full, table), setting)), setting
    if name == "task.toml":
        default = TaskFile(classes=("a",), backbones=("b",))
        assert set(default.__struct_fields__) - {"privacy", "rounds", *ALGORITHMS} == set(written)
        for setting in commented & set(written):
            assert getattr(default, setting) in (None, getattr(full, setting)), setting


@pytest.mark.parametrize(
    ("table", "kind", "file"),
    [("perturbation", Perturbation, ""), ("dp", PrivacyBudget, "map"), ("sums", SumsSettings, "operator")],
)
def test_task_file_example_has_every_privacy_setting(
    tmp_path: Path, table: str, kind: type[msgspec.Struct], file: str
) -> None:
    """The commented tables of deploy/task.toml load, each with those that it needs, and name every setting."""
    text = (DEPLOY / "task.toml").read_text(encoding="utf-8")
    tables = {
        name: re.search(rf"(?m)^# (\[privacy\.{name}\].*\n(#   .*\n?)+)", text)
        for name in ("perturbation", "dp", "sums")
    }
    needed = {"sums": ("dp", "sums")}.get(table, (table,))
    added = "".join(found[1].replace("#   ", "") for name in needed if (found := tables[name]))
    given = tomllib.loads(added)["privacy"][table]
    assert set(kind.__struct_fields__) == set(given)
    if table != "perturbation":
        text = text.replace('# algorithm = "fedtc"', 'algorithm = "statistics"').replace(
            "quorum = 8", "quorum = 10"
        )
        for name in ("public.map", "operator.toml"):
            (tmp_path / name).touch()
    task = task_in(tmp_path, text + added)
    assert getattr(task.privacy, table) == kind(
        **{**given, **({file: str(tmp_path / given[file])} if file else {})}
    )


def test_task_file_example_has_every_setting_of_statistics(tmp_path: Path) -> None:
    """The commented table of deploy/task.toml loads with its algorithm, and names every setting and its default."""
    text = (DEPLOY / "task.toml").read_text(encoding="utf-8")
    lines = re.search(r"(?m)^# (\[statistics\]\n(#   .*\n)+)", text)
    assert lines
    table = lines[1].replace("#   ", "")
    assert set(Statistics.__struct_fields__) == set(tomllib.loads(table)["statistics"])
    chosen = text.replace('# algorithm = "fedtc"', 'algorithm = "statistics"')
    assert task_in(tmp_path, chosen + table).method == Statistics()


def test_device_file_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """edge-client accepts deploy/edge-client.toml; its commented options are all options, with their defaults."""
    monkeypatch.delenv("PROTOFLEET_FLEET", raising=False)
    context = parse(f"edge-client --config {DEPLOY}/edge-client.toml")
    assert context.params["broker"] == "broker.example:1883"
    assert context.params["data"] == Path("/srv/images")
    (tmp_path / "backbone.onnx").touch()
    text = re.sub(r"(?m)^# (?=\[)", "", uncommented(DEPLOY / "edge-client.toml")).replace(
        "/srv/", f"{tmp_path}/"
    )
    (tmp_path / "full.toml").write_text(text, encoding="utf-8")
    full = parse(f"edge-client --config {tmp_path}/full.toml")
    assert (full.params["serve"], full.params["watch"]) == (True, tmp_path / "camera")
    for option in ("holdout", "provider", "batch_size", "rescan_s"):
        assert full.params[option] == context.params[option]
    set_elsewhere = {"config", "verbose", "once"}
    settings = tomllib.loads(text)
    named = {name.replace("-", "_") for name in (*settings, *settings["privacy"]) if name != "privacy"}
    assert named == {parameter.name for parameter in edge_client.commands["run"].params} - set_elsewhere


def test_device_file_on_the_page_is_accepted(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "operations" / "devices.md").read_text(encoding="utf-8")
    (settings,) = re.findall(r"(?ms)^```toml\n(.*?)^```", page)
    (tmp_path / "device.toml").write_text(settings, encoding="utf-8")
    params = parse(f"edge-client run --config {tmp_path}/device.toml").params
    assert (params["max_epsilon"], params["serve"], params["watch"]) == (8, True, Path("/srv/camera"))
    assert parse(f"edge-client watch --config {tmp_path}/device.toml").params["agree"] == (2, 3)


@pytest.mark.parametrize(
    "unit",
    ["edge-client", "aggregator", "aggregator@", "mosquitto@", "protofleet-sums"],
)
def test_units_are_valid(unit: str, tmp_path: Path) -> None:
    """Systemd reports no problem in the unit, and the program accepts its command."""
    text = (DEPLOY / f"{unit}.service").read_text(encoding="utf-8")
    started = re.search(r"(?m)^ExecStart=(.*)$", text)
    assert started
    program = started[1].split()[0]
    assert Path(program).name == unit.removesuffix("@")
    if unit != "mosquitto@":
        parse(started[1].replace("%S", "/var/lib").replace("%i", "orchard"))
    if unit.endswith("@"):
        unit += "orchard"
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed: apt-get install systemd")
    copy = tmp_path / f"{unit}.service"
    copy.write_text(text.replace(program, shutil.which("true") or program), encoding="utf-8")
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(copy)], capture_output=True, text=True, check=False
    )
    assert not [line for line in done.stderr.splitlines() if unit in line]


def test_each_program_has_a_user_of_its_own() -> None:
    """A device runs graphs from the network beside an aggregator's keys; the mosquitto unit has mosquitto's user."""
    users = [
        re.search(r"(?m)^User=(.*)$", file.read_text(encoding="utf-8")) for file in DEPLOY.glob("*.service")
    ]
    names = [found[1] for found in users if found is not None]
    assert len(names) == len(set(names)) == 5


def test_units_of_one_and_of_several_fleets_confine_alike() -> None:
    """All lines of the sandbox are in both."""
    one, several = (
        (DEPLOY / f"{name}.service").read_text(encoding="utf-8").partition("UMask=")[2]
        for name in ("aggregator", "aggregator@")
    )
    assert one == several


def test_edits_for_a_closed_fleet_are_of_texts_in_the_files() -> None:
    """The page replaces a text in the unit, and one in the operator's command."""
    unit, command = (
        (DEPLOY / f"aggregator.{kind}").read_text(encoding="utf-8") for kind in ("service", "sh")
    )
    page = (ROOT / "docs/operations/aggregator.md").read_text(encoding="utf-8")
    edits = re.findall(r"(?m)^sudo sed -i 's/([^/]+)/.*(\.service|/aggregator)$", page)
    assert len(edits) == 2
    for replaced, file in edits:
        assert replaced in (command if file == "/aggregator" else unit)


def test_brokers_of_fleets_share_no_path() -> None:
    """With `enroll-broker --port`; each is otherwise the broker of the only fleet."""
    orchard, vineyard = (
        own_configuration(name, port) for name, port in (("orchard", 8884), ("vineyard", 8885))
    )
    assert own_configuration("orchard", 8884) == orchard
    own, others = (set(re.findall(r"(?m)^[^#].*?(/\S+)$", text)) for text in (orchard, vineyard))
    assert len(own) == 7
    assert not own & others
    assert all("/orchard" in path for path in own)
    settings = [line for line in CONFIGURATION.splitlines() if line and line[0] != "#"]
    changed = [line for line in settings if line not in orchard.splitlines()]
    files = ("cafile", "certfile", "keyfile", "crlfile", "acl_file", "persistence_location", "log_dest")
    assert [line.split()[0] for line in changed] == ["listener", *files]


def test_container_images_get_every_package() -> None:
    """The files of the wheel are copied into the build, and not ignored."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    copied = re.findall(r"(?m)^COPY (.*) \S+$", (DEPLOY / "Dockerfile").read_text(encoding="utf-8"))
    needed = {
        "pyproject.toml",
        project["project"]["readme"],
        *project["project"]["license-files"],
        *(
            pattern.split("/")[1]
            for pattern in project["tool"]["hatch"]["build"]["targets"]["wheel"]["include"]
        ),
        "dashboard",
    }
    assert needed == set(" ".join(copied).split())
    allowed = (DEPLOY / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    assert needed == {line[1:] for line in allowed if line.startswith("!")}


@needs_mosquitto
def test_access_list_draws_only_the_documented_warning(tmp_path: Path, address: BrokerAddress) -> None:
    """Mosquitto has no rule for every authenticated client but a pattern, and warns of one without a name."""
    options = "allow_anonymous true\nacl_file {folder}/acl\nlog_dest stderr\nlog_type all"
    with Mosquitto(address, tmp_path, options=options, access_list=access_list("orchard")) as broker:
        log = broker.log()
    problems = [line for line in log.splitlines() if "warning" in line.lower() or "error" in line.lower()]
    (warning,) = [line for line in problems if "run as root" not in line]
    said = "ACL pattern '{}' does not contain '%c' or '%u'"
    assert said.format("pf/1/orchard/+") in warning
    assert said.format("pf/1/FLEET/+") in (ROOT / "docs" / "security.md").read_text(encoding="utf-8")


def test_compose_file_runs_the_images_and_the_commands_that_there_are() -> None:
    """Targets of the Dockerfile, mounted files of the repository, and commands that the programs accept."""
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))["services"]
    stages = re.findall(r"(?m)^FROM \S+ AS (\S+)$", (DEPLOY / "Dockerfile").read_text(encoding="utf-8"))
    programs = {"device": "edge-client", "aggregator": "aggregator"}
    ours = {name: service for name, service in services.items() if "build" in service}
    assert set(services) - set(ours) == {"broker"}
    for name, service in ours.items():
        target = service["build"]["target"]
        assert target in stages, name
        command = service["command"].replace("/run/secrets/http-token", __file__)
        context = parse_in_image(f"{programs[target]} {command}")
        assert context.params["broker"] == "broker:1883"
    for service in services.values():
        for volume in service["volumes"]:
            source = Path(volume.partition(":")[0])
            assert source.parts[0] in {"fleet", source.name} or (ROOT / source).is_file(), volume


def test_commands_of_the_device_and_second_operators_images_are_accepted() -> None:
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    (device,) = re.findall(r"docker run .*? protofleet-device (run [^\n]*)", text)
    assert parse(f"edge-client {device}").params["watch"] == Path("/camera")
    init, task, run = re.findall(r"docker run .*? protofleet-sums ((?:init|new-task|run) [^&\n]*)", text)
    assert parse(f"protofleet-sums {task}").params["folder"] == Path("/state")
    assert parse(f"protofleet-sums {init}").params["folder"] == Path("/state")
    assert parse(f"protofleet-sums {run}", PROTOFLEET_STATE="/state").params["state"] == Path("/state")


def test_kubernetes_manifests_of_one_program_are_valid() -> None:
    text = (DEPLOY / "kubernetes.yaml").read_text(encoding="utf-8")
    resources = list(yaml.safe_load_all(text))
    assert [resource["kind"] for resource in resources] == ["Service", "StatefulSet"]
    for resource in resources:
        kubernetes_validate.validate(resource, kubernetes_validate.latest_version(), strict=True)
    (container,) = resources[1]["spec"]["template"]["spec"]["containers"]
    command = container["command"][-1].partition("exec ")[2]
    assert parse_in_image(command).params["http"] == "0.0.0.0:8080"


def test_scripts_have_no_finding_of_shellcheck() -> None:
    scripts = (DEPLOY / "install-device.sh", DEPLOY / "aggregator.sh", ROOT / ".ci" / "run")
    subprocess.run([Path(sys.executable).with_name("shellcheck"), *scripts], check=True)


@needs_nats
def test_nats_accepts_its_configuration() -> None:
    """It is the one on the page about several brokers."""
    file = DEPLOY / "nats.conf"
    page = (ROOT / "docs" / "operations" / "several-brokers.md").read_text(encoding="utf-8")
    settings = re.sub(r"(?m)^#.*\n", "", file.read_text(encoding="utf-8"))
    assert f"```text\n{settings}```" in page
    subprocess.run([nats_program() or "", "-t", "-c", file], check=True)
