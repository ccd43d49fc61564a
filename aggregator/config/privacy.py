"""The tables `[privacy]` of the task file, but for `[privacy.perturbation]`, which devices receive."""

import math
from typing import Annotated

import msgspec
from msgspec import Meta

from protocol.statistics.gaussian_privacy import noise_multiplier
from protocol.statistics.noisy_sums import epsilon_of_sums, share_of_noise
from protocol.wire.messages import MAX_SUMMED, Perturbation


class PrivacyBudget(msgspec.Struct, frozen=True, kw_only=True):
    """`[privacy.dp]`: differential privacy of everything that a device uploads, with `algorithm = "statistics"`."""

    epsilon: Annotated[float, Meta(gt=0, le=20, examples=[4.0])]
    """Privacy loss of one submission."""
    delta: Annotated[float, Meta(gt=0, le=1e-3)] = 1e-5
    """The delta of the privacy loss."""
    map: Annotated[str, Meta(examples=["public.map"])]
    """Path of a file written by `protofleet public-map`, relative to the task file's folder."""
    max_epsilon: Annotated[float, Meta(gt=0, le=40, examples=[12.0])]
    """Privacy loss of all submissions of a device together. Submissions to earlier tasks count."""


class SumsSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`[privacy.sums]`: a second operator, so that no single party sees the sums of one device. With `[privacy.dp]`."""

    operator: Annotated[str, Meta(examples=["operator.toml"])]
    """Path of the file that `protofleet-sums init` has written, relative to the task file's folder."""
    min_devices: Annotated[int, Meta(ge=2, le=MAX_SUMMED, examples=[10])]
    """Devices in a sum, at least."""
    tolerance: Annotated[float, Meta(ge=0, lt=1)] = 0.34
    """Share of these that may keep their noise, or lie, without harm to the privacy of the others."""

    @property
    def honest(self) -> int:
        """Devices whose noise counts."""
        return max(1, math.floor(self.min_devices * (1 - self.tolerance)))


class PrivacySettings(msgspec.Struct, frozen=True, kw_only=True):
    """Noise that devices add before they upload, or none. docs/privacy.md compares the tables."""

    perturbation: Perturbation | None = None
    """As in FedTC; it gives no guarantee."""
    dp: PrivacyBudget | None = None
    """Differential privacy."""
    sums: SumsSettings | None = None
    """A second operator opens sums of devices, so that noise is spent once for the fleet."""

    @property
    def local_epsilon(self) -> float | None:
        """Epsilon of a submission to both operators together: of one device's share of the noise. None without sums."""
        if self.dp is None or self.sums is None:
            return None
        multiplier = noise_multiplier(self.dp.epsilon, self.dp.delta, cost=epsilon_of_sums)
        share = share_of_noise(multiplier, honest=self.sums.honest)
        return epsilon_of_sums({share: 1}, delta=self.dp.delta)
