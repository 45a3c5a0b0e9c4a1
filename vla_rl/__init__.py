"""vla-rl: RL fine-tuning of vision-language-action (VLA) robot policies.

Importing this package pulls in torch and numpy only; simulators, robots and model SDKs are imported
by the one adapter that needs them.
"""

__version__ = "0.1.0"
