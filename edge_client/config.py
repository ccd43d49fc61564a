"""What a person says on the command line and what an enrollment says, made one. Pure."""

from dataclasses import replace

from protocol.enrollment import Enrollment
from protocol.errors import ConfigError
from protocol.mqtt.tls import Access


def one_name(what: str, *, said: str | None, enrolled: str) -> str:
    """The name of a device or fleet, which stands in its certificate or in what it signs.

    Raises:
        ConfigError: the person says another one.
    """
    if said is not None and said != enrolled:
        raise ConfigError(
            f"the enrollment is that of the {what} {enrolled!r}, not of {said!r}: leave --{what} out, "
            "or use the other's enrollment"
        )
    return enrolled


def joined(access: Access, enrollment: Enrollment) -> Access:
    """How to be let in: as the person says, and where nothing is said, as the enrollment does."""
    own = enrollment.access
    if access.certificate is None:
        access = replace(access, certificate=own.certificate, key=own.key)
    return replace(access, tls=True, ca=access.ca or own.ca)
