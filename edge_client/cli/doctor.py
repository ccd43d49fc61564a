"""`edge-client doctor`."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edge_client.cli.options import member_options, open_state
from protocol.cli import examples, read_access

if TYPE_CHECKING:
    from collections.abc import Iterator

    from edge_client.config import Settings
    from edge_client.store.device_state import DeviceState
    from protocol.doctor.findings import Finding


@click.command(
    "doctor",
    epilog=examples(
        "edge-client doctor --broker broker.example --data /srv/images",
        "edge-client doctor --config /etc/protofleet/edge-client.toml --json",
    ),
)
@member_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def doctor_command(context: click.Context, /, *, as_json: bool, **options: Any) -> None:
    """Check the connection, clock, disk, images and libraries.

    Of the connection: broker, TLS, login, access list, packet limit and the aggregator's key. Takes the options of
    `run`, changes nothing, and says what to do. The exit status is 1 if a check failed; warnings leave it 0.
    Programs ignore what it publishes.
    """
    from protocol.doctor.findings import report

    settings, store, folder = _settings(**options)
    context.exit(report(_findings(settings, store, folder), as_json=as_json))


def _findings(settings: "Settings", store: "DeviceState | None", folder: Path) -> "Iterator[Finding]":
    from edge_client.doctor.fleet import FleetChecks
    from edge_client.doctor.machine import check_images, check_runtime, check_state, stored_task
    from protocol.doctor.machine import check_clock

    yield from check_state(folder, store)
    yield check_clock(known_s=settings.identity.enrolled_s, source="the enrollment")
    fleet = FleetChecks(settings, store)
    yield from fleet.run()
    task = fleet.task or stored_task(store)
    yield from check_images(settings.data, task)
    yield check_runtime()


def _settings(
    *, enrollment: Path | None, broker: str | None, data: Path, fleet: str | None, device_id: str | None,
    state: Path | None, aggregator_key: bytes | None, **access_given: Any,
) -> "tuple[Settings, DeviceState | None, Path]":  # fmt: skip
    from edge_client.config import membership
    from edge_client.core.state import Mode
    from edge_client.store.device_state import default_device_id
    from edge_client.store.stored_values import DeviceName
    from protocol.storage.state_folder import default_state_folder

    member = membership(
        enrollment,
        broker=broker,
        fleet=fleet,
        device_id=device_id,
        access=read_access(**access_given),
        aggregator_key=aggregator_key,
    )
    folder = state or default_state_folder(f"protofleet/{member.fleet}")
    store = None
    if (folder / "device.sqlite").exists():
        store = open_state(folder, member.fleet, read_only=True)
    stored = store.get(DeviceName).value if store is not None else ""
    settings = member.settings(
        device_id=member.device_id or stored or default_device_id(folder),
        mode=Mode.DRY_RUN,
        data=data,
    )
    return settings, store, folder
