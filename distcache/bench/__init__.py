"""Measurements: `python -m distcache.bench.<name> [key=value ...]`; `--help` shows the keys."""
