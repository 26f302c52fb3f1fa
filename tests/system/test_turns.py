"""Turns: who has one, who waits for it, and when it is given on."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait

import pytest

from ampopt.system import turns
from ampopt.system.turns import Turn, this_thread, working_for

MOMENT_S, LONG_S = 0.2, 10.0
"""How long one is watched that has to wait, and how long one may take that has not."""


def take(*wanted: Turn) -> None:
    for turn in wanted:
        with turn.taken():
            pass


def take_for(threads: tuple[int, ...], turn: Turn) -> None:
    with working_for(threads):
        take(turn)


def has_to_wait(work: Future[None]) -> bool:
    return not wait([work], timeout=MOMENT_S).done


def test_another_thread_waits_until_the_outermost_block_has_ended() -> None:
    turn = Turn()
    with ThreadPoolExecutor(1) as pool:
        with turn.taken():
            with turn.taken():
                other = pool.submit(take, turn)
                assert has_to_wait(other)
            assert has_to_wait(other)
        other.result(timeout=LONG_S)


def test_a_block_that_raises_gives_the_turn_on() -> None:
    turn = Turn()
    with pytest.raises(ZeroDivisionError), turn.taken():
        raise ZeroDivisionError
    with ThreadPoolExecutor(1) as pool:
        pool.submit(take, turn).result(timeout=LONG_S)


def test_a_decorated_function_has_the_turn_in_every_call_and_only_then() -> None:
    turn = Turn()
    with ThreadPoolExecutor(1) as pool:

        @turn.taken()
        def work(number: int) -> tuple[int, Future[None]]:
            other = pool.submit(take, turn)
            assert has_to_wait(other)
            return number, other

        for number in (1, 2):
            found, other = work(number)
            assert found == number
            other.result(timeout=LONG_S)


def test_a_helper_of_the_holder_has_the_turn_and_one_of_another_thread_waits() -> None:
    turn, elsewhere = Turn(), threading.get_ident() + 1
    with ThreadPoolExecutor(2) as pool:
        with turn.taken():
            pool.submit(take_for, this_thread(), turn).result(timeout=LONG_S)
            pool.submit(take_for, (elsewhere, threading.get_ident()), turn).result(timeout=LONG_S)
            other = pool.submit(take_for, (elsewhere,), turn)
            assert has_to_wait(other)
        other.result(timeout=LONG_S)


def test_the_end_of_an_inner_block_leaves_the_turn_to_the_holders_helpers() -> None:
    turn = Turn()
    with ThreadPoolExecutor(1) as pool, turn.taken():
        take(turn)
        pool.submit(take_for, this_thread(), turn).result(timeout=LONG_S)


def test_a_helper_takes_a_turn_that_nobody_has_for_itself() -> None:
    turn, here = Turn(), this_thread()
    with ThreadPoolExecutor(2) as pool:

        def work() -> Future[None]:
            with working_for(here), turn.taken():
                other = pool.submit(take, turn)
                assert has_to_wait(other)
                return other

        pool.submit(work).result(timeout=LONG_S).result(timeout=LONG_S)


def test_the_threads_that_wait_are_known_in_the_block_and_in_its_thread_alone() -> None:
    here = threading.get_ident()
    assert this_thread() == (here,)
    with ThreadPoolExecutor(1) as pool:
        with working_for((1, 2)):
            assert this_thread() == (1, 2, here)
            with working_for((3,)):
                assert this_thread() == (3, here)
            with pytest.raises(ZeroDivisionError), working_for((4,)):
                raise ZeroDivisionError
            assert this_thread() == (1, 2, here)
            assert len(pool.submit(this_thread).result(timeout=LONG_S)) == 1
        assert this_thread() == (here,)


@pytest.mark.parametrize("name", ["optimizing", "capturing", "switching"])
def test_whoever_has_one_turn_leaves_the_others_free(name: str) -> None:
    known: dict[str, Turn] = {n: getattr(turns, n) for n in ("optimizing", "capturing", "switching")}
    held = known.pop(name)
    with ThreadPoolExecutor(2) as pool:
        with held.taken():
            pool.submit(take, *known.values()).result(timeout=LONG_S)
            other = pool.submit(take, held)
            assert has_to_wait(other)
        other.result(timeout=LONG_S)
