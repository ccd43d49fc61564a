"""The code agrees with the vectors in `protocol/vectors`, and the command writes these files."""

import base64
import hashlib
import hmac
import json
from typing import Any

import msgspec
import numpy as np
import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from PIL import Image

from aggregator.intake.upload import Upload
from edge_client.core.manifest_trust import ManifestTrust, expired
from edge_client.core.uploads import cut_window
from edge_client.privacy.image_groups import pack
from edge_client.prototypes.outlier_filter import closest_features
from edge_client.prototypes.prototype_averaging import average
from protocol.errors import ConfigError, TransferError
from protocol.models.preprocessing import Preprocessing, preprocess
from protocol.statistics.confidence import confidence_bins, novelty_bins
from protocol.wire.canary_rank import canary_rank
from protocol.wire.codec import decode, digest_of, encode
from protocol.wire.joining import parse_link
from protocol.wire.messages import Frame, KeyCertificate, Message, Presence, PrivacyRecord
from protocol.wire.presence import Start, observe
from protocol.wire.quantization import dequantize, quantize
from protocol.wire.signing import (
    is_own_presence,
    is_own_record,
    is_own_transfer,
    is_valid_certificate,
    sign_frame,
)
from protocol.wire.topics import device_filters, device_topic, fleet_topic
from protocol.wire.transfer import chunk_bytes, frames_of
from tests.support.messages.every_type import WIRE_TYPES
from tests.vectors.files import FILES, FOLDER, plain, rendered, revived
from tests.vectors.images import is_refused, pixels
from tests.vectors.messages import MAX_BYTES, refusal
from tests.vectors.signatures import received

KINDS: dict[Any, type[Message | Frame]] = {
    each.__struct_config__.tag: each for each in WIRE_TYPES if issubclass(each, Message | Frame)
}


def cases(name: str, *lists: str) -> list[dict[str, Any]]:
    """Return the cases in lists of a file."""
    content = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return [each for part in lists for each in content[part]]


def header(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return content


@pytest.mark.parametrize("name", FILES)
def test_command_writes_the_file(name: str) -> None:
    text = (FOLDER / name).read_text(encoding="utf-8")
    assert text == rendered(name), "run: python -m tests.vectors, and say in the CHANGELOG what has changed"
    assert len(text.encode()) < 100_000


def test_there_is_no_other_file() -> None:
    assert sorted(each.name for each in FOLDER.iterdir()) == sorted(FILES)


@pytest.mark.parametrize("case", cases("messages", "messages"), ids=lambda case: case["type"])
def test_bytes_of_a_message_are_golden(case: dict[str, Any]) -> None:
    """The bytes of version 1 never change."""
    data = bytes.fromhex(case["bytes"])
    message = decode(data, KINDS[case["type"]], max_bytes=MAX_BYTES)
    assert plain(message) == case["fields"]
    assert encode(message) == data


def test_every_type_of_message_has_a_vector() -> None:
    assert {case["type"] for case in cases("messages", "messages")} == set(KINDS)


@pytest.mark.parametrize("case", cases("messages", "tolerated"), ids=lambda case: case["name"])
def test_other_bytes_of_a_message_are_decoded(case: dict[str, Any]) -> None:
    message = decode(bytes.fromhex(case["bytes"]), KINDS[case["type"]], max_bytes=MAX_BYTES)
    assert plain(message) == case["fields"]


@pytest.mark.parametrize("case", cases("messages", "refused"), ids=lambda case: case["name"])
def test_other_bytes_are_refused(case: dict[str, Any]) -> None:
    assert refusal(bytes.fromhex(case["bytes"]), KINDS[case["type"]]) == case["reason"] != ""


def test_topics() -> None:
    content = header("topics")
    fleet = content["fleet"]
    for channel, topic in content["fleet_topics"].items():
        assert fleet_topic(fleet, channel) == topic
    for case in content["device_topics"]:
        for channel, topic in case["topics"].items():
            assert device_topic(fleet, case["device"], channel) == topic
    assert list(device_filters(fleet)) == content["aggregator_subscribes"]


@pytest.mark.parametrize("case", cases("frames", "frames"), ids=lambda case: case["name"])
def test_payload_is_split_into_frames(case: dict[str, Any]) -> None:
    content = header("frames")
    payload = bytes.fromhex(content["payload"])[: case["size_bytes"]]
    ranges = None if case["ranges"] is None else tuple((start, stop) for start, stop in case["ranges"])
    size = case["chunk_bytes"]
    made = frames_of(payload, digest=digest_of(payload), ranges=ranges, chunk_bytes=size)
    names = {"fleet": content["fleet"], "device": content["device"]}
    for frame, data in zip(made, map(bytes.fromhex, case["frames"]), strict=True):
        stored = decode(data, Frame, max_bytes=MAX_BYTES)
        if stored.key:
            signed = sign_frame(frame, key=bytes.fromhex(content["private_key"]), **names)
            assert encode(signed) == data
        else:
            assert encode(frame) == data


def test_windows_and_sizes_of_frames() -> None:
    for case in cases("frames", "windows"):
        ranges = tuple((start, stop) for start, stop in case["ranges"])
        window, rest = cut_window(ranges, chunk_bytes=case["chunk_bytes"], frames=case["frames"])
        assert plain([window, rest]) == [case["window"], case["rest"]]
    for case in cases("frames", "chunk_bytes"):
        assert chunk_bytes(case["max_packet_bytes"]) == case["chunk_bytes"]


@pytest.mark.parametrize("case", cases("frames", "reassemblies"), ids=lambda case: case["name"])
def test_payload_is_reassembled(case: dict[str, Any]) -> None:
    digest, payload = bytes.fromhex(case["digest"]), bytes.fromhex(header("frames")["payload"])
    upload = Upload(digest, case["frames"][0]["size_bytes"])
    for step in case["frames"]:
        data = step["data"]
        content = bytes.fromhex(data) if isinstance(data, str) else payload[slice(*data)]
        frame = Frame(v=1, digest=digest, size_bytes=step["size_bytes"], offset=step["offset"], data=content)
        if "refused" in step:
            with pytest.raises(TransferError):
                _added(upload, frame)
            continue
        _added(upload, frame)
        assert plain(upload.missing()) == step["missing"]
        assert upload.is_whole == step["is_whole"]


def _added(upload: Upload, frame: Frame) -> None:
    upload.add(frame)
    if upload.is_whole:
        assert digest_of(upload.payload()) == frame.digest


def is_signed(case: dict[str, Any], signature: bytes) -> bool:
    """Return whether a signature of the bytes `signed` is valid, without this project's code."""
    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(case["key"]))
        key.verify(signature, bytes.fromhex(case["signed"]))
    except InvalidSignature:
        return False
    return True


def test_keys_of_signatures() -> None:
    for case in cases("signatures", "keys"):
        private = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(case["private_key"]))
        assert private.public_key().public_bytes_raw().hex() == case["public_key"]


@pytest.mark.parametrize("case", cases("signatures", "transfers"))
def test_signature_of_a_transfer(case: dict[str, Any]) -> None:
    key, signature = bytes.fromhex(case["key"]), bytes.fromhex(case["signature"])
    names = {"fleet": case["fleet"], "device": case["device"], "size_bytes": case["size_bytes"]}
    digest = bytes.fromhex(case["digest"])
    assert (
        is_own_transfer(key, signature, digest=digest, **names) == is_signed(case, signature) == case["valid"]
    )


@pytest.mark.parametrize("case", cases("signatures", "presences"))
def test_signature_of_a_presence(case: dict[str, Any]) -> None:
    presence = decode(bytes.fromhex(case["bytes"]), Presence, max_bytes=MAX_BYTES)
    key = bytes.fromhex(case["key"])
    assert is_own_presence(presence, public=key, topic=case["topic"]) == case["valid"]
    assert (presence.key == key and is_signed(case, presence.signature)) == case["valid"]


@pytest.mark.parametrize("case", cases("signatures", "records"))
def test_signature_of_a_privacy_record(case: dict[str, Any]) -> None:
    record = decode(bytes.fromhex(case["bytes"]), PrivacyRecord, max_bytes=MAX_BYTES)
    own = is_own_record(record, public=bytes.fromhex(case["key"]), topic=case["topic"])
    assert own == is_signed(case, record.signature) == case["valid"]


@pytest.mark.parametrize("case", cases("signatures", "certificates"))
def test_signature_of_a_certificate(case: dict[str, Any]) -> None:
    certificate = msgspec.convert(revived(case["fields"]), KeyCertificate)
    signer = {**case, "key": certificate.signer.hex()}
    valid = is_valid_certificate(certificate, fleet=case["fleet"])
    assert valid == is_signed(signer, certificate.signature) == case["valid"]


def shown_trust(trust: ManifestTrust) -> dict[str, Any]:
    return {
        "key": trust.key and trust.key.hex(),
        "number": trust.number,
        "root": trust.root and trust.root.hex(),
        "seen": {channel: release for channel, (release, _) in trust.seen.items()},
    }


@pytest.mark.parametrize("case", cases("signatures", "manifests"), ids=lambda case: case["name"])
def test_manifest_is_verified(case: dict[str, Any]) -> None:
    payload = bytes.fromhex(case["bytes"])
    reason, _ = received(payload, case["channel"], ManifestTrust(), fleet=case["fleet"])
    assert reason == case["refused"]


@pytest.mark.parametrize("case", cases("trust", "sequences"), ids=lambda case: case["name"])
def test_manifests_are_trusted_or_refused(case: dict[str, Any]) -> None:
    start = case["start"]
    key, root = (bytes.fromhex(each) if (each := start[name]) else None for name in ("key", "root"))
    trust = ManifestTrust(key, start["number"], root)
    for step in case["steps"]:
        reason, trust = received(bytes.fromhex(step["bytes"]), step["channel"], trust)
        assert reason == step["refused"]
        assert shown_trust(trust).items() <= step["trust"].items()


@pytest.mark.parametrize("case", cases("presence", "sequences"), ids=lambda case: case["name"])
def test_duplicates_react_to_presences(case: dict[str, Any]) -> None:
    own = Start(case["epoch"], bytes.fromhex(case["instance"]))
    for step in revived(case["steps"]):
        instance = bytes.fromhex(step["instance"])
        own, reaction = observe(own, Presence(state=step["state"], epoch=step["epoch"], instance=instance))
        assert (reaction.name.lower(), own.epoch) == (step["reaction"], step["epoch_after"])


def test_manifest_expires() -> None:
    for case in cases("trust", "expiry"):
        trust = ManifestTrust(expires_s={"task": case["expires_s"]})
        assert bool(expired(trust, now_s=case["now_s"])) == case["expired"]


@pytest.mark.parametrize("case", cases("preprocessing", "files"), ids=lambda case: case["name"])
def test_file_is_decoded(case: dict[str, Any]) -> None:
    found, _ = pixels(base64.b64decode(case["file"]), Preprocessing(height=1, width=1))
    assert np.abs(found.astype(int) - rgb_of(case)).max() <= case["tolerance"]


def rgb_of(case: dict[str, Any]) -> Any:
    data = np.frombuffer(base64.b64decode(case["rgb"]), np.uint8)
    return data.reshape(case["height"], case["width"], 3)


def test_images_are_preprocessed() -> None:
    images = {case["name"]: rgb_of(case) for case in cases("preprocessing", "files")}
    for case in cases("preprocessing", "cases"):
        spec = msgspec.convert(case["preprocessing"], Preprocessing)
        made = preprocess(Image.fromarray(images[case["file"]]), spec)
        assert made.tobytes() == base64.b64decode(case["pixels"]), case


@pytest.mark.parametrize("case", cases("preprocessing", "refused"), ids=lambda case: case["name"])
def test_image_is_refused(case: dict[str, Any]) -> None:
    spec = msgspec.convert(case["preprocessing"], Preprocessing)
    assert is_refused(base64.b64decode(case["file"]), spec)


@pytest.mark.parametrize("case", cases("outlier_filter", "cases"), ids=lambda case: case["name"])
def test_outliers_are_filtered(case: dict[str, Any]) -> None:
    features = np.array(case["features"], np.float32)
    assert closest_features(lambda: [features], alpha=case["alpha"]).tolist() == case["kept"]


def test_groups_are_packed() -> None:
    for case in cases("prototypes", "packed"):
        groups = [
            frozenset(f"{number} {at}".encode() for at in range(size))
            for number, size in enumerate(case["groups"])
        ]
        assert [*map(len, pack(groups, batch_size=case["batch_size"]))] == case["prototypes"]


@pytest.mark.parametrize("case", cases("prototypes", "averages"), ids=lambda case: case["name"])
def test_features_are_averaged(case: dict[str, Any]) -> None:
    features = np.array(case["features"], np.float32)
    means, counts = average(lambda: [features], np.array(case["numbers"], np.intp))
    assert means.astype(np.float16).tolist() == case["prototypes"]
    assert counts.tolist() == case["counts"]


@pytest.mark.parametrize("case", cases("prototypes", "quantized"), ids=lambda case: case["name"])
def test_prototypes_are_quantized(case: dict[str, Any]) -> None:
    integers, limits = quantize(np.array(case["values"], np.float16))
    assert integers.tolist() == case["prototypes"]
    assert limits.astype("<f2").tobytes().hex() == case["range_bytes"]
    assert dequantize(integers, limits).tolist() == case["restored"]


def test_canaries() -> None:
    limit = header("canary")["canary_rank_limit"]
    for case in cases("canary", "ranks"):
        rank = canary_rank(case["device"], case["version"])
        assert (rank, rank < limit) == (case["rank"], case["is_canary"])


def test_bins() -> None:
    for case in cases("confidence", "confidence"):
        assert confidence_bins(np.array([case["probabilities"]], np.float32)).tolist() == [case["bin"]]
    for case in cases("confidence", "novelty"):
        assert novelty_bins(np.array([case["novelty"]], np.float32)).tolist() == [case["bin"]]


@pytest.mark.parametrize("case", cases("joining", "links"), ids=lambda case: case["link"][:40])
def test_link_is_read_or_refused(case: dict[str, Any]) -> None:
    if case["fields"] is None:
        with pytest.raises(ConfigError):
            parse_link(case["link"])
        return
    link, fields = parse_link(case["link"]), dict(case["fields"])
    found = {name: getattr(link, name) for name in fields}
    assert {name: each.hex() if isinstance(each, bytes) else each for name, each in found.items()} == fields


@pytest.mark.parametrize("case", cases("joining", "requests"), ids=lambda case: case["kind"])
def test_request_proves_the_secret(case: dict[str, Any]) -> None:
    """By an HMAC, which the standard library makes."""
    secret = bytes.fromhex(case["secret"])
    tls_key = hashlib.sha256(case["tls_key"].encode()).hexdigest() if case["tls_key"] else ""
    fields = [case[name] for name in ("fleet", "device", "kind", "key")]
    content = " ".join(["protofleet 1 join", *fields, tls_key, case["aggregator_key"]]).encode()
    assert hmac.new(secret, content, "sha256").hexdigest() == case["proof"]
    assert hashlib.sha256(secret).hexdigest()[:16] == case["id"]


@pytest.mark.parametrize("case", cases("joining", "connections"))
def test_connection_is_signed(case: dict[str, Any]) -> None:
    public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(case["key"]))
    if case["valid"]:
        public.verify(bytes.fromhex(case["signature"]), case["signed"].encode())
        return
    with pytest.raises(InvalidSignature):
        public.verify(bytes.fromhex(case["signature"]), case["signed"].encode())


def test_one_answer_of_each_kind_is_accepted() -> None:
    """The first one, and the one with a later key of the aggregator."""
    verdicts = [case["valid"] for case in cases("joining", "answers")]
    assert [number for number, is_valid in enumerate(verdicts) if is_valid] == [0, 5]
