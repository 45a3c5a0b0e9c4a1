"""Small actors that learn from a replay, on top of a frozen policy: residual, steered, direct."""
