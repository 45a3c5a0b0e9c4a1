"""Any env of Gymnasium's registry, as a simulator; how it is stepped stands in `sim.stepped`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from sim.stepped import SteppedConfig, SteppedSimulator, named
from vla_rl.errors import ConfigError, MissingPackage


@dataclass
class GymConfig(SteppedConfig):
    """An env by its ``id``; "module:Name-v0" imports the module first, which registers it.
    ``options`` go to its maker.

    One env has one task, told with ``instructions``. Where the maker has an argument that names a
    task (``task_option``), the run's tasks are the values in ``tasks``.
    """

    remedy: ClassVar[str] = "Check the id (module:Name-v0 imports the module that registers it)"

    # of the registry: Name-v0, or module:Name-v0
    id: str = ""
    # the keyword argument that names a task; empty: the env has one
    task_option: str = ""
    # the keyword argument of a seed, for envs that heed it in their maker alone: one is made for
    # each episode
    seed_option: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.task_option) != bool(self.tasks):
            raise ConfigError(
                f"env.task_option={self.task_option!r} and env.tasks={self.tasks} belong together: "
                "the argument that names a task, and the tasks; leave both empty for an env with "
                "one task (a preset made for another env names that one's: run=gym names none)"
            )
        if self.instructions and len(self.instructions) != max(1, len(self.tasks)):
            raise ConfigError(
                f"env.instructions has {len(self.instructions)} texts for "
                f"{max(1, len(self.tasks))} tasks: give one for each"
            )

    def check_machine(self) -> None:
        """Raise `UserError` where Gymnasium is missing, does not know the id, or the env cannot
        serve."""
        GymSimulator(self).close()


class GymSimulator(SteppedSimulator):
    """The envs of Gymnasium's registry."""

    config: GymConfig
    kind = "gym"
    unrepeatable = (
        "If its maker takes a seed, set that (env.options.seed=0), or have one made for each "
        "episode with env.seed_option=seed"
    )

    def __init__(self, config: GymConfig) -> None:
        if not config.id.strip():
            raise ConfigError(
                "env.id is empty: name an env of Gymnasium, such as "
                "env.id=gymnasium_robotics:FetchReach-v4"
            )
        self.made_anew = bool(config.seed_option)
        super().__init__(config)

    def _task_names(self) -> Sequence[str]:
        return self.config.tasks or [self.config.id.rpartition(":")[2].rpartition("/")[2]]

    def _make(self, task: str, seed: int) -> Any:
        config = self.config
        try:
            import gymnasium
        except ImportError as error:
            raise MissingPackage("gymnasium", "lerobot", "env=gym") from error
        options: dict[str, Any] = {"render_mode": "rgb_array", **config.options}
        if config.task_option:
            options[config.task_option] = task
        if config.seed_option:
            options[config.seed_option] = seed
        if config.horizon:
            options["max_episode_steps"] = config.horizon
        with named(config, f"make of {task}" if config.task_option else "make"):
            return gymnasium.make(config.id, disable_env_checker=True, **options)
