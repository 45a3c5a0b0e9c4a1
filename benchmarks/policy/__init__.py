"""Latency of acting and speed of learning of policies."""
