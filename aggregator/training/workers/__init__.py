"""Training by programs of their own, `aggregator train`, which claim jobs from the aggregator's database."""
