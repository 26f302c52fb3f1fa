"""Batched forms of Python loops in well-known libraries: fixed sizes and masks, all classes at once."""
