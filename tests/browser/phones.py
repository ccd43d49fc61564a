"""Phones: browsers whose cameras show real photographs, and the page in them."""

import base64
import hashlib
import io
import re
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from PIL import Image
from sklearn.datasets import load_digits, load_sample_images

from tests.browser.pages import CHROMIUM, TIMEOUT_MS, DashboardPage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser, Playwright

CLASSES = ("temple", "flower", "digit")
SIZE = (320, 240)
REPEATS = 10
"""Frames for which the camera shows one photograph: it plays 30 a second."""

MOST_TAKEN = 300

SCREEN = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}


def photographs(name: str, *, count: int, seed: int) -> list[Image.Image]:
    """Return different parts of a photograph, or a different handwritten digit each."""
    randomness = np.random.default_rng((CLASSES.index(name), seed))
    if name == "digit":
        levels = load_digits().images[randomness.choice(1500, count, replace=False)]
        return [
            Image.fromarray((each * 15.9).astype(np.uint8)).convert("RGB").resize(SIZE) for each in levels
        ]
    whole = Image.fromarray(load_sample_images().images[CLASSES.index(name)])
    parts = []
    for width in randomness.integers(280, 420, count):
        height = width * SIZE[1] // SIZE[0]
        left, top = randomness.integers(0, whole.width - width), randomness.integers(0, whole.height - height)
        parts.append(whole.crop((left, top, left + width, top + height)).resize(SIZE))
    return parts


def write_photographs(folder: Path, *, count: int, seed: int) -> Path:
    """Write a box's photographs, one sub-folder a class; returns the folder."""
    for name in CLASSES:
        (folder / name).mkdir(parents=True)
        for number, image in enumerate(photographs(name, count=count, seed=seed)):
            image.save(folder / name / f"{number}.png")
    return folder


def write_film(path: Path, images: list[Image.Image]) -> Path:
    """Write photographs as a film for Chromium's fake camera."""
    with path.open("wb") as film:
        for image in images:
            frame = io.BytesIO()
            image.save(frame, "JPEG", quality=90)
            film.write(frame.getvalue() * REPEATS)
    return path


def key_digest(certificate: Path) -> str:
    """Return the digest of a certificate's public key, by which Chromium accepts it: its service workers, too."""
    key = x509.load_pem_x509_certificate(certificate.read_bytes()).public_key()
    encoded = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return base64.b64encode(hashlib.sha256(encoded).digest()).decode()


@contextmanager
def phone(playwright: "Playwright", film: Path, certificate: Path | None = None) -> "Iterator[Browser]":
    """A browser with a camera that shows a film; it accepts this server certificate, without an authority."""
    arguments = [
        "--no-sandbox",
        "--use-fake-device-for-media-stream",
        f"--use-file-for-fake-video-capture={film}",
    ]
    if certificate:
        arguments.append(f"--ignore-certificate-errors-spki-list={key_digest(certificate)}")
    program = shutil.which(CHROMIUM)
    with playwright.chromium.launch(executable_path=program, args=arguments, timeout=TIMEOUT_MS) as browser:
        yield browser


class PhonePage(DashboardPage):
    """The page for phones, opened by a link."""

    def __init__(self, browser: "Browser", link: str, **options: Any) -> None:
        origin, _, path = link.partition("/join/")
        super().__init__(browser, origin, f"/join/{path}", **{**SCREEN, "permissions": ["camera"], **options})

    def join(self) -> None:
        self.page.get_by_role("button", name="Join").click()
        self.is_connected()

    def is_connected(self) -> None:
        self.wait_for_text("header .chip", "connected")

    def show(self, screen: str) -> None:
        self.page.get_by_role("navigation").get_by_role("link", name=screen).click()

    def teach(self, name: str, count: int = 0, *, until: str = "") -> None:
        """Take images of a class until there are so many different ones; with `until`, until the page has a text."""
        button = self.page.locator(".classes button", has_text=name)
        wanted = self.page.get_by_text(until).first
        for _ in range(MOST_TAKEN):
            button.click()
            self.page.wait_for_timeout(1000 * REPEATS / 30)
            taken = re.search(r"(\d+) images", button.inner_text())
            if wanted.is_visible() if until else taken and int(taken[1]) >= count:
                return
        raise AssertionError(self.page.locator("main").inner_text())

    def recognizes(self, name: str) -> None:
        self.show("Recognize")
        self.wait_for_text(".overlay .name", name)

    def screenshots(self, path: Path) -> None:
        """Write images of the screen, light and dark."""
        for scheme in ("light", "dark"):
            self.page.emulate_media(color_scheme=scheme)
            self.page.screenshot(path=f"{path}-{scheme}.jpg", type="jpeg", quality=80)
        self.page.emulate_media(color_scheme="light")
