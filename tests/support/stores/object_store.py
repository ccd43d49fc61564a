"""A real process of moto's S3 server, and an HTTP proxy before it that provokes faults."""

import contextlib
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from protocol.mqtt.reconnecting_session import BrokerAddress
from tests.support.network.brokers import free_address
from tests.support.network.sessions import request

BUCKET = "fleet"
START_TIMEOUT_S = 240.0

SIGNED = {
    "Authorization": "AWS4-HMAC-SHA256 Credential=fleet/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, "
    "Signature=0"
}
"""The server asks for a signature, and does not verify it."""

Change = Callable[[bytes], bytes]


class ObjectStore:
    """A proxy to a server; requests can be counted and harmed.

    Attributes:
        endpoint: the proxy's URL.
        status: answered to each request in place of the server's answer, unless 0.
        cut: send half of each body of an answer, and close.
        change: what becomes of the body of an answer to GET for a blob.
        delay_s: wait before each answer.
        only: harm only requests with this method, if any.
        left: harm so many more requests; all if negative.
        harmed: requests that were harmed.
    """

    def __init__(self, server: BrokerAddress) -> None:
        self.server = server
        self.heal()
        handler = type("Handler", (_Handler,), {"store": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._http.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._http.server_address[1]}"
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()

    def heal(self) -> None:
        """Harm no more requests."""
        self.status, self.cut, self.delay_s, self.only, self.left, self.harmed = 0, False, 0.0, "", -1, 0
        self.change: Change | None = None

    def close(self) -> None:
        """Stop the proxy."""
        self._http.shutdown()
        self._http.server_close()

    def direct(self, method: str, path: str, body: bytes | None = None) -> tuple[int, dict[str, str], bytes]:
        """Send a request to the server itself."""
        return request(self.server, method, path, SIGNED, body or b"")

    def is_harmful(self, method: str) -> bool:
        """Return True if this request is to be harmed, and count it."""
        is_set = self.status or self.cut or self.change or self.delay_s
        if not is_set or (self.only and method != self.only) or not self.left:
            return False
        self.left -= 1
        self.harmed += 1
        return True


class _Handler(BaseHTTPRequestHandler):
    store: ObjectStore
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Log nothing."""

    def handle_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        is_harmed = self.store.is_harmful(self.command)
        if is_harmed:
            time.sleep(self.store.delay_s)
        if is_harmed and self.store.status:
            self._answer(self.store.status, {}, b"<Error><Code>SlowDown</Code></Error>")
            return
        status, headers, data = request(self.store.server, self.command, self.path, dict(self.headers), body)
        if is_harmed and self.store.change and "/blobs/" in self.path:
            data = self.store.change(data)
        self._answer(status, headers, data, is_cut=is_harmed and self.store.cut)

    def _answer(self, status: int, headers: dict[str, str], data: bytes, *, is_cut: bool = False) -> None:
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in ("content-length", "connection", "transfer-encoding"):
                self.send_header(name, value)
        is_head = self.command == "HEAD"
        length = headers.get("Content-Length", "0") if is_head else str(len(data))
        self.send_header("Content-Length", length)
        self.end_headers()
        with contextlib.suppress(OSError):
            if not is_head:
                self.wfile.write(data[: len(data) // 2] if is_cut else data)
        if is_cut:
            self.close_connection = True

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_any  # noqa: N815


@contextlib.contextmanager
def moto_server(folder: Path) -> Iterator[BrokerAddress]:
    """Run moto's server with an empty bucket."""
    address = free_address()
    command = [sys.executable, "-m", "moto.server", "-H", address.host, "-p", str(address.port)]
    with (folder / "moto.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _is_ready(address):
            assert process.poll() is None, (folder / "moto.log").read_text()
            assert time.monotonic() < deadline, "moto's server did not start"
            time.sleep(0.05)
        assert request(address, "PUT", f"/{BUCKET}", SIGNED, b"")[0] == 200
        yield address
    finally:
        process.kill()
        process.wait()


def fleet_credentials(server: BrokerAddress, fleets: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Return an access key and its secret for each fleet, with the rights of deploy/s3-fleet-policy.json.

    From now on the server verifies signatures, and rights on objects; it ignores conditions of policies.
    """
    import boto3  # type: ignore[import-untyped]

    policy = Path("deploy/s3-fleet-policy.json").resolve().read_text(encoding="utf-8")
    endpoint = f"http://{server.host}:{server.port}"
    iam = boto3.client(
        "iam",
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id="x",
        aws_secret_access_key="x",
    )
    found = {}
    for fleet in fleets:
        iam.create_user(UserName=fleet)
        document = policy.replace("BUCKET", BUCKET).replace("FLEET", fleet)
        iam.put_user_policy(UserName=fleet, PolicyName="fleet", PolicyDocument=document)
        key = iam.create_access_key(UserName=fleet)["AccessKey"]
        found[fleet] = key["AccessKeyId"], key["SecretAccessKey"]
    text = {"Content-Type": "text/plain"}
    assert request(server, "POST", "/moto-api/reset-auth", text, b"0")[0] == 200
    return found


def _is_ready(address: BrokerAddress) -> bool:
    with contextlib.suppress(OSError):
        urllib.request.urlopen(f"http://{address.host}:{address.port}/moto-api/", timeout=10).close()
        return True
    return False


@contextlib.contextmanager
def object_store(server: BrokerAddress, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    """Put a proxy before a server, and set the variables that lead to it."""
    store = ObjectStore(server)
    monkeypatch.setenv("AWS_ENDPOINT_URL", store.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "fleet")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "do-not-log-this")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    try:
        yield store
    finally:
        store.close()
