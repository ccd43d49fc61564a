"""The writes of operator commands, by name: for the program that holds the lock of the state directory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from aggregator.commands.arguments import DeviceArguments, HeadArguments, NoArguments
from aggregator.commands.operator_commands import forget, make_current, release
from aggregator.security import device_keys
from aggregator.storage.store import Store
from protocol.errors import ConfigError
from protocol.wire.presence import Duplicate


@dataclass(frozen=True)
class Write:
    """The write of a command, durable as a whole or not at all."""

    arguments: Any
    """A struct, or a union of structs."""
    run: Callable[[Store, Any], Sequence[str] | None]
    """Returns what to print, a sentence each.

    It raises ConfigError if the command is impossible, and StateError if the state cannot be written.
    """


def _take_over(store: Store, _arguments: NoArguments) -> Sequence[str]:
    with store.transaction():
        found, served = store.facts.get(Duplicate), store.served_task()
        if found is None:
            return ("no other aggregator with this key has been seen: nothing to do",)
        store.facts.delete(Duplicate)
        store.facts.put(msgspec.structs.replace(served, epoch=max(served.epoch, found.epoch)))
    return (f"this state continues at the next start; the aggregator at {found.where} stays out then",)


def _reset_key(store: Store, arguments: DeviceArguments) -> Sequence[str]:
    device = arguments.device
    with store.transaction():
        if not store.keys.reset(device):
            raise ConfigError(
                f"{device} has no key stored at first use: `aggregator enroll --renew` replaces an enrolled key"
            )
        device_keys.reset_device(store, device, delete_submissions=False)
    return (f"the next key used under the name {device} will be stored",)


WRITES = {
    "rollback": Write(HeadArguments, lambda store, given: (make_current(store, "rollback", given.version),)),
    "promote": Write(NoArguments, lambda store, _: (make_current(store, "promote"),)),
    "release": Write(DeviceArguments, lambda store, given: (release(store, given.device),)),
    "forget": Write(DeviceArguments, lambda store, given: forget(store, given.device)),
    "reset-key": Write(DeviceArguments, _reset_key),
    "take-over": Write(NoArguments, _take_over),
    "change-keys": Write(device_keys.KeyChange, device_keys.change_keys),
}
"""The last one is a part of `enroll` and `revoke`, whose rest needs the private key of the fleet's CA."""
