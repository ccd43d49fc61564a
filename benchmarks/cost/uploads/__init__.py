"""Uploads: how fast the aggregator stores them, and PostgreSQL beside SQLite."""
