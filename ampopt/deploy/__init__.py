"""What the user gets: the optimized module, and the files that leave the machine."""
