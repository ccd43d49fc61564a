"""Numbers against papers and peers, on real data: `python -m benchmarks NAME`."""
