"""Settings of the device program, and their merge with an enrollment."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from edge_client.core.manifest_trust import Identity
from edge_client.core.state import Mode
from protocol.errors import ConfigError
from protocol.mqtt.tls import NO_AUTHENTICATION, BrokerAccess, Brokers, parse_brokers

if TYPE_CHECKING:
    from edge_client.graphs.session import Provider
    from protocol.enrollment import Enrollment


PrivacyUnit = Literal["image", "person"]
"""The unit of differential privacy, the weaker one first."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of one device.

    Args:
        data: folder of images, or a CSV file.
        holdout: fraction of the images that is held out for evaluation.
        batch_size: images per run of a backbone.
        max_epsilon: privacy budget for all submissions together; None leaves the limit to the task.
        max_delta: delta at which the budget is counted, unless the task's is smaller.
        max_local_epsilon: budget of what both operators of masked sums together see; None sets no limit.
        privacy_unit: the weakest unit of differential privacy of a task; None accepts any task.
        allow_non_private_tasks: take part in tasks without differential privacy although there is a budget or a unit,
            or the device has made private submissions.
        second_operator: public key of the party that opens sums of masks; None refuses masked sums.
        min_devices: submissions in a sum before this device's mask is opened; None leaves the limit to the task.
        pinned_backbones: digests of the only backbones that are run; empty accepts the task's.
        variable_time: run backbones whose work depends on images under differential privacy, too.
        max_images: files that count under differential privacy; None sets no limit.
        upload_period_s: seconds between private submissions, which are published at fixed times; None publishes each
            one once it is built.
        backbones: local copies of the task's backbones.
        rescan_s: seconds between scans of the data folder.
    """

    broker: Brokers | None
    access: BrokerAccess = NO_AUTHENTICATION
    fleet: str
    device_id: str
    mode: Mode
    data: Path
    holdout: float = 0.2
    provider: "Provider" = "auto"
    threads: int | None = None
    batch_size: int = 16
    max_epsilon: float | None = None
    max_delta: float = 1e-5
    max_local_epsilon: float | None = None
    privacy_unit: PrivacyUnit | None = None
    allow_non_private_tasks: bool = False
    second_operator: bytes | None = None
    min_devices: int | None = None
    pinned_backbones: tuple[bytes, ...] = ()
    variable_time: bool = False
    max_images: int | None = None
    upload_period_s: float | None = None
    backbones: tuple[Path, ...] = ()
    rescan_s: float = 30.0
    identity: Identity = field(default_factory=Identity)


@dataclass(frozen=True)
class Membership:
    """A device's place in a fleet: as it was given, completed from an enrollment."""

    broker: Brokers | None
    fleet: str
    device_id: str | None
    access: BrokerAccess
    identity: Identity

    def settings(self, *, device_id: str, mode: Mode, data: Path, **others: Any) -> Settings:
        """Return the settings of this device; `others` are its further settings."""
        place: dict[str, Any] = {"broker": self.broker, "access": self.access, "fleet": self.fleet}
        return Settings(**place, identity=self.identity, device_id=device_id, mode=mode, data=data, **others)


def membership(
    enrollment: Path | None,
    *,
    broker: str | None,
    fleet: str | None,
    device_id: str | None,
    access: BrokerAccess,
    aggregator_key: bytes | None = None,
) -> Membership:
    """Return what was given, completed from the folder of an enrollment.

    Raises:
        ConfigError: the broker is no address; the enrollment is damaged, or for another device or fleet than the given.
    """
    identity = Identity(aggregator_key)
    if enrollment is not None:
        from protocol.enrollment import read_enrollment

        enrolled = read_enrollment(enrollment)
        for what, given, own in (
            ("device-id", device_id, enrolled.device),
            ("fleet", fleet, enrolled.fleet),
        ):
            if given not in (None, own):
                text = f"the enrollment is for the {what} {own!r}, not {given!r}"
                raise ConfigError(f"{text}: omit --{what}, or use the other enrollment")
        broker, fleet, device_id = broker or enrolled.broker, enrolled.fleet, enrolled.device
        access = _enrolled_access(access, enrolled.access)
        identity = _enrolled_identity(aggregator_key, enrolled)
    brokers = parse_brokers(broker, tls=access.tls) if broker else None
    return Membership(brokers, fleet or "default", device_id, access, identity)


def _enrolled_access(access: BrokerAccess, enrolled: BrokerAccess) -> BrokerAccess:
    if access.certificate is None:
        access = replace(access, certificate=enrolled.certificate, key=enrolled.key)
    return replace(access, tls=True, ca=access.ca or enrolled.ca)


def _enrolled_identity(aggregator_key: bytes | None, enrolled: "Enrollment") -> Identity:
    identity = Identity(
        aggregator_key or enrolled.aggregator_key,
        signing_key=enrolled.signing_key,
        enrolled_s=enrolled.enrolled_s,
    )
    if identity.aggregator_key != enrolled.aggregator_key:
        return identity
    return replace(identity, aggregator_key_number=enrolled.aggregator_key_number, root_key=enrolled.root_key)
