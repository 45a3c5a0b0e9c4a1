"""What a reward model is, and all that it may offer besides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from vla_rl.interfaces.offering import Offering, default
from vla_rl.types import EmbodimentSpec, Trajectory


class RewardModel(Offering):
    """Scores whole trajectories.

    `score` is what every reward model has; all else is optional, and stands here with what is
    assumed of one without it. What one ``can``: "progress", "filtering" (`keep_masks`),
    "preparing", "state", "reversal", "critics", "parts".
    """

    required = ("score",)
    words: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "progress": ("progress",),
        "filtering": ("keep_masks",),
        "preparing": ("prepare",),
        "state": ("state_dict",),
        "reversal": ("reverse_progress",),
        "critics": ("critics",),
        "parts": ("score_parts",),
        "references": ("set_references",),
    }

    def score(self, trajectories: Sequence[Trajectory]) -> list[Tensor]:
        """One float32 tensor per trajectory: [t], a reward per decision, paid in the last control
        step that the decision executed; or [t h], a reward per control step. Algorithms that
        discount per control step discount inside chunks."""
        raise NotImplementedError

    def prepare(self, trajectory: Trajectory) -> None:
        """A part of its work that can be done as each episode ends: called in a thread while other
        episodes still simulate."""

    @default
    def reads_frames(self) -> bool:
        """Whether it looks at images or at what the policy keeps for its replay. False: on a
        cluster they stay where they are."""
        return True

    def metrics(self) -> Mapping[str, float]:
        """Figures to log of the last `score`."""
        return {}

    # ------------------------------------------------------------ progress: `vla-rl reward quality`
    def progress(self, trajectories: Sequence[Trajectory]) -> list[Tensor]:
        """One float32 tensor [t+1] per trajectory, 0 … 1: before each decision and at the end; NaN
        where unknown. The success flag of the trajectory itself must not enter."""
        raise NotImplementedError

    def reverse_progress(self, trajectories: Sequence[Trajectory]) -> list[Tensor]:
        """A judgement of its own of episodes played backwards: [t+1] per trajectory as `progress`,
        in the order of time."""
        raise NotImplementedError

    def critics(self, trajectories: Sequence[Trajectory]) -> list[Tensor]:
        """Judgements of single steps, of which progress is made: [t] per trajectory, above 0 where
        a step led on."""
        raise NotImplementedError

    def keep_masks(self, trajectories: Sequence[Trajectory]) -> list[Tensor]:
        """Mistakes in demonstrations: which decisions are worth imitating, bool [t] per
        trajectory."""
        raise NotImplementedError

    # ----------------------------------------------------- what it is told, and what it learns from
    def set_embodiment(self, embodiment: EmbodimentSpec, stride: int) -> None:
        """For one that reads proprioception by name. ``stride``: control steps between the frames
        of demonstrations."""

    def set_references(self, trajectories: Sequence[Trajectory]) -> None:
        """The demonstrations that it compares with (``reward.reference``)."""
        raise NotImplementedError

    @default
    def wants_demonstrations(self) -> bool:
        """Whether `set_demonstrations` is to be called before RL."""
        return False

    def set_demonstrations(self, trajectories: Sequence[Trajectory]) -> None:
        raise NotImplementedError

    @default
    def learned(self) -> bool:
        """Whether it is to be trained (`fit`) before it scores."""
        return False

    def fit(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Train on trajectories, labelled by their success; a trained model goes on from where it
        is. Returns figures such as the loss."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """What changes of it in a run: nested dicts and lists of tensors, numbers and strings.
        ``fitted`` False: it cannot score yet."""
        raise NotImplementedError

    def load_state_dict(self, state: dict[str, Any]) -> Any:
        raise NotImplementedError

    # ----------------------------------------------------------------------------- made of others
    @default
    def parts(self) -> Mapping[str, Any]:
        """{name: what has a ``reward`` and a ``weight``} of a reward model made of others."""
        return {}

    def score_parts(self, trajectories: Sequence[Trajectory]) -> dict[str, list[Tensor]]:
        """{name: [t] per trajectory} of several named rewards (``algorithm.reward_names``)."""
        raise NotImplementedError

    def total(self, parts: Mapping[str, Sequence[Tensor]]) -> list[Tensor]:
        """[t] per trajectory: what `score` returns of them."""
        raise NotImplementedError

    @default
    def backend(self) -> Any:
        """Of a model that asks a chat model: ``backend.reply(questions)``, of ``text`` and
        ``images`` each, gives texts. None: it asks nobody."""
        return None
