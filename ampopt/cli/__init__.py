"""The command line: parses arguments and calls the public functions."""
