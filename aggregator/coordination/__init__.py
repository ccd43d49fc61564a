"""Pure decisions: when a collection or round closes, and which head the fleet uses."""
