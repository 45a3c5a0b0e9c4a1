"""A run: its folder, its phases, and what they open."""
