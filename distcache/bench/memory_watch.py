"""The most memory that this process and its children take together, while watched."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path

_EVERY_S = 0.1
_PSS = re.compile(r"^(Pss|Pss_Anon):\s+(\d+) kB", re.MULTILINE)


class MemoryWatch:
    """Peaks over the time in which it is open, in bytes; Linux alone (elsewhere they stay 0).

    `peak`: all memory, shared pages divided among the processes that share them; `peak_own`:
    without pages of files, which the system takes back when it needs them.
    """

    def __init__(self) -> None:
        self.peak = self.peak_own = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(_EVERY_S):
            total, own = 0, 0
            for process in family(os.getpid()):
                found = dict(_PSS.findall(_read(f"/proc/{process}/smaps_rollup")))
                total += int(found.get("Pss", 0)) << 10
                own += int(found.get("Pss_Anon", 0)) << 10
            self.peak, self.peak_own = max(self.peak, total), max(self.peak_own, own)


def family(process: int) -> list[int]:
    """A process and all its descendants."""
    found = [process]
    for task in Path(f"/proc/{process}/task").glob("*"):
        for child in _read(str(task / "children")).split():
            found += family(int(child))
    return found


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
