"""ampopt's own fast operators, with their measurement and fusion."""
