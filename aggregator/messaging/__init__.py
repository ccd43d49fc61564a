"""What the aggregator publishes, and the brokers that it can run or watch."""
