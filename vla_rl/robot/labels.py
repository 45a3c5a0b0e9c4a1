"""The reward of an arm's episodes: their labels, or a learned reward that is fitted on the labels
of this very run.

HIL-SERL's success classifier (``reward=classifier``) starts without data: until both successes and
failures were labelled an episode's label is its reward. From the fit on the learned reward scores,
also episodes that nobody labelled.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from vla_rl.assembly.context import REWARD_FOLDER, Run
from vla_rl.assembly.reward import reward_demonstrations, start_reward
from vla_rl.checkpoint import CheckpointError
from vla_rl.errors import UserError
from vla_rl.rewards.build import REWARD_FILE, load_reward, save_reward
from vla_rl.rewards.handle import is_fitted
from vla_rl.storage import replacing
from vla_rl.types import Trajectory

EVERY = 20  # labelled episodes between fits, where reward_check.refit_every does not say


class SessionReward:
    """``run``'s reward for episodes with an arm; a learned one is kept in ``<run>/reward``."""

    def __init__(self, run: Run, policy: Any, say: Callable[[str], None] = print) -> None:
        self._run, self._say = run, say
        self.reward = start_reward(run, policy)
        self.learned = self.reward.learned
        self._read = 0  # when what was read last was written
        if self.learned and self._folder.is_dir():
            self._load()

    @property
    def _folder(self) -> Path:
        return self._run.dir / REWARD_FOLDER

    def _load(self) -> None:
        self._read = (self._folder / REWARD_FILE).stat().st_mtime_ns
        load_reward(self._folder, self._run.config.reward_type, self.reward)

    def refresh(self) -> None:
        """Take what another process has fitted since."""
        with contextlib.suppress(OSError, CheckpointError):  # it is being written
            if self.learned and (self._folder / REWARD_FILE).stat().st_mtime_ns != self._read:
                self._load()

    def __call__(self, trajectory: Trajectory) -> Tensor:
        """As `RewardModel.score`; a label is paid in the last control step."""
        if self.learned and not is_fitted(self.reward):
            return trajectory.rewards.sum(1)
        return self.reward.score([trajectory])[0]

    def refit(
        self, labelled: int, newest: Callable[[int], Sequence[Trajectory]]
    ) -> dict[str, float]:
        """Once in so many ``labelled`` episodes: train on the ``newest(count)`` of them. Returns
        figures; none where it is not time, or successes or failures are missing still."""
        check = self._run.config.reward_check
        if not self.learned or labelled % (check.refit_every or EVERY):
            return {}
        try:
            found = self.reward.fit(
                [*reward_demonstrations(self._run), *newest(check.buffer_episodes)]
            )
        except UserError as error:
            self._say(f"the reward is not fitted yet: {error}")
            return {}
        config = self._run.config
        with replacing(self._folder, keep_last_good=False) as part:
            save_reward(part, config.reward_type, config.reward, self.reward, found)
        figures = {f"reward/{name}": float(value) for name, value in found.items()}
        right = found.get("held_out_accuracy")
        judged = "" if right is None else f", {right:.0%} right on ends that it had not seen"
        self._say(f"the reward was fitted on {labelled} labelled episodes{judged}")
        return figures
