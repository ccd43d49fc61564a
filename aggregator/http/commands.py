"""An operator's commands on a state directory, for the command line and for HTTP.

Functions import what they need when they run, so that `aggregator --help` answers at once.
"""

import inspect
import io
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from aggregator.commands.arguments import DeviceArguments, HeadArguments, NoArguments
from protocol.wire.messages import Name

if TYPE_CHECKING:
    from aggregator.commands.session import Session


class EnrollArguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A device to enroll, as with `aggregator enroll`."""

    device: Name
    broker: Annotated[
        str, Meta(max_length=256, description="HOST[:PORT][,...], as seen from the device.")
    ] = ""
    renew: bool = False


class LinkArguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A join link to make, as with `aggregator enroll --link`."""

    url: Annotated[
        str,
        Meta(
            pattern="^https?://",
            max_length=256,
            description="Address of the dashboard, as seen from the device.",
        ),
    ]
    device: Annotated[str, Meta(description="Its name; without one, the device chooses it.")] = ""
    broker: Annotated[str, Meta(max_length=256, description="HOST[:PORT][,...], as seen from a box.")] = ""
    renew: bool = False


class LinkReply(msgspec.Struct, frozen=True):
    """A join link, good for one device and 15 minutes, and its QR code (SVG)."""

    link: str
    qr: str


class CommandReply(msgspec.Struct, frozen=True):
    """The result of a command, in words."""

    message: str


@dataclass(frozen=True)
class Command:
    """A command: its arguments, and the function that carries it out and returns what to print, a sentence each."""

    arguments: type[msgspec.Struct]
    run: "Callable[[Session, Any], Sequence[str]]"

    @property
    def help(self) -> str:
        """The text of `--help`."""
        return inspect.getdoc(self.run) or ""

    @property
    def summary(self) -> str:
        return self.help.partition("\n")[0]


def _rollback(session: "Session", arguments: HeadArguments) -> Sequence[str]:
    """Make head VERSION current again; without VERSION, the previous head.

    All devices return to it and a candidate is rejected. Heads trained later are rolled out as usual.
    """
    return session.carry_out("rollback", arguments)


def _promote(session: "Session", arguments: NoArguments) -> Sequence[str]:
    """Roll the candidate out to all devices without waiting for its canaries."""
    return session.carry_out("promote", arguments)


def _release(session: "Session", arguments: DeviceArguments) -> Sequence[str]:
    """Release DEVICE from quarantine.

    Its prototypes are used for training from now on, whatever it uploads, until it is revoked.
    """
    return session.carry_out("release", arguments)


def _forget(session: "Session", arguments: DeviceArguments) -> Sequence[str]:
    """Delete the submissions of DEVICE, and make the head again without them.

    It stays enrolled and may upload again: to prevent that, revoke it first.
    """
    return session.carry_out("forget", arguments)


def _revoke(session: "Session", arguments: DeviceArguments) -> Sequence[str]:
    """Revoke DEVICE: refuse its messages and exclude its submissions from training."""
    from aggregator.security.enrollment import revocation_advice, revoke

    has_revocation_list = revoke(session.store, arguments.device, write=session.change_keys)
    done = f"revoked {arguments.device}: the aggregator refuses its messages from now on"
    return (done, revocation_advice(session.store.folder)) if has_revocation_list else (done,)


COMMANDS = {
    "rollback": Command(HeadArguments, _rollback),
    "promote": Command(NoArguments, _promote),
    "release": Command(DeviceArguments, _release),
    "forget": Command(DeviceArguments, _forget),
    "revoke": Command(DeviceArguments, _revoke),
}


def run_command(state: Path, name: str, arguments: bytes) -> CommandReply:
    """Carry out a command of the table on a state directory.

    Raises:
        MsgspecError: the arguments are not the command's.
        ProtofleetError: the command is impossible.
    """
    from aggregator.commands.session import open_session

    command = COMMANDS[name]
    decoded = msgspec.json.decode(arguments or b"{}", type=command.arguments)
    with open_session(state) as session:
        return CommandReply("; ".join(command.run(session, decoded)))


def enrollment_archive(state: Path, arguments: bytes) -> tuple[str, bytes]:
    """Enroll a device; return its name and its enrollment folder as a ZIP archive.

    The device's private keys are never written to the disk of this machine.

    Raises:
        MsgspecError: the arguments are not the command's.
        ProtofleetError: the device cannot be enrolled.
    """
    from aggregator.commands.session import open_session
    from aggregator.security.enrollment import enroll
    from protocol.mqtt.tls import parse_brokers

    command = msgspec.json.decode(arguments, type=EnrollArguments)
    if command.broker:
        parse_brokers(command.broker)
    with open_session(state) as session:
        served = session.store.served_task()
        files = enroll(
            session.store,
            command.device,
            fleet=served.fleet,
            out=None,
            broker=command.broker,
            renew=command.renew,
            max_devices=served.limits.max_devices,
            write=session.change_keys,
        )
        return command.device, _archive(command.device, files)


def join(state: Path, body: bytes) -> tuple[str, bytes]:
    """Enroll a device that has a join link; return its name and the answer, JSON.

    Raises:
        MsgspecError: the body is no request.
        ProtofleetError: the link is not good for it, or the device cannot be enrolled.
    """
    from aggregator.commands.session import open_session
    from aggregator.security.joining import answer_join

    with open_session(state) as session:
        served = session.store.served_task()
        return answer_join(
            session.store,
            body,
            fleet=served.fleet,
            max_devices=served.limits.max_devices,
            write=session.change_keys,
        )


def make_join_link(state: Path, arguments: bytes) -> LinkReply:
    """Make a link that enrolls a device; raises as `enrollment_archive` does."""
    from aggregator.commands.session import open_session
    from aggregator.security.joining import make_link
    from protocol.mqtt.tls import parse_brokers

    command = msgspec.json.decode(arguments, type=LinkArguments)
    if command.broker:
        parse_brokers(command.broker)
    with open_session(state) as session:
        served = session.store.served_task()
        link = make_link(
            session.store,
            address=command.url,
            fleet=served.fleet,
            device=command.device,
            broker=command.broker,
            renew=command.renew,
            max_devices=served.limits.max_devices,
            write=session.change_keys,
        )
    return LinkReply(str(link), _qr_code(str(link)))


def _qr_code(text: str) -> str:
    import segno

    image = io.BytesIO()
    segno.make(text, error="l").save(image, kind="svg", scale=4)
    return image.getvalue().decode()


def _archive(folder: str, contents: Mapping[str, bytes]) -> bytes:
    from aggregator.security.enrollment import mode_of

    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as files:
        for name, data in sorted(contents.items()):
            entry = zipfile.ZipInfo(f"{folder}/{name}")
            entry.external_attr = mode_of(name) << 16
            files.writestr(entry, data)
    return archive.getvalue()
