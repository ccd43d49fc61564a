"""Groups of images: no combination of what a device releases contains fewer images than a prototype may have."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_client.privacy.image_groups import pack, regroup
from edge_client.store.image_group_record import Group, Partition
from tests.support.devices.linear_attacker import fewest_images

Images = frozenset[bytes]


def test_the_attacker_finds_what_there_is() -> None:
    """One image between two sums, two in the difference of differences, and none where all share."""
    a, b = [1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0]
    assert fewest_images(np.array([a, b], float), below=4) == 1
    assert fewest_images(np.array([[1, 1, 0, 0, 0, 0], [0, 0, 1, 1, 1, 0]], float), below=4) == 2
    assert fewest_images(np.array([[1, 1, 0, 0], [0, 1, 1, 0], [1, 0, 1, 0]], float), below=4) == 1
    assert fewest_images(np.array([[1, 1, 1, 1, 0, 0]] * 2, float), below=4) == 4


@dataclass(frozen=True)
class Upload:
    """One submission: its task, the images that there are, those that no filter removes, hours since the last."""

    batch_size: int
    min_images: int
    present: Sequence[Images]
    kept: Images
    seed: int
    hours: float = 25.0


@dataclass
class FakeDevice:
    """A device's classes over time, and the sums that left it, with the `min_images` of their tasks."""

    partition: Partition = field(default_factory=Partition)
    sums: list[tuple[int, Images]] = field(default_factory=list)
    now_s: float = 0.0

    def upload(self, upload: Upload) -> None:
        self.now_s += upload.hours * 3600
        self.partition = self.partition.after_scan(frozenset().union(*upload.present), now_s=self.now_s)
        for present in upload.present:
            new = sorted(key for key in present & upload.kept if key not in self.partition.number_of)
            self.partition = regroup(
                self.partition,
                present,
                new,
                batch_size=upload.batch_size,
                min_images=upload.min_images,
                rng=np.random.default_rng(upload.seed),
            )
            released = self.partition.released(present, min_images=upload.min_images)
            for prototype in pack(released, batch_size=upload.batch_size):
                assert len(prototype) >= upload.min_images
                self.sums.append((upload.min_images, prototype))
            self.partition = self.partition.after_release(present, min_images=upload.min_images)


ALL = [bytes([number]) for number in range(60)]
IMAGES = ALL[:18]
some_images = st.frozensets(st.sampled_from(IMAGES), min_size=10)


@st.composite
def uploads(draw: st.DrawFn) -> Upload:
    """Draw a submission of two classes; images move between them, disappear and return."""
    batch_size = draw(st.integers(2, 5))
    present = draw(some_images)
    second = draw(st.frozensets(st.sampled_from(IMAGES), max_size=7))
    return Upload(
        batch_size=batch_size,
        min_images=draw(st.integers(2, batch_size)),
        present=(present - second, present & second),
        kept=draw(some_images),
        seed=draw(st.integers(0, 3)),
        hours=draw(st.sampled_from([25.0, 10.0, 0.1])),
    )


def _fewest(device: FakeDevice, least: int) -> int:
    """Return the images in the smallest combination of what went to tasks with a `min_images` of `least` or more."""
    released = {images for min_images, images in device.sums if min_images >= least}
    sums = np.array([[key in images for key in IMAGES] for images in released], float)
    return fewest_images(sums, below=least) if released else least


def _check_releases(sequence: Sequence[Upload]) -> None:
    """Check that no combination of what a device releases has fewer images than a prototype."""
    device = FakeDevice()
    for upload in sequence:
        device.upload(upload)
    for least in {upload.min_images for upload in sequence}:
        assert _fewest(device, least) == least


@settings(max_examples=150, deadline=None)
@given(st.lists(uploads(), min_size=2, max_size=7))
def test_no_combination_of_releases_has_fewer_images_than_a_prototype(sequence: list[Upload]) -> None:
    """For any tasks and changes of the images: of the tasks with `min_images` of at least m, at least m images."""
    _check_releases(sequence)


def _upload(numbers: Iterable[int], least: int, *, size: int = 0) -> Upload:
    images = frozenset(IMAGES[number] for number in numbers)
    return Upload(size or least, least, (images,), images, seed=0)


SEQUENCES = {
    "two images of a lower min_images are not merged with groups that were released": [
        _upload(range(5), 5),
        _upload(range(10), 5),
        _upload(range(12), 2),
        _upload(range(12), 10),
    ],
    "a group that consists of an earlier one mostly is too small": [
        _upload(range(6), 6),
        _upload(range(1, 7), 2),
        _upload(range(1, 7), 6),
    ],
    "what is left of a group and what it has lost add no weight to a group that both join": [
        _upload(range(10), 10),
        _upload([*range(5), 10], 2, size=6),
        _upload(range(18), 7),
        _upload(range(18), 13),
    ],
}


@pytest.mark.parametrize("sequence", SEQUENCES.values(), ids=SEQUENCES)
def test_min_images_that_falls_and_rises_reveals_no_smaller_sum(sequence: list[Upload]) -> None:
    _check_releases(sequence)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.frozensets(st.sampled_from(IMAGES)), st.integers(2, 5)), max_size=6))
def test_images_that_are_missing_for_a_moment_are_released_as_before(
    moments: list[tuple[Images, int]],
) -> None:
    """A folder is emptied and copied back piece by piece, or a disk fails again and again, while tasks change."""
    device = FakeDevice()
    device.upload(_upload(range(18), 2, size=5))
    groups = device.partition.groups
    for present, batch_size in moments:
        device.upload(Upload(batch_size, 2, (present,), present, seed=1, hours=3))
    device.upload(_upload(range(18), 2, size=5))
    assert device.partition.groups == groups
    assert sum(map(len, device.partition.released(frozenset(IMAGES), min_images=2))) == 18


def test_missing_images_are_awaited_for_a_day() -> None:
    """Then what is left of their groups joins new images. No day begins where a class is gone as a whole."""
    device = FakeDevice()

    def upload(images: Iterable[bytes]) -> int:
        present = frozenset(images)
        device.upload(Upload(5, 2, (present,), present, seed=0, hours=13))
        return sum(map(len, device.partition.released(present, min_images=2)))

    everything, rest = ALL[:10], ALL[1:10]
    assert [upload(images) for images in (everything, rest, everything, rest, ())] == [10, 5, 10, 5, 0]
    # New images form groups of their own meanwhile, of the usual size.
    one_of_each = [min(group.images) for group in device.partition.groups.values()]
    assert upload([*one_of_each, *ALL[10:13]]) == 0
    assert [upload(ALL[1:count]) for count in (10, 15, 20)] == [5, 10, 19]


def _regroup(partition: Partition, present: Iterable[bytes], *, least: int = 2, size: int = 5) -> Partition:
    images = frozenset(present)
    new = sorted(key for key in images if key not in partition.number_of)
    rng = np.random.default_rng(0)
    partition = regroup(partition, images, new, batch_size=size, min_images=least, rng=rng)
    return partition.after_release(images, min_images=least)


def test_images_of_broken_groups_are_used_with_enough_new_ones() -> None:
    """The deleted image, if it returns, adds to no group's weight: it waits for the next group."""
    partition = _regroup(Partition(), IMAGES[:10])
    (broken,) = (group for group in partition.groups.values() if IMAGES[0] in group.images)
    # One image was lost: four new ones and that one are five in any combination.
    assert _regroup(partition, IMAGES[1:13]) == partition
    after = _regroup(partition, IMAGES[1:14])
    lost = after.groups[after.number_of[IMAGES[0]]]
    assert (set(lost.images), lost.weight, lost.is_unmixed) == ({IMAGES[0]}, 0, False)
    (formed,) = (group for group in after.groups.values() if IMAGES[13] in group.images)
    assert formed == Group(broken.images - {IMAGES[0]} | set(IMAGES[10:14]), 5, False, 2)
    assert _regroup(after, IMAGES[:14]) == after
    extended = _regroup(after, ALL[:19])
    assert extended.released(frozenset(ALL[:19]), min_images=2)[-1] == {IMAGES[0], *ALL[14:19]}


@pytest.mark.parametrize("size", [5, 20])
def test_a_class_that_is_split_keeps_its_images(size: int) -> None:
    """Images of a group from which one of the new classes has taken some join the next group of the other."""
    partition = _regroup(Partition(), ALL[:40], size=size)
    first, second = ALL[:40:2], ALL[1:40:2]
    for images in (first, second):
        partition = _regroup(partition, images, size=size)
    second += ALL[40:42]
    for images in (first, second):
        partition = _regroup(partition, images, size=size)
    released = [partition.released(frozenset(images), min_images=2) for images in (first, second)]
    assert [sum(map(len, groups)) for groups in released] == [20, 22]


def test_a_larger_min_images_merges_groups_for_good() -> None:
    partition = _regroup(Partition(), IMAGES[:18], size=3, least=3)
    assert Counter(len(group.images) for group in partition.groups.values()) == {3: 6}
    raised = _regroup(partition, IMAGES[:18], size=6, least=6)
    assert Counter(len(group.images) for group in raised.groups.values()) == {6: 3}
    assert _regroup(raised, IMAGES[:18], size=2, least=2) == raised


def test_a_smaller_min_images_prevents_no_merging_of_what_it_was_used_for() -> None:
    """A task of 10, one of 2, and one of 5: groups that only the second has seen merge, also in another class."""
    partition = _regroup(Partition(), ALL[:10], size=10, least=10)
    for images in (ALL[:14], ALL[20:40]):
        partition = _regroup(partition, images, size=2, least=2)
    for images in (ALL[:14], ALL[20:40]):
        partition = _regroup(partition, images, size=5, least=5)
    sizes = [[len(group) for group in partition.released(frozenset(ALL[20:40]), min_images=5)]]
    assert sizes == [[6, 6, 8]]
    # Four images of the task of 2 are too few, and not merged with a group of the task of 10.
    assert [len(group) for group in partition.released(frozenset(ALL[:14]), min_images=5)] == [10]


@given(st.lists(st.integers(1, 12), max_size=9), st.integers(1, 12))
def test_prototypes_are_unions_of_groups(sizes: list[int], batch_size: int) -> None:
    """Each has at least B images, unless the class has fewer."""
    groups = [frozenset(bytes([at, n]) for n in range(size)) for at, size in enumerate(sizes)]
    packed = pack(groups, batch_size=batch_size)
    assert frozenset().union(*packed) == frozenset().union(*groups)
    assert sum(map(len, packed)) == sum(sizes)
    assert all(len(each) >= batch_size for each in packed) or len(packed) == 1
    assert all(any(group <= each for each in packed) for group in groups)
