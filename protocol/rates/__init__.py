"""How often something is done: delays of retries, and token buckets. No clock and no randomness."""
