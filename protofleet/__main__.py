"""`python -m protofleet`."""

from protofleet.cli import main

main()
