"""The review page by keyboard, for screen readers, on a phone, dark and light."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from edge_client.review.http_server import ReviewServer
from tests.browser.conftest import OpenPage
from tests.browser.pages import DashboardPage
from tests.support.devices.review_folder import TOKEN, ReviewFolder, review_folder, review_page

PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}


@pytest.fixture
def where(tmp_path: Path) -> ReviewFolder:
    return review_folder(tmp_path)


@pytest.fixture
def server(where: ReviewFolder) -> Iterator[ReviewServer]:
    with review_page(where) as server:
        yield server


def _open(open_page: OpenPage, server: ReviewServer, **options: object) -> DashboardPage:
    origin = f"http://127.0.0.1:{server.server_port}"
    opened = open_page(f"{origin}/review#{TOKEN}", **options)
    opened.origin = origin
    opened.elsewhere.clear()
    opened.wait("document.getElementById('image').naturalWidth > 0")
    return opened


def _press(opened: DashboardPage, key: str) -> None:
    """Press a key once the image is shown: earlier ones are ignored."""
    opened.wait("document.getElementById('current').ariaBusy === 'false'")
    opened.page.keyboard.press(key)


def test_keys_move_images_and_back(open_page: OpenPage, where: ReviewFolder, server: ReviewServer) -> None:
    """The next image is shown after a move."""
    opened = _open(open_page, server)
    opened.wait_for_text("#caption", "cat/wrong.png · labeled cat · held out · the head finds dog")
    _press(opened, "2")
    opened.wait_for_text("#caption", "dog/same.png")
    assert (where.data / "dog" / "wrong.png").exists()
    opened.page.keyboard.press("ArrowLeft")
    opened.wait_for_text("#caption", "moved to")
    _press(opened, "u")
    opened.wait("!document.getElementById('caption').textContent.includes('moved to')")
    assert (where.data / "cat" / "wrong.png").exists()
    opened.page.get_by_role("button", name="labeled images of no known class: 1").click()
    opened.wait_for_text("#caption", "the head finds unknown")
    _press(opened, "0")
    opened.wait_for_text("#caption", "moved to")
    assert (where.unlabeled / "stranger.png").exists()
    opened.page.get_by_role("button", name="unlabeled images to label first: 2").click()
    opened.page.get_by_role("button", name="new.png").click()
    opened.wait_for_text("#caption", "new.png")


def test_held_key_moves_one_image(open_page: OpenPage, where: ReviewFolder, server: ReviewServer) -> None:
    """A key moves an image that is shown; undo shows the image that returned."""
    opened = _open(open_page, server)
    opened.wait("document.getElementById('current').ariaBusy === 'false'")
    opened.page.keyboard.down("2")
    for _ in range(5):
        opened.page.keyboard.down("2")  # as the keyboard repeats it
    opened.page.keyboard.up("2")
    opened.wait_for_text("#caption", "dog/same.png")
    assert [each.name for each in (where.data / "dog").iterdir()].count("wrong.png") == 1
    assert (
        sum(path != each.image.path for path, each in zip(server.paths, server.found.findings, strict=True))
        == 1
    )
    opened.page.get_by_role("button", name="unlabeled images to label first").click()
    _press(opened, "u")
    opened.wait_for_text("#caption", "cat/wrong.png")


def test_kept_image_stays_and_is_remembered(
    open_page: OpenPage, where: ReviewFolder, server: ReviewServer
) -> None:
    opened = _open(open_page, server)
    _press(opened, ".")
    opened.wait_for_text("#caption", "dog/same.png")
    assert [image.relative for image in where.kept] == ["cat/wrong.png"]
    opened.page.keyboard.press("ArrowLeft")
    opened.wait_for_text("#caption", "kept")
    opened.page.get_by_role("button", name="Next →").click()
    opened.wait_for_text("#caption", "dog/same.png")


def test_failed_move_is_reported(open_page: OpenPage, where: ReviewFolder, server: ReviewServer) -> None:
    opened = _open(open_page, server)
    opened.server_stops = True  # the browser logs the answer's status
    (where.data / "cat" / "wrong.png").write_bytes(b"changed")
    opened.page.get_by_role("button", name="dog 2").click()
    opened.wait_for_text("#error", "review the images again")
    opened.errors.clear()


@pytest.mark.parametrize(
    ("scheme", "screen"), [("light", {}), ("dark", PHONE)], ids=["light desktop", "dark phone"]
)
def test_axe_finds_nothing_serious(
    open_page: OpenPage, server: ReviewServer, scheme: str, screen: dict[str, object]
) -> None:
    """Nothing is wider than a phone."""
    opened = _open(open_page, server, color_scheme=scheme, **screen)
    assert not opened.violations()
    if screen:
        assert opened.page.evaluate("document.documentElement.scrollWidth") == 390


def test_page_without_the_token_says_where_it_is(open_page: OpenPage, server: ReviewServer) -> None:
    opened = open_page(f"http://127.0.0.1:{server.server_port}/review")
    opened.wait_for_text("#error", "Open the whole address")
    opened.errors.clear()
    opened.elsewhere.clear()
