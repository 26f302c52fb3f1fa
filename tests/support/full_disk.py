"""A file on a disk that is full."""

from __future__ import annotations

import errno
import os
from typing import NoReturn


class FullDisk:
    """What `open` gives where the disk is full; the descriptor is closed as a file's is."""

    def __init__(self, descriptor: int, mode: str) -> None:
        self.descriptor = descriptor

    def __enter__(self) -> FullDisk:
        return self

    def __exit__(self, *details: object) -> None:
        os.close(self.descriptor)

    def write(self, data: bytes) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")
