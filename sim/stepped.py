"""Envs that are stepped as Gymnasium asks (https://gymnasium.farama.org, API of version 1), with
continuous actions, as a simulator: those of its registry (`sim.gym`) and lerobot's (`sim.lerobot`).

A slot has an env of its task while an episode runs; then it waits for the next slot that needs
one. Initial state i is ``reset(seed=2 i)`` in training and ``reset(seed=2 i + 1)`` held out, so the
splits share none. The env's own generator gets the seed too, since some forget it in ``reset``
(MetaWorld's). An env that starts elsewhere with one seed all the same breaks Gymnasium's promise
and is refused, unless its maker heeds a seed (``seed_option``).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from sim.gl import draw_in_own_contexts, let_others_draw
from sim.recording import record_demonstration
from sim.slots import checked_actions, instruction, running, task_named
from vla_rl.bounds import Bounded, bound, several
from vla_rl.errors import ConfigError, UserError, first_line
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
PICTURES, STATE = "pictures", "state"
WAITING = 8  # envs of a process that wait for a slot; a scene of MuJoCo takes some 50 MB
REWARDS = ("success", "env")
_SUCCESS = ("is_success", "success")  # what envs call it in ``info``
TERMINATED = "terminated"


@dataclass
class SteppedConfig(Bounded, place="env"):
    """What is said of an env that is stepped as Gymnasium asks, wherever it comes from.

    Keys of observations are dotted paths; what is not named is found: every uint8 picture [h w 3]
    is a camera (none: `render`), all other numbers (but of uint8) are proprioception. ``success``
    is the key of ``info`` that says so, or "terminated", where the end of an episode is success.
    """

    finds_cameras: ClassVar[bool] = True
    remedy: ClassVar[str] = "Check the id"  # what to check where the env failed

    # which env
    id: str = ""
    # keyword arguments of its maker
    options: dict[str, Any] = field(default_factory=dict)
    # the run's tasks
    tasks: list[str] = several([], once=True)
    # one for each task; empty: the task's own, or its name in words
    instructions: list[str] = field(default_factory=list)
    # what a policy sees; state: numbers alone, and nothing is drawn
    observe: str = bound(PICTURES, choices=(PICTURES, STATE))
    # keys of pictures, or render; empty: those that the observation has, else render
    cameras: list[str] = field(default_factory=list)
    # keys of numbers; empty: those that the observation has
    state: list[str] = field(default_factory=list)
    # key of info, or terminated; empty: is_success or success
    success: str = ""
    # success: 1 when it is reached, which ends the episode; env: what the env gives, until it ends
    reward: str = bound("success", choices=REWARDS)
    # control steps that end an episode; 0: as the env was registered
    horizon: int = bound(0, ge=0)
    control_hz: float = bound(0.0, ge=0)  # 0: the env's render_fps
    # module:name of scripted experts, called with a task's name or indexed by it, for phase collect
    expert: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.observe == STATE and self.cameras:
            raise ConfigError(
                f"env.observe=state shows no pictures, and env.cameras={self.cameras} names some: "
                "leave out one of them"
            )
        if self.expert and ":" not in self.expert:
            raise ConfigError(
                f"env.expert={self.expert!r} must be module:name, such as "
                "metaworld.policies:ENV_POLICY_MAP"
            )

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
    succeeded: bool = False
    over: bool = False


class _Waiting:
    """Envs for the next slots, at most ``most`` of them; the longest unused one goes."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._envs: list[tuple[str, Any]] = []

    def take(self, task: str) -> Any:
        """One of ``task``; None where none waits."""
        for i, (name, env) in enumerate(self._envs):
            if name == task:
                del self._envs[i]
                return env
        return None

    def keep(self, task: str, env: Any) -> None:
        self._envs.append((task, env))
        if len(self._envs) > self._most:
            self._envs.pop(0)[1].close()

    def close(self) -> None:
        while self._envs:
            self._envs.pop()[1].close()


class SteppedSimulator:
    """`vla_rl.interfaces.Simulator` over envs that are stepped as Gymnasium asks; see the module's
    text. Who makes them says how: `_make`, and what they show: `_arrays`."""

    kind = ""  # of env, as the embodiment is called
    privileged_dim = 0
    made_anew = False  # for each episode
    unrepeatable = ""  # what helps where an env starts elsewhere

    def __init__(self, config: SteppedConfig) -> None:
        self.config = config
        let_others_draw()
        self._waiting = _Waiting(0 if self.made_anew else WAITING)
        self._slots: dict[int, _Slot] = {}
        names = self._task_names()
        first, leaves = self._repeatable(names[0])
        self._cameras = () if config.observe == STATE else _found_cameras(config, leaves)
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
        self._sizes = {key: _picture(config, first, leaves, key).shape for key in self._cameras}
        box = _action_space(config, first)
        self._low, self._high = (
            np.asarray(box.low, dtype=np.float64),
            np.asarray(box.high, dtype=np.float64),
        )
        self._action_dtype = box.dtype
        self.embodiment = self._embodiment(first, sum(leaves[key].size for key in self._state))
        self.tasks = tuple(self._specs(first, names))
        self._tasks = {task.task_id: task for task in self.tasks}
        self._waiting.keep(names[0], first)

    # ------------------------------------------------------------------------ what is known at once
    def _make(self, task: str, seed: int) -> Any:
        """A new env of ``task``."""
        raise NotImplementedError

    def _task_names(self) -> Sequence[str]:
        raise NotImplementedError

    def _words(self, env: Any, names: Sequence[str]) -> Sequence[str]:
        """What each task is told as, where nothing is configured."""
        return [name.replace("-", " ").replace("_", " ") for name in names]

    def _arrays(self, seen: Any) -> dict[str, np.ndarray]:
        """What an observation holds, under dotted keys."""
        return dict(_leaves(seen))

    def _repeatable(self, task: str) -> tuple[Any, dict[str, np.ndarray]]:
        """An env of ``task`` and what it first shows, once it and another one that is made anew
        are known to start alike with one seed. Raises `ConfigError`."""
        first, other = self._make(task, 0), self._make(task, 0)
        shown, again = self._arrays(self._reset(first, 0)), {}
        if not self.made_anew:
            again["reset twice"] = self._arrays(self._reset(first, 0))
        again["made anew"] = self._arrays(self._reset(other, 0))
        other.close()
        for how, seen in again.items():
            for key, x in shown.items():
                if not np.array_equal(x, seen[key], equal_nan=x.dtype.kind == "f"):
                    raise ConfigError(
                        f"{self.config.id} starts elsewhere when it is {how} with one seed "
                        f"({key} differs), so no episode could be repeated. {self.unrepeatable}"
                    )
        return first, shown

    def _embodiment(self, env: Any, width: int) -> EmbodimentSpec:
        name = self.config.id
        rate = self.config.control_hz or float(env.metadata.get("render_fps") or 0)
        if not rate:
            raise ConfigError(
                f"{name} does not say how many control steps a second has: set env.control_hz"
            )
        return EmbodimentSpec(
            name=f"{self.kind} {name}",
            action_names=tuple(f"a{i}" for i in range(len(self._low))),
            action_units=(f"of {name}",) * len(self._low),
            action_low=tuple(map(float, self._low)),
            action_high=tuple(map(float, self._high)),
            frame=f"{OTHER}{name}",
            rotation=f"{OTHER}{name}",
            gripper=f"{OTHER}{name}",
            control_hz=rate,
            cameras=tuple(CameraSpec(key, h, w) for key, (h, w, _) in self._sizes.items()),
            proprio_names=tuple(f"s{i}" for i in range(width)),
        )

    def _horizon(self, env: Any) -> int:
        """Control steps that end an episode; 0: the env does not say."""
        return (env.spec and env.spec.max_episode_steps) or 0

    def _specs(self, env: Any, names: Sequence[str]) -> Iterator[TaskSpec]:
        horizon = self.config.horizon or self._horizon(env)
        if not horizon:
            raise ConfigError(
                f"{self.config.id} was registered without a time limit: set env.horizon, "
                "in control steps"
            )
        texts = self.config.instructions or self._words(env, names)
        for name, text in zip(names, texts, strict=True):
            yield TaskSpec(name, (text,), (text,), horizon)

    # ---------------------------------------------------------------------- the Simulator interface
    def start(self, slot: int, episode: EpisodeSpec) -> SlotObservation:
        """``reset`` with the initial state's seed. `ConfigError` for a task that is not
        configured."""
        task = task_named(self._tasks, episode.task_id)
        if slot in self._slots:
            before = self._slots.pop(slot)
            self._waiting.keep(before.task.task_id, before.env)
        seed = 2 * episode.init_state_id + (episode.split != "train")
        env = self._waiting.take(episode.task_id)
        if env is None:
            env = self._make(episode.task_id, seed)
        self._slots[slot] = _Slot(task, episode, env, self._reset(env, seed))
        return self._observe(slot)

    def step(self, slot: int, actions: np.ndarray) -> SlotStep:
        """Send ``actions`` [h a], clipped to the bounds, until success (where that is the reward),
        the env's end or the time limit."""
        s = running(self._slots, slot)
        actions = np.clip(checked_actions(slot, actions, len(self._low)), self._low, self._high)
        rewards = np.zeros(len(actions), dtype=np.float32)
        ended = truncated = False
        executed, own = 0, self.config.reward == "env"
        for action in actions:
            with named(self.config, "step"):
                s.seen, reward, terminated, cut, info = s.env.step(
                    action.astype(self._action_dtype)
                )
                success = _succeeded(self.config, info, bool(terminated))
                earned = float(reward) if own else float(success)
            if not math.isfinite(earned):
                raise UserError(
                    f"{self.config.id} gave the reward {earned}: mend the env, or set "
                    "env.reward=success"
                )
            s.elapsed += 1
            s.succeeded |= success
            rewards[executed] = earned
            executed += 1
            ended = bool(terminated) or (success and not own)
            truncated = not ended and (bool(cut) or s.elapsed >= s.task.horizon)
            if ended or truncated:
                break
        s.over = ended or truncated
        success = s.over and s.succeeded
        return SlotStep(self._observe(slot), rewards, executed, ended, truncated, success)

    def close(self) -> None:
        """Close every env. May be called again."""
        while self._slots:
            self._slots.popitem()[1].env.close()
        self._waiting.close()

    # ------------------------------------------------------------------------------------ beyond it
    def seen(self, slot: int) -> Any:
        """The env's own last observation, as its experts read it."""
        return self._slots[slot].seen

    def _reset(self, env: Any, seed: int) -> Any:
        """What the env shows after ``reset(seed=seed)``."""
        from gymnasium.utils import seeding

        draw_in_own_contexts()
        with named(self.config, "reset"):
            env.np_random = seeding.np_random(seed)[0]
            return env.reset(seed=seed)[0]

    def _observe(self, slot: int) -> SlotObservation:
        s = self._slots[slot]
        with named(self.config, "observation"):
            leaves = self._arrays(s.seen)
            images = {key: _picture(self.config, s.env, leaves, key) for key in self._cameras}
            proprio = _proprio(leaves, self._state)
        changed = [key for key, picture in images.items() if picture.shape != self._sizes[key]]
        if changed or len(proprio) != self.embodiment.proprio_dim or not np.isfinite(proprio).all():
            what = f"the picture {changed[0]}" if changed else f"the state {proprio[:8].tolist()}"
            name = self.config.id
            raise UserError(
                f"{name} shows {what}, which is of another size than at first or not "
                "finite: mend the env"
            )
        return SlotObservation(images, proprio, instruction(s.task, s.episode))


def _found_cameras(config: SteppedConfig, leaves: Mapping[str, np.ndarray]) -> tuple[str, ...]:
    pictures = [
        key for key, x in leaves.items() if x.dtype == np.uint8 and x.ndim == 3 and x.shape[2] == 3
    ]
    return tuple(config.cameras or pictures or [RENDER])


def _action_space(config: SteppedConfig, env: Any) -> Any:
    from gymnasium.spaces import Box

    space, name = env.action_space, config.id
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


def _picture(
    config: SteppedConfig, env: Any, leaves: Mapping[str, np.ndarray], key: str
) -> np.ndarray:
    shown = env.render() if key == RENDER else leaves[key]
    picture = np.asarray(shown) if shown is not None else np.zeros(0)
    if picture.ndim != 3 or picture.shape[-1] != 3 or picture.dtype != np.uint8:
        what = "its render()" if key == RENDER else f"{key!r} of its observations"
        raise ConfigError(
            f"{config.id} shows no picture: {what} is {picture.dtype} "
            f"{list(picture.shape)}, uint8 [h w 3] is needed. Name others with env.cameras, "
            "set env.options.render_mode=rgb_array, or do without: env.observe=state"
        )
    return np.ascontiguousarray(picture)


def _succeeded(config: SteppedConfig, info: Mapping[str, Any], terminated: bool) -> bool:
    if config.success == TERMINATED:
        return terminated
    for key in [config.success] if config.success else _SUCCESS:
        if key in info:
            told = np.asarray(info[key])
            if (
                told.size != 1
                or told.dtype.kind not in "biuf"
                or not np.isfinite(told.astype(float)).all()
            ):
                raise UserError(
                    f"{key} in the info of {config.id} is {str(info[key])[:60]!r}, which "
                    "is neither true nor false: name another key with env.success, or "
                    f"{TERMINATED!r}"
                )
            return bool(told.item())
    wanted = repr(config.success) if config.success else " nor ".join(map(repr, _SUCCESS))
    raise UserError(
        f"the info of {config.id} has no {wanted}, only "
        f"{', '.join(map(str, info)) or 'nothing'}: set env.success to the key that says "
        f"whether the task is done, or to {TERMINATED!r}"
    )


def _proprio(leaves: Mapping[str, np.ndarray], keys: Sequence[str]) -> np.ndarray:
    parts = [np.ravel(leaves[key]).astype(np.float32) for key in keys]
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
def named(config: SteppedConfig, doing: str) -> Iterator[None]:
    """What an env raises becomes a `UserError` that says which env, and while what."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"env.id={config.id!r} failed in {doing} ({type(error).__name__}: {first_line(error)}). "
            f"{config.remedy}, env.options={config.options}, and that its packages are installed "
            "where workers run (slots.python)"
        ) from error


def collect_episode(
    simulator: SteppedSimulator,
    episode: EpisodeSpec,
    *,
    noise_std: float = 0.0,
    rng: np.random.Generator | None = None,
    slot: int = 0,
) -> dict[str, Any]:
    """Run one episode with the scripted expert of ``env.expert``; noise as in
    `sim.simple.SimpleSimulator.collect_episode`.

    An expert is called with the env's own observation, or has a method ``get_action`` or ``act``
    that is. `UserError` where none is named.
    """
    rng = np.random.default_rng(episode.seed) if rng is None else rng
    act = expert_of(simulator.config, episode.task_id)
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


def expert_of(config: SteppedConfig, task: str) -> Any:
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
