"""`python -m fuzz`: run random networks against ampopt's promises, look at one, or sum up the logs.

`python -m fuzz --kind passes --seeds 0:20000 --out DIR` judges networks and logs them; again, it goes on.
`python -m fuzz short --out DIR` judges some of each kind, other ones each day, within a time.
`python -m fuzz show passes 17` judges one here, shrinks it where it has a fault, and shows it.
`python -m fuzz report DIR` sums logs up.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from pathlib import Path

from fuzz import report
from fuzz.shards import TIMEOUT_S, Run, entries, perform


def _seeds(text: str) -> range:
    first, _, end = text.partition(":")
    return range(int(first), int(end)) if end else range(int(first), int(first) + 1)


SHARES = {"passes": 0.6, "optimize": 0.2, "interrupts": 0.12}
"""Of the time of a short run; what is begun last ends a little later, which the rest is for."""


def _short(out: Path, jobs: int, seconds: float) -> int:
    """Some networks of each kind: in CI always the first ones, elsewhere others each day."""
    shutil.rmtree(out, ignore_errors=True)
    first = 0 if os.environ.get("CI") else 1_000_000 + int(time.time() // 86400) * 10_000
    for kind, share in SHARES.items():
        perform(Run(kind, range(first, first + 10_000), out, jobs=jobs, seconds=share * seconds))
    return report.write(list(entries(out)), None)


def main(words: list[str]) -> int:
    """Do what the command line says; the exit status is 1 where there are faults."""
    if words[:1] == ["report"]:
        parser = argparse.ArgumentParser(prog="python -m fuzz report", description="sum up logs")
        parser.add_argument("logs", type=Path, nargs="+", help="folders that runs have written")
        parser.add_argument("--out", type=Path, help="write NAME.json and NAME.md instead of printing")
        options = parser.parse_args(words[1:])
        return report.write([e for folder in options.logs for e in entries(folder)], options.out)
    if words[:1] == ["show"]:
        from fuzz.worker import judge

        parser = argparse.ArgumentParser(prog="python -m fuzz show", description="judge one network here")
        parser.add_argument("kind", choices=list(TIMEOUT_S))
        parser.add_argument("seed", type=int)
        options = parser.parse_args(words[1:])
        entry = judge(options.kind, options.seed, "cpu")
        print(
            entry.pop("network", ""),
            entry.get("details", {}).pop("trace", ""),
            json.dumps(entry, indent=1),
            sep="\n",
        )
        return 0
    if words[:1] == ["short"]:
        parser = argparse.ArgumentParser(prog="python -m fuzz short", description="some of each kind")
        parser.add_argument("--out", type=Path, required=True, help="folder of the logs, emptied before")
        parser.add_argument("--jobs", type=int, default=2, help="processes, of one thread each")
        parser.add_argument("--seconds", type=float, default=170.0, help="for everything")
        options = parser.parse_args(words[1:])
        return _short(options.out, options.jobs, options.seconds)
    parser = argparse.ArgumentParser(
        prog="python -m fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kind", choices=list(TIMEOUT_S), required=True)
    parser.add_argument("--seeds", type=_seeds, required=True, help="FIRST:END")
    parser.add_argument(
        "--out", type=Path, required=True, help="folder of the logs; seeds in them are skipped"
    )
    parser.add_argument("--shard", default="0/1", help="I/N: every N-th seed, from the I-th on")
    parser.add_argument("--jobs", type=int, default=1, help="processes, of one thread each")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no network after so many")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    o = parser.parse_args(words)
    return min(perform(Run(o.kind, o.seeds, o.out, o.shard, o.jobs, o.seconds, o.device)), 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
