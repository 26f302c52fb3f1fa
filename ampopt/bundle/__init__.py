"""Reads and writes bundles; files from an untrusted source are safe to open."""
