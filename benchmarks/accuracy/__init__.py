"""Accuracy of FedTC, FedPCL and FPL beside other ways to train."""
