"""What `test_collect` has its worker processes do, apart from it: they would import torch with
it."""

from __future__ import annotations

import os
import time

from sim import toy
from vla_rl.errors import ConfigError, MissingPackage


class WithoutPackage(toy.ToyReach):
    """A simulator that needs what is not installed."""

    Config = toy.ToyConfig
    collect_episode = toy.ToyReach.collect_episode

    def __init__(self, config):
        raise MissingPackage("rocket", "moon", "env.type=rocket")


class Dies(WithoutPackage):
    def __init__(self, config):
        os._exit(3)


def double(made: list, x: int) -> tuple[int, int]:
    """Twice x, and how many calls this worker had before; it fails at 3, dies at 99, and is slow
    at 0."""
    made.append(x)
    if x == 0:
        time.sleep(0.2)
    if x == 3:
        raise ConfigError("three is too many")
    if x == 4:
        raise KeyError("four")
    if x == 99:
        os._exit(1)
    return 2 * x, len(made) - 1
