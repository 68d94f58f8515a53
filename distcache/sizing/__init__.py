"""Slots and placement of cached rows, decided before a run from statistics and predicted costs."""
