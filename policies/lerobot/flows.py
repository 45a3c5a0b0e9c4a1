"""Families of lerobot's policies that match a flow: the prefix is encoded once, then an expert
denoises step by step.

The prefix is lerobot's own: its sampler is run up to the point where it asks for its first
velocity, and what it asks with is kept. So masks, positions and caches are those of the installed
version, with gradient.

Time runs from 1 (noise) to 0 (action); x_t = t·noise + (1 − t)·action and the velocity is noise −
action.
"""

from __future__ import annotations

import abc
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from policies.denoising.chain import Chain, flow_chain, split_prediction
from policies.lerobot.centring import Eye
from policies.lerobot.heads import TOKEN_MASK, TOKENS, ChainHead, _denoising_loss, scales, times
from policies.trunk.features import coarse, mean_word


class _Asked(Exception):
    """Ends a sampler of lerobot: it has asked for a velocity, with ``given``."""

    def __init__(self, given: dict[str, Any]):
        self.given = given


def first_question(
    model: Any, name: str, sampler: str, *inputs: Any, **more: Any
) -> dict[str, Any]:
    """The keyword arguments with which ``model.sampler(*inputs)`` first calls ``model.name``,
    which is not run."""

    def ask(**given: Any) -> None:
        raise _Asked(given)

    # without its no_grad: RL may train what the prefix comes from
    own = inspect.unwrap(getattr(type(model), sampler))
    part = dict(model.named_children()).get(name)
    if part is not None:
        hook = part.register_forward_pre_hook(
            lambda module, _, given: ask(**given), with_kwargs=True
        )
    else:
        setattr(model, name, ask)
    try:
        own(model, *inputs, **more)
    except _Asked as asked:
        return asked.given
    finally:
        if part is not None:
            hook.remove()
        else:
            delattr(model, name)
    raise RuntimeError(f"{type(model).__name__}.{sampler} ended without a call of {name}")


def repeated(condition: Any, times: int) -> Any:
    """What is fixed along a chain, for as many rows: each row ``times`` times in a row, whatever
    lerobot keeps it in."""
    from transformers import DynamicCache

    if isinstance(condition, Tensor):
        return condition.repeat_interleave(times, 0)
    if isinstance(condition, Mapping):
        return {name: repeated(value, times) for name, value in condition.items()}
    if isinstance(condition, DynamicCache):
        return DynamicCache(
            [(repeated(k, times), repeated(v, times), *rest) for k, v, *rest in condition]
        )
    return condition


def kept(condition: Any, name: str = "prefix") -> dict[str, Tensor]:
    """What is fixed along a chain as named tensors [b ...], which `restored` reads."""
    from transformers import DynamicCache

    if isinstance(condition, Tensor):
        return {name: condition}
    if isinstance(condition, DynamicCache):
        condition = {f"layer{i}": {"k": k, "v": v} for i, (k, v, *_) in enumerate(condition)}
    return {
        path: x
        for key, part in condition.items()
        for path, x in kept(part, f"{name}/{key}").items()
    }


def restored(tensors: Mapping[str, Tensor], name: str = "prefix") -> Any:
    """Inverse of `kept`; other tensors are passed over."""
    from transformers import DynamicCache

    if name in tensors:
        return tensors[name]
    below = (path.removeprefix(f"{name}/") for path in tensors if path.startswith(f"{name}/"))
    parts = list(dict.fromkeys(path.split("/")[0] for path in below))
    found = [restored(tensors, f"{name}/{part}") for part in parts]
    if parts[0] == "layer0":
        return DynamicCache([(layer["k"], layer["v"]) for layer in found])
    return {int(p) if p.isdigit() else p: x for p, x in zip(parts, found, strict=True)}


def siglip(tower: Any) -> Eye:
    """The eye of a SigLIP."""
    return Eye(tower.embeddings.patch_embedding, tower.embeddings.position_embedding.weight)


class FlowHead(ChainHead):
    """Flow matching by an action expert, as SmolVLA and π0 do it."""

    default_noise = 0.5

    def __init__(self, policy: Any, default_steps: int):
        self.policy, self.model, self.default_steps = policy, policy.model, default_steps
        self.chunk_length, self.executed = policy.config.chunk_size, policy.config.n_action_steps
        self.sample_shape = (policy.config.chunk_size, policy.config.max_action_dim)

    @property
    @abc.abstractmethod
    def trunk(self) -> Any:
        """What embeds images and words."""

    @abc.abstractmethod
    def _inputs(self, batch: dict[str, Any]) -> tuple[Any, ...]:
        """What lerobot's sampler takes: pictures per camera, their masks, the instruction's
        tokens and mask, at least."""

    def visual(self, batch: dict[str, Any]) -> Tensor:
        """The image tokens of each camera [b f]."""
        return torch.cat([coarse(self.trunk.embed_image(x)) for x in self._inputs(batch)[0]], dim=1)

    def told(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        """The mean embedding of the instruction's words."""
        return {
            "text": mean_word(self.trunk.embed_language_tokens(batch[TOKENS]), batch[TOKEN_MASK])
        }

    def loss(self, batch: dict[str, Any], valid: Tensor) -> tuple[Tensor, dict[str, float]]:
        """Velocity error over valid control steps and the robot's dimensions; lerobot draws noise
        N(0, I), then time ~ Beta(1.5, 1)."""
        n = self.noise_samples or 1
        actions, valid = (
            x.repeat_interleave(n, 0) for x in (self.policy.prepare_action(batch), valid)
        )
        noise = self.model.sample_noise(actions.shape, actions.device)
        time = self.model.sample_time(len(actions), actions.device)
        if n == 1:
            losses = self.model.forward(*self._inputs(batch), actions, noise, time)
        else:  # the prefix is the same for all of a row
            condition = repeated(self.condition(batch), n)
            share = time[:, None, None]
            x = share * noise + (1 - share) * actions
            velocity = self.model.denoise_step(x_t=x, timestep=time, **condition)
            losses = F.mse_loss(velocity, noise - actions, reduction="none")
        return _denoising_loss(losses[..., : self.policy.config.action_feature.shape[0]], valid)

    def chain(self, steps: int, form: str, noise_level: float) -> Chain:
        return flow_chain(steps, form, noise_level)

    def condition(self, batch: dict[str, Any]) -> Mapping[str, Any]:
        """The prefix, run once: what a velocity needs besides sample and time."""
        inputs = self._inputs(batch)
        start = torch.zeros(len(inputs[2]), *self.sample_shape, device=inputs[2].device)
        asked = first_question(self.model, "denoise_step", "sample_actions", *inputs, noise=start)
        return {name: value for name, value in asked.items() if name not in ("x_t", "timestep")}

    def estimates(
        self, condition: Mapping[str, Any], x: Tensor, chain: Chain, index: int | Tensor
    ) -> tuple[Tensor, Tensor]:
        velocity = self.model.denoise_step(x_t=x, timestep=times(chain, index, x), **condition)
        return split_prediction("velocity", velocity, x, *scales(chain, index, x))


class SmolVLAHead(FlowHead):
    """SmolVLA (Shukor et al. 2025, arXiv 2506.01844); the state is a token of the prefix."""

    noise_samples = 1

    def __init__(self, policy: Any):
        super().__init__(policy, policy.config.num_steps)
        self.output = self.model.action_out_proj

    @property
    def trunk(self) -> Any:
        return self.model.vlm_with_expert

    @property
    def eyes(self) -> Sequence[Eye]:
        return [siglip(self.trunk.get_vlm_model().vision_model)]

    def _inputs(self, batch: dict[str, Any]) -> tuple[Any, ...]:
        images, masks = self.policy.prepare_images(batch)
        return images, masks, batch[TOKENS], batch[TOKEN_MASK], self.policy.prepare_state(batch)


class Pi0Head(FlowHead):
    """π0 (Black et al. 2024, arXiv 2410.24164): the state goes with the noisy actions. π0.5 (arXiv
    2504.16054): the state is part of the prompt, which lerobot's preprocessor writes."""

    noise_samples = 1

    def __init__(self, policy: Any):
        super().__init__(policy, policy.config.num_inference_steps)
        self.output = self.model.action_out_proj
        self.separate_state = policy.config.type == "pi0"

    @property
    def trunk(self) -> Any:
        return self.model.paligemma_with_expert

    def _inputs(self, batch: dict[str, Any]) -> tuple[Any, ...]:
        images, masks = self.policy._preprocess_images(batch)
        state = (self.policy.prepare_state(batch),) if self.separate_state else ()
        return images, masks, batch[TOKENS], batch[TOKEN_MASK], *state

    @property
    def eyes(self) -> Sequence[Eye]:
        return [siglip(self.trunk.paligemma.model.vision_tower.vision_model)]
