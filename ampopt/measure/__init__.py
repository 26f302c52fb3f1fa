"""How fast it is, whether it is right, and both written down."""
