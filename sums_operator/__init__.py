"""The second operator's program: opens sums of masks for the aggregator, and no single one."""

import protocol as protocol  # turns the telemetry of libraries off
