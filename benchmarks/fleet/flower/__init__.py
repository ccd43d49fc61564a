"""The fleet beside Flower: FedAvg and FedProx of the same head on the same features."""
