"""`edge-client join`: enrolls this machine with a link, in place of a copied folder.

Neither a secret nor a private key is sent: the request proves that the link's secret is known, and the answer is signed
with the aggregator's key, which the link has. Who reads or changes the connection, also one over plain `http://`, can
only prevent the enrollment.
"""

import re
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from protocol.cli import examples, say
from protocol.errors import ConfigError

if TYPE_CHECKING:
    from urllib.error import HTTPError

    from protocol.wire.joining import JoinAnswer, JoinLink, JoinRequest

TIMEOUT_S = 60.0

MAX_REASON = 300
"""Characters that are shown of a refusal."""


@click.command(
    "join",
    epilog=examples("edge-client join 'https://fleet.example/join/#fleet=orchard&key=...' --out shed-1"),
)
@click.argument("link")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder to create; it must not exist.  [default: the device's name]",
)
@click.option(
    "--device-id",
    metavar="NAME",
    help="Name of the device, if the link has none.  [default: the host's name]",
)
def join_command(*, link: str, out: Path | None, device_id: str | None) -> None:
    """Enroll this machine with LINK, which `aggregator enroll --link` or the dashboard has made.

    Its keys are made here and never leave it. If the connection ends before the answer, repeat the command.
    """
    from protocol.wire.joining import parse_link

    found = parse_link(link)
    device = _name(found.name, device_id)
    if not found.secret:
        broker = f" --broker {found.broker or 'HOST[:PORT]'}"
        given = f"--fleet {found.fleet} --device-id {device} --aggregator-key {found.key.hex()}"
        say(
            f"the fleet is open, and nothing is to be enrolled; start with: edge-client{broker} {given} --data IMAGES"
        )
        return
    folder = out or Path(device)
    answer = join(found, device, folder)
    where = "" if answer.broker else " --broker HOST[:PORT]"
    say(f"enrolled {device}; start it with: edge-client --enrollment {folder}{where} --data IMAGES")


def _name(of_link: str, given: str | None) -> str:
    import platform

    from protocol.wire.topics import is_name

    if of_link and given not in (None, of_link):
        raise ConfigError(f"this link is for {of_link}: leave --device-id out")
    name = of_link or given or re.sub(r"[^A-Za-z0-9_-]+", "-", platform.node()).strip("-")[:64]
    if not is_name(name):
        raise ConfigError(
            f"invalid device name {name!r}: give --device-id with 1 to 64 letters, digits, '-' or '_'"
        )
    return name


def join(link: "JoinLink", device: str, out: Path) -> "JoinAnswer":
    """Enroll a device, and write its enrollment folder.

    The keys are made in a folder beside it, where a repetition of the command finds them: the aggregator answers the
    same request again.

    Raises:
        ConfigError: the folder exists, the aggregator cannot be reached, or has refused the request.
        BadSignature: the answer is not the aggregator's.
        StateError: the folder cannot be written.
    """
    from protocol.enrollment import read_enrollment
    from protocol.storage.blobstore import state_errors, sync
    from protocol.storage.keyfile import read_or_make_key
    from protocol.wire.joining import open_answer, signed_request
    from protocol.wire.signing import public_key

    out = out.absolute()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists: give --out a new folder, or an empty one")
    folder = out.with_name(f".{out.name}.joining")
    key = public_key(read_or_make_key(folder / "signing.key"))
    request = signed_request(link, device, "box", key=key, tls_key=_tls_key(folder / "device.key"))
    answer = open_answer(_post(f"{link.address}/join/enroll", request), link=link, request=request)
    _write(folder, link, answer)
    read_enrollment(folder)  # raises where the files do not belong together
    with state_errors(out):
        folder.rename(out)
        sync(out.parent)
    return answer


def _tls_key(file: Path) -> str:
    """Return the public key (PEM) of the private key in a file, which is made if there is none."""
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
        PublicFormat,
        load_pem_private_key,
    )

    from protocol.storage.keyfile import write_private

    if not file.exists():
        made = ec.generate_private_key(ec.SECP256R1())
        write_private(file, made.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    try:
        key = load_pem_private_key(file.read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"cannot use {file}: {error}: delete {file.parent}, and ask for a new link"
        ) from error
    return key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()


def _post(url: str, request: "JoinRequest") -> bytes:
    """Return the answer to a request; raises ConfigError if there is none, or it is a refusal."""
    import ssl
    import urllib.error
    import urllib.request

    from protocol.wire.joining import MAX_ANSWER_BYTES

    headers = {"content-type": "application/json"}
    sent = urllib.request.Request(url, msgspec.json.encode(request), headers, method="POST")  # noqa: S310 - http
    try:
        with urllib.request.urlopen(sent, timeout=TIMEOUT_S) as response:  # noqa: S310 - http
            data: bytes = response.read(2 * MAX_ANSWER_BYTES)
            return data
    except urllib.error.HTTPError as error:
        raise ConfigError(f"refused by {url}: {_reason(error)}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLCertVerificationError):
            raise ConfigError(
                f"this machine does not trust the certificate of {url} ({reason.verify_message}): name the file of its "
                "authority by SSL_CERT_FILE=FILE, or use an http:// address of the aggregator in the link, over which "
                "joining is safe as well"
            ) from error
        raise ConfigError(f"no answer from {url}: {reason}: repeat the command") from error


def _reason(error: "HTTPError") -> str:
    try:
        return str(msgspec.json.decode(error.read(64 * 1024), type=dict[str, str])["error"])[:MAX_REASON]
    except (OSError, ValueError, KeyError, msgspec.MsgspecError):
        return f"HTTP status {error.code}"


def _write(folder: Path, link: "JoinLink", answer: "JoinAnswer") -> None:
    from protocol.enrollment import FORMAT, EnrollmentCard, card_text
    from protocol.storage.blobstore import write_atomically
    from protocol.storage.state_folder import IGNORE_ALL, IGNORE_FILE

    card = EnrollmentCard(
        format=FORMAT,
        device=answer.device,
        fleet=answer.fleet,
        broker=answer.broker,
        key=answer.key,
        aggregator_key=link.key.hex(),
        aggregator_key_number=answer.aggregator_key_number,
        root_key=answer.root_key,
    )
    files = {
        IGNORE_FILE: IGNORE_ALL,
        "enrollment.toml": card_text(card),
        "ca.crt": answer.ca_crt,
        "device.crt": answer.device_crt,
    }
    for name, text in files.items():
        write_atomically(folder / name, text.encode())
