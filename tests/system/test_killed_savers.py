"""Whoever is killed while he saves leaves the old bundle or the new one."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ampopt.bundle.files import open_bundle
from ampopt.system.atomic import SUFFIX
from tests.support.bundles import FORMS, SIZE, save, version

KILLS = 100


def kill_savers(path: Path, as_folder: bool) -> None:
    """Kill one saver after the other and look at the bundle each time; print what was seen.

    The moments are drawn from a time that grows after a kill that came too early, and shrinks after another.
    Runs in a process of its own, which has no threads and no torch, so that it can fork.
    """
    last = 255
    save(path, version(last), as_folder=as_folder)
    start = time.monotonic()
    save(path, version(last), as_folder=as_folder)
    longest = time.monotonic() - start
    draw, left, new = random.Random(0), 0, 0
    for kill in range(KILLS):
        child = os.fork()
        if child == 0:
            for count in range(1000):
                save(path, version((kill * 7 + count) % 250), as_folder=as_folder)
        time.sleep(draw.random() * longest)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        left += any(name.endswith(SUFFIX) for name in os.listdir(path.parent))
        bundle = open_bundle(path)
        found = {data[0] for data in map(bundle.read, bundle.names) if data == data[:1] * len(data)}
        assert len(found) == 1, "a mix of two bundles"
        assert [len(bundle.read(name)) for name in bundle.names] == [SIZE, 10, SIZE]
        longest *= (
            1.1 if found == {last} else 1 / 1.1
        )  # about half of them saved, however fast the machine is now
        new += found != {last}
        (last,) = found
    save(path, version(255), as_folder=as_folder)
    print(left, new, len(os.listdir(path.parent)))


def save_until(step: int, path: Path, as_folder: bool) -> None:
    """Save, and die before the given look at or change of the file system; never returns."""
    count = 0

    def step_on(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal count
        count += event == "open" or event.startswith(("os.", "ctypes."))
        if count > step:
            signal.raise_signal(signal.SIGKILL)

    try:
        sys.addaudithook(step_on)
        save(path, {"a": b"1", "b": b"1"}, as_folder=as_folder)
        os._exit(0)
    finally:
        os._exit(1)


def kill_at_every_step(path: Path, as_folder: bool) -> None:
    """Kill a saver before its first step, the next one before its second; print what was there afterwards."""
    seen: list[bytes] = []
    status = None
    while status != 0:
        save(path, {"a": b"0", "b": b"0"}, as_folder=as_folder)
        assert os.listdir(path.parent) == [path.name]
        if (child := os.fork()) == 0:
            save_until(len(seen), path, as_folder)
        status = os.waitpid(child, 0)[1]
        assert status in (0, signal.SIGKILL)
        bundle = open_bundle(path)
        seen.append(bundle.read("a"))
        assert bundle.read("b") == seen[-1]
    assert seen == sorted(seen)  # the old one up to one moment, the new one from then on
    print(seen.count(b"0"), seen.count(b"1"))


@FORMS
def test_a_kill_before_any_step_leaves_the_old_bundle_or_the_new_one(as_folder: bool, tmp_path: Path) -> None:
    found = in_a_process("kill_at_every_step", tmp_path / "b", as_folder)
    assert found[0] > 5
    assert found[1] > 1


def in_a_process(function: str, path: Path, as_folder: bool) -> list[int]:
    """The numbers that a function of this file prints, in a process without threads and torch."""
    script = f"from tests.system.test_killed_savers import *; {function}(Path({str(path)!r}), {as_folder})"
    found = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    return [int(word) for word in found.stdout.split()]


@pytest.mark.slow
@FORMS
def test_a_hundred_kills_never_leave_a_mixed_or_unreadable_bundle(as_folder: bool, tmp_path: Path) -> None:
    left, new, names = in_a_process("kill_savers", tmp_path / "b", as_folder)
    assert left > KILLS // 10  # the kills did hit savers at work
    assert new > KILLS // 10  # and others when they had saved
    assert names == 1  # the last save removed what they left
