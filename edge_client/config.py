"""Settings of the device program, and their merge with an enrollment."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_client.agent.state import Mode
from protocol.errors import ConfigError
from protocol.mqtt.tls import NO_AUTHENTICATION, BrokerAccess, Brokers

if TYPE_CHECKING:
    from edge_client.runtime.session import Provider
    from protocol.enrollment import Enrollment


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
    holdout: float
    provider: "Provider"
    threads: int | None
    batch_size: int
    workers: int
    max_epsilon: float | None = None
    backbones: tuple[Path, ...]
    rescan_s: float
    strict: bool = False
    aggregator_key: bytes | None = None
    aggregator_key_number: int = 0
    root_key: bytes | None = None
    signing_key: bytes | None = field(default=None, repr=False)
    enrolled_s: float = 0.0


def enrolled_name(what: str, *, given: str | None, enrolled: str) -> str:
    """Return the enrolled name of the device or fleet.

    Raises:
        ConfigError: another name was given.
    """
    if given is not None and given != enrolled:
        raise ConfigError(
            f"the enrollment is for the {what} {enrolled!r}, not {given!r}: omit --{what}, or use the other "
            "enrollment"
        )
    return enrolled


def merged_access(access: BrokerAccess, enrollment: "Enrollment") -> BrokerAccess:
    """Return the connection security given on the command line, completed from the enrollment."""
    own = enrollment.access
    if access.certificate is None:
        access = replace(access, certificate=own.certificate, key=own.key)
    return replace(access, tls=True, ca=access.ca or own.ca)


def enrolled_identity(enrollment: "Enrollment", *, aggregator_key: bytes | None) -> dict[str, Any]:
    """Return the settings that an enrollment gives, with another aggregator's key if one was given."""
    own = {"signing_key": enrollment.signing_key, "enrolled_s": enrollment.enrolled_s}
    if aggregator_key not in (None, enrollment.aggregator_key):
        return {**own, "aggregator_key": aggregator_key}
    return {
        **own,
        "aggregator_key": enrollment.aggregator_key,
        "aggregator_key_number": enrollment.aggregator_key_number,
        "root_key": enrollment.root_key,
    }
