#!/bin/sh
# The command `aggregator` for operators: as the service's user, with the settings of aggregator.service. To install it:
#   install -m 0755 aggregator.sh /usr/local/bin/aggregator
# PGPASSWORD and AWS_* of the caller reach the program.
exec sudo -u protofleet --preserve-env=PGPASSWORD,AWS_ACCESS_KEY_ID,AWS_SECRET_ACCESS_KEY,AWS_SESSION_TOKEN,AWS_REGION,AWS_ENDPOINT_URL \
  env PROTOFLEET_STATE=/var/lib/protofleet/aggregator PROTOFLEET_TASK=/etc/protofleet/task.toml PROTOFLEET_BROKER=127.0.0.1:1883 \
  /opt/protofleet/bin/aggregator "$@"
