"""lerobot's policies behind this project's protocols; see `policies.lerobot.policy`."""
