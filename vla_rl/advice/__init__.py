"""Is a start one that RL can learn from, and what helps where it is not."""
