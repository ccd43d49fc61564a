"""Outlier devices are quarantined with a reason, and no device can cause another's quarantine."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from aggregator.ingest.validation import Prototypes
from aggregator.training.outlier_detection import MIN_DEVICES, _standardized, judge, outliers
from tests.support.prototype_sets import CLASSES, fleet, flipped, honest
from tests.support.submissions import FEATURE_SIZE

THRESHOLD = 8.0


def _judged(parts: dict[str, Prototypes], **more: tuple[str, ...]) -> dict[str, str]:
    return dict(judge(parts, classes=CLASSES, threshold=THRESHOLD, **more).quarantined)


def _changed(part: Prototypes, factor: float = 1.0, offset: float = 0.0, noise: float = 0.0) -> Prototypes:
    random = np.random.default_rng(5)
    values = part.values * factor + offset + noise * random.normal(size=part.values.shape)
    return Prototypes(values.astype(np.float32), part.labels, part.counts)


def test_unit_is_the_robust_standard_deviation() -> None:
    """The median absolute deviation is 1, so the standard deviation of a normal distribution would be 1.4826."""
    assert _standardized(np.array([1.0, 2, 3, 4, 9]))[-1] == pytest.approx(6 / 1.4826, rel=1e-4)


@pytest.mark.parametrize("shift", [0, 1])
def test_honest_devices_are_no_outliers(shift: int) -> None:
    """Neither in one place nor in different places, nor with few images or classes."""
    parts = fleet(9, shift=shift)
    parts["few"] = honest(20, prototypes=1)
    parts["one class"] = honest(21, labels=(1,), shift=shift)
    assert _judged(parts) == {}


def test_flipped_labels_are_found() -> None:
    """The reason names a class, the distance and the number of devices."""
    parts = {**fleet(8), "liar": flipped(honest(9))}
    found = _judged(parts)
    assert found.keys() == {"liar"}
    assert "robust standard deviations from the median of 9 devices" in found["liar"]
    assert found["liar"].startswith("class '")


def test_noise_is_found_by_its_scatter() -> None:
    """The mean is nearly correct, the prototypes are useless."""
    noisy = honest(9)
    for label in range(len(CLASSES)):
        mine = noisy.labels == label
        noisy.values[mine] += 5 * (noisy.values[mine] - noisy.values[mine].mean(axis=0))
    found = _judged({**fleet(8), "noisy": noisy})
    assert found.keys() == {"noisy"}
    assert "more scattered than the median of 9 devices" in found["noisy"]


def test_scale_is_found_without_a_class_on_enough_devices() -> None:
    """Lengths are compared over all classes."""
    parts = {f"dev{device}": honest(device, labels=(device % 3,)) for device in range(6)}
    parts["loud"] = _changed(parts.pop("dev5"), factor=30)
    assert _judged(parts)["loud"].startswith("all classes: ")


def test_too_few_devices_have_no_outliers() -> None:
    """A class on fewer than MIN_DEVICES devices is not judged."""
    parts = {**fleet(MIN_DEVICES - 2), "liar": flipped(honest(9))}
    assert _judged(parts) == {}
    assert _judged({**parts, "another": honest(10)}).keys() == {"liar"}


def test_released_device_is_not_quarantined() -> None:
    """The other outliers are."""
    parts = {**fleet(8), "x": flipped(honest(9)), "y": _changed(honest(10), offset=50)}
    assert _judged(parts, released=("x",)).keys() == {"y"}


def test_no_device_is_quarantined_if_most_are_outliers() -> None:
    """A warning has an example."""
    parts = {f"dev{device}": honest(device, labels=(device // 5,)) for device in range(15)}
    for device in (*range(3, 5), *range(8, 10), *range(13, 15)):
        parts[f"dev{device}"] = _changed(parts[f"dev{device}"], offset=100.0 + device)
    far = outliers(parts, classes=CLASSES, threshold=0.0)
    judgment = judge(parts, classes=CLASSES, threshold=0.0)
    assert len(far) > 7
    assert judgment.quarantined == {}
    assert judgment.warning.startswith(
        f"{len(far)} of 15 devices are far from each other, so none is quarantined"
    )


def test_rounding_is_no_outlier_among_equal_devices() -> None:
    """Anything else is."""
    parts = {f"dev{device}": honest(1, prototypes=1) for device in range(6)}
    assert _judged(parts) == {}
    parts["rounded"] = _changed(parts["dev0"], factor=1.0001)
    assert _judged(parts) == {}
    parts["liar"] = flipped(parts["dev0"])
    assert _judged(parts).keys() == {"liar"}
    assert "over 10000" in _judged({**parts, "liar": _changed(parts["dev0"], offset=1e5)})["liar"]


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
    found = outliers(parts, classes=CLASSES, threshold=0.0)
    assert outliers(dict(shuffled), classes=CLASSES, threshold=0.0) == found
    assert found.keys() <= parts.keys()
    assert all(one.deviations > 0 for one in found.values())
    judgment = judge(parts, classes=CLASSES, threshold=THRESHOLD)
    assert len(judgment.quarantined) <= len(parts) / 2


@given(st.integers(0, 1000), st.integers(-20, 20))
@settings(deadline=None, max_examples=30)
def test_scale_of_features_does_not_matter(seed: int, exponent: int) -> None:
    """Features that are c times as large give the same outliers."""
    parts = {f"dev{device}": honest(seed + device) for device in range(7)} | {
        "liar": flipped(honest(seed + 9))
    }
    found = outliers(parts, classes=CLASSES, threshold=0.0)
    scaled = {device: _changed(part, factor=2.0**exponent) for device, part in parts.items()}
    again = outliers(scaled, classes=CLASSES, threshold=0.0)
    assert again.keys() == found.keys()
    for device, one in found.items():
        assert again[device].deviations == pytest.approx(one.deviations, rel=1e-6)


_lie = st.tuples(
    st.sampled_from(["offset", "flip", "scatter", "scale"]),
    st.floats(1, 1e6),
    st.integers(1, 12),
    st.sampled_from([1, 5, 10**9]),
)


@given(st.integers(0, 1000), st.lists(_lie, min_size=1, max_size=3))
@settings(deadline=None, max_examples=100)
def test_liars_cannot_quarantine_an_honest_device(seed: int, lies: list[tuple[str, float, int, int]]) -> None:
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
        parts[f"liar{number}"] = Prototypes(part.values, part.labels, np.full(len(part.labels), images))
    assert [device for device in _judged(parts) if device.startswith("dev")] == []


def test_equal_liars_are_found() -> None:
    """Three of ten that upload the same."""
    parts = fleet(7) | {f"liar{number}": _changed(honest(20 + number), offset=100.0) for number in range(3)}
    assert _judged(parts).keys() == {"liar0", "liar1", "liar2"}
    assert next(iter(parts.values())).values.shape[1] == FEATURE_SIZE
