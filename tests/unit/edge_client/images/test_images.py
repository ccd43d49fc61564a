"""Images on disk: found, refused, decoded, held out."""

import difflib
import os
import re
import zlib
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from edge_client.images.decoding import decode
from edge_client.images.images import MOST_NAMED, LabeledImage, find_images, images_below, scan_images
from edge_client.prototypes.holdout import held_out, held_out_count
from protocol.class_folders import class_folders
from protocol.errors import ConfigError, UnreadableImage
from tests.support.devices.device_factory import gray_png, image_file, noise
from tests.support.machine_faults import not_root, open_folder

CLASSES = ("cat", "dog", "Großer Käfer")


def test_folders_give_labels_in_path_order(tmp_path: Path) -> None:
    """Recursively; a decomposed accent is the same class."""
    for name in (
        "dog/b.png",
        "dog/2023/a.JPG",
        "cat/z.png",
        "Großer Käfer/1.png",
        "Großer Ka\u0308fer/2.png",
    ):
        image_file(tmp_path / name)
    found = find_images(tmp_path, CLASSES)
    assert [(p.relative, p.label) for p in found] == [
        ("Großer Ka\u0308fer/2.png", 2),
        ("Großer Käfer/1.png", 2),
        ("cat/z.png", 0),
        ("dog/2023/a.JPG", 1),
        ("dog/b.png", 1),
    ]
    assert all(p.path.is_file() for p in found)


def test_links_to_folders_are_followed_once(tmp_path: Path) -> None:
    """None leads into another class's folder or back up."""
    image_file(tmp_path / "data/cat/1.png")
    image_file(tmp_path / "data/dog/2.png")
    image_file(tmp_path / "elsewhere/3.png")
    (tmp_path / "data/cat/up").symlink_to(tmp_path / "data")
    (tmp_path / "data/cat/self").symlink_to(tmp_path / "data/cat")
    (tmp_path / "data/cat/dogs").symlink_to(tmp_path / "data/dog")
    (tmp_path / "data/dog/more").symlink_to(tmp_path / "elsewhere")
    found = find_images(tmp_path / "data", CLASSES)
    expected = [("cat/1.png", 0), ("dog/2.png", 1), ("dog/more/3.png", 1)]
    assert [(p.relative, p.label) for p in found] == expected


def test_dangling_link_is_found_and_refused_by_name(tmp_path: Path) -> None:
    """A link to itself as well; beside the classes' folders it is skipped."""
    image_file(tmp_path / "cat/1.png")
    (tmp_path / "cat/2.png").symlink_to(tmp_path / "gone.png")
    for loop in (tmp_path / "cat/3.png", tmp_path / "4.png"):
        loop.symlink_to(loop)
    (_, dangling, looped) = find_images(tmp_path, CLASSES)
    with pytest.raises(UnreadableImage, match=r"cat/2\.png: No such file"):
        decode(dangling.path)
    with pytest.raises(UnreadableImage, match=r"cat/3\.png: Too many levels of symbolic links"):
        decode(looped.path)


def test_unknown_folders_are_named_and_left_out(tmp_path: Path) -> None:
    """All at once, an empty one and one whose name is not UTF-8 as well; the other images are found."""
    image_file(tmp_path / "cat/1.png")
    for name in ("cats", "aaa"):
        image_file(tmp_path / name / "2.png")
    (tmp_path / "zzz").mkdir()
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/do\xe9")).mkdir()
    scan = scan_images(tmp_path, CLASSES)
    assert [image.relative for image in scan.images] == ["cat/1.png"]
    assert scan.unknown == (
        *("'aaa'", "'cats' (did you mean 'cat'?)"),
        *(r"'do\udce9' (did you mean 'dog'?)", "'zzz'"),
    )


def test_skipped_files_are_counted_by_reason(tmp_path: Path) -> None:
    """Hidden files do not count."""
    for name in ("1.png", "cat/2.png", "cat/old/3.HEIC", "dog/4.heic", "dog/5.mp4", "dog/6", "dog/.7"):
        image_file(tmp_path / name, format="PNG")
    for name in ("cat/old/3.HEIC", "dog/4.heic"):
        (tmp_path / name).write_bytes(b"\0\0\0\x18ftypheic")
    os.mkfifo(tmp_path / "cat/pipe.png")
    assert scan_images(tmp_path, CLASSES).skipped == {
        "in no class's folder": 1, "suffix .heic, HEIC is not supported: convert it to JPEG": 2, "suffix .mp4": 1,
        "no suffix": 1, "not a regular file": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        "@eaDir",
        "#recycle",
        "#snapshot",
        "$RECYCLE.BIN",
        "System Volume Information",
        "__MACOSX",
        ".Trashes",
        "lost+found",
    ],
)
def test_folders_that_systems_add_are_skipped_wherever_they_stand(tmp_path: Path, name: str) -> None:
    """Thumbnails, deleted files and snapshots are no images of a class; a hidden folder is not even counted."""
    for place in ("", "cat", "cat/old"):
        image_file(tmp_path / place / name / "cat/thumbnail.png")
    image_file(tmp_path / "cat/1.png")
    scan = scan_images(tmp_path, CLASSES)
    assert [image.relative for image in scan.images] == ["cat/1.png"]
    assert scan.unknown == ()
    assert scan.skipped == ({} if name.startswith(".") else {f"folder {name} of the system": 3})
    assert [folder.name for folder in class_folders(tmp_path)] == ["cat"]


@pytest.mark.parametrize("locked", ["locked", "cat/locked", "dog"])
def test_folder_without_permission_is_left_out_and_named(locked: str) -> None:
    """The others are found; a data folder without permission is an error."""
    with open_folder() as folder:
        image_file(folder / "cat/1.png")
        image_file(folder / locked / "2.png")
        (folder / locked).chmod(0)
        with not_root():
            scan = scan_images(folder, CLASSES)
            reason = f"the folder {folder / locked} cannot be read: Permission denied"
            assert [image.relative for image in scan.images] == ["cat/1.png"]
            assert (scan.unknown, scan.skipped) == (
                (("'locked'",), {}) if locked == "locked" else ((), {reason: 1})
            )
        folder.chmod(0)
        with not_root(), pytest.raises(ConfigError, match="cannot be read: Permission denied"):
            find_images(folder, CLASSES)
        folder.chmod(0o755)


def test_folder_that_may_be_listed_but_not_entered_is_left_out() -> None:
    """The folders in it are named, and those beside it are searched."""
    with open_folder() as folder:
        image_file(folder / "cat/a/1.png")
        image_file(folder / "cat/z/inner/2.png")
        (folder / "cat/z").chmod(0o744)
        with not_root():
            scan, skipped = scan_images(folder, CLASSES), Counter[str]()
            below = list(images_below(folder, skipped))
        (folder / "cat/z").chmod(0o755)
    assert [image.relative for image in scan.images] == ["cat/a/1.png"]
    assert [image.relative for image in below] == [str(folder / "cat/a/1.png")]
    reason = f"the folder {folder / 'cat/z/inner'} cannot be read: Permission denied"
    assert scan.skipped == skipped == {reason: 1}


@pytest.mark.parametrize(
    "name",
    [
        "1.jpg.part",
        "1.jpg.filepart",
        "1.jpg.crdownload",
        "1.jpg.tmp",
        ".1.jpg.Xa3b9Q",
        "1.jpg~",
        "~1.tmp",
        ".1.jpg",
    ],
)
def test_files_under_the_names_of_unfinished_copies_are_no_images(tmp_path: Path, name: str) -> None:
    """Those of browsers, FTP clients, rsync and editors, which rename a file once it is complete."""
    image_file(tmp_path / "cat" / name, format="PNG")
    assert find_images(tmp_path, CLASSES) == ()


def test_classes_that_are_one_folder_deeper_are_found_and_named(tmp_path: Path) -> None:
    """An export of Roboflow has a folder of classes for each part."""
    for part in ("train", "valid", "test"):
        image_file(tmp_path / part / "cat/1.png")
    scan = scan_images(tmp_path, CLASSES)
    assert scan.images == ()
    assert scan.unknown[1] == f"'train' (the classes are one folder deeper, in {tmp_path / 'train'})"


def test_list_names_images_and_classes(tmp_path: Path) -> None:
    """Paths from its own folder, any suffix, columns in any order."""
    image_file(tmp_path / "a/1.png")
    image_file(tmp_path / "2.dat", format="PNG")
    (tmp_path / "list.csv").write_text("\ufefflabel,path,who\r\ndog,a/1.png,me\r\n\r\ncat,2.dat,you\r\n")
    found = find_images(tmp_path / "list.csv", CLASSES)
    assert [(p.relative, p.label) for p in found] == [("2.dat", 0), ("a/1.png", 1)]


def test_list_names_persons(tmp_path: Path) -> None:
    """Accents are normalized, as folders of persons are; an empty cell, or no column, names none."""
    for number in range(3):
        image_file(tmp_path / f"{number}.png")
    rows = ["person,path,label", "rene\u0301,0.png,cat", " ren\u00e9 ,1.png,cat", ",2.png,dog"]
    (tmp_path / "list.csv").write_text("\n".join(rows))
    found = find_images(tmp_path / "list.csv", CLASSES)
    assert [image.person for image in found] == ["ren\u00e9", "ren\u00e9", ""]
    assert found[0].is_unchanged()


@pytest.mark.parametrize(
    "text",
    ["\ufeffpath;label\r\n1.png;cat\r\n", '"label"\t"path"\ncat\t1.png\n'],
    ids=["semicolons", "tabs"],
)
def test_list_of_a_spreadsheet(tmp_path: Path, text: str) -> None:
    """A spreadsheet separates columns by semicolons where a comma is in numbers."""
    image_file(tmp_path / "1.png")
    (tmp_path / "list.csv").write_bytes(text.encode())
    assert [image.relative for image in find_images(tmp_path / "list.csv", CLASSES)] == ["1.png"]


def test_a_list_of_unknown_labels_is_found_in_the_time_of_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A similar class is searched for the labels that a message names: a search takes up to 0.1 s."""
    searched: list[str] = []

    def search(name: str, *_: object, **__: object) -> list[str]:
        searched.append(name)
        return []

    monkeypatch.setattr(difflib, "get_close_matches", search)
    image_file(tmp_path / "a.png")
    image_file(tmp_path / "b.png")
    rows = [f"{name},{name}-{number % 50}" for number in range(200) for name in ("a.png", "b.png")]
    (tmp_path / "list.csv").write_text("\n".join(["path,label", *rows]))
    for _ in range(2):
        assert len(scan_images(tmp_path / "list.csv", CLASSES).unknown) == 100
    assert len(searched) == MOST_NAMED


@pytest.mark.parametrize("other", ["./a.png", "folder/../a.png", "folder//../a.png", "{}/a.png"])
def test_a_file_is_in_a_list_once_however_its_path_is_written(tmp_path: Path, other: str) -> None:
    """Twice would be two images, with twice the influence that differential privacy allows one."""
    image_file(tmp_path / "a.png")
    image_file(tmp_path / "folder" / "a.png")
    (tmp_path / "list.csv").write_text(
        f"path,label\na.png,cat\nfolder/a.png,cat\n{other.format(tmp_path)},dog\n"
    )
    with pytest.raises(ConfigError, match=r"line 4: .* is already in line 2"):
        scan_images(tmp_path / "list.csv", CLASSES)


def test_unknown_labels_of_a_list_are_named_with_their_first_line(tmp_path: Path) -> None:
    for name in ("1.png", "2.png"):
        image_file(tmp_path / name)
    (tmp_path / "list.csv").write_text("path,label\n1.png,cat\n2.png,dgo\nx.png,dgo\n2.png\n")
    scan = scan_images(tmp_path / "list.csv", CLASSES)
    assert [image.relative for image in scan.images] == ["1.png"]
    assert scan.unknown == ("'dgo' in line 3 (did you mean 'dog'?)", "'' in line 5")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "must start with the header path,label, not ''"),
        ("1.png,cat\n", "must start with the header path,label, not '1.png,cat'"),
        ("path,label\n\n2.png,cat\n", "line 3: there is no file .*2.png"),
        ("path,label\n,cat\n", "line 2: there is no file"),
        ("path,label\n2.png,cat\n3.png,cat\n", "line 2: there is no file .*2.png, nor any other of the list"),
        ("path,label\n1.png,cat\n1.png,dog\n", "line 3: 1.png is already in line 2"),
        ("path,label\n1.png,\xff\n", "cannot be read as a CSV file in UTF-8"),
    ],
)
def test_invalid_list_is_refused_with_the_line(tmp_path: Path, text: str, says: str) -> None:
    image_file(tmp_path / "1.png")
    (tmp_path / "list.csv").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=says) as refusal:
        find_images(tmp_path / "list.csv", CLASSES)
    assert "\n" not in str(refusal.value)


def test_a_deleted_file_of_a_list_is_left_out_and_named(tmp_path: Path) -> None:
    """A file in a folder without permission as well; if there is none at all, a disk may be missing: an error."""
    with open_folder() as folder:
        image_file(folder / "1.png")
        image_file(folder / "locked/2.png")
        (folder / "locked").chmod(0)
        (folder / "list.csv").write_text("path,label\n1.png,cat\ngone.png,dog\nlocked/2.png,dog\n\0,dog\n")
        with not_root():
            scan = scan_images(folder / "list.csv", CLASSES)
    assert [image.relative for image in scan.images] == ["1.png"]
    assert scan.skipped == {f"there is no such file, the first in line 3: {folder / 'gone.png'}": 3}


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(tmp_path: Path, orientation: int) -> None:
    upright = Image.new("RGB", (48, 32), "white")
    upright.paste("red", (0, 0, 16, 16))
    undo = [None, None, 0, 3, 1, 5, 2, 6, 4][orientation]
    stored = upright if undo is None else upright.transpose(Image.Transpose(undo))
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = image_file(tmp_path / "p.jpg", stored, exif=exif, quality=95, subsampling=0)
    image = decode(path)
    assert image.size == (48, 32)
    red = image.getpixel((8, 8))
    assert isinstance(red, tuple)
    assert red[0] > 200
    assert red[1] < 60


def test_first_of_several_frames_is_used(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (8, 8), color) for color in ("blue", "green")]
    path = image_file(tmp_path / "p.gif", frames[0], save_all=True, append_images=frames[1:])
    assert decode(path).convert("RGB").getpixel((0, 0)) == (0, 0, 255)


FORMATS: list[tuple[str, dict[str, Any]]] = [
    (name, {}) for name in ("JPEG", "PNG", "GIF", "BMP", "PPM", "TIFF", "WEBP")
]


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
@pytest.mark.parametrize(
    ("name", "options"), [*FORMATS, ("JPEG", {"progressive": True}), ("TIFF", {"compression": "tiff_lzw"})]
)
def test_truncated_image_is_refused_and_never_padded(
    tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    """Cut anywhere, it is refused by name, or every pixel is as in the whole file."""
    path = image_file(tmp_path / "cut.image", noise(64, 48), format=name, **options)
    data = path.read_bytes()
    whole = np.asarray(decode(path).convert("RGB"))
    cuts = [*range(0, len(data), max(1, len(data) // 60)), len(data) - 1, len(data) - 2, len(data) - 20]
    refusals = []
    for cut in cuts:
        path.write_bytes(data[:cut])
        try:
            np.testing.assert_array_equal(np.asarray(decode(path).convert("RGB")), whole)
        except UnreadableImage as refusal:
            refusals.append(str(refusal))
    assert len(refusals) >= len(cuts) - 4
    assert all(re.match(f"{re.escape(str(path))}: .", refusal) for refusal in refusals)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "the file is empty"),
        *((data, "it is none of JPEG, PNG") for data in (bytes(100), b"hello", b"%!PS-Adobe\n")),
    ],
)
def test_other_files_are_refused_by_name(tmp_path: Path, data: bytes, reason: str) -> None:
    (tmp_path / "p.jpg").write_bytes(data)
    with pytest.raises(UnreadableImage, match=rf"p\.jpg: {reason}"):
        decode(tmp_path / "p.jpg")


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(
    ("width", "height", "reason"),
    [
        (10_000, 10_000, ".*pixels"),
        (60_000, 60_000, ".*pixels"),
        (1, 80_000_000, "80000000 rows"),
        (0, 10, ""),
        (10, 0, ""),
    ],
)
def test_decompression_bombs_and_empty_images_are_refused(
    tmp_path: Path, width: int, height: int, reason: str
) -> None:
    (tmp_path / "p.png").write_bytes(gray_png(width, height, zlib.compress(bytes(10_000))))
    with pytest.raises(UnreadableImage, match=rf"p\.png: {reason}"):
        decode(tmp_path / "p.png")


FRACTIONS = st.sampled_from([0.0, 0.001, 0.1, 0.2, 0.25, 0.29, 0.3, 0.5, 0.7, 0.9, 0.99]) | st.floats(0, 0.99)
NAMES = st.lists(st.text(min_size=1, max_size=5), unique=True, max_size=40)
SEVERAL_CLASSES = st.lists(NAMES, min_size=1, max_size=3)


def _images(classes: Sequence[Sequence[str]]) -> list[LabeledImage]:
    return [
        LabeledImage(Path(), f"{label}/{name}", label, size_bytes=1, mtime_ns=1)
        for label, names in enumerate(classes)
        for name in names
    ]


@pytest.mark.parametrize(
    ("images", "fraction", "count"),
    [
        (15, 0.2, 3), (4, 0.2, 0), (5, 0.2, 1), (9, 0.2, 1), (10, 0.2, 2), (5, 0.1, 1), (19, 0.1, 1),
        (100, 0.29, 29), (10, 0.7, 7), (3, 0.5, 1), (4, 0.9, 3), (0, 0.9, 0), (1000, 0.0, 0),
    ],
)  # fmt: skip
def test_the_fraction_is_rounded_down(images: int, fraction: float, count: int) -> None:
    """Also where the product of floats is a little below the number; of five images at least one is held out."""
    assert held_out_count(images, fraction) == count


@given(SEVERAL_CLASSES, FRACTIONS)
def test_every_class_holds_out_its_own_share(classes: list[list[str]], fraction: float) -> None:
    """Never above the fraction, except for one image of few."""
    images = _images(classes)
    kept = held_out(images, fraction)
    assert kept <= {image.relative for image in images}
    for label, names in enumerate(classes):
        count = sum(path.startswith(f"{label}/") for path in kept)
        assert count == held_out_count(len(names), fraction)
        assert count <= Fraction(str(fraction)) * len(names) or (count == 1 and len(names) >= 5)
        assert count >= 1 or len(names) < 5 or fraction == 0


@given(SEVERAL_CLASSES, FRACTIONS, st.randoms())
def test_which_images_are_held_out_depends_on_the_paths_of_their_class(
    classes: list[list[str]], fraction: float, random: Random
) -> None:
    """Order, folder, contents of files and other classes do not matter."""
    images = _images(classes)
    kept = held_out(images, fraction)
    moved = [
        LabeledImage(Path("/moved"), image.relative, image.label, size_bytes=3, mtime_ns=4)
        for image in images
    ]
    random.shuffle(moved)
    assert held_out(moved, fraction) == kept
    first = [image for image in images if not image.label]
    assert held_out(first, fraction) == {path for path in kept if path.startswith("0/")}


@given(NAMES.filter(bool), FRACTIONS)
def test_a_new_image_changes_the_side_of_at_most_one_other(names: list[str], fraction: float) -> None:
    """A removed image reverses that."""
    *before, added = _images([names])
    others = {image.relative for image in before}
    assert len((held_out(before, fraction) ^ held_out([*before, added], fraction)) & others) <= 1


def test_paths_outside_utf8_are_accepted() -> None:
    images = _images([[os.fsdecode(b"\xff%d" % number) for number in range(5)]])
    assert len(held_out(images, 0.2)) == 1
