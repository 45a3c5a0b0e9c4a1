"""The loops: what is collected, scored and learned from, in which order."""
