"""The arguments of operator commands, on the command line, over HTTP, and to the aggregator that runs."""

from typing import Annotated

import msgspec
from msgspec import Meta

from protocol.wire.messages import Name


class HeadArguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The head to make current; without a version, the previous one."""

    version: Annotated[int, Meta(ge=1)] | None = None


class NoArguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A command without arguments."""


class DeviceArguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The device that a command is about."""

    device: Name
