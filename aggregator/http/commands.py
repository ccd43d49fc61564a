"""Operator commands over HTTP: the functions of the command line, on the same state directory."""

import contextlib
import io
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import msgspec
from msgspec import Meta

from aggregator.heads.forgotten_devices import forget
from aggregator.heads.operator_commands import release, submit_command
from aggregator.security.enrollment import enroll, revocation_advice, revoke
from aggregator.storage.open_store import open_store
from aggregator.storage.store import Store
from protocol.mqtt.tls import parse_brokers
from protocol.wire.messages import Name

Arguments = TypeVar("Arguments", bound=msgspec.Struct)


class HeadCommand(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The head to make current; without a version, the previous one."""

    version: Annotated[int, Meta(ge=1)] | None = None


class NoArguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A command without arguments."""


class DeviceCommand(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The device that a command is about."""

    device: Name


class EnrollCommand(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A device to enroll, as with `aggregator enroll`."""

    device: Name
    broker: Annotated[
        str, Meta(max_length=256, description="HOST[:PORT][,...], as seen from the device.")
    ] = ""
    renew: bool = False


class Outcome(msgspec.Struct, frozen=True):
    """The result of a command, in words."""

    message: str


def _rollback(store: Store, command: HeadCommand) -> str:
    return submit_command(store, "rollback", command.version)


def _promote(store: Store, _command: NoArguments) -> str:
    return submit_command(store, "promote")


def _release(store: Store, command: DeviceCommand) -> str:
    return release(store, command.device)


def _forget(store: Store, command: DeviceCommand) -> str:
    return "; ".join(forget(store, command.device))


def _revoke(store: Store, command: DeviceCommand) -> str:
    text = f"revoked {command.device}: the aggregator refuses its messages from now on"
    return f"{text}; {revocation_advice(store.folder)}" if revoke(store, command.device) else text


@dataclass(frozen=True)
class Command(Generic[Arguments]):
    """A command: its arguments, the function that carries it out, and what it does."""

    arguments: type[Arguments]
    run: Callable[[Store, Arguments], str]
    summary: str


COMMANDS: dict[str, Command[Any]] = {
    "rollback": Command(HeadCommand, _rollback, "Make an earlier head current."),
    "promote": Command(NoArguments, _promote, "Roll the candidate out to all devices."),
    "release": Command(DeviceCommand, _release, "Release a device from quarantine."),
    "forget": Command(DeviceCommand, _forget, "Delete a device's submissions."),
    "revoke": Command(DeviceCommand, _revoke, "Revoke a device's key."),
}


def run_command(state: Path, name: str, arguments: bytes) -> Outcome:
    """Carry out a command on a state directory; waits up to 10 s for the running aggregator.

    Raises:
        MsgspecError: the arguments are not the command's.
        ProtofleetError: the command is impossible.
    """
    command = COMMANDS[name]
    decoded = msgspec.json.decode(arguments or b"{}", type=command.arguments)
    with _existing(state) as store:
        return Outcome(command.run(store, decoded))


def enrollment_archive(state: Path, arguments: bytes) -> tuple[str, bytes]:
    """Enroll a device; return its name and its enrollment folder as a ZIP archive.

    No copy of the folder, which has the device's private keys, stays on this machine.

    Raises:
        MsgspecError: the arguments are not the command's.
        ProtofleetError: the device cannot be enrolled.
    """
    command = msgspec.json.decode(arguments, type=EnrollCommand)
    if command.broker:
        parse_brokers(command.broker)
    with _existing(state) as store, tempfile.TemporaryDirectory(dir=state, prefix=".enroll-") as folder:
        out = Path(folder) / command.device
        served = store.served_task()
        enroll(
            store,
            command.device,
            fleet=served.fleet,
            out=out,
            broker=command.broker,
            renew=command.renew,
            max_devices=served.limits.max_devices,
        )
        archive = io.BytesIO()
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as files:
            for file in sorted(out.iterdir()):
                entry = zipfile.ZipInfo(f"{command.device}/{file.name}")
                entry.external_attr = (file.stat().st_mode & 0o777) << 16
                files.writestr(entry, file.read_bytes())
        return command.device, archive.getvalue()


@contextlib.contextmanager
def _existing(state: Path) -> Iterator[Store]:
    open_store(state, read_only=True).close()  # raises where there is none, instead of creating one
    with contextlib.closing(open_store(state)) as store:
        yield store
