"""Images of private builds: each decoded in a process of its own, in the same budget of time."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from PIL import ExifTags, Image

from edge_client.graphs import forked_runs
from edge_client.graphs.forked_runs import MIN_BUDGET_S
from edge_client.images.extraction import Digests, Pixels, Refusal, pixels_of
from edge_client.images.images import LabeledImage, unlabeled
from edge_client.images.isolated_decoding import IsolatedDecoder, isolated_decoder
from protocol.models.preprocessing import Preprocessing
from tests.support.devices.device_factory import image_file, noise, slow_jpeg

SPEC = Preprocessing(height=16, width=20)


@pytest.fixture
def decoder(monkeypatch: pytest.MonkeyPatch) -> Iterator[IsolatedDecoder]:
    monkeypatch.setattr(forked_runs, "WALL_FACTOR", 1e6)  # this machine may be busy
    with isolated_decoder(SPEC) as decoder:
        yield decoder


def _image(file: Path) -> LabeledImage:
    return unlabeled(file)


def _decoded(decoder: IsolatedDecoder, file: Path) -> tuple[Pixels | Refusal, Digests]:
    digests: Digests = {}
    return decoder.pixels_of(_image(file), [SPEC], None, digests), digests


def test_images_and_refusals_are_those_of_this_process(decoder: IsolatedDecoder, tmp_path: Path) -> None:
    """Also of a file that was changed since it was found."""
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    turned = image_file(tmp_path / "turned.jpg", exif=exif)
    (cut := tmp_path / "cut.jpg").write_bytes(turned.read_bytes()[:500])
    for file in (turned, image_file(tmp_path / "other.png"), cut):
        digests: Digests = {}
        expected = pixels_of(_image(file), [SPEC], None, digests)
        made, found = _decoded(decoder, file)
        assert found == digests
        if isinstance(expected, Refusal):
            assert (made, file) == (expected, cut)
        else:
            assert isinstance(made, dict)
            np.testing.assert_array_equal(made[SPEC], expected[SPEC])
    image = _image(turned)
    image_file(turned, noise(seed=1))
    made = decoder.pixels_of(image, [SPEC], None, {})
    assert made == Refusal("it was changed while it was read", may_pass=True)


def test_an_image_that_takes_longer_than_the_budget_is_unusable_and_the_next_one_is_not(
    decoder: IsolatedDecoder, tmp_path: Path
) -> None:
    """A file of 0.7 MB, which takes half a minute. The budget comes from random pixels."""
    assert decoder.slot_s >= forked_runs.WALL_FACTOR * MIN_BUDGET_S
    made, digests = _decoded(decoder, slow_jpeg(tmp_path / "slow.jpg", scans=20_000))
    assert isinstance(made, Refusal)
    assert (made.reason.partition(" takes")[0], made.may_pass, digests) == ("decoding", False, {})
    assert isinstance(_decoded(decoder, image_file(tmp_path / "next.png"))[0], dict)


def test_an_image_that_ends_its_process_is_unusable_and_the_next_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forked_runs, "MIN_BUDGET_S", 1e3)
    before = {*psutil.Process().children()}
    with isolated_decoder(SPEC) as decoder:
        (program,) = {*psutil.Process().children()} - before

        def kill() -> None:
            while not (runs := program.children()):
                time.sleep(0.01)
            runs[0].kill()

        killing = threading.Thread(target=kill)
        killing.start()
        made, _ = _decoded(decoder, slow_jpeg(tmp_path / "slow.jpg", scans=20_000))
        killing.join()
        assert made == Refusal("its decoder crashes: save it anew")
        assert isinstance(_decoded(decoder, image_file(tmp_path / "next.png"))[0], dict)
