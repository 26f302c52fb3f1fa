"""One thread at a time captures, quietly, and leaves the process as it found it."""

from __future__ import annotations

import sys
import warnings
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
import torch
from torch import nn

from ampopt.ir.capturing import capturing
from ampopt.system import turns

MOMENT_S, LONG_S = 0.2, 10.0
"""How long one is watched that has to wait, and how long one may take that has not."""


def capture_nothing() -> None:
    with capturing():
        pass


def test_another_thread_waits_until_this_one_has_captured() -> None:
    with ThreadPoolExecutor(1) as pool:
        with capturing():
            other = pool.submit(capture_nothing)
            assert not wait([other], timeout=MOMENT_S).done
        other.result(timeout=LONG_S)


def test_a_capture_within_a_capture_does_not_wait_for_itself() -> None:
    with capturing(), capturing():
        pass
    with ThreadPoolExecutor(1) as pool:
        pool.submit(capture_nothing).result(timeout=LONG_S)


def test_calls_of_what_is_captured_already_do_not_wait() -> None:
    model = nn.ReLU()
    with ThreadPoolExecutor(1) as pool, capturing():
        assert pool.submit(model, torch.ones(1)).result(timeout=LONG_S) == 1


def test_a_capture_that_fails_gives_the_turn_on() -> None:
    with pytest.raises(ZeroDivisionError), capturing():
        raise ZeroDivisionError
    with ThreadPoolExecutor(1) as pool:
        pool.submit(capture_nothing).result(timeout=LONG_S)
    assert turns.capturing._holder is None


def test_it_is_silent(capfd: pytest.CaptureFixture[str]) -> None:
    with capturing():
        warnings.warn("an exporter's", UserWarning, stacklevel=1)
        print("and a compiler's", file=sys.stderr)
    assert capfd.readouterr() == ("", "")
