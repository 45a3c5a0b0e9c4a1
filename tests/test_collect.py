"""Collecting demonstrations in worker processes: what the worker says when it cannot start reaches the user."""

from __future__ import annotations

import os

import pytest

from sim import toy
from vla_rl.data.collect import collect_demonstrations
from vla_rl.errors import MissingPackage, UserError
from vla_rl.run.settings import CollectConfig


class WithoutPackage(toy.ToyReach):
    """A simulator that needs what is not installed."""

    Config = toy.ToyConfig
    collect_episode = staticmethod(toy.collect_episode)

    def __init__(self, config):
        raise MissingPackage("rocket", "moon", "env.type=rocket")


class Dies(WithoutPackage):
    def __init__(self, config):
        os._exit(3)


@pytest.mark.parametrize(
    "simulator, error, text",
    [
        ("WithoutPackage", MissingPackage, r"env.type=rocket needs the package 'rocket'.*vla-rl\[moon\]"),
        ("Dies", UserError, "a collecting worker process died"),
    ],
)
def test_a_simulator_that_cannot_be_built_says_why(tmp_path, simulator, error, text):
    folder = tmp_path / "dataset"
    with pytest.raises(error, match=text):
        collect_demonstrations(
            f"test_collect:{simulator}", toy.ToyConfig(), ["reach_red"], CollectConfig(workers=1), seed=0, folder=folder,
            progress=lambda *_, **__: None,
        )  # fmt: skip
    assert not folder.exists()
