"""Advantages and losses as pure tensor functions, and the thin classes that use them."""
