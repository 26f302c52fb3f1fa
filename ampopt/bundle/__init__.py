"""Files that are safe to open, whoever wrote them."""
