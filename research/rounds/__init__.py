"""FedPCL, FPL and rivals from their papers on the same fleets."""
