"""Simulators against the plain form of each."""
