"""Batches and where they come from: synthetic, Criteo, Parquet, interactions, your own."""
