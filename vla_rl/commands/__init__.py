"""The commands of ``vla-rl``: of each its options and what it calls. They only compose; the work
is elsewhere."""
