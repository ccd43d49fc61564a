"""Pure decisions: when a collection or round closes, which head the fleet uses, and how much a device may count."""
