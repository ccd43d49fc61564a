"""Hides psycopg from tests and the programs that they start."""

raise ModuleNotFoundError("hidden by make test-fast", name="psycopg")
