"""The command line: words into calls of the public verbs."""
