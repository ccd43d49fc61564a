"""A closed fleet that devices join by links, over HTTPS."""

import contextlib
import socket
from pathlib import Path

from aggregator.commands.session import open_session
from aggregator.security.certificate_authority import create_ca, issue_server, utc_now
from aggregator.security.joining import make_link
from protocol.storage.keyfile import write_private
from protocol.wire.joining import JoinLink
from tests.support.devices.phone import Phone
from tests.support.fleets.closed_fleet import FLEET, ClosedFleet
from tests.support.fleets.fleet import Fleet, write_task
from tests.support.network.brokers import free_address

TOKEN = "the token of the dashboard"


class JoinedFleet(Fleet):
    """A closed fleet whose HTTP server has a certificate."""

    def __init__(self, root: Path) -> None:
        self.http = free_address()
        self.closed = ClosedFleet(root, free_address())
        super().__init__(root, self.closed.broker, enrolled=True)
        authority = create_ca("https", now=utc_now())
        issued = issue_server(authority, ["localhost", "127.0.0.1"], now=utc_now(), days=30)
        self.ca = root / "https-ca.crt"
        self.ca.write_bytes(authority.certificate)
        (root / "https.crt").write_bytes(issued.certificate)
        write_private(root / "https.key", issued.key)
        (root / "http-token").write_text(TOKEN)

    def serve(self, **settings: object) -> None:
        """Start the aggregator with these settings of the task, and wait for its HTTP server."""
        task = write_task(self.root, **{"quorum": 1, "fleet": FLEET, **settings})  # type: ignore[arg-type]
        files = ("--http-cert", self.root / "https.crt", "--http-key", self.root / "https.key")
        token = ("--http-token-file", self.root / "http-token")
        self.start_aggregator(task, "--http", str(self.http), *files, *token)
        self.wait_for("the aggregator", lambda status: status["running"])
        self.wait_until("the HTTP server", self.listens)

    def listens(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection((self.http.host, self.http.port)):
            return True
        return False

    @property
    def address(self) -> str:
        return f"https://localhost:{self.http.port}"

    def link(self, device: str = "", **options: object) -> JoinLink:
        with open_session(self.aggregator_state) as session:
            return make_link(
                session.store,
                address=self.address,
                fleet=FLEET,
                device=device,
                broker=str(self.broker),
                write=session.change_keys,
                **options,  # type: ignore[arg-type]
            )

    def phone(self, device: str, link: JoinLink | None = None) -> Phone:
        return Phone(link or self.link(device), device, str(self.ca))

    def joined(self, device: str) -> Phone:
        phone = self.phone(device)
        phone.join()
        return phone

    def state_of(self, device: str) -> str:
        found = {each["device"]: each["state"] for each in self.status()["devices"]}
        return str(found.get(device, ""))
