"""What rows of benchmarks say."""

from __future__ import annotations

import pytest

from benchmarks.results_files import told


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('File "/home/me/benchmarks/by_hand.py", line 43', 'ValueError: File "by_hand.py", line 43'),
        ("1/2 of it, at 3 GB/s", "ValueError: 1/2 of it, at 3 GB/s"),
        ("x" * 400, "ValueError: " + "x" * 288),
    ],
)
def test_a_failure_names_files_without_the_folders_of_a_machine(text: str, said: str) -> None:
    assert told(ValueError(text)) == said
