"""Differential privacy and the second operator in the status."""

from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import Meta

from aggregator.status.annotations import Metric
from aggregator.status.devices import Device
from aggregator.status.rows import Rows
from aggregator.storage.stored_values import UnixSeconds
from aggregator.sums.stored_lists import devices_of, sums_of
from protocol.cli import counted
from protocol.statistics.noisy_sums import ENOUGH, hidden_images, unit_in_words

NEARLY = 0.9
"""Share of a budget or a quota from which it is nearly used up."""

SHOWN_KEY = 16
"""Digits of a key in a text."""


class Privacy(msgspec.Struct, frozen=True, kw_only=True):
    """Differential privacy: what the task promises, and what devices have spent."""

    unit: Annotated[str, Meta(description="The unit of the privacy loss, in words.")]
    images_per_person: Annotated[
        int | None, Meta(description="Images of one person that count at most; null if an image is the unit.")
    ]
    hidden: Annotated[
        int | None,
        Meta(description="Images of a class that the newest head's noise hides; null without a head."),
    ]
    is_poor: Annotated[
        bool,
        Meta(description="The newest head has fewer than ten times these images of a class, on average."),
    ]
    epsilon: Annotated[float, Meta(description="Of one submission.")]
    max_epsilon: Annotated[float, Meta(description="Of all submissions of a device.")]
    delta: float
    local_epsilon: Annotated[
        float | None,
        Meta(
            description="With a second operator, `epsilon` and `max_epsilon` are conditional: they hold only if it is "
            "honest. This is what both operators together see of one submission; null without one."
        ),
    ] = None
    spent: Annotated[float | None, Meta(description="The greatest total that a device has reported.")]
    nearly_spent: Annotated[
        int,
        Meta(description="Devices that have spent 90 % of the task's `max_epsilon` or more."),
        Metric("devices_with_epsilon_nearly_spent"),
    ]

    def __str__(self) -> str:
        promised = (
            f"epsilon {self.epsilon:g} for a submission, {self.max_epsilon:g} for a device, of {self.unit}"
        )
        spent = "none spent" if self.spent is None else f"at most {self.spent:.2f} spent"
        near = f"{counted(self.nearly_spent, 'device')} near the limit"
        condition = (
            ""
            if self.local_epsilon is None
            else ", conditional: only if the second operator is honest, and "
            f"{self.local_epsilon:.2f} for a submission to both operators together"
        )
        return f"{promised} (delta {self.delta:g}){condition}; {spent}, {near}"


class Sums(msgspec.Struct, frozen=True, kw_only=True):
    """The second operator, and the sums that it opens."""

    min_devices: Annotated[int, Meta(description="Devices in a list, at least.")]
    tolerance: Annotated[float, Meta(description="Share of these that may add no noise.")]
    seal_key: Annotated[str, Meta(description="Public key in hex of this task, to which masks are sealed.")]
    sign_key: Annotated[
        str, Meta(description="Public key in hex, signs sums: `edge-client --second-operator`.")
    ]
    lists: Annotated[int, Meta(description="Lists of devices whose sums are in the newest head.")]
    devices: Annotated[int, Meta(description="Their devices.")]
    left_out: Annotated[int, Meta(description="Devices of opened lists that could not be used.")]
    requested: Annotated[int, Meta(description="Devices of the list that no head has yet; 0 for none.")]
    requested_s: Annotated[UnixSeconds | None, Meta(description="Since when; null once it is opened.")]
    waiting: Annotated[int, Meta(description="Devices that have submitted and are in no list.")]
    problem: Annotated[str, Meta(description="Why the second operator has not opened it; or empty.")]
    left_out_reason: Annotated[
        str, Meta(description="Why the newest list was left out of all heads; or empty.")
    ]

    def __str__(self) -> str:
        keys = f"second operator {self.sign_key[:SHOWN_KEY]}, seal key {self.seal_key[:SHOWN_KEY]}"
        least = (
            f"at least {self.min_devices} devices in a sum, of which {self.tolerance:.0%} may add no noise"
        )
        opened = f"{counted(self.lists, 'list')} of {counted(self.devices, 'device')} opened"
        left_out = f", {self.left_out} left out" if self.left_out else ""
        return f"{keys}; {least}; {opened}{left_out}, {self.requested} requested, {self.waiting} waiting"


def privacy_of(rows: Rows, devices: Iterable[Device]) -> Privacy | None:
    if (budget := rows.served.privacy.dp) is None:
        return None
    spent = [device.epsilon for device in devices if device.epsilon is not None]
    newest = rows.heads[-1] if rows.heads else None
    hidden = None
    if newest is not None:
        sums = rows.served.privacy.sums
        shares = newest.devices / (1 if sums is None else sums.honest)
        hidden = hidden_images(budget.noise_multiplier, devices=shares)
    return Privacy(
        unit=unit_in_words(budget.images_per_person),
        images_per_person=budget.images_per_person,
        hidden=hidden,
        is_poor=newest is not None and newest.prototypes < ENOUGH * (hidden or 0) * len(rows.served.classes),
        epsilon=budget.epsilon,
        max_epsilon=budget.max_epsilon,
        delta=budget.delta,
        local_epsilon=rows.served.privacy.local_epsilon,
        spent=max(spent, default=None),
        nearly_spent=sum(each >= NEARLY * budget.max_epsilon for each in spent),
    )


def second_operator_of(rows: Rows) -> Sums | None:
    served = rows.served
    operator, settings = served.second_operator, served.privacy.sums
    if operator is None or settings is None:
        return None
    lists = sums_of(rows.store.facts, served.digest)
    pending = lists.pending
    return Sums(
        min_devices=operator.min_devices,
        tolerance=settings.tolerance,
        seal_key=operator.seal_key.hex(),
        sign_key=operator.sign_key.hex(),
        lists=lists.count,
        devices=lists.summed,
        left_out=len(lists.devices) - lists.summed,
        requested=len(pending.members) if pending else 0,
        requested_s=pending.requested_s if pending and not pending.masks else None,
        waiting=len(rows.counting.keys() - devices_of(lists)),
        problem=pending.problem if pending else "",
        left_out_reason=lists.problem,
    )
