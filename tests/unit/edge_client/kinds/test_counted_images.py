"""The images that a release counts: where the unit is a person, each person's depend on this person alone."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import msgspec
import pytest
from msgspec import UNSET

from edge_client.images.images import LabeledImage
from edge_client.kinds import private_submission
from edge_client.kinds.counted_images import CountedImages, counted_images, person_of
from edge_client.privacy.sum_mechanism import noisy_sums
from protocol.wire.messages import Privacy
from tests.support.devices.device_factory import CLASSES, image_file, noise
from tests.support.devices.worker_benches import WANTED, PrivateBench

PERSONS = msgspec.structs.replace(WANTED, noise_multiplier=9.0, images_per_person=3, person_level=2)


@pytest.fixture
def bench(tmp_path: Path) -> PrivateBench:
    """Return a device whose images lie in folders of persons: ten of anna in two classes, two of ben."""
    bench = PrivateBench(tmp_path, count=0, differential_privacy=PERSONS)
    for number in range(10):
        add(bench, f"{CLASSES[number % 2]}/anna/{number}.png", seed=number)
    for number in range(2):
        add(bench, f"cat/ben/{number}.png", seed=100 + number)
    return bench


def add(bench: PrivateBench, path: str, *, seed: int) -> None:
    image_file(bench.data / path, noise(seed=seed))


def count(bench: PrivateBench, key: bytes = b"a device's") -> CountedImages:
    workspace = bench.workspace()
    return counted_images(workspace, bench.manifest, workspace.extract(bench.manifest), key=key)


def names(counted: CountedImages, person: str = "") -> list[str]:
    paths = [image.relative for of_class in counted.by_label for image in of_class]
    return [path for path in paths if f"/{person}" in path]


def test_of_a_person_at_most_so_many_count(bench: PrivateBench) -> None:
    """In all classes together; of one with fewer, all."""
    counted = count(bench)
    assert len(names(counted, "anna")) == 3
    assert len(names(counted, "ben")) == 2
    assert (counted.persons, counted.left_out, counted.unnamed) == (2, 7, 0)
    assert [image.label for of_class in counted.by_label for image in of_class] == sorted(
        CLASSES.index(Path(name).parts[0]) for name in names(counted)
    )


def test_the_choice_depends_on_this_person_and_the_secret_alone(bench: PrivateBench) -> None:
    """Not on names, order, or anybody else, also if they are on equal images; another device chooses others."""
    anna = names(count(bench), "anna")
    for number in range(10):
        add(bench, f"cat/anton/{number}.png", seed=number)
    assert names(count(bench), "anna") == anna
    assert len(names(count(bench), "anton")) == 3
    (bench.data / "cat/ben/0.png").unlink()
    assert names(count(bench), "anna") == anna
    choices = {tuple(names(count(bench, b"%d" % number), "anna")) for number in range(20)}
    assert len(choices) > 10


def test_equal_pixels_of_a_person_are_one_image(bench: PrivateBench) -> None:
    """In the first of its classes; those of two persons are one of each: neither changes what the other adds."""
    for path in ("cat/ben/copy.png", "dog/ben/copy.png", "cat/carl/copy.png"):
        add(bench, path, seed=100)
    counted = names(count(bench))
    assert [name for name in counted if "/ben/" in name] == ["cat/ben/0.png", "cat/ben/1.png"]
    assert "cat/carl/copy.png" in counted


def test_images_without_a_person_all_count(bench: PrivateBench) -> None:
    """The owner states that nobody is on more than so many; files of equal pixels are one."""
    for number in range(5):
        add(bench, f"dog/{number}.png", seed=200 + number)
    add(bench, "cat/copy.png", seed=200)
    counted = count(bench)
    assert (counted.persons, counted.left_out, counted.unnamed) == (2, 7, 5)
    assert {"cat/copy.png", "dog/1.png"} <= {*names(counted)}
    assert "dog/0.png" not in names(counted)


def test_a_list_names_persons_before_folders(bench: PrivateBench) -> None:
    """Where it names none, the folder does."""
    lines = [f"cat/ben/{number}.png,cat,anna" for number in range(2)]
    lines += [f"cat/anna/{number}.png,cat," for number in range(0, 10, 2)]
    (bench.data / "list.csv").write_text("\n".join(["path,label,person", *lines]))
    bench.settings = replace(bench.settings, data=bench.data / "list.csv")
    assert (count(bench).persons, len(names(count(bench)))) == (1, 3)
    levels = msgspec.structs.replace(PERSONS, person_level=UNSET)
    bench.manifest = msgspec.structs.replace(bench.manifest, differential_privacy=levels)
    assert (count(bench).persons, count(bench).unnamed, len(names(count(bench)))) == (1, 5, 7)


@pytest.mark.parametrize(
    ("level", "person"), [(1, "cat"), (2, "rene\u0301"), (3, "2026"), (4, ""), (UNSET, "")]
)
def test_person_is_a_folder(level: Any, person: str) -> None:
    """Accents are normalized; the file's own name is no person."""
    image = LabeledImage(Path(), "cat/rene\u0301/2026/1.png", 0, size_bytes=1, mtime_ns=1)
    found = person_of(image, msgspec.structs.replace(PERSONS, person_level=level))
    assert found == ("ren\u00e9" if level == 2 else person)
    named = replace(image, person="anna")
    assert person_of(named, msgspec.structs.replace(PERSONS, person_level=level)) == "anna"


def test_other_persons_of_the_same_files_are_another_release(bench: PrivateBench) -> None:
    """It is charged before an image is read: persons decide which images count."""
    images = [f"{CLASSES[number % 2]}/anna/{number}.png,{CLASSES[number % 2]}" for number in range(10)]

    def cost_with(persons: list[str]) -> Privacy:
        rows = [f"{image},{person}" for image, person in zip(images, persons, strict=True)]
        (bench.data / "list.csv").write_text("\n".join(["path,label,person", *rows]))
        bench.settings = replace(bench.settings, data=bench.data / "list.csv")
        bench.restart()
        return bench.cost()

    assert cost_with(["anna"] * 10).releases == cost_with(["anna"] * 10).releases == 1
    assert cost_with(["anna"] * 9 + ["ben"]).releases == 2


def test_the_sums_are_of_the_images_that_count(bench: PrivateBench) -> None:
    """Five of twelve, by the device's own key, which stays."""
    with patch.object(private_submission, "noisy_sums", Mock(wraps=noisy_sums)) as sums:
        bench.upload()
        add(bench, "dog/ben/new.png", seed=300)
        bench.upload()
    (first, labels), (second, _) = (call.args for call in sums.call_args_list)
    assert (len(first), len(labels), len(second)) == (5, 5, 6)
    assert {*map(tuple, first.tolist())} < {*map(tuple, second.tolist())}
