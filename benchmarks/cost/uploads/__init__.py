"""Uploads: the aggregator beside other receivers, several receivers, and PostgreSQL beside SQLite."""
