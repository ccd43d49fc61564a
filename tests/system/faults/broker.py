"""A mosquitto that can be killed, loses its memory if it has to, and reads its access list again."""

import signal
from pathlib import Path
from typing import TYPE_CHECKING

from protocol.mqtt.session import BrokerAddress
from tests.support.brokers import start_mosquitto

if TYPE_CHECKING:
    import subprocess

_OPTIONS = """
allow_anonymous true
user root
persistence true
persistence_location {folder}/
autosave_interval 2
"""


class Mosquitto:
    """One broker process at a time, always with the same files.

    Args:
        address: where it listens.
        folder: of its configuration, its log and its memory.
        options: further lines of its configuration; `{folder}` in them is `folder`.
        access: its access list, where the options name one as `{folder}/acl`.
    """

    def __init__(self, address: BrokerAddress, folder: Path, *, options: str = "", access: str = "") -> None:
        self.address = address
        self.folder = folder
        self._options = (_OPTIONS + options).format(folder=folder)
        self._access = folder / "acl"
        self._access.write_text(access)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it listens."""
        self._process = start_mosquitto(self.address, self.folder, options=self._options)

    def kill(self, *, forgetting: bool = False) -> None:
        """End it as a power cut does; with `forgetting`, its memory on disk is lost as well."""
        self._end(signal.SIGKILL)
        if forgetting:
            (self.folder / "mosquitto.db").unlink(missing_ok=True)

    def stop(self) -> None:
        """End it in order."""
        self._end(signal.SIGTERM)

    def allow(self, access: str) -> None:
        """Give it another access list."""
        self._access.write_text(access)
        if self._process is not None:
            self._process.send_signal(signal.SIGHUP)

    @property
    def log(self) -> str:
        """What it has said."""
        return "\n".join(file.read_text(errors="replace") for file in self.folder.glob("mosquitto-*.log"))

    def _end(self, how: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(timeout=60)
            self._process = None
