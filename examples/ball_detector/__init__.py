"""Train EncDecMil18 to find a ball, make it fast, and run it where there is no torch."""
