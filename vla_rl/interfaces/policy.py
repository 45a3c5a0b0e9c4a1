"""What a policy is, and all that it may offer besides."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vla_rl.interfaces.offering import Offering, default
from vla_rl.types import ActionChunk, EmbodimentSpec, Observation, PolicyEvaluation, PolicyOutput


class Policy(Offering):
    """Acts. ``chunk_length`` control steps come out of each decision.

    `act` is what every policy has; all else is optional, and stands here with what is assumed of a
    policy without it. A policy subclasses this, or is any object with methods of the same names
    (`Policy.of`). What one ``can`` is told by the methods it has: "likelihood" (`evaluate`),
    "imitation", "value", "features", "cached_features" (imitation from features that were
    kept), "noise", "chain", "guidance", "distillation", "memory", "ranks", "image_features", "publishing".
    """

    required: ClassVar[tuple[str, ...]] = ("act",)
    words: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "likelihood": ("evaluate",),
        "imitation": ("imitation_loss",),
        "value": ("value",),
        "features": ("frame_features",),
        "cached_features": ("imitation_loss", "hold_features"),
        "noise": ("decode",),
        "chain": ("sample",),
        "guidance": ("act_towards",),
        "distillation": ("make_student",),
        "memory": ("initial_memory",),
        "ranks": ("blocks",),
        "image_features": ("image_features",),
        "publishing": ("save_pretrained",),
    }

    embodiment: EmbodimentSpec
    chunk_length: int

    def act(
        self,
        observation: Observation,
        *,
        deterministic: bool = False,
        seeds: Sequence[int] | None = None,
    ) -> PolicyOutput:
        """One chunk per row. ``seeds`` [b] fix each row's sampling noise, whatever rows it is
        batched with."""
        raise NotImplementedError

    @default
    def executed_steps(self) -> int:
        """Of a chunk, how many control steps are meant to be executed."""
        return self.chunk_length

    def initial_memory(self) -> Any:
        """What a `RememberingPolicy` is handed at an episode's first decision."""
        raise NotImplementedError

    # ------------------------------------------------------------------- likelihood: PPO and GRPO
    # Names of the axes ``*k`` of log-probs: "control_step", "action_dim", "denoising_step",
    # "token". A token-level ratio keeps all axes, a step-level ratio sums all but "control_step", a
    # denoising-step-level ratio all but "denoising_step", a chunk-level ratio sums all.
    log_prob_axes: tuple[str, ...] = ()

    @default
    def correlated_axes(self) -> Sequence[str]:
        """Axes along which entries are not sampled independently, though each has its own log-prob;
        a ratio that sums over one of them is no likelihood ratio, and PPO refuses it."""
        return ()

    def evaluate(self, observation: Observation, replay: Mapping[str, Tensor]) -> PolicyEvaluation:
        """Log-probs, with gradient, of the decisions that ``replay`` (`PolicyOutput.replay`)
        holds."""
        raise NotImplementedError

    def prepare_for_rl(self) -> None:
        """Called before an algorithm first learns, to freeze parts for example; a resumed run calls
        it again."""

    def value(self, observation: Observation) -> Tensor | None:
        """Of the policy's value head, which then serves instead of a separate critic: [b] with
        gradient, that of `act` and `evaluate` for the same observation; None: it has no head.

        It decides nothing and draws no noise, so it is cheaper than `act` where deciding takes more
        than the forward.
        """
        return None

    def value_parameters(self) -> Iterable[nn.Parameter]:
        """The value head's own parameters: they learn at ``critic_learning_rate``, and alone in the
        critic warm-up."""
        return ()

    # ------------------------------------------------------------------ imitation: SFT, filtered BC
    def targets(self, observation: Observation, actions: Tensor) -> Tensor:
        """What `imitation_loss` is handed in place of ``actions`` [b h a] (physical units) that
        were done on ``observation``, as it was before anything of it is hidden or exchanged."""
        return actions

    def imitation_loss(
        self, observation: Observation, actions: Tensor, valid: Tensor
    ) -> tuple[Tensor, dict[str, float]]:
        """Scalar loss and metrics for chunks ``actions`` float32 [b h a] (physical units, as
        `targets` has them), ``valid`` bool [b h].

        A policy that also offers features may take them as ``features``, and then encodes no
        image. With ``imitates_itself`` it takes ``own`` bool [b] too.
        """
        raise NotImplementedError

    def first_look(self, shown: Callable[[], Observation]) -> None:
        """Called once, before SFT's first update; ``shown`` reads demonstrations [b] that it will
        be shown: what a new policy may set its weights by. A resumed run loads its own over
        them."""

    @default
    def imitates_itself(self) -> bool:
        """Whether `imitation_loss` tells the rows that the policy sampled itself (``own``) from a
        demonstrator's. Their loss is −log-likelihood under the distribution that it acts by: what
        softens the labels of demonstrations, of which there are few, would spread its actions a
        little further each time that it imitates itself."""
        return False

    @default
    def told_improvement(self) -> bool:
        """Whether `imitation_loss` takes ``improved`` bool [b] too: which rows show an action that
        was better than usual. It then acts as if told that its own are."""
        return False

    # ----------------------------------------------------- features: small networks beside or on it
    def frame_features(self, observation: Observation) -> dict[str, Tensor]:
        """{name: float [b d]} without gradient, of about unit scale: "visual", what its images
        make, and smaller ones such as its standardised proprio and what the instruction says. A row
        depends on that row alone."""
        raise NotImplementedError

    def blind_features(self, observation: Observation) -> dict[str, Tensor]:
        """`frame_features` without "visual", for which images can be left alone."""
        features = self.frame_features(observation)
        return {name: value for name, value in features.items() if name != "visual"}

    def hold_features(self) -> None:
        """Freezes what makes `frame_features`: called before the policy first learns from those
        that were kept."""

    def image_features(self, frames: Tensor) -> Tensor:
        """What it lends to a reward (``reward.encoder.type=policy``): float32 [b f] of pictures
        uint8 [b H W 3], without gradient."""
        raise NotImplementedError

    def image_token_spread(self, observation: Observation) -> float | None:
        """How much its image features differ from picture to picture; None: nobody knows."""
        return None

    # -------------------------------------------------------------------- noise: steering, students
    def decode(
        self, observation: Observation, noise: Tensor, features: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        """One noise into one chunk, without any further draw: physical actions float32 [b h a] from
        standard normal ``noise`` [b h a]. ``features`` are this policy's own `frame_features` of
        the observation, which then need not show its images."""
        raise NotImplementedError

    @default
    def decodes_pictures(self) -> bool:
        """Whether `decode` reads the images whatever the features are: learners then draw them from
        the replay."""
        return False

    def sample(
        self,
        observation: Observation,
        features: Mapping[str, Tensor],
        seeds: Sequence[int] | None = None,
    ) -> PolicyOutput:
        """As `act`, of a policy whose decision is a chain of denoising steps, from its own
        `frame_features` of the observation. The replay holds what `evaluate` needs in the images'
        place."""
        raise NotImplementedError

    def make_student(self, steps: int, method: str) -> Any:
        """A faster student, of the given count of denoising steps.

        It is a `Policy` with ``distillation_loss(observation, teacher, generator, noises) → (loss,
        metrics)`` and ``after_update()``; those of its parameters that are to be trained require a
        gradient. ``distillation_state()`` and ``load_distillation_state(state)`` hold what its
        learning needs besides its weights to go on after an interruption.
        """
        raise NotImplementedError

    # -------------------------------------------------------------- guidance: real-time chunking
    @default
    def guidable(self) -> bool:
        """Whether its sampler allows `act_towards`."""
        return False

    def act_towards(
        self,
        observation: Observation,
        wanted: Tensor,
        weight: Tensor,
        most: float,
        *,
        deterministic: bool = False,
    ) -> ActionChunk:
        """A chunk drawn near ``wanted`` [b h a] (physical units), of which each control step counts
        by ``weight`` [b h] in [0, 1]; the factor of the guidance is at most ``most``. Nobody knows
        its likelihood."""
        raise NotImplementedError

    def lasts(self, output: PolicyOutput) -> Tensor | None:
        """The share [h] of a control step, above 0, that each row of ``output`` lasts in a session
        with an arm; None: all of it."""
        return None

    # ------------------------------------------------------------------- made, saved and loaded
    @classmethod
    def from_statistics(
        cls,
        config: Any,
        embodiment: EmbodimentSpec,
        action_stats: Mapping[str, Any],
        proprio_stats: Mapping[str, Any],
    ) -> Any:
        """A new policy, for demonstrations of these statistics: dicts of lists low, high, mean,
        std, q01, q99, for policies that normalise by them."""
        made: Any = cls
        return made(config, embodiment)

    @default
    def policy_type(self) -> str:
        """What checkpoints find its class by: a name of the registry, or ``module:Class``."""
        return f"{type(self).__module__}:{type(self).__qualname__}"

    def config_dict(self) -> dict[str, Any]:
        """JSON-ready: all that building the policy again needs besides embodiment, text files and
        weights. Here: the fields of its config, which are none of them dataclasses.

        A policy on top of another one puts that one's ``config_dict`` (with its ``policy_type``,
        and its ``embodiment`` where that is another) into its own as ``base``, and names its text
        files "base.NAME".
        """
        own: Any = self
        return {"config": dataclasses.asdict(own.config)}

    def extra_files(self) -> dict[str, str]:
        """Text files by name, ending in .json or .txt, such as a tokenizer."""
        return {}

    @classmethod
    def from_config_dict(
        cls, data: Mapping[str, Any], embodiment: EmbodimentSpec, files: Mapping[str, str]
    ) -> Any:
        """Inverse of `config_dict` and `extra_files`; weights are loaded afterwards. One on top of
        another takes that one, built, as a fourth argument."""
        made: Any = cls
        return made(made.Config(**data["config"]), embodiment)

    # ----------------------------------------------------------------------- weights, several ranks
    def parameters(self) -> Iterable[torch.nn.Parameter]:
        """What learns, where it requires a gradient."""
        return ()

    training: bool = False

    def train(self, mode: bool = True) -> Any:
        """From here on it is trained; a policy may act differently then."""
        return self

    def eval(self) -> Any:
        """From here on it acts."""
        return self

    def beneath(self) -> Any:
        """The frozen policy that it stands on, which can act by itself; None: it stands on
        none."""
        return None

    def refer_to(self, folder: Path) -> None:
        """Its checkpoints may leave the frozen policy's weights in ``folder``, the checkpoint that
        they were read from."""

    # The key of its own config that names the folder of a frozen base (`base_folder`).
    base_key: str

    def base_folder(self) -> Path | None:
        """The folder to which checkpoints leave frozen weights, a published model's or another
        checkpoint's, as absolute or from the working directory; None: checkpoints hold all weights.

        A checkpoint stores where it is and a fingerprint of its weights
        (`vla_rl.checkpoint.BaseReference`); as it is loaded the folder is found again, and stands
        under ``base_key``.
        """
        return None

    def completed(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights of a checkpoint, with what this policy can make of them where they lack a
        part of it."""
        return dict(weights)

    def save_pretrained(self, folder: Path) -> None:
        """The form that its own project has for it (``vla-rl export``)."""
        raise NotImplementedError

    @default
    def forms(self) -> Sequence[str]:
        """Names of the projects that have a form for it (``vla-rl export --form``)."""
        return ()

    def save_as(self, form: str, folder: Path) -> None:
        """That of ``forms``."""
        raise NotImplementedError

    def blocks(self) -> Iterable[torch.nn.Module]:
        """For several processes that train it together (`vla_rl.ranks.shard`): parts whose weights
        are gathered one at a time. Each is only ever called as a module, and within one that is
        trained all weights have one dtype; what lies outside of them is gathered for the whole
        forward. Any dataclass of tensors that `evaluate` returns must be a registered pytree, as
        `PolicyEvaluation` is."""
        raise NotImplementedError

    def learn_together(self, index: int, size: int, total: Callable[[Tensor], Tensor]) -> None:
        """This is rank ``index`` of ``size``; ``total`` adds a tensor up over the ranks, with
        gradient. For statistics over a batch of which each rank sees a part, and for noise that
        ranks must not share."""


class RememberingPolicy(Policy):
    """A policy whose decision depends on earlier ones of the episode: a queue of actions, a history
    of observations ("memory" in ``can``).

    The policy itself keeps nothing, since its rows belong to many episodes. `act` also takes
    ``memory``, one entry per row: ``initial_memory()`` at an episode's first decision, then what
    the last one returned in `PolicyOutput.memory`.
    """

    def act(
        self,
        observation: Observation,
        *,
        deterministic: bool = False,
        seeds: Sequence[int] | None = None,
        memory: Sequence[Any] | None = None,
    ) -> PolicyOutput:
        raise NotImplementedError
