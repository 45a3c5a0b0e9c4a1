"""Any env of Gymnasium with continuous actions, as a simulator (https://gymnasium.farama.org, API
of version 1).

Each slot keeps one env a task. Initial state i is ``reset(seed=2 i)`` in training and
``reset(seed=2 i + 1)`` held out, so the splits share none. An env whose second ``reset`` with a
seed starts elsewhere breaks Gymnasium's promise and is refused; MetaWorld's are so, and are made
anew for each episode with ``seed_option``.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from sim.recording import record_demonstration
from sim.slots import checked_actions, instruction, running, task_named
from vla_rl.bounds import Bounded, bound, several
from vla_rl.errors import ConfigError, MissingPackage, UserError, first_line
from vla_rl.specs import (
    OTHER,
    CameraSpec,
    EmbodimentSpec,
    EpisodeSpec,
    SlotObservation,
    SlotStep,
    TaskSpec,
)

RENDER = "render"  # the camera that is the env's own `render()`
REWARDS = ("success", "env")
_SUCCESS = ("is_success", "success")  # what envs call it in ``info``
TERMINATED = "terminated"


@dataclass
class GymConfig(Bounded, place="env"):
    """An env by its ``id``; "module:Name-v0" imports the module first, which registers it.
    ``options`` go to its maker.

    One env has one task, told with ``instructions``. Where the maker has an argument that names a
    task (``task_option``), the run's tasks are the values in ``tasks``. Keys of observations are
    dotted paths; what is not named is found: every uint8 picture [h w 3] is a camera (none:
    `render`), all other numbers (but of uint8) are proprioception. ``success`` is the key of
    ``info`` that says so, or "terminated", where the end of an episode is success.
    """

    finds_cameras: ClassVar[bool] = True

    # of the registry: Name-v0, or module:Name-v0
    id: str = ""
    # keyword arguments of its maker
    options: dict[str, Any] = field(default_factory=dict)
    # the keyword argument that names a task; empty: the env has one
    task_option: str = ""
    # its values, which are the run's tasks
    tasks: list[str] = several([], once=True)
    # one for each task; empty: the task's name in words
    instructions: list[str] = field(default_factory=list)
    # the keyword argument of a seed, for envs that heed it in their maker alone: one is made for
    # each episode
    seed_option: str = ""
    # keys of pictures, or render; empty: those that the observation has, else render
    cameras: list[str] = field(default_factory=list)
    # keys of numbers; empty: those that the observation has
    state: list[str] = field(default_factory=list)
    # key of info, or terminated; empty: is_success or success
    success: str = ""
    # success: 1 when it is reached; env: what the env gives
    reward: str = bound("success", choices=REWARDS)
    # control steps that end an episode; 0: as the env was registered
    horizon: int = bound(0, ge=0)
    control_hz: float = bound(0.0, ge=0)  # 0: the env's render_fps
    # module:name of scripted experts, called with a task's name or indexed by it, for phase collect
    expert: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.task_option) != bool(self.tasks):
            raise ConfigError(
                f"env.task_option={self.task_option!r} and env.tasks={self.tasks} belong together: "
                "the argument that names a task, and the tasks; leave both empty for an env with "
                "one task"
            )
        if self.instructions and len(self.instructions) != max(1, len(self.tasks)):
            raise ConfigError(
                f"env.instructions has {len(self.instructions)} texts for "
                f"{max(1, len(self.tasks))} tasks: give one for each"
            )
        if self.expert and ":" not in self.expert:
            raise ConfigError(
                f"env.expert={self.expert!r} must be module:name, such as "
                "metaworld.policies:ENV_POLICY_MAP"
            )

    @property
    def task_names(self) -> tuple[str, ...]:
        return tuple(self.tasks) or (self.id.rpartition(":")[2].rpartition("/")[2],)

    def check_machine(self) -> None:
        """Raise `UserError` where Gymnasium is missing, does not know the id, or the env cannot
        serve."""
        GymSimulator(self).close()

    def describe(self) -> str:
        """What a figure measured here depends on besides the policy, in a line for reports."""
        given = ", ".join(f"{key}={value}" for key, value in sorted(self.options.items()))
        return (
            f"{self.id}{f' ({given})' if given else ''}, success by "
            f"{self.success or 'is_success or success'}"
        )


@dataclass
class _Slot:
    task: TaskSpec
    episode: EpisodeSpec
    env: Any
    seen: Any
    elapsed: int = 0
    over: bool = False


class GymSimulator:
    """`vla_rl.interfaces.Simulator`; see the module's text."""

    privileged_dim = 0

    def __init__(self, config: GymConfig) -> None:
        if not config.id.strip():
            raise ConfigError(
                "env.id is empty: name an env of Gymnasium, such as "
                "env.id=gymnasium_robotics:FetchReach-v4"
            )
        self.config = config
        self._envs: dict[tuple[int, str], Any] = {}
        self._slots: dict[int, _Slot] = {}
        names = config.task_names
        first, seen = self._begun(0, names[0], 0)
        leaves = dict(_leaves(seen))
        again = dict(_leaves(self._begun(0, names[0], 0)[1]))
        moved = [
            key
            for key, x in leaves.items()
            if not np.array_equal(x, again[key], equal_nan=x.dtype.kind == "f")
        ]
        if moved:
            raise ConfigError(
                f"{config.id} starts elsewhere when it is reset twice with one seed ({moved[0]} "
                "differs), so no episode could be repeated. If its maker takes a seed, name that "
                "argument with env.seed_option (MetaWorld: seed)"
            )
        first = self._envs[0, names[0]]
        pictures = [
            key
            for key, x in leaves.items()
            if x.dtype == np.uint8 and x.ndim == 3 and x.shape[2] == 3
        ]
        self._cameras = tuple(config.cameras or pictures or [RENDER])
        numbers = [
            key for key, x in leaves.items() if x.dtype.kind in "fiu" and x.dtype != np.uint8
        ]
        self._state = tuple(config.state or numbers)
        for kind, keys in (("cameras", self._cameras), ("state", self._state)):
            for key in keys:
                if key not in leaves and (kind, key) != ("cameras", RENDER):
                    raise ConfigError(
                        f"env.{kind} names {key!r}, observations of {config.id} have "
                        f"{', '.join(leaves)}"
                    )
        self._sizes = {key: self._picture(first, leaves, key).shape for key in self._cameras}
        width = sum(leaves[key].size for key in self._state)
        box = self._action_space(first)
        self._low, self._high = (
            np.asarray(box.low, dtype=np.float64),
            np.asarray(box.high, dtype=np.float64),
        )
        self._action_dtype = box.dtype
        rate = config.control_hz or float(first.metadata.get("render_fps") or 0)
        if not rate:
            raise ConfigError(
                f"{config.id} does not say how many control steps a second has: set env.control_hz"
            )
        self.embodiment = EmbodimentSpec(
            name=f"gym {config.id}",
            action_names=tuple(f"a{i}" for i in range(len(self._low))),
            action_units=(f"of {config.id}",) * len(self._low),
            action_low=tuple(map(float, self._low)),
            action_high=tuple(map(float, self._high)),
            frame=f"{OTHER}{config.id}",
            rotation=f"{OTHER}{config.id}",
            gripper=f"{OTHER}{config.id}",
            control_hz=rate,
            cameras=tuple(CameraSpec(key, h, w) for key, (h, w, _) in self._sizes.items()),
            proprio_names=tuple(f"s{i}" for i in range(width)),
        )
        horizon = config.horizon or (first.spec and first.spec.max_episode_steps) or 0
        if not horizon:
            raise ConfigError(
                f"{config.id} was registered without a time limit: set env.horizon, "
                "in control steps"
            )
        texts = config.instructions or [name.replace("-", " ").replace("_", " ") for name in names]
        self.tasks = tuple(
            TaskSpec(name, (text,), (text,), horizon)
            for name, text in zip(names, texts, strict=True)
        )
        self._tasks = {task.task_id: task for task in self.tasks}

    # ---------------------------------------------------------------------- the Simulator interface
    def start(self, slot: int, episode: EpisodeSpec) -> SlotObservation:
        """``reset`` with the initial state's seed. `ConfigError` for a task that is not
        configured."""
        task = task_named(self._tasks, episode.task_id)
        env, seen = self._begun(
            slot, episode.task_id, 2 * episode.init_state_id + (episode.split != "train")
        )
        self._slots[slot] = _Slot(task, episode, env, seen)
        return self._observe(slot)

    def step(self, slot: int, actions: np.ndarray) -> SlotStep:
        """Send ``actions`` [h a], clipped to the bounds, until success, the env's end or the
        time limit."""
        s = running(self._slots, slot)
        actions = np.clip(checked_actions(slot, actions, len(self._low)), self._low, self._high)
        rewards = np.zeros(len(actions), dtype=np.float32)
        success = ended = truncated = False
        executed = 0
        for action in actions:
            with _named(self.config, "step"):
                s.seen, reward, terminated, cut, info = s.env.step(
                    action.astype(self._action_dtype)
                )
                success = self._succeeded(info, bool(terminated))
                earned = float(reward) if self.config.reward == "env" else float(success)
            if not math.isfinite(earned):
                raise UserError(
                    f"{self.config.id} gave the reward {earned}: mend the env, or set "
                    "env.reward=success"
                )
            s.elapsed += 1
            rewards[executed] = earned
            executed += 1
            ended = success or bool(terminated)
            truncated = not ended and (bool(cut) or s.elapsed >= s.task.horizon)
            if ended or truncated:
                break
        s.over = ended or truncated
        return SlotStep(self._observe(slot), rewards, executed, ended, truncated, success)

    def close(self) -> None:
        """Close every env. May be called again."""
        self._slots.clear()
        while self._envs:
            self._envs.popitem()[1].close()

    # ------------------------------------------------------------------------------------ beyond it
    def seen(self, slot: int) -> Any:
        """The env's own last observation, as its experts read it."""
        return self._slots[slot].seen

    def _begun(self, slot: int, task: str, seed: int) -> tuple[Any, Any]:
        """The slot's env of a task after ``reset(seed=seed)``, and what it shows."""
        if self.config.seed_option and (slot, task) in self._envs:
            self._envs.pop((slot, task)).close()
        env = self._env(slot, task, seed)
        with _named(self.config, "reset"):
            return env, env.reset(seed=seed)[0]

    def _env(self, slot: int, task: str, seed: int) -> Any:
        if (slot, task) not in self._envs:
            try:
                import gymnasium
            except ImportError as error:
                raise MissingPackage("gymnasium", "lerobot", "env=gym") from error
            options = dict(self.config.options)
            options.setdefault("render_mode", "rgb_array")
            if self.config.task_option:
                options[self.config.task_option] = task
            if self.config.seed_option:
                options[self.config.seed_option] = seed
            if self.config.horizon:
                options["max_episode_steps"] = self.config.horizon
            with _named(self.config, "make"):
                made = gymnasium.make(self.config.id, disable_env_checker=True, **options)
            self._envs[slot, task] = made
        return self._envs[slot, task]

    def _action_space(self, env: Any) -> Any:
        from gymnasium.spaces import Box

        space, name = env.action_space, self.config.id
        if not isinstance(space, Box) or len(space.shape) != 1:
            raise ConfigError(
                f"{name} takes actions of {space}, this platform sends a vector of "
                "numbers (Box, one axis)"
            )
        low, high = np.asarray(space.low, float), np.asarray(space.high, float)
        if not (np.isfinite(low).all() and np.isfinite(high).all() and (low < high).all()):
            raise ConfigError(
                f"{name} takes actions between {low.tolist()} and {high.tolist()}: finite bounds "
                "are needed, each low below its high; register the env with "
                "gymnasium.wrappers.RescaleAction around it"
            )
        return space

    def _picture(self, env: Any, leaves: Mapping[str, np.ndarray], key: str) -> np.ndarray:
        shown = env.render() if key == RENDER else leaves[key]
        picture = np.asarray(shown) if shown is not None else np.zeros(0)
        if picture.ndim != 3 or picture.shape[-1] != 3 or picture.dtype != np.uint8:
            what = "its render()" if key == RENDER else f"{key!r} of its observations"
            raise ConfigError(
                f"{self.config.id} shows no picture: {what} is {picture.dtype} "
                f"{list(picture.shape)}, uint8 [h w 3] is needed. Name others with env.cameras, or "
                "set env.options.render_mode=rgb_array"
            )
        return np.ascontiguousarray(picture)

    def _succeeded(self, info: Mapping[str, Any], terminated: bool) -> bool:
        if self.config.success == TERMINATED:
            return terminated
        for key in [self.config.success] if self.config.success else _SUCCESS:
            if key in info:
                told = np.asarray(info[key])
                if (
                    told.size != 1
                    or told.dtype.kind not in "biuf"
                    or not np.isfinite(told.astype(float)).all()
                ):
                    raise UserError(
                        f"{key} in the info of {self.config.id} is {str(info[key])[:60]!r}, which "
                        "is neither true nor false: name another key with env.success, or "
                        f"{TERMINATED!r}"
                    )
                return bool(told.item())
        wanted = (
            repr(self.config.success) if self.config.success else " nor ".join(map(repr, _SUCCESS))
        )
        raise UserError(
            f"the info of {self.config.id} has no {wanted}, only "
            f"{', '.join(map(str, info)) or 'nothing'}: set env.success to the key that says "
            f"whether the task is done, or to {TERMINATED!r}"
        )

    def _observe(self, slot: int) -> SlotObservation:
        s = self._slots[slot]
        with _named(self.config, "observation"):
            leaves = dict(_leaves(s.seen))
            images = {key: self._picture(s.env, leaves, key) for key in self._cameras}
            proprio = self._proprio(leaves)
        changed = [key for key, picture in images.items() if picture.shape != self._sizes[key]]
        if changed or len(proprio) != self.embodiment.proprio_dim or not np.isfinite(proprio).all():
            what = f"the picture {changed[0]}" if changed else f"the state {proprio[:8].tolist()}"
            name = self.config.id
            raise UserError(
                f"{name} shows {what}, which is of another size than at first or not "
                "finite: mend the env"
            )
        return SlotObservation(images, proprio, instruction(s.task, s.episode))

    def _proprio(self, leaves: Mapping[str, np.ndarray]) -> np.ndarray:
        parts = [np.ravel(leaves[key]).astype(np.float32) for key in self._state]
        return np.concatenate(parts or [np.zeros(0, np.float32)])


def _leaves(tree: Any, path: str = "") -> list[tuple[str, np.ndarray]]:
    """Arrays of an observation under dotted keys; one that is an array itself is called
    "observation"."""
    if isinstance(tree, Mapping):
        return [
            leaf
            for key, inner in tree.items()
            for leaf in _leaves(inner, f"{path}.{key}" if path else str(key))
        ]
    return [(path or "observation", np.asarray(tree))]


@contextlib.contextmanager
def _named(config: GymConfig, doing: str) -> Iterator[None]:
    """What an env raises becomes a `UserError` that says which env, and while what."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"env.id={config.id!r} failed in {doing} ({type(error).__name__}: "
            f"{first_line(error)}). Check the id (module:Name-v0 imports the module that registers "
            f"it), env.options={config.options}, and that its packages are installed where workers "
            "run (slots.python)"
        ) from error


def collect_episode(
    simulator: GymSimulator,
    episode: EpisodeSpec,
    *,
    noise_std: float = 0.0,
    rng: np.random.Generator | None = None,
    slot: int = 0,
) -> dict[str, Any]:
    """Run one episode with the scripted expert of ``env.expert``; noise as in
    `sim.toy.collect_episode`.

    An expert is called with the env's own observation, or has a method ``get_action`` or ``act``
    that is. `UserError` where none is named.
    """
    rng = np.random.default_rng(episode.seed) if rng is None else rng
    act = _expert(simulator.config, episode.task_id)
    half = (simulator._high - simulator._low) / 2
    observation = simulator.start(slot, episode)
    return record_demonstration(
        episode,
        observation,
        act=lambda: np.clip(
            np.asarray(act(simulator.seen(slot)), dtype=np.float64), simulator._low, simulator._high
        ),
        disturb=lambda label: label + noise_std * half * rng.standard_normal(label.shape),
        execute=functools.partial(simulator.step, slot),
    )


def _expert(config: GymConfig, task: str) -> Any:
    if not config.expert:
        raise UserError(
            f"{config.id} has no scripted expert: name one with env.expert=module:name, train on "
            "data (dataset=FOLDER), or leave collect and sft out of phases"
        )
    module, _, name = config.expert.partition(":")
    try:
        made: Any = functools.reduce(getattr, name.split("."), importlib.import_module(module))
        expert = made[task]() if isinstance(made, Mapping) else made(task)
    except Exception as error:
        raise UserError(
            f"env.expert={config.expert!r} gives no expert for {task} ({first_line(error)})"
        ) from error
    for method in ("get_action", "act"):
        if hasattr(expert, method):
            return getattr(expert, method)
    if not callable(expert):
        raise UserError(
            f"env.expert={config.expert!r} gives {type(expert).__name__}, which cannot "
            "be asked for an action"
        )
    return expert
