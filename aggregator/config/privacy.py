"""The tables `[privacy]` of the task file, but for `[privacy.perturbation]`, which devices receive."""

import math
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from protocol.statistics.gaussian_privacy import noise_multiplier
from protocol.statistics.noisy_sums import epsilon_of_sums, rows_changed, share_of_noise
from protocol.wire.messages import MAX_IMAGES_PER_PERSON, MAX_SUMMED, Perturbation


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
    unit: Literal["image", "person"] = "image"
    """The unit of the privacy loss: one image, or one person with all images."""
    images_per_person: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_IMAGES_PER_PERSON)] | None, Meta(examples=[10])
    ] = None
    """With `unit = "person"`: images of one person that count at most, and as many times the noise of one.

    Of a person with more, a device chooses by a keyed hash. Persons are named by the column `person` of its list of
    images, or by `person_level`. Where neither names one, all images count, and the owner states that nobody is on
    more than so many.
    """
    person_level: Annotated[Annotated[int, Meta(ge=1, le=16)] | None, Meta(examples=[2])] = None
    """With `unit = "person"`: the folder below a device's data folder that names the person.

    With 2, it is the one in the class's folder: `CLASS/PERSON/image.jpg`.
    """

    @property
    def noise_multiplier(self) -> float:
        """Standard deviation of a submission's noise divided by what one image can change."""
        return noise_multiplier(self.epsilon, self.delta, cost=epsilon_of_sums, rows=self._rows)

    def epsilon_of_share(self, *, honest: int) -> float:
        """Return epsilon of a submission with the share of the noise of one of `honest` devices."""
        share = share_of_noise(self.noise_multiplier, honest=honest)
        return epsilon_of_sums({share / self._rows: 1}, delta=self.delta)

    @property
    def _rows(self) -> int:
        return rows_changed(counted=self.images_per_person, images_per_person=self.images_per_person)


class SumsSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`[privacy.sums]`: a second operator, so that no single party sees the sums of one device. With `[privacy.dp]`."""

    operator: Annotated[str, Meta(examples=["operator.toml"])]
    """Path of the file that `protofleet-sums new-task` has made for this task, relative to the task file's folder."""
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
        return self.dp.epsilon_of_share(honest=self.sums.honest)
