"""Review of a device's images by a person: what the fleet's head finds suspicious, as a list and as a page."""
