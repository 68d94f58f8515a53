"""What the package costs, measured: run from a checkout, `python -m benchmarks.step` and others."""
