"""`python -m sums_operator`."""

from sums_operator.cli import main

main()
