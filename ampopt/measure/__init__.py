"""Timing, verification, and reports of both."""
