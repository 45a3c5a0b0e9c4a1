"""lerobot's policies (SmolVLA, Diffusion Policy, ACT, π0, π0.5) behind this project's protocols.

The model, its preprocessing and its normalisation are lerobot's own objects; what stands here is
how they meet an `Observation`, how a chain gets a likelihood, and how both kinds of checkpoint are
read and written:

- lerobot's form: the folder that its ``save_pretrained`` writes. `LeRobotPolicy.from_published`
  reads it for a given robot, `LeRobotPolicy.save_pretrained` writes it back, and lerobot's
  ``from_pretrained`` and evaluation load that.
- this project's form (`vla_rl.checkpoint`), which training saves and resumes from.

ACT is deterministic, so it acts and imitates. The others denoise a chunk step by step; each step is
a Gaussian (`policies.denoising.chain`), so they have a likelihood, with the axes
denoising_step, control_step and action_dim. Action dimensions that only pad the model's, and steps
before the present one, follow the sampler without noise: they carry no likelihood.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from policies.denoising import chain as chains
from policies.denoising.base import chunk_normals, drawn_steps
from policies.inputs import require_known
from policies.lerobot.build import OFFLINE, build_pipelines, build_policy
from policies.lerobot.centring import centre
from policies.lerobot.families import FAMILIES
from policies.lerobot.fit import match_cameras, require_fit
from policies.lerobot.flows import kept, repeated, restored
from policies.lerobot.guided import GuidedChain
from policies.lerobot.heads import (
    ACTION,
    PADDED,
    STATE,
    ChainHead,
    RegressionHead,
    column,
)
from policies.lerobot.improvement import AdvisedPolicy
from policies.lerobot.new import new_policy
from policies.lerobot.noise import NoiseNet, inputs_of
from policies.lerobot.openpi import FAMILIES as OPENPIS
from policies.lerobot.openpi import is_openpi, read_openpi, write_openpi
from policies.lerobot.package import require_lerobot
from policies.lerobot.sizes import SIZES
from policies.lerobot.stored import WEIGHTS, Stored, decode, encode
from policies.lerobot.student import TeachingChain
from policies.lerobot.weights import add_lora, is_tied, load_weights, save_weights, tie
from policies.settings import LEARNED_NOISE, LeRobotConfig
from policies.trunk.features import spread
from policies.trunk.noise import counter_normals, row_seeds
from vla_rl.errors import ConfigError, EmbodimentMismatch, UserError
from vla_rl.interfaces import Policy
from vla_rl.types import ActionChunk, EmbodimentSpec, Observation, PolicyEvaluation, PolicyOutput

NET = "noise_net."  # before the names of its weights
KEPT_BYTES = 2**20  # of a decision's prefix that is kept with it, where RL does not train it


# ------------------------------------------------------------------------------------------- policy
class LeRobotPolicy(AdvisedPolicy, nn.Module, Policy):
    """A policy of lerobot that acts and imitates (see the module's text). Build it with
    `from_published` (a checkpoint of lerobot), `from_statistics` (what SFT calls) or
    `vla_rl.checkpoint.load_policy`."""

    policy_type = "lerobot"

    def __init__(
        self, config: LeRobotConfig, embodiment: EmbodimentSpec, stored: Stored, model: nn.Module
    ):
        super().__init__()
        self.config, self.embodiment, self.stored, self.model = config, embodiment, stored, model
        self.head = FAMILIES[stored.family].make_head(model)
        self.require_words(stored.family, bool(FAMILIES[stored.family].tokenizer))
        self._share_noise()
        self.cameras = match_cameras(config, embodiment, stored)
        self.preprocessor, self.postprocessor = build_pipelines(stored, config.words)
        self._processor_device = "cpu"
        self._checked_instructions: set[str] = set()
        self.chunk_length = self.head.chunk_length
        if config.chunk_length != self.chunk_length:
            raise ConfigError(
                f"policy.chunk_length is {config.chunk_length}, this {stored.family} checkpoint "
                f"predicts chunks of {self.chunk_length}: set "
                f"policy.chunk_length={self.chunk_length}"
            )

    def _share_noise(self) -> None:
        head, samples = self.head, self.config.noise_samples
        if head.noise_samples is not None:
            head.noise_samples = samples
        elif samples > 1:
            raise ConfigError(
                f"policy.noise_samples is {samples}, and the loss of lerobot's "
                f"{self.stored.family} takes one noise of each demonstration: leave it at 1"
            )

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    # --------------------------------------------------------------------------------- construction
    @classmethod
    def from_stored(
        cls,
        config: LeRobotConfig,
        embodiment: EmbodimentSpec,
        stored: Stored,
        *,
        fetch: bool = False,
        weights: Path | None = None,
    ) -> LeRobotPolicy:
        """The policy with those of ``weights``, a file of lerobot's, or random ones, and adapters
        where ``config`` asks for them; ``fetch`` lets lerobot load the pretrained parts its
        settings name."""
        require_fit(config, embodiment, stored)
        model = build_policy(stored.settings, config.words, {"device": "cpu"} if fetch else OFFLINE)
        kind = (
            LeRobotPolicy
            if FAMILIES[stored.family].head_class() is RegressionHead
            else LeRobotChainPolicy
        )
        policy = kind(config, embodiment, stored, model)
        if weights is not None:
            load_weights(policy.model, weights)
        if config.lora_rank:
            add_lora(policy.model, config.lora_rank, config.lora_alpha, config.lora_targets)
        return policy

    @classmethod
    def from_published(cls, config: LeRobotConfig, embodiment: EmbodimentSpec) -> LeRobotPolicy:
        """The policy of ``config.checkpoint`` as it is, for the robot ``embodiment``.

        Raises `ConfigError`, `UserError` (folder or weights incomplete), `EmbodimentMismatch`,
        `MissingPackage` and `MissingDependency` (what the backbone needs is not on this machine).
        """
        require_lerobot()
        return cls._load(config, embodiment, cls._read(config, embodiment))

    @classmethod
    def from_statistics(
        cls,
        config: LeRobotConfig,
        embodiment: EmbodimentSpec,
        action_stats: Mapping[str, Any],
        proprio_stats: Mapping[str, Any],
    ) -> LeRobotPolicy:
        """The policy to fine-tune on a dataset: ``config.checkpoint`` or a new one, normalised with
        the dataset's statistics (dicts of ``low, high, mean, std, q01, q99``)."""
        require_lerobot()
        if config.checkpoint:
            stored = cls._read(config, embodiment).with_statistics(action_stats, proprio_stats)
            return cls._load(config, embodiment, stored)
        stored = new_policy(config, embodiment, action_stats, proprio_stats)
        return cls.from_stored(config, embodiment, stored, fetch=True)

    @classmethod
    def _read(cls, config: LeRobotConfig, embodiment: EmbodimentSpec) -> Stored:
        if is_openpi(Path(config.checkpoint)):
            return read_openpi(config, embodiment)
        stored = Stored.read(Path(config.checkpoint))
        options = config.option_values()
        unknown = sorted(set(options) - set(stored.settings))
        if unknown:
            raise ConfigError(
                f"policy.options has {unknown[0]!r}, which the {stored.family} policy in "
                f"{config.checkpoint} does not know"
            )
        own_size = {SIZES: stored.settings[SIZES]} if SIZES in stored.settings else {}
        return dataclasses.replace(
            stored, settings=encode(decode(stored.settings | options)) | own_size
        )

    @classmethod
    def _load(
        cls, config: LeRobotConfig, embodiment: EmbodimentSpec, stored: Stored
    ) -> LeRobotPolicy:
        weights = Path(config.checkpoint) / WEIGHTS
        return cls.from_stored(config, embodiment, stored, weights=weights).eval()

    # --------------------------------------------------------------------------------------- inputs
    def _batch(
        self,
        observation: Observation,
        actions: Tensor | None = None,
        valid: Tensor | None = None,
        check: bool = True,
    ) -> dict[str, Any]:
        """What lerobot's preprocessor makes of an observation (and of chunks to imitate), on the
        policy's device."""
        device = self.device
        self._move_processors(device)
        if missing := [
            camera for camera in self.cameras.values() if camera not in observation.images
        ]:
            raise EmbodimentMismatch(
                f"the policy reads camera {missing[0]!r}, the observation has "
                f"{sorted(observation.images)}"
            )
        batch: dict[str, Any] = {
            key: observation.images[camera].to(device).permute(0, 3, 1, 2).float() / 255.0
            for key, camera in self.cameras.items()
        }
        batch[STATE] = observation.proprio.to(device)
        batch["task"] = list(observation.instruction)
        if check and FAMILIES[self.stored.family].tokenizer:
            self._check_instructions(observation.instruction)
        if actions is not None and valid is not None:
            batch |= {ACTION: actions.to(device), PADDED: ~valid.to(device)}
        return self.preprocessor(batch)

    def _move_processors(self, device: torch.device) -> None:
        if str(device) != self._processor_device:
            for step in (*self.preprocessor.steps, *self.postprocessor.steps):
                if hasattr(step, "tensor_device"):  # the step that moves tensors
                    step.device, step.tensor_device = device.type, device
            self._processor_device = str(device)

    def _check_instructions(self, instructions: Sequence[str]) -> None:
        """Refuse what lerobot's tokenizer would silently cut or pass on empty."""
        prompt, state = (
            FAMILIES[self.stored.family].prompt,
            " ".join(["255"] * self.embodiment.proprio_dim),
        )
        tokenizers = [step for step in self.preprocessor.steps if hasattr(step, "input_tokenizer")]
        for text in set(instructions) - self._checked_instructions:
            if not text.strip():
                raise UserError(
                    "an observation has an empty instruction; this policy is told what to do by it"
                )
            for step in tokenizers:
                length = len(
                    step.input_tokenizer(prompt.format(text=text.rstrip("\n"), state=state))[
                        "input_ids"
                    ]
                )
                if length > step.max_length:
                    raise UserError(
                        f"the instruction {text!r} has {length} tokens as it is put, this policy "
                        f"reads at most {step.max_length}: shorten it"
                    )
            self._checked_instructions.add(text)

    def _chunk(self, normalized: Tensor) -> ActionChunk:
        """Physical actions [b h a]; as many control steps are valid as the checkpoint says to
        execute."""
        if FAMILIES[self.stored.family].padded:  # its postprocessor takes them so, and cuts them
            more = self.stored.settings["max_action_dim"] - normalized.shape[-1]
            normalized = nn.functional.pad(normalized, (0, more))
        actions = self.postprocessor(normalized).float()
        valid = torch.arange(self.chunk_length, device=actions.device) < self.head.executed
        return ActionChunk(actions=actions, valid=valid.expand(len(actions), -1).clone())

    # ----------------------------------------------------------------------------------- interfaces
    @torch.no_grad()
    def act(
        self,
        observation: Observation,
        *,
        deterministic: bool = False,
        seeds: Sequence[int] | None = None,
    ) -> PolicyOutput:
        """One chunk per row, the same every time: this family has no noise, ``seeds`` change
        nothing and the reported log-prob [b] is 0 (`PPO` refuses a policy without `evaluate`)."""
        assert isinstance(self.head, RegressionHead), (
            "`from_stored` makes a LeRobotChainPolicy of every other family"
        )
        self.model.eval()
        chunk = self._chunk(self.head.predict(self._batch(observation)))
        return PolicyOutput(
            chunk=chunk,
            behavior_log_prob=torch.zeros(len(observation), device=self.device),
            replay={},
        )

    @property
    def executed_steps(self) -> int:
        """See `vla_rl.interfaces.Policy`."""
        return self.head.executed

    @torch.no_grad()
    def frame_features(self, observation: Observation) -> dict[str, Tensor]:
        """See `vla_rl.interfaces.Policy`: what the family's own encoder makes of the images,
        the normalised state, and the mean embedding of the instruction's words where the family is
        told what to do. It may be empty here."""
        self.model.eval()
        batch = self._batch(observation, check=False)
        return {
            "visual": self.head.visual(batch),
            "state": batch[STATE].float(),
            **self.head.told(batch),
        }

    def first_look(self, shown: Callable[[], Observation]) -> None:
        """See `vla_rl.interfaces.Policy`."""
        if self.config.checkpoint or not self.head.eyes:
            return
        seen = shown()
        self.model.eval()
        centre(self.head.eyes, lambda: self.head.visual(self._batch(seen)))

    @torch.no_grad()
    def image_token_spread(self, observation: Observation) -> float | None:
        """See `vla_rl.interfaces.Policy`. State and instruction are those of the first row, as
        some encoders read them along with the pictures."""
        if not self.cameras:
            return None
        rows = [0] * len(observation)
        first = observation[rows]
        alike = dataclasses.replace(
            observation, proprio=first.proprio, instruction=first.instruction
        )
        self.model.eval()
        return spread(self.head.visual(self._batch(alike, check=False)).float())

    def imitation_loss(
        self,
        observation: Observation,
        actions: Tensor,
        valid: Tensor,
        improved: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        """lerobot's training loss of the family, as a mean over valid control steps, in training
        mode (dropout, crops).

        ``actions`` [b h a] in physical units, ``valid`` [b h]; ``improved`` [b], where
        `told_improvement`, by default all of them. Noise and times come from torch's global
        generator. Metrics, in normalised units: ``mse`` of the denoising target, or ACT's ``l1`` and ``kl``.
        """
        if tuple(actions.shape[1:]) != (self.chunk_length, self.embodiment.action_dim):
            raise EmbodimentMismatch(
                f"imitation_loss got actions {tuple(actions.shape)}, this policy predicts chunks "
                f"of {self.chunk_length} x {self.embodiment.action_dim}: load the data with that "
                "chunk length"
            )
        self.model.train()
        told = self._advice(observation, improved)
        return self.head.loss(self._batch(told, actions, valid), valid.to(self.device))

    # ---------------------------------------------------------------------------------- checkpoints
    def config_dict(self) -> dict[str, Any]:
        """What this project's ``config.json`` holds; `from_config_dict` inverts it."""
        dtypes = {
            name: str(p.dtype).removeprefix("torch.") for name, p in self.model.named_parameters()
        }
        return {
            "config": dataclasses.asdict(self.config),
            "lerobot": self.stored.settings,
            "pipelines": self.stored.pipelines,
            "dtypes": {name: dtype for name, dtype in dtypes.items() if dtype != "float32"},
            **({"tied": True} if is_tied(self.model) else {}),
        }

    @classmethod
    def from_config_dict(
        cls, data: Mapping[str, Any], embodiment: EmbodimentSpec, files: Mapping[str, str]
    ) -> LeRobotPolicy:
        """Inverse of `config_dict` (weights are loaded afterwards)."""
        require_lerobot()
        require_known(data["config"], LeRobotConfig)
        stored = Stored(dict(data["lerobot"]), dict(data["pipelines"]))
        policy = cls.from_stored(LeRobotConfig(**data["config"]), embodiment, stored)
        for name, parameter in policy.model.named_parameters():
            parameter.data = parameter.data.to(getattr(torch, data["dtypes"].get(name, "float32")))
        if data.get("tied"):
            tie(policy.model)
        return policy

    def save_pretrained(self, folder: Path | str) -> None:
        """Write the policy in lerobot's form: its ``from_pretrained``, its processors and its
        evaluation load the folder."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.stored.write(folder)
        save_weights(self.model, folder / WEIGHTS)

    @property
    def forms(self) -> tuple[str, ...]:
        """See `vla_rl.interfaces.Policy.forms`."""
        return ("lerobot", "openpi") if self.stored.family in OPENPIS else ("lerobot",)

    def save_as(self, form: str, folder: Path) -> None:
        if form == "openpi":
            write_openpi(self.stored, self.model, self.embodiment.name, folder)
        else:
            self.save_pretrained(folder)

    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters())


def _is_blank(observation: Observation) -> bool:
    """Whether it is one that only asks for sizes (`Observation.blank`), as what learns on top of
    a policy does first; it says nothing, and shows nothing."""
    told = any(text.strip() for text in observation.instruction)
    return not told and not any(bool(x.any()) for x in observation.images.values())


class _Walk(NamedTuple):
    """A chain that was taken: ``path`` K + 1 samples [b T d] from the first noise on, ``log_probs``
    of its K steps [b h a], what is fixed along it, and the one step [b] that was noisy, where it
    was one."""

    path: list[Tensor]
    log_probs: list[Tensor]
    condition: Any
    first_step: Tensor


class LeRobotChainPolicy(GuidedChain, TeachingChain, LeRobotPolicy):
    """A diffusion or flow policy: actions come out of a chain of Gaussian steps, which is what
    `replay` keeps."""

    log_prob_axes = ("denoising_step", "control_step", "action_dim")
    decodes_pictures = True  # its features are too coarse to act from
    head: ChainHead

    def __init__(
        self, config: LeRobotConfig, embodiment: EmbodimentSpec, stored: Stored, model: nn.Module
    ):
        super().__init__(config, embodiment, stored, model)
        noise_level = self.head.default_noise if config.noise_level is None else config.noise_level
        self.chain = self.head.chain(
            config.denoising_steps or self.head.default_steps, config.sampler, noise_level
        )
        self.noise_net: NoiseNet | None = None
        if config.sampler == LEARNED_NOISE:
            self.noise_net = self._new_noise_net()
        else:
            self.chain = self.chain.with_std_limits(config.min_std, config.max_std)
        steps = len(self.chain)
        if config.trained_steps > steps:
            raise ConfigError(
                f"policy.trained_steps is {config.trained_steps}, the chain has {steps} steps: "
                f"choose 0 to {steps}"
            )
        self.first_trained = steps - config.trained_steps if config.trained_steps else 0
        trained = steps - self.first_trained
        self._discount = chains.discount_schedule(trained, config.advantage_discount)
        self._clip_scale = chains.clip_schedule(trained, config.clip_base, config.clip_rate)

    def _new_noise_net(self) -> NoiseNet:
        if self.head.output is None:
            raise ConfigError(
                f"policy.sampler={LEARNED_NOISE} learns its noise from what an expert makes of "
                f"each control step, and lerobot's {self.stored.family} has none to show: use "
                "flow_sde or flow_cps"
            )
        config, width = self.config, self.head.output.in_features
        low, high = config.learned_std_low, config.learned_std_high
        return NoiseNet(width, self.embodiment.action_dim, low, high).to(self.device)

    def completed(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `vla_rl.interfaces.Policy`: what imitated without a noise network gets an
        untrained one, and one that is not asked for is left out."""
        own = (
            {f"{NET}{k}": x for k, x in self.noise_net.state_dict().items()}
            if self.noise_net
            else {}
        )
        return own | {k: x for k, x in weights.items() if k in own or not k.startswith(NET)}

    @property
    def steps_per_likelihood(self) -> int:
        """Size of the "denoising_step" axis."""
        return 1 if self.config.stochastic_steps == "one" else len(self._discount)

    @property
    def correlated_axes(self) -> tuple[str, ...]:
        return self.config.correlated_axes

    def _actions(self, x: Tensor) -> Tensor:
        """The robot's part [b h a] of a sample [b T d]."""
        return x[:, self.head.first_step :, : self.embodiment.action_dim]

    def _decided(self, x: Tensor) -> ActionChunk:
        """What the end of a chain [b T d] stands for."""
        return self._chunk(self._actions(self.head.finished(x)))

    def _step(
        self,
        condition: Any,
        x: Tensor,
        index: int | Tensor,
        guidance: Any = None,
        first: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Mean and standard deviation (a number, or [b 1 1]) of the stochastic step ``index``, one
        or one a row, from ``x`` [b T d], and the plain step of a chain that began with
        ``first``."""

        def of(values: Tensor) -> Tensor:
            return column(values, index, x)

        std = of(self.chain.std)
        if self.noise_net is None:
            action, noise = self._estimates(condition, x, index, guidance)
        else:
            assert self.head.output is not None, "as `_new_noise_net` saw"
            with inputs_of(self.head.output) as seen:
                action, noise = self._estimates(condition, x, index, guidance)
            std = self.noise_net(seen[-1])
            std = nn.functional.pad(std, (0, x.shape[-1] - std.shape[-1]), value=1.0)
        mean = of(self.chain.weight_action) * action + of(self.chain.weight_noise) * noise
        onward = noise if first is None or not self.head.keeps_first_noise else first
        plain = of(self.chain.mean_action) * action + of(self.chain.mean_noise) * onward
        return mean, std, plain

    def _log_prob(self, x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
        """Of the robot's entries [b h a]. That of Flow-Noise is the mean over the steps and the
        first noise, whose ratio is 1."""
        log_prob = chains.gaussian_log_prob(self._actions(x), self._actions(mean), self._own(std))
        return log_prob if self.noise_net is None else log_prob / (len(self.chain) + 1)

    def _own(self, std: Tensor) -> Tensor:
        """The robot's part of standard deviations, where each entry has its own."""
        return std if self.noise_net is None else self._actions(std)

    @torch.no_grad()
    def act(
        self,
        observation: Observation,
        *,
        deterministic: bool = False,
        seeds: Sequence[int] | None = None,
    ) -> PolicyOutput:
        """One chunk per row. ``deterministic``: from the row's first noise along the sampler
        without noise (DDIM with η = 0, or Euler); without ``seeds`` that noise is the same at every
        call."""
        walk = self._walk(observation, deterministic, seeds)
        prefix = kept(walk.condition) if self.config.freeze_prefix else {}
        if sum(x[0].numel() * x.element_size() for x in prefix.values()) > KEPT_BYTES:
            prefix = {}
        path, log_prob, first = torch.stack(walk.path, 1), torch.stack(walk.log_probs, 1), {}
        if self.config.stochastic_steps == "one":
            rows, at = (
                torch.arange(len(path), device=path.device)[:, None],
                walk.first_step[:, None],
            )
            path, log_prob = path[rows, torch.cat([at, at + 1], 1)], log_prob[rows, at]
            first = {"first_step": walk.first_step}
        else:
            path, log_prob = path[:, self.first_trained :], log_prob[:, self.first_trained :]
        return PolicyOutput(
            chunk=self._decided(walk.path[-1]),
            behavior_log_prob=log_prob,
            replay={"chain": path, **first, **prefix},
        )

    def _walk(
        self,
        observation: Observation,
        deterministic: bool,
        seeds: Sequence[int] | None,
        guidance: Any = None,
        start: Tensor | None = None,
    ) -> _Walk:
        b, steps, shape = len(observation), len(self.chain), self.head.sample_shape
        seeds = row_seeds([0] * b if deterministic and seeds is None else seeds, b)
        draws, shared = (0, 0.0) if deterministic else (steps, self.config.noise_correlation)
        drawn = chunk_normals(seeds, draws, *shape, shared)
        first, noise = (x.to(self.device) for x in drawn)
        free = self._free()
        self.model.eval()
        condition = self.condition(observation, check=not _is_blank(observation))
        begin = self.head.begins(first if start is None else start)
        chosen = drawn_steps(seeds, self.first_trained, steps).to(self.device)
        path, log_probs = [begin], []
        for k in range(steps):
            mean, std, plain = self._step(condition, path[-1], k, guidance, path[0])
            x = plain
            if not deterministic:
                noisy = (
                    free
                    if self.config.stochastic_steps == "all"
                    else (free & (chosen == k)[:, None, None])
                )
                x = torch.where(noisy, mean + std * noise[:, k], plain)
            log_probs.append(self._log_prob(x, mean, std))
            path.append(x)
        return _Walk(path, log_probs, condition, chosen)

    @torch.no_grad()
    def decode(
        self, observation: Observation, noise: Tensor, features: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        """See `vla_rl.interfaces.Policy`: the sampler without noise, from ``noise`` [b h a].
        What only pads the model's sample starts from the same numbers each time. It needs the
        observation's images, whatever ``features`` are."""
        start = counter_normals([0] * len(noise), math.prod(self.head.sample_shape)).to(self.device)
        start = start.view(len(noise), *self.head.sample_shape)
        self._actions(start).copy_(noise)
        walk = self._walk(observation, True, None, start=start)
        return self._decided(walk.path[-1]).actions

    def evaluate(self, observation: Observation, replay: Mapping[str, Tensor]) -> PolicyEvaluation:
        """Log-prob and entropy [b k h a] of the stored ``chain`` [b k+1 T d] under the present
        weights, with gradient.

        Observations are encoded once, and all steps make one pass. Runs in evaluation mode and
        outside of autocast: dropout or another precision would make ratios differ from 1 at
        unchanged weights.
        """
        self.model.eval()
        path, trained = replay["chain"].to(self.device), self.steps_per_likelihood
        if path.shape[1] != trained + 1:
            raise ValueError(
                f"the stored chain has {path.shape[1] - 1} steps, this policy learns from {trained}"
            )
        index = torch.arange(self.first_trained, self.first_trained + trained).repeat(len(path), 1)
        if self.config.stochastic_steps == "one":
            index = replay["first_step"].cpu()[:, None]
        with torch.autocast(self.device.type, enabled=False):
            condition = repeated(self._fixed(observation, replay), trained)
            before, after = path[:, :-1].flatten(0, 1), path[:, 1:].flatten(0, 1)
            mean, std, _ = self._step(condition, before, index.flatten())
            log_prob = self._log_prob(after, mean, std).unflatten(0, index.shape)
        own = self._own(std).expand(*std.shape[:1], *log_prob.shape[2:]).unflatten(0, index.shape)

        def per_step(values: Tensor) -> Tensor:
            chosen = values[index - self.first_trained].to(log_prob.device)
            return chosen[:, :, None, None].expand_as(log_prob)

        return PolicyEvaluation(
            log_prob=log_prob,
            entropy=chains.gaussian_entropy(own),
            advantage_weight=None
            if self.config.advantage_discount == 1.0
            else per_step(self._discount),
            clip_scale=None if self.config.clip_base == 1.0 else per_step(self._clip_scale),
        )

    def _fixed(self, observation: Observation, replay: Mapping[str, Tensor]) -> Any:
        """What is fixed along a chain; of the time of acting, or without gradient, where RL leaves
        what makes it as it is."""
        if not self.config.freeze_prefix:
            return self.condition(observation)
        if any(name.startswith("prefix") for name in replay):
            return restored({name: x.to(self.device) for name, x in replay.items()})
        with torch.no_grad():
            return self.condition(observation)

    def _free(self) -> Tensor:
        """bool [T d]: entries of a sample that are noised, that is those of the robot's own
        chunk."""
        free = torch.zeros(self.head.sample_shape, dtype=torch.bool, device=self.device)
        free[self.head.first_step :, : self.embodiment.action_dim] = True
        return free
