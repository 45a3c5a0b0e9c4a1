"""What plug-ins may offer beyond `vla_rl.interfaces`: the core asks with ``isinstance`` and does
without where none is.

Each Protocol holds one question, so that a class answers it by having these names and nothing else.
Options of configs and attributes of classes are in `vla_rl.asked`. `vla_rl.rewards.handle` asks
reward models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import Generator, Tensor, nn

from vla_rl.types import (
    ActionChunk,
    EmbodimentSpec,
    EpisodeSpec,
    Observation,
    PolicyOutput,
    Trajectory,
    Transitions,
)


# ----------------------------------------------------------------------------------------- policies
@runtime_checkable
class PreparedPolicy(Protocol):
    """A policy that changes before RL, such as by freezing parts."""

    def prepare_for_rl(self) -> None:
        """Called before an algorithm first learns; a resumed run calls it again."""
        ...


@runtime_checkable
class PartlyExecuted(Protocol):
    """A policy of whose chunks only the first ``executed_steps`` are meant to be executed."""

    @property
    def executed_steps(self) -> int: ...


@runtime_checkable
class ReferringActor(Protocol):
    """An actor whose checkpoints can leave the frozen policy's weights where they are."""

    def refer_to(self, folder: Path) -> None:
        """``folder`` is the checkpoint that the frozen policy was read from."""
        ...


@runtime_checkable
class BlindFeatures(Protocol):
    """A `FeaturePolicy` that can leave its images alone."""

    def blind_features(self, observation: Observation) -> dict[str, Tensor]:
        """`FeaturePolicy.frame_features` without "visual"."""
        ...


@runtime_checkable
class HeldFeatures(Protocol):
    """A `FeaturePolicy` that can learn and yet see as before."""

    def hold_features(self) -> None:
        """Freezes what makes `FeaturePolicy.frame_features`: called before it first learns from
        those that were kept."""
        ...


@runtime_checkable
class SeeingActor(Protocol):
    """An `ActorPolicy` whose encoder may read pictures, beside frames that `annotate` leaves them
    out of: a replay has them.

    ``reads_pictures`` False: it reads none. ``shift``: by how many pixels learners shift them at
    most (DrQ)."""

    reads_pictures: bool
    shift: int

    def pictures(self, observation: Observation) -> dict[str, Tensor]:
        """Frames uint8 [b H W 3] for its encoder, one of each camera; none where it reads none."""
        ...


@runtime_checkable
class PictureDecoder(Protocol):
    """A `NoisePolicy`, or an actor on one, that decodes from the observation's images whatever its
    features are, where ``decodes_pictures``: learners then draw them from the replay."""

    decodes_pictures: bool


@runtime_checkable
class ChainPolicy(Protocol):
    """A `LikelihoodPolicy`, `FeaturePolicy` and `NoisePolicy` whose decision is a chain of
    denoising steps, and that can draw one without its images."""

    def sample(
        self,
        observation: Observation,
        features: Mapping[str, Tensor],
        seeds: Sequence[int] | None = None,
    ) -> PolicyOutput:
        """As of `Policy.act`, from its own `frame_features` of the observation. The replay holds
        what `evaluate` needs in the images' place."""
        ...


@runtime_checkable
class GuidedPolicy(Protocol):
    """A policy that can draw a chunk towards one that is wanted while it denoises it: real-time
    chunking."""

    @property
    def guidable(self) -> bool:
        """Whether its sampler allows it."""
        ...

    def act_towards(
        self,
        observation: Observation,
        wanted: Tensor,
        weight: Tensor,
        most: float,
        *,
        deterministic: bool = False,
    ) -> ActionChunk:
        """Near ``wanted`` [b h a] (physical units), of which each control step counts by ``weight``
        [b h] in [0, 1]; the factor of the guidance is at most ``most``. Nobody knows its
        likelihood."""
        ...


@runtime_checkable
class StackedPolicy(Protocol):
    """A policy on top of a frozen one, which can act by itself."""

    def beneath(self) -> Any:
        """The frozen one."""
        ...


@runtime_checkable
class WeightedActor(Protocol):
    """An `ActorPolicy` that can be trained on decisions that were executed, some more than
    others."""

    def weighted_loss(
        self,
        batch: Transitions,
        encoded: Tensor,
        frames: Mapping[str, Tensor],
        weights: Tensor,
        generator: Generator,
    ) -> tuple[Tensor, dict[str, float]]:
        """Loss and metrics; each row counts by its weight [b], exactly or in the mean over
        ``generator``'s draws."""
        ...


@runtime_checkable
class CompletingPolicy(Protocol):
    """A policy that can go on from weights that lack a part of it."""

    def completed(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights of a checkpoint, with what this policy can make of them."""
        ...


@runtime_checkable
class PractisingActor(Protocol):
    """An actor that counts its updates, such as one whose reach grows with them."""

    def practised(self) -> None:
        """Called after each update of the actor."""
        ...


@runtime_checkable
class ChoosingActor(Protocol):
    """An `ActorPolicy` that can decide its gripper apart, by values of three choices; what critics
    read then leaves it out.

    ``choices``: features to values, trained by the algorithm; None: the gripper is an action as the
    others.
    """

    if TYPE_CHECKING:  # a submodule: see `vla_rl.interfaces.ActorPolicy`
        choices: nn.Module | None

    def choice_values(
        self, encoded: Tensor, frames: Mapping[str, Tensor], choices: nn.Module | None = None
    ) -> Tensor:
        """[b 3] by ``choices`` (None: its own)."""
        ...

    def choosable(self, frames: Mapping[str, Tensor]) -> Tensor:
        """Which choices there are at these frames, bool [b 3]."""
        ...

    def chosen(self, actions: Tensor, valid: Tensor, frames: Mapping[str, Tensor]) -> Tensor:
        """Which choice decisions were that were stored, int64 [b]; −1: none of them. ``actions``
        as sent [b h a]."""
        ...

    def gripper_changes(self, actions: Tensor, valid: Tensor) -> Tensor:
        """1 where a control step of an episode's decisions [t h a] turned the gripper around,
        float32 [t h]."""
        ...


@runtime_checkable
class ValueHeadPolicy(Protocol):
    """A policy with a value head, whose value is `PolicyEvaluation.value`."""

    def value_parameters(self) -> Iterable[nn.Parameter]:
        """The head's parameters: they learn at ``critic_learning_rate``, and alone in the critic
        warm-up."""
        ...


@runtime_checkable
class SelfImitatingPolicy(Protocol):
    """An `ImitationPolicy` that tells decisions of its own from a demonstrator's.

    ``imitates_itself`` True: its ``imitation_loss`` takes ``own`` bool [b], the rows that it
    sampled itself. Their loss is −log-likelihood under the distribution that it acts by. What
    softens the labels of demonstrations, of which there are few, would spread its actions a little
    further each time that it imitates itself.
    """

    imitates_itself: bool


@runtime_checkable
class ImageFeatures(Protocol):
    """A policy that lends its image features to a reward (``reward.encoder.type=policy``)."""

    def image_features(self, frames: Tensor) -> Tensor:
        """Float32 [b f] of pictures uint8 [b H W 3], without gradient."""
        ...


@runtime_checkable
class ImageSpread(Protocol):
    """A policy that can say whether its image features differ from picture to picture."""

    def image_token_spread(self, observation: Observation) -> float: ...


@runtime_checkable
class PublishablePolicy(Protocol):
    """A policy that its own project has a form for (``vla-rl export``)."""

    def save_pretrained(self, folder: Path) -> None: ...


@runtime_checkable
class FormedPolicy(Protocol):
    """A policy that other projects have forms for, by name (``vla-rl export --form``)."""

    @property
    def forms(self) -> Sequence[str]: ...

    def save_as(self, form: str, folder: Path) -> None: ...


@runtime_checkable
class TrainingMode(Protocol):
    """A policy that acts differently while it is trained, as a `torch.nn.Module` does."""

    training: bool

    def train(self, mode: bool = True) -> Any: ...

    def eval(self) -> Any: ...


# ------------------------------------------------------------------------------------------ critics
@runtime_checkable
class ObservingCritic(Protocol):
    """A critic that keeps statistics of its inputs."""

    def observe(self, observation: Observation) -> None:
        """Called once per batch, before values are read."""
        ...


@runtime_checkable
class ChoosyCritic(Protocol):
    """A critic that says whether it looks at images. False spares copying them; without it they
    are copied."""

    reads_images: bool


# --------------------------------------------------------------------------------------- collectors
@runtime_checkable
class ClosingCollector(Protocol):
    """A collector that holds processes, which end with the phase."""

    def close(self) -> None: ...


@runtime_checkable
class AheadCollector(Protocol):
    """A collector whose episodes may start ``ahead`` iterations before they are learned from, and
    be learned from ``late`` iterations after the one that they were planned for."""

    ahead: int
    late: int

    def issue(self, plan: Sequence[EpisodeSpec]) -> None:
        """Start these; a `Collector.collect` of the same plan will ask for them."""
        ...

    def await_done(self, enough: Callable[[Sequence[str]], bool]) -> Sequence[str]:
        """The rollout ids of episodes that are done and were not asked for yet, in the order of
        their ends, once ``enough`` holds for them."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The episodes that are done and were not asked for yet."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`; before anything is issued."""
        ...


# --------------------------------------------------------------------------------------------- envs
@runtime_checkable
class RepeatableEnv(Protocol):
    """``repeatable`` True: the same episode and actions give the same images again, so that
    videos can be drawn later."""

    repeatable: bool


@runtime_checkable
class WorkerEnv(Protocol):
    """An env of processes; they take cores from the policy."""

    num_workers: int


@runtime_checkable
class MeasuredEnv(WorkerEnv, Protocol):
    """An env that knows for how many seconds its workers simulated, all together."""

    @property
    def busy_seconds(self) -> float: ...


# ------------------------------------------------------------------------------------------ rewards
@runtime_checkable
class FilteringReward(Protocol):
    """A reward that tells mistakes in demonstrations."""

    def keep_masks(self, trajectories: Sequence[Trajectory]) -> list[Tensor]:
        """Which decisions are worth imitating: bool [t] per trajectory."""
        ...


@runtime_checkable
class PreparingReward(Protocol):
    """A reward model that can do a part of its work as each episode ends."""

    def prepare(self, trajectory: Trajectory) -> None:
        """Called in a thread while other episodes still simulate."""
        ...


@runtime_checkable
class ReportingReward(Protocol):
    """A reward model with figures to log."""

    def metrics(self) -> dict[str, float]:
        """Of the last `score`."""
        ...


@runtime_checkable
class StatefulReward(Protocol):
    """A reward model that changes in a run. It also has ``load_state_dict(state)``."""

    def state_dict(self) -> dict[str, Any]:
        """Nested dicts and lists of tensors, numbers and strings. ``fitted`` False: it cannot
        score yet."""
        ...


@runtime_checkable
class LearnedReward(Protocol):
    """``learned`` True: the model is a `FittedReward`, to be trained before it scores."""

    @property
    def learned(self) -> bool: ...


@runtime_checkable
class DemonstratedReward(Protocol):
    """``wants_demonstrations`` True: the model has ``set_demonstrations(trajectories)``, called
    before RL."""

    @property
    def wants_demonstrations(self) -> bool: ...


@runtime_checkable
class EmbodiedReward(Protocol):
    """A reward model that reads proprioception by name."""

    def set_embodiment(self, embodiment: EmbodimentSpec, stride: int) -> None:
        """``stride``: control steps between the frames of demonstrations."""
        ...


@runtime_checkable
class ReferenceReward(Protocol):
    """A reward model that compares with demonstrations (``reward.reference``)."""

    def set_references(self, trajectories: Sequence[Trajectory]) -> None: ...


@runtime_checkable
class AskingReward(Protocol):
    """A reward model that asks a chat model: ``backend.reply(questions)``, of ``text`` and
    ``images`` each, gives texts."""

    backend: Any


@runtime_checkable
class ReversibleProgress(Protocol):
    """A progress model with a judgement of its own of episodes played backwards."""

    def reverse_progress(self, trajectories: Sequence[Trajectory]) -> list[Tensor]:
        """[t+1] per trajectory as `ProgressReward.progress`, in the order of time."""
        ...


@runtime_checkable
class StepCritics(Protocol):
    """A progress model made of judgements of single steps."""

    def critics(self, trajectories: Sequence[Trajectory]) -> list[Tensor]:
        """[t] per trajectory: above 0 where a step led on."""
        ...


@runtime_checkable
class PartedScores(Protocol):
    """A reward model of several named rewards (``algorithm.reward_names``)."""

    def score_parts(self, trajectories: Sequence[Trajectory]) -> dict[str, list[Tensor]]:
        """{name: [t] per trajectory}."""
        ...

    def total(self, parts: Mapping[str, Sequence[Tensor]]) -> list[Tensor]:
        """[t] per trajectory: what `score` returns of them."""
        ...


@runtime_checkable
class RewardPart(Protocol):
    @property
    def reward(self) -> Any: ...


@runtime_checkable
class RewardOfParts(Protocol):
    """A reward model made of others."""

    @property
    def parts(self) -> Mapping[str, RewardPart]: ...
