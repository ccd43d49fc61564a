"""Configuration and access list of the mosquitto broker of a closed fleet."""

from typing import get_args

from protocol.wire.messages import PROTOCOL_VERSION
from protocol.wire.topics import (
    FROM_DEVICES,
    SHARDS,
    DeviceChannel,
    FleetChannel,
    device_filters,
    fleet_topic,
)

FOLDER = "/etc/mosquitto/protofleet"
"""Folder of the files that `aggregator enroll-broker` writes, on the broker's machine."""

LOG = "/var/log/mosquitto/protofleet.log"
"""The broker's log file."""

SECOND_OPERATOR = "second-operator"
"""Name of the second operator at the broker."""

CONFIGURATION = f"""\
# mosquitto for a closed fleet: TLS, and client certificates issued by the fleet's CA.
# `aggregator enroll-broker` writes this file and the files that it names; docs/security.md explains their installation.
#
# This is a complete configuration: use it as /etc/mosquitto/mosquitto.conf, not beside it in conf.d (mosquitto
# refuses a setting that is given twice).

listener 8883
cafile {FOLDER}/ca.crt
certfile {FOLDER}/broker.crt
keyfile {FOLDER}/broker.key

# Certificate revocation list. After a change: systemctl restart mosquitto, which also closes open connections.
crlfile {FOLDER}/revoked.crl

# The certificate's common name is the user name. It is also the client id: otherwise a device could disconnect
# another device by connecting with its id.
allow_anonymous false
require_certificate true
use_identity_as_username true
use_username_as_clientid true
acl_file {FOLDER}/acl

# TLS begins with small packets, each of which would wait 40 ms for the previous one.
set_tcp_nodelay true

# Task, head and presence are retained messages. They survive a crash of the broker only if they were saved,
# here every 10 seconds.
persistence true
persistence_location /var/lib/mosquitto/
autosave_interval 10

# Limits of the queues and packets; mosquitto.conf explains the values.
max_queued_messages 20000
max_queued_bytes 134217728
memory_limit 2147483648
persistent_client_expiration 1h
max_inflight_messages 256
max_packet_size 262144

# Refused connections are logged as notice and error; denied publications only as debug, a few lines for each
# message. docs/security.md shows what to look for, and how to keep the file small.
log_dest file {LOG}
log_type error
log_type warning
log_type notice
log_type debug
connection_messages false
"""


def folder_of(fleet: str) -> str:
    """Return the folder of the files on the broker's machine, for a mosquitto of the fleet's own beside others."""
    return f"/etc/mosquitto/{fleet}"


def own_configuration(fleet: str, port: int) -> str:
    """Return the configuration of a mosquitto of the fleet's own beside others, which no path is shared with."""
    text = CONFIGURATION.replace("listener 8883", f"listener {port}")
    for shared, own in (
        (FOLDER, folder_of(fleet)),
        (LOG, f"/var/log/mosquitto/{fleet}.log"),
        ("/var/lib/mosquitto/", f"/var/lib/mosquitto/{fleet}/"),
        (
            "use it as /etc/mosquitto/mosquitto.conf, not",
            "the unit mosquitto@.service runs it. Do not use it",
        ),
    ):
        text = text.replace(shared, own)
    return text


def user_name(program: str, fleet: str) -> str:
    """Return the user name at the broker of `aggregator` or SECOND_OPERATOR, which is not a valid device name."""
    return f"{program}@{fleet}"


def access_list(fleet: str) -> str:
    """Return mosquitto's access control list (acl_file) for a fleet."""
    shared, device = fleet_topic(fleet, "state").removesuffix("/state"), f"pf/{PROTOCOL_VERSION}/{fleet}/d"
    to_devices = [channel for channel in get_args(DeviceChannel) if channel not in FROM_DEVICES]
    # Without wildcards, because a device could otherwise store any number of retained messages on the broker.
    tails = {"up": [f"up/{shard}" for shard in range(SHARDS)]}
    writes = [f"write {device}/%u/{tail}" for each in FROM_DEVICES for tail in tails.get(each, [each])]
    reads = [f"read {device}/%u/{channel}" for channel in ("state", *to_devices)]
    request, reply = fleet_topic(fleet, "sums/request"), fleet_topic(fleet, "sums/reply")
    own = [channel for channel in get_args(FleetChannel) if channel != "state"]
    lines = [
        "# Devices: the fleet's topics and their own. (mosquitto warns that the first line has no %u.)",
        f"pattern read {shared}/+",
        *(f"pattern {line}" for line in [*writes, *reads]),
        "",
        "# Aggregator: read from devices, write to devices and to the fleet's topics.",
        f"user {user_name('aggregator', fleet)}",
        *(f"topic read {topic}" for topic in device_filters(fleet)),
        *(f"topic write {device}/+/{channel}" for channel in to_devices),
        *(f"topic write {fleet_topic(fleet, channel)}" for channel in own),
        f"topic readwrite {fleet_topic(fleet, 'state')}",
        f"topic write {request}",
        f"topic read {reply}",
        "",
        "# Second operator, with a certificate of `aggregator enroll-sums`.",
        f"user {user_name(SECOND_OPERATOR, fleet)}",
        f"topic read {request}",
        f"topic write {reply}",
    ]
    return "\n".join(lines) + "\n"
