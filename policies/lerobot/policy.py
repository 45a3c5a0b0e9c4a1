"""lerobot's policies (SmolVLA, Diffusion Policy, ACT, π0, π0.5) behind this project's protocols.

The model, its preprocessing and its normalisation are lerobot's own objects; what stands here is
how they meet an `Observation`, how a chain gets a likelihood, and how both kinds of checkpoint are
read and written:

- lerobot's form: the folder that its ``save_pretrained`` writes. `LeRobotPolicy.from_published`
  reads it for a given robot, `LeRobotPolicy.save_pretrained` writes it back, and lerobot's
  ``from_pretrained`` and evaluation load that.
- this project's form (`vla_rl.checkpoint`), which training saves and resumes from.

ACT is deterministic, so it acts and imitates. The others denoise a chunk step by step; each step is
a Gaussian (`policies.denoising.chain`), so they are a `LikelihoodPolicy` with the axes
denoising_step, control_step and action_dim. Action dimensions that only pad the model's, and steps
before the present one, follow the sampler without noise: they carry no likelihood.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from policies.denoising import chain as chains
from policies.lerobot.build import OFFLINE, build_pipelines, build_policy
from policies.lerobot.families import FAMILIES
from policies.lerobot.fit import match_cameras, require_fit
from policies.lerobot.flows import repeated
from policies.lerobot.guided import GuidedChain
from policies.lerobot.heads import (
    ACTION,
    PADDED,
    STATE,
    ChainHead,
    FinishingHead,
    RegressionHead,
    column,
)
from policies.lerobot.new import new_policy
from policies.lerobot.openpi import FAMILIES as OPENPIS
from policies.lerobot.openpi import is_openpi, read_openpi, write_openpi
from policies.lerobot.package import require_lerobot
from policies.lerobot.sizes import SIZES
from policies.lerobot.stored import WEIGHTS, Stored, decode, encode
from policies.lerobot.weights import is_tied, load_weights, save_weights, tie
from policies.settings import LeRobotConfig
from policies.trunk.noise import counter_normals
from vla_rl.errors import ConfigError, EmbodimentMismatch, UserError
from vla_rl.interfaces import Policy
from vla_rl.types import ActionChunk, EmbodimentSpec, Observation, PolicyEvaluation, PolicyOutput


# ------------------------------------------------------------------------------------------- policy
class LeRobotPolicy(nn.Module, Policy):
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
        self.cameras = match_cameras(config, embodiment, stored)
        self.preprocessor, self.postprocessor = build_pipelines(stored, config.vlm)
        self._processor_device = "cpu"
        self._checked_instructions: set[str] = set()
        self.chunk_length = self.head.chunk_length
        if config.chunk_length != self.chunk_length:
            raise ConfigError(
                f"policy.chunk_length is {config.chunk_length}, this {stored.family} checkpoint "
                f"predicts chunks of {self.chunk_length}: set "
                f"policy.chunk_length={self.chunk_length}"
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
    ) -> LeRobotPolicy:
        """The policy with random weights; ``fetch`` lets lerobot load the pretrained parts its
        settings name."""
        require_fit(config, embodiment, stored)
        model = build_policy(stored.settings, config.vlm, {"device": "cpu"} if fetch else OFFLINE)
        kind = (
            LeRobotPolicy
            if FAMILIES[stored.family].head_class() is RegressionHead
            else LeRobotChainPolicy
        )
        return kind(config, embodiment, stored, model)

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
        policy = cls.from_stored(config, embodiment, stored)
        load_weights(policy.model, Path(config.checkpoint) / WEIGHTS)
        return policy.eval()

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

    def imitation_loss(
        self, observation: Observation, actions: Tensor, valid: Tensor
    ) -> tuple[Tensor, dict[str, float]]:
        """lerobot's training loss of the family, as a mean over valid control steps, in training
        mode (dropout, crops).

        ``actions`` [b h a] in physical units, ``valid`` [b h]. Noise and times come from torch's
        global generator. Metrics, in normalised units: ``mse`` of the denoising target, or ACT's
        ``l1`` and ``kl``.
        """
        if tuple(actions.shape[1:]) != (self.chunk_length, self.embodiment.action_dim):
            raise EmbodimentMismatch(
                f"imitation_loss got actions {tuple(actions.shape)}, this policy predicts chunks "
                f"of {self.chunk_length} x {self.embodiment.action_dim}: load the data with that "
                "chunk length"
            )
        self.model.train()
        return self.head.loss(self._batch(observation, actions, valid), valid.to(self.device))

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

    def extra_files(self) -> dict[str, str]:
        return {}

    @classmethod
    def from_config_dict(
        cls, data: Mapping[str, Any], embodiment: EmbodimentSpec, files: Mapping[str, str]
    ) -> LeRobotPolicy:
        """Inverse of `config_dict` (weights are loaded afterwards)."""
        require_lerobot()
        unknown = sorted(set(data["config"]) - {f.name for f in dataclasses.fields(LeRobotConfig)})
        if unknown:
            raise ConfigError(
                f"the checkpoint's policy config has unknown keys {unknown}: it needs "
                "a newer vla_rl"
            )
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


class LeRobotChainPolicy(GuidedChain, LeRobotPolicy):
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
        chain = self.head.chain(
            config.denoising_steps or self.head.default_steps, config.sampler, noise_level
        )
        self.chain = chain.with_std_limits(config.min_std, config.max_std)
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

    def _actions(self, x: Tensor) -> Tensor:
        """The robot's part [b h a] of a sample [b T d]."""
        return x[:, self.head.first_step :, : self.embodiment.action_dim]

    def _decided(self, x: Tensor) -> ActionChunk:
        """What the end of a chain [b T d] stands for."""
        return self._chunk(
            self._actions(self.head.finished(x) if isinstance(self.head, FinishingHead) else x)
        )

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
        action, noise = self._estimates(condition, x, index, guidance)

        def of(values: Tensor) -> Tensor:
            return column(values, index, x)

        mean = of(self.chain.weight_action) * action + of(self.chain.weight_noise) * noise
        onward = noise if first is None or not self.head.keeps_first_noise else first
        plain = of(self.chain.mean_action) * action + of(self.chain.mean_noise) * onward
        return mean, of(self.chain.std), plain

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
        path, log_probs = self._walk(observation, deterministic, seeds)
        return PolicyOutput(
            chunk=self._decided(path[-1]),
            behavior_log_prob=torch.stack(log_probs, dim=1),
            replay={"chain": torch.stack(path[self.first_trained :], dim=1)},
        )

    def _walk(
        self,
        observation: Observation,
        deterministic: bool,
        seeds: Sequence[int] | None,
        guidance: Any = None,
        start: Tensor | None = None,
    ) -> tuple[list[Tensor], list[Tensor]]:
        b, steps, shape = len(observation), len(self.chain), self.head.sample_shape
        if seeds is None:
            seeds = [0] * b if deterministic else torch.randint(2**62, (b,)).tolist()
        if len(seeds) != b:
            raise ValueError(f"act got {len(seeds)} seeds for {b} observations")
        draws = 1 if deterministic else steps + 1
        noise = (
            counter_normals(seeds, draws * math.prod(shape)).view(b, draws, *shape).to(self.device)
        )
        free = self._free()
        self.model.eval()
        # (what steers asks a blank one first)
        told = start is None or any(text.strip() for text in observation.instruction)
        condition = self.head.condition(self._batch(observation, check=told))
        path, log_probs = [noise[:, 0] if start is None else start], []
        for k in range(steps):
            mean, std, plain = self._step(condition, path[-1], k, guidance, path[0])
            x = plain if deterministic else torch.where(free, mean + std * noise[:, k + 1], plain)
            if k >= self.first_trained:
                log_probs.append(
                    chains.gaussian_log_prob(self._actions(x), self._actions(mean), std)
                )
            path.append(x)
        return path, log_probs

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
        path, _ = self._walk(observation, True, None, start=start)
        return self._decided(path[-1]).actions

    def evaluate(self, observation: Observation, replay: Mapping[str, Tensor]) -> PolicyEvaluation:
        """Log-prob and entropy [b k h a] of the stored ``chain`` [b k+1 T d] under the present
        weights, with gradient.

        Observations are encoded once, and all steps make one pass. Runs in evaluation mode and
        outside of autocast: dropout or another precision would make ratios differ from 1 at
        unchanged weights.
        """
        self.model.eval()
        path, trained = replay["chain"].to(self.device), len(self._discount)
        if path.shape[1] != trained + 1:
            raise ValueError(
                f"the stored chain has {path.shape[1] - 1} steps, this policy learns from {trained}"
            )
        with torch.autocast(self.device.type, enabled=False):
            condition = repeated(self.head.condition(self._batch(observation)), trained)
            steps = torch.arange(self.first_trained, self.first_trained + trained).repeat(len(path))
            before, after = path[:, :-1].flatten(0, 1), path[:, 1:].flatten(0, 1)
            mean, std, _ = self._step(condition, before, steps)
            log_prob = chains.gaussian_log_prob(self._actions(after), self._actions(mean), std)
        log_prob = log_prob.unflatten(0, (len(path), trained))

        def per_step(values: Tensor) -> Tensor:
            return values.to(log_prob.device)[None, :, None, None].expand_as(log_prob)

        return PolicyEvaluation(
            log_prob=log_prob,
            entropy=per_step(chains.gaussian_entropy(self.chain.std[self.first_trained :])),
            advantage_weight=None
            if self.config.advantage_discount == 1.0
            else per_step(self._discount),
            clip_scale=None if self.config.clip_base == 1.0 else per_step(self._clip_scale),
        )

    def _free(self) -> Tensor:
        """bool [T d]: entries of a sample that are noised, that is those of the robot's own
        chunk."""
        free = torch.zeros(self.head.sample_shape, dtype=torch.bool, device=self.device)
        free[self.head.first_step :, : self.embodiment.action_dim] = True
        return free
