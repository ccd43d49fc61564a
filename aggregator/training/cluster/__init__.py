"""The Ray cluster: the connection to it, and the training of FedTC's adapter by its workers."""
