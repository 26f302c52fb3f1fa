"""Atomic file writes: a reader sees the old file or the new one, even if the writer is killed.

All of ampopt's file replacements use this module. A new file is written to the target's folder under a
temporary name, synced to disk, and moved to its place by one rename within the file system. It takes over the
permissions of what it replaces, and has no others while it is written.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

SUFFIX = ".ampopt-save"
"""Suffix of temporary names, also of leftovers from killed processes."""

_TURN = "turn-to-replace-"
"""In the place of a temporary name's own digits: the file whose lock is the turn to replace several files."""

_MOST_WAITS = 1000
"""How often a process waits for its turn: each time another one, which waited too, has had it."""

_NOT_OURS = (errno.EACCES, errno.EPERM, errno.ELOOP, errno.EISDIR, errno.ENXIO)
"""Errors of opening what another user, or no save, has put in the lock's place."""

_IS_POSIX = os.name == "posix"
"""Elsewhere there are no locks to tell leftovers by, and no folders that can be opened."""

_RENAME_EXCHANGE = 2  # linux/fs.h
_AT_FDCWD = -100  # linux/fcntl.h


@contextlib.contextmanager
def replacing(target: Path, *, folder: bool = False) -> Iterator[Path]:
    """Yield the path of a new empty file or folder; after the block it replaces `target`.

    The block must write to this file, and not move another one to its place. A folder that is not empty
    cannot be replaced by a rename: the two are exchanged by renameat2(RENAME_EXCHANGE), one atomic step, and
    the old one is removed afterwards. A link to versioned folders would be as atomic, but then `target` would
    not be a folder, and copying it would lose its content.

    If the block raises, `target` does not change. Leftovers of killed processes are removed first. Raises
    OSError; for a folder also on Windows, and if `target` exists, on systems other than Linux and on file
    systems without exchange (network and FAT file systems).
    """
    if folder and not _IS_POSIX:
        raise OSError(errno.ENOTSUP, "saving a folder needs Linux or macOS")
    mode = _mode_of(target, folder)
    with _beside(target, folder) as temporary:
        _permit(temporary, mode, stat.S_IRWXU)
        yield temporary
        _flush(temporary)
        _permit(temporary, mode)
        if folder and target.exists():
            _exchange(temporary, target)
        else:
            os.replace(temporary, target)
        _sync_folder(target.parent)


@contextlib.contextmanager
def replacing_together(target: Path, *companions: Path) -> Iterator[Path]:
    """Yield a new empty folder; files that the block writes in it replace those of the same names.

    All are in one folder; `target` must be written, companions may be. One file is replaced in one step. For
    several files the old target is removed first, the companions are replaced next, and the new target comes
    last. If the process is killed in between, there is no target, but never one with another's companions.
    Processes that do this with one target do it one after the other, but for systems without locks, and where
    what another user left, or a link, is in the lock's place. Whoever has opened the old target before, and
    opens a companion after, reads the new one. A new companion has the target's permissions. Raises OSError.
    """
    modes = {each: _mode_of(each, folder=False) for each in (target, *companions)}
    with _beside(target, folder=True) as temporary:
        _permit(temporary, stat.S_IRWXU)
        yield temporary
        _flush(temporary)
        written = [each for each in companions if (temporary / each.name).exists()]
        for each in (*written, target):
            _permit(temporary / each.name, modes[target] if modes[each] is None else modes[each])
        with _one_at_a_time(target):
            if written:
                target.unlink(missing_ok=True)
            for each in (*written, target):
                os.replace(temporary / each.name, each)
        _sync_folder(target.parent)


def create(path: str | Path, content: bytes, mode: int) -> None:
    """Write a file that does not exist yet; if writing fails, nothing of it remains.

    `mode`: its permissions, less the process's umask. Raises OSError, including FileExistsError.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
    except BaseException:
        os.unlink(path)
        raise


def also_named(file: Path, *names: Path) -> None:
    """Give a file more names in its file system; one that is taken is left to what has it. Raises OSError."""
    for name in names:
        with contextlib.suppress(FileExistsError):
            os.link(file, name)


@contextlib.contextmanager
def _beside(target: Path, folder: bool) -> Iterator[Path]:
    """A new file or folder beside `target`, locked during the block; what is still there then is removed."""
    if not _IS_POSIX:
        temporary = _new_name(target)
        try:
            temporary.mkdir() if folder else temporary.touch(exist_ok=False)
            yield temporary
        finally:
            _remove(temporary)
        return
    _remove_leftovers(target)
    temporary, lock = _create(target, folder)
    try:
        yield temporary
    finally:
        _remove(temporary)  # the new one if something failed, after an exchange the old one
        os.close(lock)


@contextlib.contextmanager
def _one_at_a_time(target: Path) -> Iterator[None]:
    """Run the block while no other process runs its own for the same target, where it gets a turn.

    The lock is a file beside the target, which goes with the block; of a killed process it is a leftover,
    which nobody waits for.
    """
    path = target.with_name(f".{target.name}.{_TURN}{SUFFIX}")
    descriptor = _turn(path) if _IS_POSIX else None
    if descriptor is None:
        yield
        return
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)
        os.close(descriptor)


def _turn(path: Path) -> int | None:
    """Wait for the lock of a file that is at its place then; a descriptor that holds it.

    None without a turn: what is there may not be opened (another user's file) or is no file (a link, a
    folder), or others have removed it again and again.
    """
    import fcntl

    for _ in range(_MOST_WAITS):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        except OSError as e:
            if e.errno in _NOT_OURS:
                return None
            raise
        try:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is_at(path, descriptor):  # else whom this waited for has removed it
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
    return None


def _mode_of(target: Path, folder: bool) -> int | None:
    """The permissions that what replaces `target` takes over; None if nothing of its kind is there.

    Of another user's file those to write stay behind: it becomes ours, and others could change it.
    """
    with contextlib.suppress(OSError):
        status = os.lstat(target)
        if (stat.S_ISDIR if folder else stat.S_ISREG)(status.st_mode):
            is_ours = not _IS_POSIX or status.st_uid == os.geteuid()
            return status.st_mode & (0o777 if is_ours else 0o755)
    return None


def _permit(path: Path, mode: int | None, also: int = 0) -> None:
    """Set permissions, if there are any to set, where the file system has them."""
    if mode is not None:
        with contextlib.suppress(OSError):
            path.chmod(mode | also)


def _new_name(target: Path) -> Path:
    return target.with_name(f".{target.name}.{secrets.token_hex(8)}{SUFFIX}")


def _create(target: Path, folder: bool) -> tuple[Path, int]:
    """A new file or folder with a name of its own, and a descriptor that holds its lock.

    The lock tells whose process lives: the system frees it with the process, and no reused process number,
    other container or other machine is mistaken for the owner.
    """
    while True:
        temporary, is_made = _new_name(target), False
        # Another process that removes leftovers may be there before the lock: then begin again.
        try:
            if folder:
                temporary.mkdir()
                is_made = True
            flags = os.O_RDONLY | os.O_DIRECTORY if folder else os.O_WRONLY | os.O_CREAT | os.O_EXCL
            descriptor = os.open(temporary, flags, 0o666)
        except BaseException as e:
            if not (is_made and isinstance(e, FileNotFoundError) and target.parent.is_dir()):
                _remove(temporary)
                raise
            continue
        if locked(descriptor) is not False and _is_at(temporary, descriptor):
            return temporary, descriptor
        os.close(descriptor)


def locked(descriptor: int) -> bool | None:
    """Try to take the lock: True on success, False if another process holds it, None if unsupported."""
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def remove_unless_written(path: Path) -> bool:
    """Remove a temporary file, unless a living process holds its lock; whether it was removed.

    It is removed under the lock: who has just made it notices, and begins again. Raises OSError.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK) if _IS_POSIX else None
    except OSError:  # no file, or one that may not be read: no process of this user writes it
        descriptor = None
    try:
        if descriptor is not None and locked(descriptor) is False:
            return False
        path.unlink()
        return True
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _remove_leftovers(target: Path) -> None:
    """Remove what killed processes left beside `target`: named as here, this user's, and locked by nobody."""
    try:
        names = os.listdir(target.parent)
    except PermissionError:  # it may be written but not read
        return
    for name in names:
        token = name.removeprefix(f".{target.name}.").removesuffix(SUFFIX)
        if name != f".{target.name}.{token}{SUFFIX}" or len(token) != 16:
            continue
        path = target.with_name(name)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            continue  # another user's, or just removed by another process
        try:
            if os.fstat(descriptor).st_uid == os.geteuid() and locked(descriptor):
                _remove(path)
        finally:
            os.close(descriptor)


def _remove(path: Path) -> None:
    """Remove a file or a flat folder. What cannot be removed stays, for the next save to try again."""
    with contextlib.suppress(OSError):
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            os.unlink(path)
            return
        for name in os.listdir(path):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path / name)
        os.rmdir(path)


def _flush(path: Path) -> None:
    """Wait until a file, or a flat folder and its files, are on the disk."""
    if not path.is_dir():
        _fsync(path)
        return
    for name in os.listdir(path):
        _fsync(path / name)
    _sync_folder(path)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)  # Windows wants to write
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk, where the system lets one open folders for that."""
    with contextlib.suppress(PermissionError):  # it may be written but not read
        _fsync(path)


def _exchange(one: Path, other: Path) -> None:
    """Let two paths of one file system change their places in one step."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        failure = errno.ENOSYS
    else:
        paths = os.fsencode(one), os.fsencode(other)
        failed = renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE)
        failure = ctypes.get_errno() if failed else 0
    if failure in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        reason = (
            "this system cannot replace a folder at one moment: save under a new name, or as a single file"
        )
        raise OSError(failure, reason)
    if failure:
        raise OSError(failure, os.strerror(failure), str(other))
