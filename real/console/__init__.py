"""The operator's console: a web page, and the server behind it, which runs in its own process
and imports no torch."""
