"""Envs that lerobot makes (`lerobot.envs.factory.make_env`), by their type: pusht, aloha,
metaworld, libero, or a plug-in's.

A policy sees what lerobot's policies do: its features by their names, after its own processing of
observations; "observation.images.top" is the camera "top". How they are stepped stands in
`sim.stepped`.
"""

from __future__ import annotations

import contextlib
import importlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from sim.stepped import SteppedConfig, SteppedSimulator, named
from vla_rl.bounds import several
from vla_rl.errors import ConfigError, MissingPackage

_PREFIXES = ("observation.images.", "observation.")
LIBERO = "libero"  # counts its initial states itself, and heeds no seed for them


@dataclass
class LeRobotEnvConfig(SteppedConfig):
    """An env of lerobot's by its type, the ``id``; "module:type" imports the module first, which
    registers it. ``options`` are those of lerobot's own config of that env.

    ``cameras`` and ``state`` are lerobot's features without "observation.images." and
    "observation."; what is not named is found. ``success`` and ``reward`` as of env=gym.
    """

    remedy: ClassVar[str] = "Check env.id (pip install 'lerobot[TYPE]' brings what a type needs)"

    # lerobot's type of env, such as pusht, aloha, metaworld; or module:type
    id: str = ""
    # those of its tasks that are used, as suite/number; empty: all
    tasks: list[str] = several([], once=True)

    def check_machine(self) -> None:
        """Raise `UserError` where lerobot is missing, does not know the type, or the env cannot
        serve."""
        LeRobotSimulator(self).close()


class LeRobotSimulator(SteppedSimulator):
    """lerobot's envs, each taken out of the vector of one in which lerobot makes it."""

    config: LeRobotEnvConfig
    kind = "lerobot"
    unrepeatable = (
        "The env has to heed the seed of its reset; MetaWorld's does from lerobot 0.6 on "
        "(Python 3.12)"
    )

    def __init__(self, config: LeRobotEnvConfig) -> None:
        self._own = _own_config(config)
        with named(config, "make"):
            from lerobot.envs.factory import make_env_pre_post_processors

            self._processed, acting = make_env_pre_post_processors(self._own, None)
        if acting.steps:
            raise ConfigError(
                f"env.id={config.id!r} changes actions on their way (its postprocessor has "
                f"{len(acting.steps)} steps), which this platform does not do: use another env"
            )
        made = self._made(config)
        self._known = {name: (_words_of(env), _limit_of(env)) for name, env in made.items()}
        for env in made.values():
            env.close()
        super().__init__(config)

    def _made(self, config: LeRobotEnvConfig) -> dict[str, Any]:
        """{task: env} of all that lerobot makes of the type."""
        from lerobot.envs.factory import make_env

        with named(config, "make"), contextlib.redirect_stdout(io.StringIO()):
            suites = make_env(self._own, n_envs=1)
            vectors = {
                f"{suite}/{number}": vector
                for suite, numbered in suites.items()
                for number, vector in numbered.items()
            }
            return {name: vector.envs[0] for name, vector in vectors.items()}

    def _make(self, task: str, seed: int) -> Any:
        made = self._made(self.config)
        env = made.pop(task)
        for other in made.values():
            other.close()
        return env

    def _reset(self, env: Any, seed: int) -> Any:
        if self._own.type == LIBERO:
            env.unwrapped.init_state_id = seed  # even ones in training, odd ones held out
        return super()._reset(env, seed)

    def _arrays(self, seen: Any) -> dict[str, np.ndarray]:
        from lerobot.envs.utils import preprocess_observation

        features = self._processed(preprocess_observation(_batch(seen)))
        return {
            _short(key): _unbatched(value.numpy())
            for key, value in sorted(features.items())
            if key.startswith(_PREFIXES)
        }

    def _task_names(self) -> Sequence[str]:
        wanted = self.config.tasks or list(self._known)
        if missing := [name for name in wanted if name not in self._known]:
            raise ConfigError(
                f"env.tasks names {missing[0]!r}, and lerobot makes of env.id={self.config.id}: "
                f"{', '.join(self._known)}"
            )
        return wanted

    def _words(self, env: Any, names: Sequence[str]) -> Sequence[str]:
        return [self._known[name][0] or name.partition("/")[0] for name in names]

    def _horizon(self, env: Any) -> int:
        return super()._horizon(env) or max(self._known[name][1] for name in self._task_names())


def _own_config(config: LeRobotEnvConfig) -> Any:
    """lerobot's config of the type, with the options and the time limit."""
    module, _, kind = config.id.rpartition(":")
    try:
        from lerobot.envs.configs import EnvConfig
    except ImportError as error:
        raise MissingPackage("lerobot", "lerobot", "env=lerobot") from error
    with named(config, "make"):
        if module:
            importlib.import_module(module)
        known = EnvConfig.get_known_choices()
        if kind not in known:
            raise ConfigError(
                f"env.id={config.id!r} is no env of lerobot's, which has {', '.join(sorted(known))} "
                "(a plug-in's is module:type)"
            )
        return EnvConfig.get_choice_class(kind)(**config.options)


def _words_of(env: Any) -> str:
    """What lerobot tells its policies to do there."""
    for name in ("task_description", "task"):
        if env.has_wrapper_attr(name):
            return str(env.get_wrapper_attr(name))
    return ""


def _limit_of(env: Any) -> int:
    name = "_max_episode_steps"
    return int(env.get_wrapper_attr(name) or 0) if env.has_wrapper_attr(name) else 0


def _batch(seen: Any) -> Any:
    if isinstance(seen, Mapping):
        return {key: _batch(inner) for key, inner in seen.items()}
    return np.ascontiguousarray(np.asarray(seen)[None])


def _short(key: str) -> str:
    return key.removeprefix(next(p for p in _PREFIXES if key.startswith(p)))


def _unbatched(value: np.ndarray) -> np.ndarray:
    """A picture as uint8 [h w 3], whatever else as it is."""
    if value.ndim != 4:
        return value[0]
    return np.ascontiguousarray((value[0].transpose(1, 2, 0) * 255).round().astype(np.uint8))
