"""A Flower app: FedTC's adapter and head, trained by FedAvg or FedProx."""
