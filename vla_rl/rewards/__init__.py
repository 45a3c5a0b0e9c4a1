"""Reward models at work: built, combined, fitted, judged, and scoring episodes."""
