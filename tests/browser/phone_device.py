"""A phone's device in a browser, without its page."""

import base64
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tests.support.fleets.fleet import wait_until

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext, ConsoleMessage

PLACE = "/join/device/state.js"
"""A file of the origin, with the headers of the page, in whose place modules are imported."""

OPEN = """async () => {
    const { openDevice } = await import("/join/device/device.js");
    window.blobOf = (text) => new Blob([Uint8Array.from(atob(text), (each) => each.charCodeAt(0))]);
    window.device = await openDevice({ onChange() {} });
}"""
ADD = """async (images) => {
    for (const [label, text] of images) await device.addImage({ blob: blobOf(text), label, origin: "camera" });
}"""
CLASSIFY = """async (images) => {
    const answers = [];
    for (const text of images) {
        const answer = await device.classify(blobOf(text));
        answers.push({ ...answer, probabilities: [...answer.probabilities] });
    }
    return answers;
}"""


TAKE = """async (files) => {
    const { Features } = await import("/join/device/features.js");
    const features = new Features(async () => null);
    const blobs = files.map((text) => new Blob([Uint8Array.from(atob(text), (each) => each.charCodeAt(0))]));
    const ids = blobs.map((blob) => features.take(blob).then(({ id }) => id, () => ""));
    return Promise.all(ids).finally(() => features.end());
}"""


class PhoneDevice:
    """A device in a tab of a browser's context, whose storage outlives the tab."""

    def __init__(self, context: "BrowserContext", origin: str) -> None:
        self.errors: list[str] = []
        self.page = context.new_page()
        self.page.on("console", self._log)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.goto(f"{origin}{PLACE}")

    def take(self, files: list[str]) -> list[str]:
        """Return the ids of image files (base64), empty for those that are refused."""
        return list(self.page.evaluate(TAKE, files))

    def open(self) -> None:
        self.page.evaluate(OPEN)

    def join(self, link: str, name: str) -> None:
        """Join, and wait for the task."""
        self.page.evaluate("([link, name]) => device.join(link, name)", [link, name])
        self.wait("state.task && state.connection === 'online'")

    @property
    def state(self) -> dict[str, Any]:
        """The state that the device shows."""
        return dict(self.page.evaluate("device.state"))

    def wait(self, condition: str) -> None:
        """Wait until an expression of `state` holds."""
        wait_until(
            condition,
            lambda: bool(
                self.page.evaluate(f"(() => {{ const {{ state }} = device; return {condition}; }})()")
            ),
            diagnostics=lambda: (
                json.dumps({**self.state, "images": len(self.state["images"])}) + str(self.errors)
            ),
        )

    def add(self, images: Sequence[tuple[str, bytes]]) -> None:
        """Add image files with their labels, as if the camera had taken them."""
        self.page.evaluate(ADD, [(label, base64.b64encode(file).decode()) for label, file in images])

    def classify(self, files: Sequence[bytes]) -> list[dict[str, Any]]:
        """Return the predictions for image files, one after the other."""
        return list(self.page.evaluate(CLASSIFY, [base64.b64encode(file).decode() for file in files]))

    def _log(self, message: "ConsoleMessage") -> None:
        is_icon = message.location["url"].endswith("/favicon.ico")
        if message.type in {"error", "warning"} and not is_icon:
            self.errors.append(f"{message.text} {message.location}")
