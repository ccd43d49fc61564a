"""The dashboard's page: static files that `aggregator run --http` serves."""
