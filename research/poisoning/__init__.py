"""Attacks on the training of heads and local models: false uploads, and what detecting them costs."""
