"""Figures that devices and the aggregator compute alike. Imports `wire` and `errors`."""
