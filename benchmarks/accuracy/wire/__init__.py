"""Bytes that devices upload against the accuracy of the head: every algorithm, on the same data and devices."""
