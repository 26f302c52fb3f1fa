"""Check that every room of ampopt stands in one layer: import-linter says nothing about the others."""

from __future__ import annotations

import re
import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # comes with pytest and mypy on Python 3.10

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    lines = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    placed = [name for line in lines for name in re.findall(r"[\w.]+", line)]
    modules = {f"ampopt.{path.stem}" for path in (ROOT / "ampopt").glob("*.py")} - {"ampopt.__init__"}
    modules |= {f"ampopt.{path.name}" for path in (ROOT / "ampopt").iterdir() if any(path.glob("*.py"))}
    # `python -m ampopt` starts the command line; nothing imports it.
    wrong = sorted(module for module in modules - {"ampopt.__main__"} if placed.count(module) != 1)
    if wrong:
        sys.exit(f"give each of these one place in the layers of pyproject.toml: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
