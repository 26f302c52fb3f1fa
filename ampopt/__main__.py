"""`python -m ampopt` runs the `ampopt` command."""

from __future__ import annotations

from ampopt.cli.app import main

if __name__ == "__main__":
    main()
