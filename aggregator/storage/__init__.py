"""The aggregator's state directory: typed repositories on one SQLite file, and blobs."""
