"""The package list, which pyproject.toml alone cannot state: what is found, and `configs/` as
`vla_rl.configs`."""

from setuptools import find_packages, setup

NAMES = ("vla_rl", "sim", "real", "policies", "reward_models", "benchmarks")
FOUND = find_packages(include=[f"{name}{rest}" for name in NAMES for rest in ("", ".*")])
setup(packages=[*FOUND, "vla_rl.configs"])
