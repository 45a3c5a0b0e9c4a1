"""Runs, and what they learn with: replay, updates, rewards."""
