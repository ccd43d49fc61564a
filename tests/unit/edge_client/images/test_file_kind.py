"""Files by their first bytes: a name decides nothing that the content contradicts."""

import os
from pathlib import Path

import pytest

from edge_client.images import file_kind
from edge_client.images.decoding import decoded
from edge_client.images.images import find_images, scan_images
from protocol.errors import UnreadableImage
from tests.support.devices.device_factory import image_file

HEIC = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (HEIC, "its content is HEIC, which is not supported: convert it to JPEG"),
        (b"\0\0\0\x1cftypmif1\0\0\0\0mif1avif", "its content is AVIF, "),
        (b"\0\0\0\x20ftypisom\0\0\2\0isomiso2", "its content is MP4, "),
        (b"\xff\x0a" + bytes(20), "its content is JPEG XL, "),
        (b"\0\0\0\x0cjP  \r\n\x87\n", "its content is JPEG 2000, "),
        (b"%PDF-1.7", "its content is PDF, "),
        (
            b"\xff\xd8\xff\xe0" + bytes(64),
            "it is a damaged JPEG, or of an unsupported kind: save it anew as RGB",
        ),
        (b"hello", "it is none of JPEG, PNG, BMP, GIF, PPM, TIFF, WEBP$"),
    ],
)
def test_the_reason_names_what_the_content_is(data: bytes, reason: str) -> None:
    """Also where the bytes come without a name."""
    with pytest.raises(UnreadableImage, match=f"^{reason}"), decoded(data):
        pass


def test_a_jpeg_with_the_suffix_of_another_kind_is_used(tmp_path: Path) -> None:
    """Its first bytes are read again only if the file has changed; links to nowhere and pipes stay as they are."""
    image_file(tmp_path / "cat/1.HEIC", format="JPEG")
    (tmp_path / "cat/2.HEIC").write_bytes(HEIC)
    (tmp_path / "cat/3.heif").symlink_to(tmp_path / "gone")
    os.mkfifo(tmp_path / "cat/4.avif")
    file_kind.is_image.cache_clear()
    for _ in range(3):
        scan = scan_images(tmp_path, ["cat"])
        assert [image.relative for image in scan.images] == ["cat/1.HEIC", "cat/3.heif"]
        reason = "suffix .heic, HEIC is not supported: convert it to JPEG"
        assert scan.skipped == {reason: 1, "not a regular file": 1}
    assert file_kind.is_image.cache_info().misses == 2
    image_file(tmp_path / "cat/2.HEIC", format="PNG")
    assert len(find_images(tmp_path, ["cat"])) == 3
