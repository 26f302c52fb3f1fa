"""Our own fast operators, and what measures and fuses with them."""
