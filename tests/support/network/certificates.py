"""A fleet's certificates as files, and mosquitto's configuration for them."""

from datetime import timedelta
from pathlib import Path

from aggregator.security.certificate_authority import (
    Issued,
    create_ca,
    issue_client,
    issue_server,
    revocation_list,
    utc_now,
)
from protocol.mqtt.tls import BrokerAccess

HOSTS = ("localhost", "127.0.0.1")


class Certificates:
    """A certificate authority and its certificates, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.authority = create_ca("orchard", now=utc_now() - timedelta(days=365))
        self.ca = folder / "ca.crt"
        self.ca.write_bytes(self.authority.certificate)
        self.revoked = folder / "revoked.crl"
        self.revoke()
        self.broker()

    def broker(self, *hosts: str, ago_days: int = 0) -> None:
        """Issue the broker's certificate, `ago_days` days ago."""
        now = utc_now() - timedelta(days=ago_days)
        self._write("broker", issue_server(self.authority, hosts or HOSTS, now=now, days=100))

    def client(self, name: str, *, ago_days: int = 0) -> Issued:
        """Issue a client's certificate, `ago_days` days ago."""
        now = utc_now() - timedelta(days=ago_days)
        issued = issue_client(self.authority, name, now=now, days=100)
        self._write(name, issued)
        return issued

    def revoke(self, *serials: int) -> None:
        now = utc_now()
        self.revoked.write_bytes(revocation_list(self.authority, dict.fromkeys(serials, now), now=now))

    def access(self, name: str = "") -> BrokerAccess:
        """Return the settings of a client, with the certificate of that name if one is given."""
        if not name:
            return BrokerAccess(tls=True, ca=self.ca)
        return BrokerAccess(
            tls=True, ca=self.ca, certificate=self.folder / f"{name}.crt", key=self.folder / f"{name}.key"
        )

    def mosquitto(self, *, mutual: bool = True) -> str:
        """Return mosquitto's configuration lines; `mutual` requires certificates of clients."""
        lines = [f"certfile {self.folder}/broker.crt", f"keyfile {self.folder}/broker.key"]
        if mutual:
            lines += [
                f"cafile {self.ca}",
                f"crlfile {self.revoked}",
                "require_certificate true",
                "use_identity_as_username true",
                "use_username_as_clientid true",
            ]
        return "\n".join(lines)

    def _write(self, name: str, issued: Issued) -> None:
        (self.folder / f"{name}.crt").write_bytes(issued.certificate)
        (self.folder / f"{name}.key").write_bytes(issued.key)
