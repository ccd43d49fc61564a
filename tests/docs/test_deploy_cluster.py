"""The files in deploy/cluster/, for a fleet whose roles are programs of their own."""

import os
import re
import subprocess
from collections import Counter
from typing import Any

import click
import kubernetes_validate
import pytest
import yaml

from tests.docs.command_lines import DEPLOY, parse
from tests.support.network.nats import nats_program, needs_nats

CLUSTER = DEPLOY / "cluster"
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load((CLUSTER / "compose.yaml").read_text(encoding="utf-8"))[
    "services"
]
RESOURCES: list[dict[str, Any]] = list(
    yaml.safe_load_all((CLUSTER / "kubernetes.yaml").read_text(encoding="utf-8"))
)


def parsed(command: str, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> click.Context:
    """Parse a command of `aggregator` with variables, and with those that the image sets."""
    for name, value in {"PROTOFLEET_TASK": str(DEPLOY / "task.toml"), **environment}.items():
        monkeypatch.setenv(name, value)
    return parse(f"aggregator {command}")


ROLES = [name for name, service in SERVICES.items() if "build" in service]


def test_compose_file_has_two_of_each_role() -> None:
    roles = Counter(SERVICES[name]["command"].split()[0] for name in ROLES)
    assert roles == {"coordinate": 2, "receive": 2, "train": 2}


@pytest.mark.parametrize("name", ROLES)
def test_commands_of_the_compose_file_are_accepted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has the database and the object store, and its brokers are services of the file."""
    service = SERVICES[name]
    found = parsed(service["command"], service["environment"], monkeypatch).params
    assert found["database"] == "postgresql://protofleet@database/fleets"
    assert os.environ["PROTOFLEET_BLOBS"] == "s3://fleets/orchard"
    for broker in filter(None, found.get("broker", "").split(",")):
        assert SERVICES[broker]["environment"]["NATS_NAME"] == broker


def test_secrets_of_the_compose_file_come_from_the_environment() -> None:
    """No password is in the file, and the line that makes the secrets makes each."""
    text = (CLUSTER / "compose.yaml").read_text(encoding="utf-8")
    needed = set(re.findall(r"\$\{(\w+):\?\}", text))
    (made,) = re.findall(r"for name in ([A-Z_ ]+); do", text)
    assert needed == set(made.split())
    for line in re.findall(r"^.*(?:PASSWORD|SECRET|TOKEN|MC_HOST)\w*: .*$", text, re.MULTILINE):
        assert "${" in line, line


@pytest.mark.parametrize("resource", RESOURCES, ids=lambda each: f"{each['kind']}-{each['metadata']['name']}")
def test_kubernetes_manifests_are_valid(resource: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's arguments are accepted with the ConfigMap's variables, and its volumes exist."""
    kubernetes_validate.validate(resource, kubernetes_validate.latest_version(), strict=True)
    if resource["kind"] != "Deployment":
        return
    spec = resource["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    (variables,) = (each["data"] for each in RESOURCES if each["kind"] == "ConfigMap")
    command = " ".join(container["args"]).replace("BROKER", "broker")
    assert parsed(command, variables, monkeypatch).params["database"] == variables["PROTOFLEET_STORE"]
    mounted = {
        mount["name"]
        for each in (*spec["containers"], *spec.get("initContainers", ()))
        for mount in each["volumeMounts"]
    }
    assert mounted == {volume["name"] for volume in spec["volumes"]}


@needs_nats
def test_nats_accepts_its_configuration() -> None:
    """Every server of the compose file has a route to each."""
    text = (CLUSTER / "nats.conf").read_text(encoding="utf-8")
    assert re.findall(r"nats://(nats-\d):6222", text) == [
        name for name in SERVICES if name.startswith("nats")
    ]
    environment = {**os.environ, "NATS_NAME": "nats-1"}
    subprocess.run([nats_program() or "", "-t", "-c", CLUSTER / "nats.conf"], env=environment, check=True)
