"""Outlier devices are quarantined with a reason, and no device can cause another's quarantine."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from numpy.typing import NDArray

from aggregator.coordination.bounds import COMPARED_DEVICES
from aggregator.intake.validation import Prototypes
from aggregator.training.robust.outlier_detection import judge, outliers
from aggregator.training.robust.outlier_statistics import (
    ClassSummary,
    DeviceSummary,
    class_means,
    distances,
    effective_dimensions,
    summaries,
)
from protocol.wire.quantization import dequantize, quantize
from tests.support.messages.prototype_sets import CLASSES, IMAGES, fleet, flipped, honest
from tests.support.messages.submissions import FEATURE_SIZE

FALSE_ALARM_RATE = 0.01
OFTEN = 0.5


def _judged(parts: dict[str, Prototypes], **more: tuple[str, ...]) -> dict[str, str]:
    return dict(
        judge(summaries(parts), classes=CLASSES, false_alarm_rate=FALSE_ALARM_RATE, **more).quarantined
    )


def _changed(part: Prototypes, factor: float = 1.0, offset: float = 0.0, noise: float = 0.0) -> Prototypes:
    random = np.random.default_rng(5)
    values = part.values * factor + offset + noise * random.normal(size=part.values.shape)
    return Prototypes(values.astype(np.float32), part.labels, part.counts)


def _flat(means: NDArray[np.float64], *, images: int = 10) -> dict[str, Prototypes]:
    """Return devices with two prototypes of one class, of whose images the mean is given and the variance L."""
    parts = {}
    for device, mean in enumerate(means):
        half = np.sqrt(mean.size / images) * np.eye(mean.size)[device % mean.size]
        counts = np.full(2, images // 2)
        parts[f"dev{device:04}"] = Prototypes(
            np.stack([mean - half, mean + half]).astype(np.float32), np.zeros(2, np.int64), counts
        )
    return parts


def test_distance_is_relative_to_what_is_expected() -> None:
    """It is four fifths, since places are expected to differ by a quarter of what images do."""
    random = np.random.default_rng(0)
    means = 5 + random.normal(size=(1000, 8)) / np.sqrt(10)
    parts = summaries(_flat(means))
    test = distances(class_means(parts, 0))
    assert test.ratios.mean() == pytest.approx(4 / 5, rel=0.1)
    assert test.ratios.var() == pytest.approx(2 / 8 * (4 / 5) ** 2, rel=0.2)


@pytest.mark.parametrize("dimensions", [1, 3, 20])
def test_effective_dimensions_of_equal_variances(dimensions: int) -> None:
    """Half of them count."""
    random = np.random.default_rng(0)
    deviations = np.zeros((500, 50))
    deviations[:, :dimensions] = random.normal(size=(500, dimensions))
    assert effective_dimensions(deviations) == pytest.approx(max(1, dimensions / 2), rel=0.1)


def test_flipped_labels_are_found() -> None:
    """The reason names a class, the distance and the number of devices."""
    parts = {**fleet(8), "malicious": flipped(honest(9))}
    found = _judged(parts)
    assert found.keys() == {"malicious"}
    assert "times as far as expected from the median of 9 devices, limit " in found["malicious"]
    assert found["malicious"].startswith("class '")


def test_noise_is_found_by_its_scatter() -> None:
    """The mean is nearly correct, the prototypes are useless."""
    noisy = honest(9)
    for label in range(len(CLASSES)):
        mine = noisy.labels == label
        noisy.values[mine] += 5 * (noisy.values[mine] - noisy.values[mine].mean(axis=0))
    found = _judged({**fleet(8), "noisy": noisy})
    assert found.keys() == {"noisy"}
    assert "times as scattered as plausible, by the median of 9 devices, limit " in found["noisy"]


@pytest.mark.parametrize("prototypes", [1, 6])
def test_scatter_is_found_whatever_the_numbers_of_images(prototypes: int) -> None:
    """Of few prototypes of many images among many equal ones, also where the other devices have one of a class."""
    parts = {f"dev{device}": honest(device, prototypes=prototypes) for device in range(9)}
    part = honest(9, prototypes=200)
    values, counts = part.values.copy(), part.counts.copy()
    for label in range(len(CLASSES)):
        mine = np.flatnonzero(part.labels == label)
        values[mine] = values[mine].mean(axis=0)
        heavy = mine[:18]
        counts[heavy] = 300
        values[heavy, 0] += np.resize([1, -1], 18) * np.sqrt(20 * FEATURE_SIZE / 300)
    found = _judged({**parts, "malicious": Prototypes(values, part.labels, counts)})
    assert found.keys() == {"malicious"}
    assert "times as scattered as plausible, by the median of 10 devices" in found["malicious"]
    assert _judged({**parts, "larger": honest(9, prototypes=6)}) == {}


def test_scale_is_found_without_a_class_on_enough_devices() -> None:
    """Lengths are compared over all classes."""
    parts = {f"dev{device}": honest(device, labels=(device % 3,)) for device in range(6)}
    parts["loud"] = _changed(parts.pop("dev5"), factor=30)
    assert _judged(parts)["loud"].startswith("all classes: ")


def test_too_few_devices_have_no_outliers() -> None:
    """A class on fewer than COMPARED_DEVICES devices is not judged."""
    parts = {**fleet(COMPARED_DEVICES - 2), "malicious": flipped(honest(9))}
    assert _judged(parts) == {}
    assert _judged({**parts, "another": honest(10)}).keys() == {"malicious"}


def test_released_device_is_not_quarantined() -> None:
    """The other outliers are quarantined."""
    parts = {**fleet(8), "x": flipped(honest(9)), "y": _changed(honest(10), offset=50)}
    assert _judged(parts, released=("x",)).keys() == {"y"}


def test_no_device_is_quarantined_if_most_are_outliers() -> None:
    """A warning has an example."""
    parts = fleet(6)
    for device, part in enumerate(parts.values()):
        part.values[part.labels == device // 2] += 100.0 + device
    judgment = judge(summaries(parts), classes=CLASSES, false_alarm_rate=FALSE_ALARM_RATE)
    assert judgment.quarantined == {}
    assert judgment.warning.startswith("6 of 6 devices are far from each other, so none is quarantined; dev")


def test_rounding_is_no_outlier_among_equal_devices() -> None:
    """Anything else is."""
    parts = {f"dev{device}": honest(1, prototypes=1) for device in range(6)}
    assert _judged(parts) == {}
    parts["rounded"] = _changed(parts["dev0"], factor=1.0001)
    assert _judged(parts) == {}
    parts["malicious"] = flipped(parts["dev0"])
    assert _judged(parts).keys() == {"malicious"}
    assert "over 1000" in _judged({**parts, "malicious": _changed(parts["dev0"], offset=1e5)})["malicious"]


def test_rounding_to_one_byte_is_no_outlier_among_equal_devices() -> None:
    """A device with more classes has wider ranges than the others, and alone rounds to other values."""
    features = np.random.default_rng(0).gamma(0.3, size=(9, 64)).astype(np.float16)
    parts = {}
    for device in range(8):
        labels = np.arange(9 if device == 0 else 3)
        values = dequantize(*quantize(features[labels]))
        parts[f"dev{device}"] = Prototypes(values, labels, np.full(len(labels), 5))
    assert (parts["dev0"].values[:3] != parts["dev1"].values).any()
    assert _judged(parts) == {}


@st.composite
def _parts(draw: st.DrawFn) -> dict[str, Prototypes]:
    """Draw any prototypes that validation accepts, with few dimensions."""
    parts = {}
    for device in range(draw(st.integers(1, 8))):
        rows = draw(st.integers(1, 4))
        values = draw(npst.arrays(np.float16, (rows, 2), elements=st.floats(-65504, 65504, width=16)))
        labels = draw(npst.arrays(np.int64, rows, elements=st.integers(0, 2)))
        counts = draw(npst.arrays(np.int64, rows, elements=st.integers(1, 10**9)))
        parts[f"dev{device}"] = Prototypes(values.astype(np.float32), labels, counts)
    return parts


@given(_parts(), st.randoms())
@settings(deadline=None)
def test_order_of_devices_does_not_matter(parts: dict[str, Prototypes], random: st.DrawFn) -> None:
    """Deviations are positive numbers, never NaN."""
    shuffled = list(parts.items())
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    found = outliers(summaries(parts), classes=CLASSES, false_alarm_rate=OFTEN)
    assert outliers(summaries(dict(shuffled)), classes=CLASSES, false_alarm_rate=OFTEN) == found
    assert found.keys() <= parts.keys()
    assert all(one.excess > 0 for one in found.values())
    judgment = judge(summaries(parts), classes=CLASSES, false_alarm_rate=FALSE_ALARM_RATE)
    assert len(judgment.quarantined) <= len(parts) / 2


@given(st.integers(0, 1000), st.integers(-20, 20))
@settings(deadline=None, max_examples=30)
def test_scale_of_features_does_not_matter(seed: int, exponent: int) -> None:
    """Features that are c times as large give the same outliers."""
    parts = {f"dev{device}": honest(seed + device) for device in range(7)} | {
        "malicious": flipped(honest(seed + 9))
    }
    found = outliers(summaries(parts), classes=CLASSES, false_alarm_rate=OFTEN)
    scaled = {device: _changed(part, factor=2.0**exponent) for device, part in parts.items()}
    again = outliers(summaries(scaled), classes=CLASSES, false_alarm_rate=OFTEN)
    assert again.keys() == found.keys()
    for device, one in found.items():
        assert again[device].excess == pytest.approx(one.excess, rel=1e-6)


_lie = st.tuples(
    st.sampled_from(["offset", "flip", "scatter", "scale"]),
    st.floats(1, 1e6),
    st.integers(1, 12),
    st.sampled_from([1, 5, 10**9]),
)


@given(st.integers(0, 1000), st.lists(_lie, min_size=1, max_size=3))
@settings(deadline=None, max_examples=100)
def test_attackers_cannot_quarantine_an_honest_device(
    seed: int, lies: list[tuple[str, float, int, int]]
) -> None:
    """Up to 30 % of a fleet may lie in any way, together or alone."""
    parts = {f"dev{device}": honest(seed + device) for device in range(7)}
    for number, (kind, size, prototypes, images) in enumerate(lies):
        part = honest(seed + 100 + number, prototypes=prototypes)
        changes = {
            "offset": {"offset": size},
            "scatter": {"noise": size},
            "scale": {"factor": size},
            "flip": {},
        }
        part = _changed(flipped(part) if kind == "flip" else part, **changes[kind])
        parts[f"malicious{number}"] = Prototypes(part.values, part.labels, np.full(len(part.labels), images))
    assert [device for device in _judged(parts) if device.startswith("dev")] == []


def _elsewhere(device: int, place: NDArray[np.float64], labels: tuple[int, ...] = (0, 1, 2)) -> Prototypes:
    part = honest(device, labels=labels)
    return Prototypes((part.values + place).astype(np.float32), part.labels, part.counts)


@pytest.mark.parametrize(("usual", "others"), [(12, 8), (14, 6), (18, 2)])
def test_group_in_another_place_is_reported_and_not_quarantined(usual: int, others: int) -> None:
    """An attacker beside the group is quarantined."""
    parts = fleet(usual) | {f"far{device}": _elsewhere(50 + device, 1.5 * PLACE) for device in range(others)}
    judgment = judge(summaries(parts), classes=CLASSES, false_alarm_rate=FALSE_ALARM_RATE)
    assert judgment.quarantined == {}
    assert "far0" in judgment.warning or others > usual / 2
    attacker = {"malicious": flipped(honest(99))}
    judgment = judge(summaries(parts | attacker), classes=CLASSES, false_alarm_rate=FALSE_ALARM_RATE)
    assert judgment.quarantined.keys() == {"malicious"}


def test_group_in_another_place_is_seen_beside_classes_of_few_images() -> None:
    """A class of which each device has one image separates all devices."""
    random, parts = np.random.default_rng(0), dict[str, DeviceSummary]()
    for device in range(12):
        place = np.full(FEATURE_SIZE, 2.0 * (device >= 10))
        means = place + random.normal(size=FEATURE_SIZE) / 10, place + 4 * random.normal(size=FEATURE_SIZE)
        classes = {
            label: ClassSummary(mean, images, 1.0, FEATURE_SIZE)
            for label, (mean, images) in enumerate(zip(means, (100.0, 1.0), strict=True))
        }
        parts[f"{device:02}"] = DeviceSummary(classes, 101.0, 1.0, 1.0)
    judgment = judge(parts, classes=("cat", "dog"), false_alarm_rate=0.01)
    assert not judgment.quarantined
    assert "10, 11" in judgment.warning


PLACE = np.random.default_rng(3).normal(size=FEATURE_SIZE)


def _swapped(part: Prototypes) -> Prototypes:
    """Return prototypes with two of three labels swapped."""
    return Prototypes(part.values, np.array([0, 2, 1])[part.labels], part.counts)


OUTLIERS: dict[str, tuple[dict[str, Prototypes], dict[str, Prototypes]]] = {
    # It cannot be distinguished from an attacker.
    "a device in another place": (fleet(12), {"far": _elsewhere(50, 1.5 * PLACE)}),
    # Another class's name explains their images.
    "alike devices with flipped labels": (
        fleet(14),
        {f"malicious{device}": flipped(honest(50 + device)) for device in range(6)},
    ),
    "three of ten that upload the same": (
        fleet(7),
        {f"malicious{number}": _changed(honest(20 + number), offset=100.0) for number in range(3)},
    ),
    # Of a class on many devices, although it is correct about the third.
    "two of three labels swapped": (fleet(8), {"malicious": _swapped(honest(9))}),
    # Nothing speaks for a device without classes of many devices.
    "a device of a rare class": (
        {f"dev{device:02}": honest(device, labels=(0, 1)) for device in range(10)}
        | {f"fox{device}": honest(20 + device, labels=(2,)) for device in range(4)},
        {"far": _elsewhere(50, 3 * PLACE, labels=(2,))},
    ),
}


@pytest.mark.parametrize(("parts", "found"), OUTLIERS.values(), ids=OUTLIERS.keys())
def test_outliers_are_quarantined(parts: dict[str, Prototypes], found: dict[str, Prototypes]) -> None:
    assert _judged(parts | found).keys() == found.keys()


@pytest.mark.parametrize(("devices", "images"), [(5, 10), (8, 20), (20, 100), (200, 10)])
@pytest.mark.parametrize("directions", [0, 1])
def test_honest_devices_are_quarantined_in_one_training_of_a_hundred(
    devices: int, images: int, directions: int
) -> None:
    """At most, in one place or in places that differ; `python -m research false-alarms` measures it on more."""
    alarms, fleets = 0, 800 // devices
    deviations = np.arange(1, 25) ** -0.75
    for seed in range(fleets):
        random = np.random.default_rng([seed, devices, images])
        places = random.normal(size=(devices, directions)) @ random.normal(size=(directions, 24))
        parts = {}
        for device in range(devices):
            rows = 2 * (images // IMAGES)
            noise = deviations * random.normal(size=(rows, 24)) / np.sqrt(IMAGES)
            labels = np.repeat([0, 1], rows // 2)
            values = 3.0 + labels[:, None] + 0.2 * places[device] + noise
            parts[f"dev{device:03}"] = Prototypes(values.astype(np.float32), labels, np.full(rows, IMAGES))
        alarms += bool(
            judge(summaries(parts), classes=("a", "b"), false_alarm_rate=FALSE_ALARM_RATE).quarantined
        )
    assert alarms <= 0.01 * fleets


@pytest.mark.parametrize("kind", ["distance", "scatter"])
def test_majority_of_a_rare_class_cannot_have_its_only_honest_device_quarantined(kind: str) -> None:
    """Four of 14 devices: the honest one agrees with the others about the classes that most devices have."""
    parts = {f"dev{device:02}": honest(device, labels=(0, 1)) for device in range(9)} | {"alone": honest(9)}
    for number in range(4):
        lie = honest(20 + number)
        if kind == "distance":
            lie.values[lie.labels == 2] += (3 * PLACE).astype(np.float32)
        else:  # as if all images of a device were nearly the same one
            mine = lie.labels == 2
            lie.values[mine] = lie.values[mine].mean(axis=0) + 0.1 * (
                lie.values[mine] - lie.values[mine].mean(axis=0)
            )
        parts[f"malicious{number}"] = lie
    judgment = judge(summaries(parts), classes=CLASSES, false_alarm_rate=FALSE_ALARM_RATE)
    assert judgment.quarantined == {}
    assert judgment.disputed == {2}
    assert "1 of 14 devices are far only in classes in which few devices agree" in judgment.warning
    assert ", so they are not quarantined: alone; alone: class 'fox': " in judgment.warning


def test_effective_dimensions_of_many_devices_are_those_of_their_pairs() -> None:
    """With more devices than dimensions, the cosines of all pairs are not computed, and the result is the same."""
    deviations = np.random.default_rng(0).normal(size=(40, 6)) * (5, 3, 1, 1, 1, 1)
    deviations[3] = 0
    wide = np.hstack([deviations, np.zeros((40, 60))])
    assert effective_dimensions(deviations) == pytest.approx(effective_dimensions(wide), rel=1e-12)
