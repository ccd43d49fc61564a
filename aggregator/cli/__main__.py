"""`python -m aggregator.cli`."""

from aggregator.cli import main

main()
