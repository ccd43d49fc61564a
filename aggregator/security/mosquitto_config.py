"""What a mosquitto broker of a closed fleet is told: its configuration, and who may read and write what. Pure."""

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
"""Where the configuration expects what `aggregator enroll-broker` writes."""

LOG = "/var/log/mosquitto/protofleet.log"
"""Where it has the broker say what it does."""

CONFIGURATION = f"""\
# mosquitto for a closed fleet: encrypted, and open to nobody without a certificate of the fleet's own authority.
# `aggregator enroll-broker` writes this file and all that it names; docs/security.md says how to install them.
#
# It is a whole configuration: use it in the place of /etc/mosquitto/mosquitto.conf, not beside it in conf.d
# (mosquitto refuses a setting that is given twice).

listener 8883
cafile {FOLDER}/ca.crt
certfile {FOLDER}/broker.crt
keyfile {FOLDER}/broker.key

# Who may no longer connect. After a change: systemctl restart mosquitto, which ends their connections as well.
crlfile {FOLDER}/revoked.crl

# The name in the certificate is who somebody is, whatever they say. It is their client id too, or else one device
# could end another one's connection by taking its id.
allow_anonymous false
require_certificate true
use_identity_as_username true
use_username_as_clientid true
acl_file {FOLDER}/acl

# Encrypted, a connection begins with small packets, and each would wait 40 ms for the one before.
set_tcp_nodelay true

# The task, the head and everybody's presence are retained messages. They outlive a crash of the broker only if
# they were saved: here at most 10 seconds ago.
persistence true
persistence_location /var/lib/mosquitto/
autosave_interval 10

# What waits for one subscriber, and what the aggregator gets before it has acknowledged anything; mosquitto.conf
# says why.
max_queued_messages 20000
max_queued_bytes 536870912
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


def aggregator_name(fleet: str) -> str:
    """Who the aggregator is to the broker; no device can be called so."""
    return f"aggregator@{fleet}"


def access_list(fleet: str) -> str:
    """Mosquitto's list of who may read and write what, by the name in their certificate or their user name."""
    shared, device = fleet_topic(fleet, "state").removesuffix("/state"), f"pf/{PROTOCOL_VERSION}/{fleet}/d"
    to_devices = [channel for channel in get_args(DeviceChannel) if channel not in FROM_DEVICES]
    # One by one: with a wildcard, a device could leave any number of retained messages with the broker.
    tails = {"up": [f"up/{shard}" for shard in range(SHARDS)]}
    writes = [f"write {device}/%u/{tail}" for each in FROM_DEVICES for tail in tails.get(each, [each])]
    reads = [f"read {device}/%u/{channel}" for channel in ("state", *to_devices)]
    own = [channel for channel in get_args(FleetChannel) if channel != "state"]
    lines = [
        "# Every device: what concerns the whole fleet, and its own topics. (mosquitto warns of the first line, for",
        "# it is the same for all of them.)",
        f"pattern read {shared}/+",
        *(f"pattern {line}" for line in [*writes, *reads]),
        "",
        "# The aggregator: what devices say, its answers, and what it says to the whole fleet.",
        f"user {aggregator_name(fleet)}",
        *(f"topic read {topic}" for topic in device_filters(fleet)),
        *(f"topic write {device}/+/{channel}" for channel in to_devices),
        *(f"topic write {fleet_topic(fleet, channel)}" for channel in own),
        f"topic readwrite {fleet_topic(fleet, 'state')}",
    ]
    return "\n".join(lines) + "\n"
