"""Answers to an image that are no class, and the states of Home Assistant that no answer may be."""

UNRECOGNIZED, UNSURE = "unrecognized", "unsure"
"""An image of no class of the fleet, and one whose class is not probable enough."""

HOME_ASSISTANT = frozenset({"None", "unavailable", "unknown"})
"""Home Assistant's own words for a sensor without a value: two states, and a payload that sets one of them."""
