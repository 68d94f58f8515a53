"""Figures that are drawn to files: without a display, and without pyplot's state."""

from __future__ import annotations

import logging
import os
from typing import Any

log = logging.getLogger(__name__)


def new_figure(width: float, height: float) -> Any | None:
    """A figure of `width` x `height` inches; None, with a warning, where matplotlib is missing."""
    # Importing matplotlib reads the backend's name and raises for one that this Python does not
    # have: a notebook names its own to all commands that it starts. None is needed here.
    backend = os.environ.pop("MPLBACKEND", None)
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        log.warning("no plots: matplotlib is not installed (pip install matplotlib)")
        return None
    finally:
        if backend is not None:
            os.environ["MPLBACKEND"] = backend
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure
