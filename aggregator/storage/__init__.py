"""The aggregator's state directory: SQLite tables, migrations and device keys."""
