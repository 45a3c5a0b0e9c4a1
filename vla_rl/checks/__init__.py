"""What can be known before a run begins."""
