"""What runs found, in numbers: a summary of logs as JSON and as Markdown."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fuzz.outcome import FAULTS, REVERTED

Entry = dict[str, Any]


def summary(entries: Sequence[Entry]) -> dict[str, Any]:
    """Counts by outcome and reason for each kind of run, faults, what was reverted, and what it ran with."""
    runs = [e for e in entries if "run" in e]
    judged = {(e["kind"], e["seed"]): e for e in entries if "seed" in e}  # a seed judged twice counts once
    kinds = sorted({kind for kind, _ in judged})
    return {
        "runs": _distinct(
            {k: r[k] for k in ("commit", "changed_files", "python", "device", "environment")} for r in runs
        ),
        "started": sorted(r["started"] for r in runs)[:1],
        "kinds": {kind: _count([e for (k, _), e in judged.items() if k == kind]) for kind in kinds},
        "faults": [e for e in judged.values() if e["outcome"] in FAULTS],
        "reverted": sorted(
            (e for e in judged.values() if e["outcome"] == REVERTED),
            key=lambda e: (e.get("stage") != "capture", e.get("stage", ""), e["kind"], e["seed"]),
        ),
    }


def _distinct(values: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return [json.loads(text) for text in dict.fromkeys(json.dumps(v, sort_keys=True) for v in values)]


def _count(entries: Sequence[Entry]) -> dict[str, Any]:
    seeds = sorted(e["seed"] for e in entries)
    seconds = sorted(e.get("seconds", 0.0) for e in entries)
    reasons = {
        outcome: dict(
            Counter(_general(e["reason"]) for e in entries if e["outcome"] == outcome).most_common(40)
        )
        for outcome in ("ok", "refused", "skipped")
    }
    return {
        "networks": len(entries),
        "seeds": f"{seeds[0]} to {seeds[-1]}",
        "outcomes": dict(Counter(e["outcome"] for e in entries).most_common()),
        "reasons": {outcome: found for outcome, found in reasons.items() if found},
        "seconds": {"sum": round(sum(seconds)), "median": seconds[len(seconds) // 2], "largest": seconds[-1]},
    }


def _general(reason: str) -> str:
    """A reason with the numbers taken out, so that those of one kind are counted together."""
    return "".join("#" if c.isdigit() else c for c in reason).replace("##", "#").replace("##", "#")[:110]


def markdown(found: dict[str, Any]) -> str:
    """The summary as a page to read."""
    lines = ["# What the hostile tests found", ""]
    for run in found["runs"]:
        environment = ", ".join(f"{key} {value}" for key, value in run["environment"].items())
        changed = f" with {run['changed_files']} changed files" if run["changed_files"] else ""
        lines += [
            f"Commit {run['commit']}{changed}, Python {run['python']}, on {run['device']}: {environment}.",
            "",
        ]
    lines += [
        "| kind | networks | seeds | outcomes | seconds a network (median, largest) |",
        "|---|---|---|---|---|",
    ]
    for kind, count in found["kinds"].items():
        outcomes = ", ".join(f"{number} {name}" for name, number in count["outcomes"].items())
        seconds = f"{count['seconds']['median']}, {count['seconds']['largest']}"
        lines.append(f"| {kind} | {count['networks']} | {count['seeds']} | {outcomes} | {seconds} |")
    for kind, count in found["kinds"].items():
        for outcome, reasons in count["reasons"].items():
            if list(reasons) != [""]:
                lines += ["", f"## {kind}: {outcome}, by reason", ""]
                lines += [f"- {number}: {reason}" for reason, number in reasons.items()]
    if found["faults"]:
        lines += ["", "## Faults", ""]
        lines += [
            f"- {e['kind']} {e['seed']}: {e['outcome']} in {e.get('stage', '')}: {e['reason']}"
            for e in found["faults"]
        ]
    if found["reverted"]:
        lines += ["", "## Reverted", ""]
        lines += ["Wrong programs and passes that raise, which ampopt's own verification refuses or its pass"]
        lines += [
            "manager records, so that no user gets them. Not counted as faults; wrong captures first.",
            "",
        ]
        lines += [_reverted(e) for e in found["reverted"]]
    return "\n".join(lines) + "\n"


def _reverted(entry: Entry) -> str:
    details = entry.get("details", {})
    also = "".join(f"; also in {other}" for other in details.get("also", ()))
    place = f"{entry['kind']} {entry['seed']}: in {entry.get('stage', '')}"
    return f"- {place}: {entry['reason']} (not served: {details.get('why', '')}){also}"


def write(entries: Sequence[Entry], out: Path | None) -> int:
    """Write the summary to `out`.json and `out`.md, or print it; 1 where there are faults."""
    found = summary(entries)
    if out is None:
        print(markdown(found))
    else:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
        out.with_suffix(".md").write_text(markdown(found))
    return 1 if found["faults"] else 0
