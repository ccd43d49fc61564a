"""A device's enrollment folder is read completely or refused in one line."""

import base64
import re
import shutil
from pathlib import Path

import pytest

from aggregator.security.enrollment import enroll
from aggregator.storage.open_store import open_store
from protocol.enrollment import FORMAT, EnrollmentCard, card_text, read_card, read_enrollment
from protocol.errors import ConfigError


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders of two devices of a fleet, and of one of another."""
    root = tmp_path_factory.mktemp("folders")
    for fleet, devices in (("orchard", ("shed-1", "shed-2")), ("vineyard", ("hut-1",))):
        store = open_store(root / fleet)
        for device in devices:
            enroll(store, device, fleet=fleet, out=root / device)
        store.close()
    return root


@pytest.fixture
def folder(folders: Path, tmp_path: Path) -> Path:
    """A copy of the first one."""
    return shutil.copytree(folders / "shed-1", tmp_path / "shed-1")


def refused(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_enrollment(folder)
    return str(caught.value)


@pytest.mark.parametrize("name", ["enrollment.toml", "ca.crt", "device.crt", "signing.key"])
def test_missing_or_damaged_enrollment_file_is_named(folder: Path, name: str) -> None:
    (folder / name).write_bytes(b"\xff not what it was")
    assert str(folder / name) in refused(folder)
    (folder / name).unlink()
    assert str(folder / name) in refused(folder)


ED25519 = b"\x06\x03\x2b\x65\x70"
"""Object identifier of Ed25519 in a key's DER."""


def spoil(file: Path, was: bytes, now: bytes) -> None:
    first, *lines, last = file.read_text().splitlines()
    inner = base64.b64decode("".join(lines))
    assert was in inner
    changed = base64.encodebytes(inner.replace(was, now, 1)).decode()
    file.write_text(f"{first}\n{changed}{last}\n")


@pytest.mark.parametrize(
    ("name", "was", "now", "said"),
    [
        ("signing.key", ED25519, b"\x06\x03\x2b\x65\x7f", "is not a private key"),
        ("ca.crt", b"\xa0\x03\x02\x01\x02", b"\xa0\x03\x02\x01\x07", "is not a PEM certificate"),
        ("device.crt", b"shed-1", b"shed-\xff", "device.crt is not the certificate of shed-1"),
        (
            "device.crt",
            b"\x2a\x86\x48\xce\x3d\x04\x03\x02",
            b"\x2a\x86\x48\xce\x3d\x04\x03\x7f",
            "not issued by the authority",
        ),
    ],
    ids=["kind of key", "version", "name", "algorithm"],
)
def test_unknown_certificate_contents_are_refused(
    folder: Path, name: str, was: bytes, now: bytes, said: str
) -> None:
    spoil(folder / name, was, now)
    assert said in refused(folder)


@pytest.mark.parametrize(
    ("name", "of", "said"),
    [
        ("device.crt", "shed-2", "device.crt is not the certificate of shed-1"),
        ("signing.key", "shed-2", "signing.key is not the key of shed-1"),
        ("ca.crt", "hut-1", "device.crt was not issued by the authority in"),
        ("enrollment.toml", "shed-2", "device.crt is not the certificate of shed-2"),
    ],
)
def test_files_of_another_enrollment_are_refused(
    folder: Path, folders: Path, name: str, of: str, said: str
) -> None:
    shutil.copy(folders / of / name, folder / name)
    assert said in refused(folder)
    assert "use the folder as `aggregator enroll` wrote it" in refused(folder)


@pytest.mark.parametrize(
    ("pattern", "text", "said"),
    [
        ("format = 1", "format = 2", "has format 2, expected 1: upgrade protofleet here"),
        ('aggregator_key = ".*"', 'aggregator_key = "00"', "expected keys of 32 bytes"),
        ('aggregator_key = ".*"', 'aggregator_key = "xy"', "is damaged"),
        ('device = ".*"\n', "", "missing required field `device`"),
        ("format = 1", "format = " + "[" * 10_000, "is damaged"),
    ],
)
def test_invalid_enrollment_toml_is_refused(folder: Path, pattern: str, text: str, said: str) -> None:
    file = folder / "enrollment.toml"
    file.write_text(re.sub(pattern, text, file.read_text()))
    assert said in refused(folder)


def test_enrollment_toml_is_read_back_and_unknown_keys_ignored(tmp_path: Path) -> None:
    keys = {"key": "0a" * 32, "aggregator_key": "0b" * 32}
    names = {"device": "shed-1", "fleet": "orchard", "broker": 'a"b\\c', "root_key": "0c" * 32}
    card = EnrollmentCard(format=FORMAT, aggregator_key_number=7, **names, **keys)
    (tmp_path / "enrollment.toml").write_text(card_text(card) + "added = 1\n")
    assert read_card(tmp_path) == card


def test_repr_omits_private_keys(folder: Path) -> None:
    enrollment = read_enrollment(folder)
    assert enrollment.signing_key.hex() not in repr(enrollment)
    assert str(enrollment.signing_key) not in repr(enrollment)
