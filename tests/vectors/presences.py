"""Vectors of presences on a client's own topic: which of two programs with the same key continues."""

from typing import Any

from protocol.wire.messages import Presence
from protocol.wire.presence import MAX_EPOCH, Start, observe

_OWN, _LOWER, _HIGHER = (bytes([each]) * 16 for each in (5, 4, 6))


def vectors() -> dict[str, Any]:
    """Return sequences of presences that a client receives, with its reactions."""
    return {
        "about": "A client with this `epoch` and `instance`, that has not received its own presence yet, receives the "
        "presences of `steps` on its own topic, all signed with its key. `reaction`: `publish` its own presence again, "
        "`report` (the same, and warn of a program that started earlier), `stay_out` (publish `replaced` and end) or "
        "`none`. `epoch_after` is its epoch then.",
        "sequences": [
            _sequence("its own presence", ("online", 0, _OWN)),
            _sequence("an earlier will of its own start", ("offline", 0, _OWN), ("online", 0, _OWN)),
            _sequence("its own presence of a lower epoch", ("online", -1, _OWN)),
            _sequence("a will of its own instance is its own", ("offline", 0, _OWN), ("online", -5, _HIGHER)),
            _sequence("from the past: a higher epoch", ("online", 7, _LOWER), ("online", 8, _OWN)),
            _sequence("from the past: the same epoch, a higher instance", ("offline", 0, _HIGHER)),
            _sequence("from the past: the same epoch, a lower instance", ("online", 0, _LOWER)),
            _sequence("from the past: a lower epoch", ("online", -3, _HIGHER), ("offline", -3, _HIGHER)),
            _sequence("from the past: replaced", ("replaced", -3, _HIGHER)),
            _sequence("a later start", ("online", 0, _OWN), ("online", 1, _LOWER)),
            _sequence("the same epoch, a higher instance", ("online", 0, _OWN), ("online", 0, _HIGHER)),
            _sequence("the same epoch, a lower instance", ("online", 0, _OWN), ("online", 0, _LOWER)),
            _sequence("an earlier start", ("online", 0, _OWN), ("online", -5, _HIGHER)),
            _sequence("the will of an earlier start", ("online", 0, _OWN), ("offline", -5, _HIGHER)),
            _sequence("an earlier start stops", ("online", 0, _OWN), ("stopped", -5, _HIGHER)),
            _sequence("an earlier start stays out", ("online", 0, _OWN), ("replaced", -5, _HIGHER)),
            _sequence("a later start that has ended", ("online", 0, _OWN), ("stopped", 4, _LOWER)),
            _sequence("an epoch above 2^62", ("online", 0, _OWN), ("online", MAX_EPOCH, _HIGHER)),
        ],
    }


EPOCH = 1_700_000_000


def _sequence(name: str, *seen: tuple[Any, int, bytes]) -> dict[str, Any]:
    own, steps = Start(EPOCH, _OWN), []
    for state, more, instance in seen:
        presence = Presence(state=state, epoch=EPOCH + more, instance=instance)
        own, reaction = observe(own, presence)
        fields = {"state": state, "epoch": presence.epoch, "instance": instance.hex()}
        steps.append({**fields, "reaction": reaction.name.lower(), "epoch_after": own.epoch})
    return {"name": name, "epoch": EPOCH, "instance": _OWN.hex(), "steps": steps}
