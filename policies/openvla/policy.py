"""OpenVLA and OpenVLA-OFT behind the protocols of `vla_rl.interfaces`: acting, likelihoods,
imitation.

What the language model reads is laid out in `policies.openvla.sequence`; weights come from
`policies.openvla.weights`, a checkpoint's other files from `policies.openvla.checkpoint`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from policies.inputs import chosen_cameras, require_chunk, require_proprio
from policies.lora import merged
from policies.normalization import VectorStats
from policies.openvla import stored
from policies.openvla.checkpoint import Source, read_source, write_checkpoint
from policies.openvla.config import Architecture, OpenVLAConfig
from policies.openvla.images import PictureInput
from policies.openvla.model import (
    L1Head,
    Projector,
    ProprioProjector,
    Rope,
    ValueHead,
    VisionBackbone,
    make_llama,
)
from policies.openvla.published import check_published
from policies.openvla.sequence import Prefix, Sequences
from policies.openvla.statistics import (
    OWN_STATISTICS,
    described,
    proprio_range,
    random_source,
    statistics_of,
)
from policies.openvla.tokens import ActionCodec, PromptTokenizer, normalize_proprio
from policies.openvla.weights import load_published, materialise, prepare
from policies.trunk.features import coarse, mean_word
from policies.trunk.llama import native_bfloat16
from policies.trunk.noise import choose, chunk_uniforms, row_seeds, seeded
from vla_rl.errors import ConfigError
from vla_rl.interfaces import Policy
from vla_rl.types import ActionChunk, EmbodimentSpec, Observation, PolicyEvaluation, PolicyOutput


class OpenVLABase(nn.Module, Policy):
    """What both kinds of head share. ``statistics`` is one entry of upstream's ``norm_stats``:
    "action" and "proprio"."""

    policy_type: str
    config_path = (stored.OWN, "config")
    base_key = "checkpoint"
    action_values: Tensor
    proprio_low: Tensor  # these where the policy uses proprioception
    proprio_high: Tensor
    proprio_mask: Tensor

    def __init__(
        self,
        config: OpenVLAConfig,
        embodiment: EmbodimentSpec,
        source: Source,
        statistics: tuple[str, Mapping[str, Any]],
    ):
        """The modules without weights (on the device "meta"); the class methods below fill them."""
        super().__init__()
        self.config, self.embodiment, self.source = config, embodiment, source
        self.chunk_length = config.chunk_length
        self.temperature = config.temperature
        self.unnorm_key, self.statistics = statistics[0], dict(statistics[1])
        self.architecture = Architecture.from_config(source.config, source.where)
        self.cameras = chosen_cameras(config.cameras, embodiment) or embodiment.cameras[:1]
        stored.check_recorded(config, source, len(self.cameras))
        self.tokenizer = PromptTokenizer(
            source.tokenizer_json, prompt=config.prompt, dialect=config.dialect
        )
        self.codec = ActionCodec.from_statistics(
            self.statistics["action"],
            embodiment,
            self.architecture.action_bins,
            config.normalization,
            config.gripper,
            config.action_space == "unit",
            described("action", self.unnorm_key, source),
        )
        with torch.device("meta"):
            self.vision_backbone = VisionBackbone(self.architecture)
            width = self.architecture.width
            self.projector = Projector(self.vision_backbone.width, width, self.architecture.fused)
            self.language_model = make_llama(self.architecture)
            if config.use_proprio:
                self.proprio_projector = ProprioProjector(embodiment.proprio_dim, width)
            self._make_head(width)
            self.to(self.weights_dtype)
            if config.value_head:
                self.value_head = ValueHead(width)
        self.rope = Rope(self.architecture)
        self.register_buffer("action_values", self.codec.table(), persistent=False)
        sizes = (self.architecture.image_size, len(self.architecture.towers))
        self.pictures = PictureInput(config, embodiment, self.cameras, source, *sizes)
        if config.use_proprio:
            scale = proprio_range(statistics, config, embodiment, source)
            for name, values in zip(("low", "high", "mask"), scale, strict=True):
                self.register_buffer(f"proprio_{name}", values, persistent=False)
        self.sequences = Sequences(
            config, self.architecture, self.language_model, self.rope, self.action_tokens
        )

    def _make_head(self, width: int) -> None:
        """Modules of the head besides the language model's own."""

    # --------------------------------------------------------------------------------- construction
    @classmethod
    def from_published(cls, config: OpenVLAConfig, embodiment: EmbodimentSpec) -> Any:
        """The policy of ``config.checkpoint`` as it was published, for acting or as the start of
        RL."""
        if not config.checkpoint:
            raise ConfigError(
                "policy.checkpoint is empty: give the folder of an OpenVLA checkpoint, or train "
                "one first (phases=[sft,...])"
            )
        source = read_source(config.checkpoint, config.dialect)
        policy = cls(config, embodiment, source, source.choose_statistics(config.unnorm_key))
        check_published(
            config,
            source,
            policy.unnorm_key,
            embodiment,
            l1="action_head" in dict(policy.named_children()),
        )
        load_published(policy, new_parts=("value_head",))
        return prepare(policy)

    @classmethod
    def from_pretrained(cls, folder: Path | str, embodiment: EmbodimentSpec, **options: Any) -> Any:
        """`from_published` with the options of `OpenVLAConfig` as keywords."""
        return cls.from_published(
            OpenVLAConfig(**{**options, "checkpoint": str(folder)}), embodiment
        )

    @classmethod
    def from_statistics(
        cls,
        config: OpenVLAConfig,
        embodiment: EmbodimentSpec,
        action_stats: Mapping[str, Any],
        proprio_stats: Mapping[str, Any],
        *,
        seed: int | None = None,
        device: str = "cpu",
    ) -> Any:
        """A policy to be trained on a dataset, from ``config.checkpoint`` or with random weights.

        With ``config.unnorm_key`` the checkpoint's own statistics stay in use; else they are the
        dataset's. Parts that the checkpoint does not have start from random weights.
        """
        source = (
            read_source(config.checkpoint, config.dialect)
            if config.checkpoint
            else random_source(config)
        )
        if config.checkpoint and config.unnorm_key:
            statistics = source.choose_statistics(config.unnorm_key)
        else:
            of_data = (VectorStats.from_dict(action_stats), VectorStats.from_dict(proprio_stats))
            statistics = (OWN_STATISTICS, statistics_of(config, embodiment, *of_data))
            source = dataclasses.replace(source, statistics_from="the dataset")
        policy = cls(config, embodiment, source, statistics)
        with seeded(seed):
            if config.checkpoint:
                load_published(policy)
            else:
                materialise(policy, device)
            return prepare(policy)

    @classmethod
    def from_config_dict(
        cls, data: Mapping[str, Any], embodiment: EmbodimentSpec, files: Mapping[str, str]
    ) -> Any:
        """Inverse of `config_dict` and `extra_files`; weights are loaded afterwards, by
        `load_state_dict`."""
        config, source, key = stored.read(data, files)
        policy = cls(config, embodiment, source, source.choose_statistics(key))
        if config.save_trained_only:
            load_published(policy)
        else:
            materialise(policy, "cpu", random=False)
        return prepare(policy)

    # --------------------------------------------------------------------------------------- inputs
    @property
    def device(self) -> torch.device:
        return self.action_values.device

    @property
    def weights_dtype(self) -> torch.dtype:
        return getattr(torch, self.config.weights)

    def uses_bfloat16(self) -> bool:
        """Whether forwards multiply in bfloat16 on the present device."""
        if self.config.weights == "bfloat16" or self.config.precision == "bfloat16":
            return True
        return self.config.precision == "auto" and native_bfloat16(self.device.type)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.uses_bfloat16())

    def _vision_tokens(self, pixels: Tensor) -> Tensor:
        """uint8 [b cameras 3 S S] → [b cameras·patches d]."""
        b, cameras = pixels.shape[:2]
        towers = [x.to(self.weights_dtype) for x in self.pictures(pixels)]
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.config.freeze_vision):
            features = self.vision_backbone(towers)
        return self.projector(features).view(b, cameras * self.vision_backbone.patches, -1)

    def prefix(self, observation: Observation, pixels: Tensor | None = None) -> Prefix:
        """All that the language model reads before the action positions."""
        require_proprio(observation, self.embodiment)
        ids, lengths = self.tokenizer.batch(observation.instruction)
        images = len(self.cameras) * self.vision_backbone.patches
        self.sequences.check_length(int(lengths.max()), images, observation.instruction)
        pixels = self.pictures.pixels(observation) if pixels is None else pixels
        parts = [self._vision_tokens(pixels)]
        if self.config.use_proprio:
            proprio = normalize_proprio(
                observation.proprio.to(self.device),
                self.proprio_low,
                self.proprio_high,
                self.proprio_mask,
            )
            parts.append(self.proprio_projector(proprio.to(self.weights_dtype))[:, None])
        return self.sequences.prefix(ids, lengths, parts)

    @torch.no_grad()
    def frame_features(self, observation: Observation) -> dict[str, Tensor]:
        """See `vla_rl.interfaces.Policy`: each camera's projected patches on a coarse grid,
        proprio (scaled as the statistics say, where they are of this robot), and the mean embedding
        of the prompt's tokens."""
        with self._autocast():
            tokens = self._vision_tokens(self.pictures.pixels(observation))
        images = tokens.view(len(tokens) * len(self.cameras), self.vision_backbone.patches, -1)
        return {"visual": coarse(images).view(len(tokens), -1), **self.blind_features(observation)}

    @torch.no_grad()
    def blind_features(self, observation: Observation) -> dict[str, Tensor]:
        """See `vla_rl.interfaces.Policy`."""
        # (blank: for sizes)
        ids, lengths = self.tokenizer.batch([text or "?" for text in observation.instruction])
        said = torch.arange(ids.shape[1]) < lengths[:, None]
        with self._autocast():
            text = self.sequences.embed(ids.to(self.device))
        proprio = observation.proprio.to(self.device)
        statistics = self.statistics.get("proprio")
        if (
            isinstance(statistics, Mapping)
            and len(statistics.get("q01", ())) == self.embodiment.proprio_dim
        ):
            known = (self.unnorm_key, self.statistics)
            scale = proprio_range(known, self.config, self.embodiment, self.source)
            proprio = normalize_proprio(proprio, *(x.to(self.device) for x in scale))
        return {"state": proprio.float(), "text": mean_word(text, said)}

    def blocks(self) -> list[nn.Module]:
        """The transformer blocks, and the value head for its float32, for `vla_rl.ranks.shard`."""
        towers = (block for tower in self.vision_backbone.towers for block in tower.blocks)
        head = [self.value_head] if self.config.value_head else []
        return [*towers, *self.language_model.model.layers, *head]

    @property
    def action_tokens(self) -> int:
        return self.chunk_length * self.embodiment.action_dim

    def _value(self, first: Tensor) -> Tensor | None:
        """Value [b] from the hidden state [b d] that predicts the first action token."""
        return self.value_head(first.float()).float() if self.config.value_head else None

    def value_parameters(self) -> Iterator[nn.Parameter]:
        """The value head's own parameters, for a learning rate of their own."""
        return self.value_head.parameters() if self.config.value_head else iter(())

    # ---------------------------------------------------------------------------------- checkpoints
    def config_dict(self) -> dict[str, Any]:
        """See `policies.openvla.stored.config_json`."""
        statistics = (self.unnorm_key, self.statistics)
        return stored.config_json(self.config, self.source, len(self.cameras), statistics)

    def extra_files(self) -> dict[str, str]:
        """The text files of the checkpoint: tokenizer, preprocessor, statistics."""
        return stored.text_files(self.source, (self.unnorm_key, self.statistics))

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As of any module; with ``save_trained_only`` without what training does not change."""
        state = super().state_dict(*args, **kwargs)
        if not self.config.save_trained_only:
            return state
        frozen = {name for name, p in self.named_parameters() if not p.requires_grad}
        return {name: value for name, value in state.items() if name not in frozen}

    def base_folder(self) -> Path | None:
        """See `vla_rl.interfaces.Policy`."""
        return Path(self.config.checkpoint) if self.config.save_trained_only else None

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Inverse of `state_dict`."""
        return super().load_state_dict(
            state_dict, strict=strict and not self.config.save_trained_only, assign=assign
        )

    def save_pretrained(
        self, folder: Path | str, *, dtype: str = "bfloat16", step: int = 0
    ) -> None:
        """Write the policy in upstream's format, LoRA merged into the weights (the policy itself
        stays as it is)."""
        recorded = stored.recorded(self.config, len(self.cameras))
        source = dataclasses.replace(self.source, config={**self.source.config, **recorded})
        statistics = {self.unnorm_key: self.statistics}
        weights = merged(self)
        write_checkpoint(folder, source, statistics, weights, getattr(torch, dtype), step)

    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters())


class OpenVLA(OpenVLABase):
    """Discrete action tokens; it has a likelihood, and imitates.

    Sampling and every reported log-prob are on the 256 action tokens alone, at ``temperature`` (as
    SimpleVLA-RL does). `replay` holds ``action_tokens`` int16 [b h a]: indices into that slice.
    """

    log_prob_axes: tuple[str, ...] = ("control_step", "action_dim")
    policy_type = "openvla"

    @property
    def correlated_axes(self) -> tuple[str, ...]:
        return self.config.correlated_axes

    def hidden_states(
        self, observation: Observation, tokens: Tensor | None = None, pixels: Tensor | None = None
    ) -> Tensor:
        """Hidden states [b n d] that predict the n = h·a action tokens; ``tokens`` [b h a] feed
        autoregressive decoding."""
        prefix = self.prefix(observation, pixels)
        if self.config.decoding == "parallel":
            return self.sequences.parallel(prefix)
        if tokens is None:
            raise ValueError(
                "autoregressive decoding needs the action tokens to compute hidden states"
            )
        return self.sequences.with_tokens(prefix, tokens.flatten(1))

    def action_logits(
        self, observation: Observation, tokens: Tensor | None = None, pixels: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Logits float32 [b h a 256] at temperature 1 and value [b] or None, with gradient."""
        with self._autocast():
            hidden = self.hidden_states(observation, tokens, pixels)
            logits = self.sequences.action_logits(hidden)
        logits = logits.view(len(observation), self.chunk_length, -1, logits.shape[-1])
        return logits, self._value(hidden[:, 0])

    def value(self, observation: Observation) -> Tensor | None:
        """See `vla_rl.interfaces.Policy`: one forward, and of autoregressive decoding no
        token."""
        if not self.config.value_head:
            return None
        with self._autocast():
            prefix = self.prefix(observation)
            if self.config.decoding == "autoregressive":
                return self._value(self.sequences.first(prefix))
            first = self.sequences.parallel(prefix)[:, 0]
        return self._value(first)

    def _decode(
        self, observation: Observation, pixels: Tensor, uniforms: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Autoregressive decoding: tokens [b n], their log-probs [b n], value [b]."""
        chosen, log_prob = [], []

        def take(hidden: Tensor, s: int) -> Tensor:
            logits = self.sequences.action_logits(hidden)
            log_probs = F.log_softmax(logits / self.temperature, dim=-1)
            tokens = choose(log_probs, None if uniforms is None else uniforms[:, s])
            chosen.append(tokens)
            log_prob.append(log_probs.gather(-1, tokens[:, None]).squeeze(-1))
            return tokens

        with self._autocast():
            prefix = self.prefix(observation, pixels)
            dtype = torch.bfloat16 if self.uses_bfloat16() else prefix.x.dtype
            value = self._value(self.sequences.decode(prefix, dtype, take))
        return torch.stack(chosen, 1), torch.stack(log_prob, 1), value

    @torch.no_grad()
    def act(
        self,
        observation: Observation,
        *,
        deterministic: bool = False,
        seeds: Sequence[int] | None = None,
    ) -> PolicyOutput:
        """One chunk per row, in physical units; see `vla_rl.interfaces.Policy`.

        ``seeds`` [b] need to differ between decisions as well as between rows. Without them torch's
        global generator draws them. Deterministic: the most likely of the 256 action tokens.
        """
        b, h, a = len(observation), self.chunk_length, self.embodiment.action_dim
        uniforms = None
        if not deterministic:
            uniforms = chunk_uniforms(row_seeds(seeds, b), h, a, self.config.noise_correlation)
            uniforms = uniforms.flatten(1).to(self.device)
        pixels = self.pictures.pixels(observation)
        if self.config.decoding == "autoregressive":
            tokens, log_prob, value = self._decode(observation, pixels, uniforms)
        else:
            logits, value = self.action_logits(observation, pixels=pixels)
            log_probs = F.log_softmax(logits.flatten(1, 2) / self.temperature, dim=-1)
            tokens = choose(log_probs, uniforms)
            log_prob = log_probs.gather(-1, tokens[..., None]).squeeze(-1)
        tokens = tokens.view(b, h, a)
        return PolicyOutput(
            chunk=ActionChunk.whole(self.decode_actions(tokens)),
            behavior_log_prob=log_prob.view(b, h, a),
            replay={
                "action_tokens": tokens.to(torch.int16),
                **({"pixels": pixels} if self.config.replay_pixels else {}),
            },
            value=value,
        )

    def evaluate(self, observation: Observation, replay: Mapping[str, Tensor]) -> PolicyEvaluation:
        """Log-prob and entropy [b h a] of stored ``action_tokens`` at the sampling temperature,
        with gradient."""
        tokens = replay["action_tokens"].to(self.device).long()
        pixels = replay["pixels"].to(self.device) if "pixels" in replay else None
        logits, value = self.action_logits(observation, tokens, pixels)
        log_probs = F.log_softmax(logits / self.temperature, dim=-1)
        return PolicyEvaluation(
            log_prob=log_probs.gather(-1, tokens[..., None]).squeeze(-1),
            entropy=-(log_probs.exp() * log_probs).sum(-1),
            value=value,
        )

    def encode_actions(self, actions: Tensor) -> Tensor:
        """Action tokens int64 [b h a] of physical actions."""
        return self.codec.encode(actions).to(self.device)

    def decode_actions(self, tokens: Tensor) -> Tensor:
        """Physical actions float32 [b h a] of action tokens."""
        dims = torch.arange(self.embodiment.action_dim, device=tokens.device)
        return self.action_values[dims, tokens.long()]

    def imitation_loss(
        self, observation: Observation, actions: Tensor, valid: Tensor
    ) -> tuple[Tensor, dict[str, float]]:
        """Cross entropy per action token over the whole vocabulary, as upstream trains (temperature
        1), over valid steps.

        Metrics: ``nll`` (nats per token), ``accuracy`` (the most likely action token equals the
        label), ``mae`` (its action against the true one, physical units), ``entropy`` (nats per
        token, on the action tokens).
        """
        require_chunk(actions, self.chunk_length, self.embodiment)
        actions = actions.to(self.device)
        tokens = self.encode_actions(actions)
        weight = valid.to(self.device, torch.float32)[..., None].expand_as(actions)
        weight = weight / weight.sum().clamp(min=1.0)
        with self._autocast():
            hidden = self.hidden_states(observation, tokens)
            logits = self.language_model.lm_head(hidden).float().view(*tokens.shape, -1)
        first = self.architecture.first_action_id
        nll = F.cross_entropy(
            logits.flatten(0, 2), (tokens + first).flatten(), reduction="none"
        ).view_as(weight)
        loss = (nll * weight).sum()
        with torch.no_grad():
            log_probs = F.log_softmax(
                logits[..., first : first + self.architecture.action_bins], dim=-1
            )
            best = log_probs.argmax(-1)
            metrics = torch.stack(
                [
                    loss,
                    ((best == tokens) * weight).sum(),
                    ((self.decode_actions(best) - actions).abs() * weight).sum(),
                    (-(log_probs.exp() * log_probs).sum(-1) * weight).sum(),
                ]
            ).tolist()
        return loss, dict(zip(("nll", "accuracy", "mae", "entropy"), metrics, strict=True))


class OpenVLAL1(OpenVLABase):
    """OpenVLA-OFT with its L1 regression head: acting and imitation. It has no likelihood, so RL
    needs `OpenVLA`."""

    policy_type = "openvla_l1"

    def _make_head(self, width: int) -> None:
        if self.config.decoding != "parallel":
            raise ConfigError(
                "policy.type=openvla_l1 reads all actions from one forward: set "
                "policy.decoding=parallel"
            )
        self.action_head = L1Head(width, self.embodiment.action_dim)

    def normalized_actions(self, observation: Observation) -> Tensor:
        """The head's output float32 [b h a], with gradient."""
        with self._autocast():
            hidden = self.sequences.parallel(self.prefix(observation))
            return self.action_head(hidden.to(self.weights_dtype), self.chunk_length).float()

    @torch.no_grad()
    def act(
        self,
        observation: Observation,
        *,
        deterministic: bool = False,
        seeds: Sequence[int] | None = None,
    ) -> PolicyOutput:
        """One chunk per row, in physical units. There is nothing to sample; the reported
        log-prob is 0."""
        actions = self._physical(self.normalized_actions(observation))
        return PolicyOutput(
            ActionChunk.whole(actions),
            behavior_log_prob=actions.new_zeros(len(observation)),
            replay={},
        )

    def _physical(self, normalized: Tensor) -> Tensor:
        values = self.codec.to_physical(normalized.detach().cpu().double().numpy())
        return torch.from_numpy(values).to(self.device, torch.float32)

    def imitation_loss(
        self, observation: Observation, actions: Tensor, valid: Tensor
    ) -> tuple[Tensor, dict[str, float]]:
        """Mean absolute error of normalised actions over valid steps; metric ``mae`` is that in
        physical units."""
        require_chunk(actions, self.chunk_length, self.embodiment)
        labels = torch.from_numpy(self.codec.to_normalized(actions.cpu().numpy())).to(
            self.device, torch.float32
        )
        weight = valid.to(self.device, torch.float32)[..., None].expand_as(labels)
        weight = weight / weight.sum().clamp(min=1.0)
        predicted = self.normalized_actions(observation)
        loss = ((predicted - labels).abs() * weight).sum()
        mae = ((self._physical(predicted) - actions.to(self.device)).abs() * weight).sum()
        return loss, {"l1": float(loss.detach()), "mae": float(mae)}
