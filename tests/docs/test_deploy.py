"""The files in deploy/ do what their comments state, tested with their programs."""

import getpass
import hashlib
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import tomllib
import zipfile
from pathlib import Path

import kubernetes_validate
import msgspec
import paho.mqtt.client as paho
import psutil
import pytest
import yaml
from paho.mqtt.enums import CallbackAPIVersion

from aggregator.algorithms.algorithm import Training
from aggregator.algorithms.fedpcl import FedPCL
from aggregator.algorithms.registry import ALGORITHMS
from aggregator.algorithms.statistics.feature_map import Statistics
from aggregator.config.schema import (
    Client,
    Limits,
    PrivacyBudget,
    Robust,
    Rounds,
    SumsSettings,
    TaskFile,
)
from aggregator.config.task_file import load_task
from aggregator.coordination.rollout_state import Settings
from aggregator.security.mosquitto_config import CONFIGURATION, access_list, own_configuration
from edge_client.cli import cli as edge_client
from protocol.mqtt.client import stop_thread
from protocol.mqtt.reconnecting_session import BrokerAddress
from protocol.wire.messages import MAX_SIGNED_BYTES, Perturbation
from tests.docs.command_lines import DEPLOY, parse
from tests.support.network.brokers import Mosquitto, mosquitto, needs_mosquitto

ROOT = DEPLOY.parent
TIMEOUT_S = 120.0


def mosquitto_options(folder: Path) -> str:
    """Return deploy/mosquitto.conf without its listener, with its database in a folder of the test."""
    text = (DEPLOY / "mosquitto.conf").read_text(encoding="utf-8")
    text = re.sub(r"(?m)^listener .*$", "", text)
    text = re.sub(r"(?m)^persistence_location .*$", f"persistence_location {folder}/", text)
    return f"{text}\nuser {getpass.getuser()}\n"


def client(broker: BrokerAddress, name: str) -> paho.Client:
    """Return a connected client without a thread."""
    connected = paho.Client(CallbackAPIVersion.VERSION2, client_id=name)
    connected.connect(broker.host, broker.port)
    while not connected.is_connected():
        connected.loop(0.1)
    return connected


def subscriber(broker: BrokerAddress, name: str, topic: str) -> paho.Client:
    """Return a client whose subscription at QoS 1 the broker has acknowledged."""
    made, subscribed = client(broker, name), threading.Event()
    made.on_subscribe = lambda *_: subscribed.set()
    made.subscribe(topic, qos=1)
    while not subscribed.is_set():
        made.loop(0.1)
    return made


def publish(
    broker: BrokerAddress, topic: str, *, times: int = 1, payload: bytes = b"x", retain: bool = False
) -> None:
    """Publish at QoS 1 and wait until the broker has acknowledged all."""
    sender = client(broker, "sender")
    sender.loop_start()
    for message in [sender.publish(topic, payload, qos=1, retain=retain) for _ in range(times)]:
        message.wait_for_publish(TIMEOUT_S)
    sender.disconnect()
    stop_thread(sender)


def receive(subscriber: paho.Client, *, messages: int) -> int:
    """Receive this number of messages, or those that arrive within TIMEOUT_S; returns how many arrived."""
    received: list[paho.MQTTMessage] = []
    subscriber.on_message = lambda _client, _data, message: received.append(message)
    deadline = time.monotonic() + TIMEOUT_S
    while len(received) < messages and time.monotonic() < deadline:
        subscriber.loop(0.1)
    return len(received)


@needs_mosquitto
def test_retained_messages_outlive_the_broker(tmp_path: Path, address: BrokerAddress) -> None:
    """Mosquitto sends a retained task after a restart."""
    options = mosquitto_options(tmp_path)
    with mosquitto(address, tmp_path, options=options):
        publish(address, "pf/1/orchard/task", retain=True)
    with mosquitto(address, tmp_path, options=options):
        subscriber = client(address, "receiver")
        subscriber.subscribe("pf/1/+/task", qos=1)
        assert receive(subscriber, messages=1) == 1


@needs_mosquitto
def test_slow_subscriber_loses_nothing(tmp_path: Path, address: BrokerAddress) -> None:
    """More messages than mosquitto's default of 1000 wait for a subscriber that does not read meanwhile."""
    with mosquitto(address, tmp_path, options=mosquitto_options(tmp_path)):
        receiver = subscriber(address, "receiver", "pf/1/orchard/d/+/up/+")
        publish(address, "pf/1/orchard/d/shed-1/up/0", times=3000)
        assert receive(receiver, messages=3000) == 3000


@needs_mosquitto
def test_memory_of_a_client_that_does_not_read_is_bounded(tmp_path: Path, address: BrokerAddress) -> None:
    """The broker drops what is more than its queue, names the client in its log, and serves the others."""
    options = mosquitto_options(tmp_path)
    size, limit = 250_000, int(re.findall(r"(?m)^max_queued_bytes (\d+)", options)[0])
    with mosquitto(address, tmp_path, options=options) as broker:
        _deaf = subscriber(address, "deaf", "pf/1/orchard/d/deaf/blk")
        # In flight, and one and a half times the queue.
        publish(address, "pf/1/orchard/d/deaf/blk", times=256 + limit * 3 // 2 // size, payload=bytes(size))
        assert psutil.Process(broker.pid).memory_info().rss < limit + 256 * size + 64 * 1024**2
        assert "Outgoing messages are being dropped for client deaf" in broker.log()
        publish(address, "pf/1/orchard/task", retain=True)
        reader = client(address, "reader")
        reader.subscribe("pf/1/orchard/task", qos=1)
        assert receive(reader, messages=1) == 1


@needs_mosquitto
def test_largest_message_is_accepted(tmp_path: Path, address: BrokerAddress) -> None:
    """A manifest of the largest size that the protocol allows is under the broker's packet limit."""
    with mosquitto(address, tmp_path, options=mosquitto_options(tmp_path)):
        publish(address, "pf/1/orchard/task", payload=bytes(MAX_SIGNED_BYTES), retain=True)
        subscriber = client(address, "receiver")
        subscriber.subscribe("pf/1/orchard/task", qos=1)
        assert receive(subscriber, messages=1) == 1


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
    text = uncommented(DEPLOY / "edge-client.toml").replace("/srv/", f"{tmp_path}/")
    (tmp_path / "full.toml").write_text(text, encoding="utf-8")
    full = parse(f"edge-client --config {tmp_path}/full.toml")
    for option in ("holdout", "provider", "batch_size", "rescan_s"):
        assert full.params[option] == context.params[option]
    set_elsewhere = {"config", "help", "version", "verbose", "once", "dry_run", "as_json"}
    named = {name.replace("-", "_") for name in tomllib.loads(text)}
    assert named == {parameter.name for parameter in edge_client.params} - set_elsewhere


@pytest.mark.parametrize(
    "unit",
    ["edge-client", "aggregator", "aggregator@", "aggregator-dashboard", "mosquitto@", "protofleet-sums"],
)
def test_units_are_valid(unit: str, tmp_path: Path) -> None:
    """Systemd reports no problem in the unit, and the program accepts its command."""
    text = (DEPLOY / f"{unit}.service").read_text(encoding="utf-8")
    started = re.search(r"(?m)^ExecStart=(.*)$", text)
    assert started
    program = started[1].split()[0]
    assert Path(program).name == unit.removesuffix("@").removesuffix("-dashboard")
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


def test_compose_file_runs_the_images_and_the_commands_that_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Targets of the Dockerfile, mounted files of the repository, and commands that the programs accept."""
    monkeypatch.setenv("PROTOFLEET_TASK", str(DEPLOY / "task.toml"))  # set by the image
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))["services"]
    stages = re.findall(r"(?m)^FROM \S+ AS (\S+)$", (DEPLOY / "Dockerfile").read_text(encoding="utf-8"))
    programs = {"device": "edge-client", "aggregator": "aggregator"}
    ours = {name: service for name, service in services.items() if "build" in service}
    assert set(services) - set(ours) == {"broker"}
    for name, service in ours.items():
        target = service["build"]["target"]
        assert target in stages, name
        context = parse(
            f"{programs[target]} {service['command'].replace('/run/secrets/http-token', __file__)}"
        )
        assert context.params["broker"] == "broker:1883"
    for service in services.values():
        for volume in service["volumes"]:
            source = Path(volume.partition(":")[0])
            assert source.parts[0] in {"fleet", source.name} or (ROOT / source).is_file(), volume


def test_kubernetes_manifests_are_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROTOFLEET_TASK", str(DEPLOY / "task.toml"))  # set by the image
    text = (DEPLOY / "kubernetes.yaml").read_text(encoding="utf-8")
    resources = list(yaml.safe_load_all(text))
    assert [resource["kind"] for resource in resources] == ["Service", "StatefulSet"]
    for resource in resources:
        kubernetes_validate.validate(resource, kubernetes_validate.latest_version(), strict=True)
    (container,) = resources[1]["spec"]["template"]["spec"]["containers"]
    command = container["command"][-1].partition("exec ")[2]
    assert parse(command).params["http"] == "0.0.0.0:8080"


def test_scripts_have_no_finding_of_shellcheck() -> None:
    scripts = (DEPLOY / "install-device.sh", DEPLOY / "aggregator.sh", ROOT / ".ci" / "run")
    subprocess.run([Path(sys.executable).with_name("shellcheck"), *scripts], check=True)


def wheel(folder: Path, name: str, *, requires: str = "", program: str = "", text: str = "") -> str:
    """Write a wheel of one module, and return its sha256 in hex."""
    info = f"{name}-1.0.dist-info"
    module = program.replace("-", "_") or name
    files = {
        f"{module}.py": text or f"def main() -> None:\n    import {requires or 'sys'}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
        + (f"Requires-Dist: {requires}\n" if requires else ""),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[console_scripts]\n{program} = {module}:main\n" if program else "",
        f"{info}/RECORD": "",
    }
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, content in files.items():
            archive.writestr(file, content)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def install_device(
    folder: Path, sha256: str, images: str = "images", fleet: str = "broker.example"
) -> subprocess.CompletedProcess[str]:
    """Run install-device.sh with pip, below a folder in place of /; nothing is asked of the system's programs."""
    script, programs = folder / "deploy" / "install-device.sh", folder / "programs"
    if not script.exists():
        script.parent.mkdir()
        shutil.copy(DEPLOY / "edge-client.service", script.parent)
        text = (DEPLOY / script.name).read_text(encoding="utf-8")
        script.write_text(re.sub(r"/(?=(opt|etc)/)", f"{folder}/", text), encoding="utf-8")
        for name in ("opt", "etc/systemd/system", programs.name):
            (folder / name).mkdir(parents=True)
        for name in ("apt-get", "chown", "id", "systemctl", "runuser"):
            (programs / name).write_text(f'#!/bin/sh\necho {name} "$@" >> {folder}/calls\n', encoding="ascii")
            (programs / name).chmod(0o755)
    (folder / images).mkdir(exist_ok=True)
    arguments = ("protofleet-1.0-py3-none-any.whl", sha256, "device.lock", fleet, images)
    path = f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder)}
    return subprocess.run(
        ["sh", script, *arguments], cwd=folder, env=env, check=False, capture_output=True, text=True
    )


def test_installation_script_installs_what_the_checksums_are_of(tmp_path: Path) -> None:
    """A wheel with another sha256, a package with another one and a package that the lock lacks stop it."""
    package = wheel(tmp_path, "dependency")
    sha256 = wheel(tmp_path, "protofleet", requires="dependency", program="edge-client")
    lock, calls = tmp_path / "device.lock", tmp_path / "calls"
    lock.write_text("# empty\n", encoding="ascii")

    refused = install_device(tmp_path, "0" * 64)
    assert refused.returncode == 1
    assert f"protofleet-1.0-py3-none-any.whl is not {'0' * 64}" in refused.stderr
    assert not calls.exists()
    incomplete = install_device(tmp_path, sha256)
    assert "protofleet 1.0 requires dependency, which is not installed" in incomplete.stdout
    lock.write_text(f"dependency==1.0 --hash=sha256:{'0' * 64}\n", encoding="ascii")
    assert "DO NOT MATCH THE HASHES" in install_device(tmp_path, sha256).stderr
    lock.write_text("dependency==1.0\n", encoding="ascii")
    assert "Hashes are required" in install_device(tmp_path, sha256).stderr
    assert "systemctl" not in calls.read_text(encoding="utf-8")

    lock.write_text(f"dependency==1.0 --hash=sha256:{package}\n", encoding="ascii")
    installed = install_device(tmp_path, sha256)
    assert installed.returncode == 0, installed.stderr
    settings = tomllib.loads((tmp_path / "etc/protofleet/edge-client.toml").read_text(encoding="utf-8"))
    assert settings == {"broker": "broker.example", "data": str(tmp_path / "images")}
    assert "systemctl restart edge-client" in calls.read_text(encoding="utf-8")


@pytest.mark.parametrize("images", ['a"b', "a\\b", "a\nb"])
def test_installation_script_refuses_paths_that_settings_cannot_hold(tmp_path: Path, images: str) -> None:
    refused = install_device(tmp_path, wheel(tmp_path, "protofleet"), images)
    assert refused.returncode == 2
    assert "no lock file at device.lock" in refused.stderr
    (tmp_path / "device.lock").touch()
    refused = install_device(tmp_path, wheel(tmp_path, "protofleet"), images)
    assert refused.returncode == 2
    assert "rename the folder" in refused.stderr
    assert not (tmp_path / "calls").exists()
