"""What a reward says of the episode that runs: for the console's curve, and for the record.

``python -m vla_rl.robot.reward_process CONFIG.json`` with socket, job, every and threads: a process
that only listens and says `Progress`. Nobody waits for it. Where its model takes long it looks less
often; where it dies the session goes on.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from vla_rl import build
from vla_rl import config as configs
from vla_rl.assembly.learner_main import job_of, run_of
from vla_rl.config import RunConfig
from vla_rl.rewards.build import reads_policy
from vla_rl.rewards.handle import is_fitted
from vla_rl.rewards.tools import needs_judging
from vla_rl.robot.labels import SessionReward
from vla_rl.robot.process import run_process
from vla_rl.types import EmbodimentSpec, EpisodeSpec, Observation, SlotObservation, Trajectory

SOURCE = "reward"
MOST = 64  # moments of an episode that are kept: beyond them every second one goes

Judge = Callable[[Trajectory], "float | None"]
"""An episode until now → its progress; None where there is nothing to say."""


class RewardWatcher:
    """Takes the supervisor's messages (`hear`) and says what to send (`score`). No clock, no
    socket.

    It looks at every ``every``-th control step: at the first picture of each camera from after it.
    ``refresh`` is called as an episode begins, for a model that is trained meanwhile.
    """

    def __init__(
        self,
        judge: Judge,
        pictures: Callable[[Any], np.ndarray | None],
        model: str,
        every: int,
        refresh: Callable[[], None] = lambda: None,
    ) -> None:
        self._judge, self._pictures, self.model, self._every, self._refresh = (
            judge,
            pictures,
            model,
            every,
            refresh,
        )
        self._parse = build.attribute("real.tasks:parse")
        self._cameras: tuple[str, ...] = ()
        self._width = 0
        self._frames: dict[str, Any] = {}
        self._episode, self._task = -1, self._parse("")
        self._proprio: tuple[float, ...] = ()
        self._steps = 0
        self._since: float | None = None  # a picture from after this is wanted
        self._stride = every
        self._seen: list[SlotObservation] = []
        self._last = 0  # the control step that the newest of them follows
        self._new = False

    def hear(self, message: Any) -> None:
        if message.kind == "welcome":
            self._cameras, self._width = message.cameras, len(message.action_names)
        elif message.kind == "frame":
            self._frames[message.camera] = message
            self._look()
        elif message.kind == "state":
            self._follow(message)
        elif message.kind == "notice" and message.name == "begin":
            self._refresh()
            self._episode, self._task, self._steps = message.episode, self._parse(message.value), 0
            self._stride, self._seen, self._new, self._since = self._every, [], False, message.stamp
        elif message.kind == "notice" and message.name in ("end_episode", "discard"):
            self._episode, self._since, self._new = -1, None, False

    def _follow(self, state: Any) -> None:
        self._proprio = state.proprio or self._proprio
        if state.episode == self._episode and state.step_done:
            self._steps = state.step + 1
            if self._since is None and self._steps >= self._last + self._stride:
                self._since = state.stamp

    def _look(self) -> None:
        if self._since is None or not self._proprio:
            return
        frames = [self._frames.get(name) for name in self._cameras]
        if any(frame is None or frame.capture < self._since for frame in frames):
            return
        images = {frame.camera: self._pictures(frame) for frame in frames if frame is not None}
        if any(image is None for image in images.values()):
            return  # overwritten meanwhile: the next one will do
        proprio = np.array(self._proprio, np.float32)
        self._seen.append(SlotObservation(images, proprio, self._task.instruction))  # type: ignore[arg-type]
        if len(self._seen) > MOST:
            self._seen, self._stride = [*self._seen[:-1:2], self._seen[-1]], 2 * self._stride
        self._last, self._since, self._new = self._steps, None, len(self._seen) > 1

    @property
    def due(self) -> bool:
        """Whether something was seen since the last score."""
        return self._new

    def score(self) -> dict[str, Any] | None:
        """The fields of a `Progress`; None where the reward says nothing."""
        self._new = False
        value = self._judge(self._until_now())
        if value is None or not math.isfinite(value):
            return None
        return {"model": self.model, "episode": self._episode, "step": self._last, "value": value}

    def _until_now(self) -> Trajectory:
        """As if the episode were cut here. What was done between the pictures is not in it: no
        progress model reads that."""
        t = len(self._seen) - 1
        return Trajectory(
            episode=EpisodeSpec(
                self._task.name, self._task.number, rollout_id=f"live/{self._episode}/{self._last}"
            ),
            observations=Observation.from_slots(self._seen[:-1]),
            final_observation=Observation.from_slots(self._seen[-1:]),
            actions=torch.zeros(t, 1, self._width),
            valid=torch.ones(t, 1, dtype=torch.bool),
            rewards=torch.zeros(t, 1),
            behavior_log_prob=torch.zeros(t),
            replay={},
            terminated=False,
            truncated=True,
            success=False,
        )


class AskedOnce:
    """A chat backend that is asked each question once: of an episode that grows most were asked
    before."""

    def __init__(self, backend: Any, most: int = 4096) -> None:
        self._backend, self._most = backend, most
        self._known: dict[tuple[Any, ...], str] = {}

    def reply(self, questions: Sequence[Any]) -> list[str]:
        keys = [(q.text, *(hash(image.numpy().tobytes()) for image in q.images)) for q in questions]
        new = {key: q for key, q in zip(keys, questions) if key not in self._known}
        if len(self._known) + len(new) > self._most:
            self._known.clear()
            new = dict(zip(keys, questions))
        self._known |= dict(zip(new, self._backend.reply(list(new.values())) if new else []))
        return [self._known[key] for key in keys]


def why_not(config: RunConfig) -> str:
    """Why the config's reward cannot judge an episode that runs; "" where it can."""
    if reads_policy(config.reward):
        return (
            "it reads the policy's own features (reward.encoder.type=policy), which only whole "
            "episodes offer"
        )
    if not needs_judging(config.reward_type, config.reward):
        return "it judges whole episodes; use pairwise, process, classifier, value_progress or vlac"
    return ""


def judge_of(reward: SessionReward) -> Judge:
    """What ``reward`` says at the end of what was seen; nothing as long as it is not fitted."""
    backend = reward.reward.backend
    if backend is not None and not isinstance(backend, AskedOnce):
        reward.reward.backend = AskedOnce(backend)

    def judge(trajectory: Trajectory) -> float | None:
        if reward.learned and not is_fitted(reward.reward):
            return None
        with torch.inference_mode():
            return float(reward.reward.progress([trajectory])[0][-1])

    return judge


def watcher_of(
    reward: SessionReward, model: str, every: int, refresh: bool = False
) -> RewardWatcher:
    """``refresh``: another process fits it."""
    rings = build.attribute("real.ring:Rings")()
    return RewardWatcher(
        judge_of(reward), rings, model, every, reward.refresh if refresh else lambda: None
    )


# -------------------------------------------------------------------------------------- the process
def start_watcher(
    body: Any, config: RunConfig, embodiment: EmbodimentSpec, every: int, threads: int
) -> None:
    """Start the process; its end does not end the session."""
    job = {
        "socket": body.socket,
        "job": job_of(config, embodiment, []),
        "every": every,
        "threads": threads or 1,
    }
    body.process(
        "reward",
        "vla_rl.robot.reward_process",
        [body.write_config("reward", job)],
        timeout=600.0,
        may_end=True,
    )


def load_watcher(config: RunConfig, embodiment: EmbodimentSpec, every: int) -> RewardWatcher:
    """With the reward of ``config``, trained where its checkpoint says so. Raises `UserError`."""
    reward = SessionReward(run_of(config, job_of(config, embodiment, [])), None)
    return watcher_of(reward, config.reward_type, every, refresh=True)


def serve(client: Any, watcher: RewardWatcher) -> None:
    """Until the session ends. All that waits is heard before anything is scored."""
    progress, link_error = (
        build.attribute("real.messages:Progress"),
        build.attribute("real.link:LinkError"),
    )
    try:
        while True:
            message = client.receive(0.1)
            while message is not None:
                watcher.hear(message)
                message = client.receive(0.0)
            if watcher.due and (fields := watcher.score()) is not None:
                client.send(progress, **fields)
    except link_error:
        return


def main(config: dict[str, Any]) -> None:
    torch.set_num_threads(int(config["threads"]))
    os.nice(10)
    job = config["job"]
    watcher = load_watcher(
        configs.from_tree(job["config"]),
        EmbodimentSpec.from_dict(job["embodiment"]),
        config["every"],
    )
    client = build.attribute("real.link:Client")(config["socket"], "viewer", SOURCE)
    print("ready", flush=True)
    serve(client, watcher)


if __name__ == "__main__":
    run_process(main)
