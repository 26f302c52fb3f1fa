"""`python -m fuzz`: run random networks against ampopt's promises, look at one, or sum up the logs."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from fuzz import report
from fuzz.shards import TIMEOUT_S, Run, entries, perform


def _seeds(text: str) -> range:
    first, _, end = text.partition(":")
    return range(int(first), int(end)) if end else range(int(first), int(first) + 1)


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
        print(entry.pop("network", ""), entry.get("details", {}).pop("trace", ""), json.dumps(entry, indent=1), sep="\n")
        return 0
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("--kind", choices=list(TIMEOUT_S), required=True)
    parser.add_argument("--seeds", type=_seeds, required=True, help="FIRST:END")
    parser.add_argument("--out", type=Path, required=True, help="folder of the logs; seeds in them are skipped")
    parser.add_argument("--shard", default="0/1", help="I/N: every N-th seed, from the I-th on")
    parser.add_argument("--jobs", type=int, default=1, help="processes, of one thread each")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no network after so many")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    o = parser.parse_args(words)
    return min(perform(Run(o.kind, o.seeds, o.out, o.shard, o.jobs, o.seconds, o.device)), 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
