"""Programs past one machine: what doctor reports, what a start needs, and what the HTTP server reads again."""

import asyncio
import contextlib
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from aggregator.cli import cli
from aggregator.cluster_modules import BLOBS, DATABASES, cluster_module
from aggregator.http import snapshots
from aggregator.http.snapshots import Snapshots
from aggregator.messaging.manifest_signer import identity_of
from aggregator.storage.open_store import open_store
from aggregator.storage.stored_values import SigningKey
from protocol.errors import RuntimeMissing
from protocol.wire.signing import public_key
from tests.support.databases.postgresql import PostgreSQL
from tests.support.fleets.aggregator_process import PROGRAM, run_aggregator, write_task
from tests.support.fleets.closed_fleet import findings, statuses
from tests.support.messages.submissions import SERVED
from tests.support.stores.object_store import BUCKET, moto_server, object_store


@pytest.mark.parametrize(
    ("modules", "name", "library"),
    [(DATABASES, "postgresql://h/d", "psycopg"), (BLOBS, "s3://bucket", "obstore")],
)
def test_missing_library_is_an_error_that_names_the_extra(
    modules: dict[str, str], name: str, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    for each in [each for each in sys.modules if each.startswith("aggregator.cluster.")]:
        monkeypatch.delitem(sys.modules, each)
    with pytest.raises(
        RuntimeMissing, match=rf"{library} is not installed: pip install .*\[aggregator,cpu,cluster\]"
    ):
        cluster_module(modules, name)


def test_ray_needs_the_address_of_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program ends before its first training would fail."""
    pytest.importorskip("torch")
    pytest.importorskip("ray")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    task = write_task(tmp_path, '[training]\nengine = "ray"')
    done = run_aggregator("run", "--task", str(task), "--state", str(tmp_path / "state"), program=PROGRAM)
    assert (done.returncode, (tmp_path / "state").exists()) == (1, False)
    assert done.stderr.endswith('error: engine = "ray" needs a cluster: set RAY_ADDRESS=HOST:PORT\n')


def test_database_and_object_store_are_checked(
    tmp_path: Path, postgresql: PostgreSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the service's configuration file names them, before the first start and after it; nothing is created."""
    config = tmp_path / "aggregator.toml"
    config.write_text(
        f'task = "{write_task(tmp_path)}"\nstate = "{tmp_path}/new"\nbroker = "127.0.0.1:9"\n'
        f'store = "{postgresql.url}"\nblobs = "s3://{BUCKET}/barn"\nhttp = "off"\n'
    )
    given = ["doctor", "--config", str(config)]
    with moto_server(tmp_path) as address, object_store(address, monkeypatch):
        _, found = findings(cli, *given)
        assert (statuses(found)["state"], statuses(found)["blobs"]) == ("ok", "ok"), found
        assert "no aggregator state in fleet_barn" in found["state"][0]["text"]
        _, found = findings(cli, *given, "--blobs", "s3://no-such-bucket/barn")
        assert statuses(found)["blobs"] == "failed"
        assert "the bucket does not exist" in found["blobs"][0]["text"]
    assert not (tmp_path / "new").exists()
    with contextlib.closing(open_store(tmp_path / "other", database=postgresql.url, fleet="barn")) as store:
        store.facts.put(SigningKey(public_key(identity_of(store.folder)).hex()))
    _, found = findings(cli, *given)
    assert "not running" in found["state"][0]["text"]
    assert "copy the folder identity" in found["folder"][0]["text"]
    _, found = findings(cli, *given, "--store", "postgresql://127.0.0.1:9/none")
    assert statuses(found)["state"] == "failed"
    _, found = findings(
        cli, "doctor", "--state", str(tmp_path / "new"), "--store", "postgresql://db.example/fleets"
    )
    assert found["state"][0]["text"].endswith("give --task")  # it names the fleet


def test_state_in_postgresql_is_read_again_only_when_it_has_changed(
    tmp_path: Path, postgresql: PostgreSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another program; the start and the end of the aggregator are changes, too."""
    monkeypatch.setattr(snapshots, "POLL_S", 0)
    monkeypatch.setattr(snapshots, "REST", 0)

    async def compare() -> None:
        read = Snapshots(tmp_path)
        with contextlib.closing(
            open_store(tmp_path, database=postgresql.url, fleet=tmp_path.name, lock=True)
        ) as store:
            store.facts.put(SERVED)
            first = await read.current()
            assert first.status is not None
            assert first.status.running
            assert await read.current() is first
            store.facts.put(SigningKey("00"))
            second = await read.current()
            assert second.status is not None
            assert second.status.aggregator_key == "00"
            assert await read.current() is second
        # PostgreSQL releases the lock of the closed connection when it notices the end, some milliseconds later.
        while (third := await read.current()).status is None or third.status.running:
            pass
        await read.end()

    with ThreadPoolExecutor(1) as pool:  # a browser's tests leave a running event loop in this thread
        pool.submit(asyncio.run, compare()).result()
