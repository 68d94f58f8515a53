"""Checksums that many processes make together: a hash over the hashes of a file's blocks."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

HASHED_BYTES = 16 << 20
"""Bytes under one hash of a file's checksum."""


@dataclass(frozen=True)
class HashTask:
    """Hashes of consecutive blocks of a file from byte `start` on, `blocks` of them."""

    path: str
    start: int
    blocks: int


def hash_blocks(task: HashTask) -> bytes:
    """The SHA-256 of each block, one after the other."""
    digests = b""
    with open(task.path, "rb") as file:
        file.seek(task.start)
        for _ in range(task.blocks):
            digests += hashlib.sha256(file.read(HASHED_BYTES)).digest()
    return digests


def hash_tasks(path: Path, blocks: int = 16) -> list[HashTask]:
    """Tasks that together hash a whole file, in order."""
    total = -(-path.stat().st_size // HASHED_BYTES)
    return [
        HashTask(str(path), start * HASHED_BYTES, min(blocks, total - start))
        for start in range(0, total, blocks)
    ]
