"""Policies that denoise an action chunk: flow matching and diffusion, their likelihood, and
one-step students."""
