"""Compiles ampopt's C++ code as a shared library for this processor, once, on the machine where it runs."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ampopt.errors import AmpoptError
from ampopt.system.atomic import replacing
from ampopt.system.cache_folder import cache_folder, is_ours

SOURCES = Path(__file__).parent / "cpp"

FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-ffp-contract=fast",
    "-shared",
    "-fPIC",
    "-fvisibility=hidden",
)

COMPILERS = ("c++", "g++", "clang++")
"""Compilers in the order in which they are tried, after $CXX."""

MOST_SECONDS = 120.0


class CompilerError(AmpoptError):
    """There is no C++ compiler, or it cannot compile ampopt's code."""


def library(source: str, *macros: str, includes: Sequence[str] = ()) -> Path:
    """The library compiled from a file of `cpp/` with macros such as `BLOCK=8`; it is cached on disk.

    `includes`: additional include folders. Raises CompilerError.
    """
    given = (*(f"-I{folder}" for folder in includes), *(f"-D{macro}" for macro in macros))
    command = (_compiler(), *FLAGS, *given, str(SOURCES / source))
    folder = cache_folder() or Path(_own_folder().name)
    file = folder / f"{source.partition('.')[0]}-{_key(command)}.so"
    try:
        if not _is_kept(file):
            folder.mkdir(parents=True, exist_ok=True)
            _compile(command, file)
    except OSError as error:
        raise CompilerError(f"the compiled {source} cannot be kept in {folder}: {error}") from error
    return file


def _is_kept(file: Path) -> bool:
    """Whether a library is there and ours, and marked as used; another process may just be removing it."""
    try:
        if not is_ours(file):
            return False
        os.utime(file)  # the oldest go first
    except FileNotFoundError:
        return False
    return True


@functools.cache
def _own_folder() -> tempfile.TemporaryDirectory[str]:
    """For this process only, where there is no cache."""
    return tempfile.TemporaryDirectory(prefix="ampopt-")


def _compiler() -> str:
    for name in filter(None, (os.environ.get("CXX"), *COMPILERS)):
        if found := shutil.which(name):
            return found
    raise CompilerError(
        f"there is no C++ compiler: $CXX, {', '.join(COMPILERS)} are not to be found; install one of them"
    )


@functools.cache
def _key(command: tuple[str, ...]) -> str:
    """A hash of all that the library depends on: our code, the compiler, the processor."""
    digest = hashlib.sha256()
    for file in sorted(SOURCES.iterdir()):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        digest.update(subprocess.run([command[0], "--version"], capture_output=True, timeout=10).stdout)
    digest.update("\0".join([*command, platform.machine(), *_processor()]).encode())
    return digest.hexdigest()[:32]


def _processor() -> list[str]:
    """What the processor can do, as Linux tells it; a home directory may be shared by several machines."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        return sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))})
    return [platform.processor()]


def _compile(command: Sequence[str], file: Path) -> None:
    """Write the library in one step: another process may be about to do the same.

    It is compiled elsewhere and copied: a linker removes the file that it is to write, and makes another.
    """
    with replacing(file) as kept, tempfile.TemporaryDirectory(prefix="ampopt-") as folder:
        made = Path(folder) / file.name
        try:
            done = subprocess.run(
                [*command, "-o", str(made)], capture_output=True, text=True, timeout=MOST_SECONDS
            )
        except subprocess.TimeoutExpired as error:
            raise CompilerError(f"{' '.join(command)} takes longer than {MOST_SECONDS:.0f} s") from error
        if done.returncode:
            said = "\n".join(done.stderr.splitlines()[:5])
            raise CompilerError(f"{' '.join(command)} fails with status {done.returncode}: {said}")
        shutil.copyfile(made, kept)
