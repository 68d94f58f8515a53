"""The parts of a run: what it is built from, its order of batches, its loop and its end."""
