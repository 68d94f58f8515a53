"""Benchmarks of the package: run from a checkout, for example `python -m benchmarks.step`."""
