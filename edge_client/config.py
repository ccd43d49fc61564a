"""Settings of the device program, and their merge with an enrollment."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from edge_client.agent.state import Mode
from protocol.errors import ConfigError
from protocol.mqtt.tls import NO_AUTHENTICATION, BrokerAccess, Brokers

if TYPE_CHECKING:
    from edge_client.runtime.session import Provider


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of one device.

    Args:
        data: folder of images, or a CSV file.
        holdout: fraction of the images that is held out for evaluation.
        batch_size: images per run of a backbone.
        workers: threads that decode images.
        max_epsilon: privacy budget for all submissions together; None leaves the limit to the task.
        backbones: local copies of the task's backbones.
        rescan_s: seconds between scans of the data folder.
        strict: refuse folders and labels that are no class of the task, instead of leaving their images out.
        aggregator_key: the aggregator's public key, 32 bytes; None trusts the first key received.
        aggregator_key_number: that of the certificate of `aggregator_key`.
        root_key: the public key that signs the aggregator's later keys, 32 bytes; None if it is not known.
        signing_key: the device's private key, 32 bytes; None uses the one in the state directory.
        enrolled_s: when the device was enrolled, unix seconds; the time is later than that, whatever the clock says.
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
    workers: int = 1
    max_epsilon: float | None = None
    backbones: tuple[Path, ...] = ()
    rescan_s: float = 30.0
    strict: bool = False
    aggregator_key: bytes | None = None
    aggregator_key_number: int = 0
    root_key: bytes | None = None
    signing_key: bytes | None = field(default=None, repr=False)
    enrolled_s: float = 0.0


class Membership(NamedTuple):
    """A device's place in a fleet: as it was given, completed from an enrollment."""

    broker: str | None
    fleet: str
    device_id: str | None
    access: BrokerAccess
    identity: Mapping[str, Any]
    """The keys among the `Settings`."""


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
        ConfigError: the enrollment is damaged, or for another device or fleet than the given one.
    """
    if enrollment is None:
        return Membership(broker, fleet or "default", device_id, access, {"aggregator_key": aggregator_key})
    from protocol.enrollment import read_enrollment

    enrolled = read_enrollment(enrollment)
    for what, given, own in (("device-id", device_id, enrolled.device), ("fleet", fleet, enrolled.fleet)):
        if given not in (None, own):
            raise ConfigError(
                f"the enrollment is for the {what} {own!r}, not {given!r}: omit --{what}, or use the other enrollment"
            )
    if access.certificate is None:
        access = replace(access, certificate=enrolled.access.certificate, key=enrolled.access.key)
    access = replace(access, tls=True, ca=access.ca or enrolled.access.ca)
    identity = {"signing_key": enrolled.signing_key, "enrolled_s": enrolled.enrolled_s}
    if aggregator_key in (None, enrolled.aggregator_key):
        identity |= {"aggregator_key_number": enrolled.aggregator_key_number, "root_key": enrolled.root_key}
    identity["aggregator_key"] = aggregator_key or enrolled.aggregator_key
    return Membership(broker or enrolled.broker or None, enrolled.fleet, enrolled.device, access, identity)
