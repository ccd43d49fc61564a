"""Programs that receive the uploads of a part of the devices, and know the aggregator only through the store."""
