"""The hostile tests: random networks against everything that ampopt promises. `python -m fuzz --help`."""
