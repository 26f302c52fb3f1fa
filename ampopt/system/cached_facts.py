"""Facts on disk that are dear to find out, as JSON in the cache folder, by a hash of all that they depend on.

Facts are what JSON holds: numbers, texts, lists, and dicts with texts as keys. Files are small, written
atomically, and have a checksum; a damaged one is removed. A cache that fails acts as an empty one.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from ampopt.system.cache_folder import drop, keep, kept

SCHEMA = 3


def find(folder: Path, key: str) -> Any:
    """What was stored under a key, a SHA-256 in hexadecimal; None if nothing was, or the file is damaged."""
    file = _file(folder, key)
    try:
        if (found := kept(file)) is None:
            return None
        data = json.loads(found.decode())
        if data["schema"] != SCHEMA or data["sha256"] != _checksum(key, data["facts"]):
            raise ValueError("damaged")
        return data["facts"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        drop(file)
        return None


def store(folder: Path, key: str, facts: Any) -> None:
    """Store facts under a key, replacing what was there; the least recently used files are removed.

    Raises TypeError for facts that JSON does not hold.
    """
    data = {"schema": SCHEMA, "facts": facts, "sha256": _checksum(key, facts)}
    keep(_file(folder, key), json.dumps(data).encode())


def forget(folder: Path, key: str) -> None:
    """Remove what was stored under a key, because it is no good."""
    drop(_file(folder, key))


def _file(folder: Path, key: str) -> Path:
    return folder / f"{key}.json"


def _checksum(key: str, facts: Any) -> str:
    return hashlib.sha256((key + json.dumps(facts, sort_keys=True)).encode()).hexdigest()
