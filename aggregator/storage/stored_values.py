"""Single values that survive a restart: a typed struct each, stored as JSON under the name of its class."""

from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from aggregator.config.limits import Limits
from aggregator.config.privacy import PrivacySettings
from aggregator.coordination import rollout_state, round_state
from protocol.wire.messages import BlobRef, SecondOperator

UnixSeconds = Annotated[float, Meta(description="Unix seconds.")]


class ServedTask(msgspec.Struct, frozen=True):
    """The task that the aggregator was started with last."""

    digest: bytes
    epoch: int
    """The number of that start; greater at each start."""
    fleet: str
    algorithm: str
    classes: tuple[str, ...]
    settings: round_state.Settings
    rollout: rollout_state.Settings = rollout_state.Settings()
    limits: Limits = Limits()
    privacy: PrivacySettings = PrivacySettings()
    second_operator: SecondOperator | None = None
    counts_images: bool = False
    """Numbers of prototypes count the images in them, since devices may upload principal prototypes."""
    is_personal: bool = False
    """Each device has a head of its own."""


class TaskPreparation(msgspec.Struct, frozen=True):
    """The task whose graphs are being exported, before it is served."""

    algorithm: str


class BlobLocation(msgspec.Struct, frozen=True):
    """The place of the aggregator's blobs, unless they are in its state directory."""

    owner: str
    """Written there; it identifies the aggregator that the place belongs to."""
    location: str = ""
    """A URL; empty until the owner was written."""


class SigningKey(msgspec.Struct, frozen=True):
    """The public key that devices know the aggregator by, in hex."""

    public: str
    root: str = ""
    """The root key that its newest certificate names, in hex; empty if the fleet has none."""


class SealKey(msgspec.Struct, frozen=True):
    """The private X25519 key to which devices seal masked submissions, in hex."""

    private: str


class ManifestNumbers(msgspec.Struct, frozen=True):
    """The last release number of each fleet channel, signed with `key` (public, in hex)."""

    numbers: Mapping[str, int]
    key: str


class EarlierRefusals(msgspec.Struct, frozen=True):
    """Messages that were refused before their devices got other keys, by reason."""

    counts: dict[str, int]


class LostFiles(msgspec.Struct, frozen=True):
    """Blobs that a program needs and found missing or damaged, and that are not restored yet, by hex digest."""

    digests: tuple[str, ...]


class CompiledGraphs(msgspec.Struct, frozen=True):
    """The graphs of the tasks served lately, by a digest of their inputs, then by role."""

    graphs: Mapping[str, Mapping[str, BlobRef]]


class NotServed(msgspec.Struct, frozen=True):
    """Tasks and graphs that the served task does not use, and since when, in elapsed seconds."""

    since_s: dict[str, float]
    """By the hex digest of a task with rows, or the key of its graphs in `CompiledGraphs`."""


class ClosedFleet(msgspec.Struct, frozen=True):
    """Only enrolled devices may take part, since this time (unix seconds)."""

    since_s: float


class StoredLink(msgspec.Struct, frozen=True, kw_only=True):
    """A join link, good for one device until it expires; its secret is derived from `nonce` and the signing key."""

    id: str
    nonce: str
    device: str
    """Empty if the device chooses its name."""
    broker: str
    days: int
    """Validity of the device's certificate."""
    renew: bool
    """Replace the keys of a device that is enrolled or revoked."""
    expires_s: int
    """Unix seconds."""
    proof: str = ""
    """Of the request that has used it."""
    answer: str = ""
    """To that request, which is answered again."""


class JoinLinks(msgspec.Struct, frozen=True):
    """The join links that have not expired."""

    links: tuple[StoredLink, ...] = ()
