"""Errors after which an aggregator begins again, as `standby.run` does."""

from protocol.errors import ProtofleetError, StateError


class NoAnswer(StateError):
    """PostgreSQL or an object store does not answer, or not now."""


class NotLeader(ProtofleetError):
    """Another aggregator leads the fleet, or the tables went back in time: this one can write nothing more."""
