"""`python -m edge_client.cli`."""

from edge_client.cli import main

main()
