"""A vision-language-action model in miniature: ViT → projector → Llama → discrete action tokens.

The parts and their order are those of OpenVLA (arXiv 2406.09246) and OpenVLA-OFT (arXiv
2502.19645), so that a recipe that works here carries over; one config scales it from about a
million parameters to the 7B layout (`PRESETS`).

Sequence: the prefix of `policies.trunk` | action positions. An action position stands for one
action dimension of one control step, or (``tokens_per_step``) for a whole control step whose
dimensions are read by a head each. Decoding is "parallel" (a learned query per action position,
bidirectional attention, one forward, as in OFT) or "autoregressive" (causal attention, each action
position reads the tokens of the one before, KV cache).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from policies.action_bins import ActionBins
from policies.inputs import require_chunk
from policies.normalization import VectorStats
from policies.settings import NanoVLAConfig
from policies.tokenizer import WordTokenizer
from policies.trunk.llama import MASKED, init_linear, parameter
from policies.trunk.noise import choose, chunk_uniforms, row_seeds
from policies.trunk.trunk import IMAGE_TOKENS, Inputs, VisionLanguageTrunk
from vla_rl.errors import ConfigError
from vla_rl.mirror import averaged, mirrored_observation
from vla_rl.types import ActionChunk, EmbodimentSpec, Observation, PolicyEvaluation, PolicyOutput

PRESETS: dict[str, dict[str, Any]] = {
    "nano": {},
    "small": {
        "stem_channels": [48, 96, 192],
        "stem_kernels": [4, 3, 3, 3],
        "stem_strides": [2, 2, 2, 2],
        "vit_width": 256,
        "vit_depth": 4,
        "vit_heads": 8,
        "vit_mlp_ratio": 4.0,
        "llm_width": 384,
        "llm_depth": 6,
        "llm_heads": 6,
        "llm_mlp": 1024,
        "instruction_tokens": 0,
    },
    "7b": {
        "stem_channels": [],
        "patch_size": 14,
        "vit_width": 1152,
        "vit_depth": 27,
        "vit_heads": 16,
        "vit_mlp_ratio": 4304 / 1152,
        "merge": 1,
        "action_bins": 256,
        "tokens_per_step": False,
        "instruction_length": 32,
        "instruction_tokens": 0,
        "llm_width": 4096,
        "llm_depth": 32,
        "llm_heads": 32,
        "llm_mlp": 11008,
        "gradient_checkpointing": True,
    },
}


def preset(name: str, **changes: Any) -> NanoVLAConfig:
    """The config called ``name`` ("nano", "small", "7b") with ``changes`` applied."""
    if name not in PRESETS:
        raise ConfigError(f"unknown policy preset {name!r}, choose one of {', '.join(PRESETS)}")
    return NanoVLAConfig(**{**PRESETS[name], **changes})


class NanoVLA(VisionLanguageTrunk):
    """Token VLA policy; it has a likelihood, and imitates.

    For the statistics see `VisionLanguageTrunk`. ``temperature`` can be set at any time: sampling
    and all log-probs follow it. `replay` holds ``action_tokens`` int16 [b h a].
    """

    log_prob_axes: tuple[str, ...] = ("control_step", "action_dim")
    policy_type = "nano_vla"
    config_class = NanoVLAConfig
    imitates_itself = True

    def __init__(
        self,
        config: NanoVLAConfig,
        embodiment: EmbodimentSpec,
        action_stats: VectorStats | None = None,
        proprio_stats: VectorStats | None = None,
        tokenizer: WordTokenizer | None = None,
    ):
        d, h, a = config.llm_width, config.chunk_length, embodiment.action_dim
        slots = h if config.tokens_per_step else h * a  # action positions
        super().__init__(
            config, embodiment, action_stats, proprio_stats, tokenizer, positions=slots
        )
        config.check_robot(embodiment)
        self.slots = slots
        self.group = a if config.tokens_per_step else 1  # action tokens read at each
        self.temperature = config.temperature
        self._compiled: Any = None
        self.action_queries = parameter(self.slots, d, std=0.5)
        if config.decoding == "autoregressive":
            self.action_embedding = nn.Embedding(self.group * config.action_bins, d)
            nn.init.trunc_normal_(self.action_embedding.weight, std=0.5 / math.sqrt(self.group))
        # Small logits at the start: the first loss is log(bins), and no bin is favoured before
        # there is evidence.
        self.action_head = init_linear(nn.Linear(d, self.group * config.action_bins), 0.02)
        self._build_value_head()

        self.bins = ActionBins(config, embodiment, self.action_stats)
        if config.symmetric:
            self.bins.require_symmetric(embodiment)

    @property
    def correlated_axes(self) -> tuple[str, ...]:
        return self.config.correlated_axes

    # ------------------------------------------------------------------------------- the two views
    def image_tokens(
        self, observation: Observation, replay: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        """See `VisionLanguageTrunk`; of a ``symmetric`` policy [b 2N d], those of the mirror
        behind."""
        if not self.config.symmetric or (replay is not None and IMAGE_TOKENS in replay):
            return super().image_tokens(observation, replay)
        return torch.cat(super().image_tokens(self._both(observation)).chunk(2), 1)

    def _inputs(
        self, observation: Observation, replay: Mapping[str, Tensor] | None = None
    ) -> Inputs:
        """See `VisionLanguageTrunk`; of a ``symmetric`` policy of 2b rows, those of the mirror
        behind."""
        if not self.config.symmetric:
            return super()._inputs(observation, replay)
        tokens = torch.cat(self.image_tokens(observation, replay).chunk(2, 1))
        return super()._inputs(self._both(observation), {IMAGE_TOKENS: tokens})

    def _kept(self, image_tokens: Tensor) -> dict[str, Tensor]:
        if self.config.symmetric:
            image_tokens = torch.cat(image_tokens.chunk(2), 1)
        return super()._kept(image_tokens)

    def _both(self, observation: Observation) -> Observation:
        return Observation.cat([observation, mirrored_observation(observation, self.embodiment)])

    # -------------------------------------------------------------------------------------- forward
    def _slot_inputs(self, tokens: Tensor | None, b: int) -> Tensor:
        """Input [b S d] of the action positions; in autoregressive decoding each also reads the
        tokens before it."""
        queries = self.action_queries.expand(b, -1, -1)
        if tokens is None:
            return queries
        before = self._embed_tokens(tokens.reshape(b, self.slots, self.group))[:, :-1]
        return queries + F.pad(before, (0, 0, 1, 0))

    def _embed_tokens(self, tokens: Tensor) -> Tensor:
        """Sum of the embeddings of each position's tokens: [b s g] → [b s d]."""
        offsets = torch.arange(self.group, device=tokens.device) * self.config.action_bins
        return self.action_embedding(tokens.long() + offsets).sum(-2)

    def _forward(
        self,
        image_tokens: Tensor,
        text_ids: Tensor,
        text_rows: Tensor,
        proprio: Tensor,
        tokens: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Raw logits float32 [b h a bins] and value [b]; ``tokens`` [b h a] feed autoregressive
        decoding."""
        with self._autocast():
            prefix = self._prefix(image_tokens, text_ids, text_rows, proprio)
            x = torch.cat([prefix, self._slot_inputs(tokens, len(prefix))], dim=1)
            causal = tokens is not None
            # of the prefix only the last position is read again, by the value head
            x, _ = self.trunk(x, causal=causal, wanted=0 if causal else self.slots + 1)
            logits = self._logits(x[:, -self.slots :])
        return logits, self._value(x[:, : -self.slots])

    def _logits(self, hidden: Tensor) -> Tensor:
        """[b s d] → raw logits float32 [b s·g/a a bins] (one position of a token-wise model: [b
        1 1 bins])."""
        b, s, _ = hidden.shape
        logits = self.action_head(hidden).float()
        if s == self.slots:
            logits = logits.view(b, self.chunk_length, -1, self.config.action_bins)
            return self.bins.mask(logits)
        return logits.view(b, s, self.group, self.config.action_bins)

    def logits_and_value(
        self,
        observation: Observation,
        tokens: Tensor | None = None,
        kept: Mapping[str, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Logits float32 [b h a bins] at temperature 1, and value [b] or None, with gradient;
        ``kept`` image features."""
        return self._from_inputs(self._inputs(observation, kept), tokens)

    def _from_inputs(self, inputs: Inputs, tokens: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if self.config.decoding == "autoregressive" and tokens is None:
            raise ValueError("autoregressive decoding needs the action tokens to compute logits")
        if self.config.decoding == "parallel":
            tokens = None
        forward = self._forward
        if self.config.compile:
            self._compiled = self._compiled or torch.compile(self._forward, dynamic=True)
            forward = self._compiled
        logits, value = forward(*inputs, None if tokens is None else tokens.to(self.device))
        if not self.config.symmetric:
            return logits, value
        seen, turned = logits.chunk(2)
        logits = (seen + self.bins.turned(turned, self.embodiment)) / 2.0
        return logits, None if value is None else value.view(2, -1).mean(0)

    def _log_probs(self, logits: Tensor) -> Tensor:
        return F.log_softmax(logits / self.temperature, dim=-1)

    def _decode(
        self, inputs: Inputs, uniforms: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Autoregressive decoding with a KV cache: tokens [b h a], log-probs [b h a bins], value
        [b]."""
        # by position within a control step
        unused = self.bins.unused.view(-1, self.group, self.config.action_bins)
        chosen, all_log_probs = [], []
        with self._autocast():
            hidden, past, value = self._first_position(inputs)
            for s in range(self.slots):
                logits = self._logits(hidden[:, -1:])[:, 0].masked_fill(
                    unused[s % len(unused)], MASKED
                )
                log_probs = self._log_probs(logits)  # [b g bins]
                tokens = choose(log_probs, None if uniforms is None else uniforms[:, s])
                chosen.append(tokens)
                all_log_probs.append(log_probs)
                if s + 1 < self.slots:
                    x = self._embed_tokens(tokens[:, None]) + self.action_queries[s + 1]
                    hidden, past = self.trunk(x, True, self.prefix_length + s + 1, past)
        shape = (len(hidden), self.chunk_length, self.embodiment.action_dim)
        return (
            torch.stack(chosen, 1).view(shape),
            torch.stack(all_log_probs, 1).view(*shape, -1),
            value,
        )

    def _first_position(
        self, inputs: Inputs
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]], Tensor | None]:
        """Hidden states of the prefix and the first action position, their keys and values, and
        the value [b]."""
        prefix = self._prefix(*inputs)
        x = torch.cat([prefix, self.action_queries[:1].expand(len(prefix), 1, -1)], dim=1)
        hidden, past = self.trunk(x, causal=True)
        return hidden, past, self._value(hidden[:, : self.prefix_length])

    # ----------------------------------------------------------------------------------- interfaces
    def value(self, observation: Observation) -> Tensor | None:
        """See `vla_rl.interfaces.Policy`."""
        if not self.config.value_head:
            return None
        inputs = self._inputs(observation)
        if self.config.decoding == "parallel":
            return self._from_inputs(inputs, None)[1]
        with self._autocast():
            return self._first_position(inputs)[2]

    def _choose(
        self, inputs: Inputs, uniforms: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Tokens [b h a], drawn by ``uniforms`` [b h a] or the likeliest; log-probs [b h a bins];
        value [b]."""
        if self.config.decoding == "autoregressive":
            flat = None if uniforms is None else uniforms.view(-1, self.slots, self.group)
            return self._decode(inputs, flat)
        logits, value = self._from_inputs(inputs, None)
        log_probs = self._log_probs(logits)
        return choose(log_probs, uniforms), log_probs, value

    def _likeliest(self, observation: Observation) -> Tensor:
        """The likeliest actions [b h a] (physical units)."""
        return self.bins.decode(self._choose(self._inputs(observation), None)[0])

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
        global generator draws them. The reported tokens and their log-prob at the sampling
        temperature are those drawn, or the likeliest, also where ``deterministic_mode`` makes other
        actions of them.
        """
        b, h, a = len(observation), self.chunk_length, self.embodiment.action_dim
        uniforms = None
        if not deterministic:
            uniforms = chunk_uniforms(row_seeds(seeds, b), h, a, self.config.noise_correlation)
            uniforms = uniforms.to(self.device)
        inputs = self._inputs(observation)
        tokens, log_probs, value = self._choose(inputs, uniforms)
        actions = self.bins.decode(tokens)
        if deterministic and self.config.deterministic_mode == "mean":
            actions = self.bins.mean(log_probs.exp())
        elif deterministic and self.config.deterministic_mode == "mirror":
            actions = averaged(observation, actions, self.embodiment, self._likeliest)
        return PolicyOutput(
            chunk=ActionChunk.whole(actions),
            behavior_log_prob=log_probs.gather(-1, tokens[..., None]).squeeze(-1),
            replay={"action_tokens": tokens.to(torch.int16), **self._kept(inputs[0])},
            value=value,
        )

    def evaluate(self, observation: Observation, replay: Mapping[str, Tensor]) -> PolicyEvaluation:
        """Log-prob and entropy [b h a] of stored ``action_tokens`` at the sampling temperature,
        with gradient."""
        tokens = replay["action_tokens"].to(self.device).long()
        logits, value = self.logits_and_value(observation, tokens, replay)
        log_probs = self._log_probs(logits)
        return PolicyEvaluation(
            log_prob=log_probs.gather(-1, tokens[..., None]).squeeze(-1),
            entropy=-(log_probs.exp() * log_probs).sum(-1),
            value=value,
        )

    def imitation_loss(
        self,
        observation: Observation,
        actions: Tensor,
        valid: Tensor,
        features: Mapping[str, Tensor] | None = None,
        own: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        """Cross entropy per token over valid control steps. ``features`` are this policy's
        `frame_features` of the observation: then no image is encoded. Rows that are its ``own``
        decisions (bool [b]) have hard labels and the temperature that it acts at, others soft ones
        and temperature 1 (`vla_rl.interfaces.Policy`).

        Metrics: ``nll`` (nats per token against hard labels), ``accuracy`` (argmax equals the
        label), ``mae`` (argmax against the true action, mean over dimensions, physical units),
        ``entropy`` (nats per token).
        """
        require_chunk(actions, self.chunk_length, self.embodiment)
        actions = actions.to(self.device)
        weight = valid.to(self.device, torch.float32)[..., None].expand_as(actions)
        weight = weight / weight.sum().clamp(min=1.0)
        tokens = self.bins.encode(actions)
        seen = valid.repeat(2, 1) if self.config.symmetric else valid
        with self.pictures.learning(seen, self.training):
            kept = None if features is None else self._tokens_of(features)
            logits, _ = self.logits_and_value(observation, tokens, kept)
        own = torch.zeros(len(actions), dtype=torch.bool) if own is None else own
        own = own.to(self.device)[:, None, None]
        log_probs = F.log_softmax(
            logits / torch.where(own, self.temperature, 1.0)[..., None], dim=-1
        )
        nll = -log_probs.gather(-1, tokens[..., None]).squeeze(-1)
        losses = nll
        if self.config.soft_label_sigma > 0:
            losses = torch.where(
                own, nll, -(self.bins.soft_labels(actions, tokens) * log_probs).sum(-1)
            )
        if self.config.label_smoothing > 0:
            used = (~self.bins.unused).float()
            uniform = -(log_probs * used / used.sum(-1, keepdim=True)).sum(-1)
            losses = torch.lerp(
                losses, torch.where(own, losses, uniform), self.config.label_smoothing
            )
        loss = (losses * weight).sum()
        with torch.no_grad():
            best = log_probs.argmax(-1)
            metrics = torch.stack(
                [
                    (nll * weight).sum(),
                    ((best == tokens) * weight).sum(),
                    ((self.bins.decode(best) - actions).abs() * weight).sum(),
                    (-(log_probs.exp() * log_probs).sum(-1) * weight).sum(),
                ]
            ).tolist()
        return loss, dict(zip(("nll", "accuracy", "mae", "entropy"), metrics, strict=True))
