"""A VLA whose head denoises action chunks, with the likelihood of its own denoising chain: PPO for
flow and diffusion.

Trunk: `policies.trunk`, as NanoVLA. Head: `ActionExpert` on the trunk's cached keys and values. A
decision starts from noise and takes ``denoising_steps`` steps of a `Chain`; the stochastic ones are
Gaussian, so each has a log-prob, and the decision becomes a short Markov chain that any
policy-gradient method can train through.

Followed, and where this departs from it:
- πRL (arXiv 2510.25889): Flow-SDE, Flow-Noise. Flow-SDE's random step is drawn per row, there per
  batch.
- DPPO (arXiv 2409.00588): floors of the standard deviations, clamped log-probs, noise and x̂0
  clipping, discount and clip schedule over denoising steps, training of the last K' steps with a
  frozen copy before them. The mean over dimensions that DPPO takes is PPO's own option
  (``algorithm.ratio_reduction=mean``).
- RL-100 (arXiv 2510.14830): sum over a chunk's dimensions, limits of the standard deviations, no
  noise at the last step.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from policies.denoising import chain as chains
from policies.denoising.base import DenoisingBase, chunk_normals, drawn_steps
from policies.denoising.consistency import ConsistencyVLA, Grid, same_noise_loss
from policies.denoising.expert import Cache
from policies.denoising.guidance import Guidance, guided
from policies.denoising.settings import DIFFUSIONS, DenoisingVLAConfig
from policies.denoising.students import make_student, prediction_beside, starting_weights
from policies.inputs import require_chunk
from policies.normalization import VectorStats
from policies.tokenizer import WordTokenizer
from policies.trunk.llama import mlp
from policies.trunk.noise import row_seeds
from vla_rl.types import ActionChunk, EmbodimentSpec, Observation, PolicyEvaluation, PolicyOutput


class DenoisingVLA(DenoisingBase):
    """It has a likelihood, and imitates.

    `replay`: ``chain`` float32 [b K'+1 h a] (normalised) and ``first_step`` int64 [b], the index of
    the step that leaves ``chain[:, 0]``. The chain is float32 throughout, so re-evaluating at
    unchanged weights reproduces each log-prob. A deterministic decision takes the ODE (DDIM with η
    = 0) from the row's own first noise.
    """

    log_prob_axes: tuple[str, ...] = ("denoising_step", "control_step", "action_dim")
    policy_type = "denoising_vla"
    config_class = DenoisingVLAConfig
    frozen: DenoisingVLA | None
    is_frozen: Tensor  # where there is a frozen copy
    train_alphas: Tensor  # where the sampler is a diffusion
    draws: Tensor
    discount: Tensor
    clip_scale: Tensor
    # the columns of `chains.Chain`
    chain_time: Tensor
    chain_signal: Tensor
    chain_noise: Tensor
    chain_weight_action: Tensor
    chain_weight_noise: Tensor
    chain_std: Tensor
    chain_mean_action: Tensor
    chain_mean_noise: Tensor

    def __init__(
        self,
        config: DenoisingVLAConfig,
        embodiment: EmbodimentSpec,
        action_stats: VectorStats | None = None,
        proprio_stats: VectorStats | None = None,
        tokenizer: WordTokenizer | None = None,
    ):
        super().__init__(config, embodiment, action_stats, proprio_stats, tokenizer)
        w, a = config.expert_width, embodiment.action_dim
        if config.sampler == "flow_noise":
            self.std_head = nn.Sequential(mlp(w, w // 2, w // 4), nn.Tanh(), nn.Linear(w // 4, a))
        if config.student_steps:
            self.student = self._new_expert()
        self.scheduler = None
        if config.sampler in DIFFUSIONS:
            self.scheduler = chains.make_scheduler(
                config.sampler, config.train_timesteps, config.prediction
            )
            chain = chains.diffusion_chain(self.scheduler, config.denoising_steps, config.eta)
            self.register_buffer(
                "train_alphas", self.scheduler.alphas_cumprod.float(), persistent=False
            )
        else:
            chain = chains.flow_chain(config.denoising_steps, config.sampler, config.noise_level)
        if config.min_std or config.max_std:
            chain = chain.with_std_limits(config.min_std, config.max_std)
        if not config.last_step_noise:
            chain = chain.without_last_noise()
        self.first_trained, self.end_stochastic = chains.trained_range(config, chain)
        for name, column in chain.rows().items():
            self.register_buffer(f"chain_{name}", column, persistent=False)
        trained = self.end_stochastic - self.first_trained
        discount = chains.discount_schedule(trained, config.advantage_discount)
        self.register_buffer("discount", discount, persistent=False)
        self.register_buffer(
            "clip_scale",
            chains.clip_schedule(trained, config.clip_base, config.clip_rate),
            persistent=False,
        )
        # Part of the weights, so that a resumed run draws the noise an uninterrupted one would have
        # drawn.
        self.register_buffer("draws", torch.zeros((), dtype=torch.int64))
        self.frozen = None
        if config.freeze_untrained:
            self.frozen = copy.deepcopy(self).requires_grad_(False)
            self.frozen.frozen = None
            self.register_buffer("is_frozen", torch.zeros((), dtype=torch.bool))

    def blocks(self) -> list[nn.Module]:
        student = self.student.layers if self.config.student_steps else ()
        return [
            *super().blocks(),
            *student,
            *(self.frozen.blocks() if self.frozen is not None else ()),
        ]

    # ---------------------------------------------------------------------------------------- steps
    @property
    def correlated_axes(self) -> tuple[str, ...]:
        return self.config.correlated_axes

    @property
    def steps_per_likelihood(self) -> int:
        """Size of the "denoising_step" axis."""
        return (
            1 if self.config.stochastic_steps == "one" else self.end_stochastic - self.first_trained
        )

    def _bounds(self) -> tuple[Tensor, Tensor] | None:
        return (
            (self.normalize(self.action_low), self.normalize(self.action_high))
            if self.config.clip_action
            else None
        )

    def _step(
        self,
        x: Tensor,
        index: Tensor | int,
        modulation: Tensor,
        cache: Cache,
        guidance: Guidance | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Mean and standard deviation of the stochastic step, and the deterministic step, from
        ``x`` [b s h a].

        ``index`` is the number of the step, or [b s]; ``modulation`` that of its time.
        """

        def at(column: Tensor) -> Tensor:
            return column[index] if isinstance(index, int) else column[index][..., None, None]

        signal, noise = at(self.chain_signal), at(self.chain_noise)

        def estimate(x: Tensor) -> tuple[Tensor, ...]:
            output, features = self.run_expert(x, modulation, cache)
            return *chains.split_prediction(
                self.config.prediction, output, x, signal, noise
            ), features

        action, epsilon, features = guided(estimate, x, signal, noise, guidance)
        # behind the guidance: what is clipped has no gradient
        if (bounds := self._bounds()) is not None:
            action, epsilon = chains.clip_estimate(action, x, signal, noise, bounds)
        ode = at(self.chain_mean_action) * action + at(self.chain_mean_noise) * epsilon
        if self.config.sampler == "flow_noise":
            low, high = self.config.learned_std_low, self.config.learned_std_high
            # log-variance between its limits, as in πRL
            share = 0.5 * (self.std_head(features).tanh() + 1.0)
            return ode, low * (high / low) ** share, ode
        mean = at(self.chain_weight_action) * action + at(self.chain_weight_noise) * epsilon
        return mean, at(self.chain_std).expand_as(mean), ode

    def _log_prob(self, x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
        config = self.config
        log_prob = chains.gaussian_log_prob(x, mean, std.clamp(min=config.min_log_prob_std))
        if config.log_prob_low is not None or config.log_prob_high is not None:
            log_prob = log_prob.clamp(config.log_prob_low, config.log_prob_high)
        # πRL's joint likelihood is the mean over the K steps and the first noise (whose ratio is
        # 1).
        return log_prob / (len(self.chain_time) + 1) if config.sampler == "flow_noise" else log_prob

    # ----------------------------------------------------------------------------------- interfaces
    @torch.no_grad()
    def act(
        self,
        observation: Observation,
        *,
        deterministic: bool = False,
        seeds: Sequence[int] | None = None,
    ) -> PolicyOutput:
        """One chunk per row, in physical units; see `vla_rl.interfaces.Policy`."""
        kept = self._kept(self.image_tokens(observation)) if self.keeps_image_tokens else {}
        return self._decide(observation, kept, deterministic, seeds)

    @torch.no_grad()
    def sample(
        self,
        observation: Observation,
        features: Mapping[str, Tensor],
        seeds: Sequence[int] | None = None,
    ) -> PolicyOutput:
        """See `vla_rl.interfaces.Policy`."""
        kept = {name: tokens.to(self.device) for name, tokens in self._tokens_of(features).items()}
        return self._decide(observation, kept, False, seeds)

    def _decide(
        self,
        observation: Observation,
        kept: dict[str, Tensor],
        deterministic: bool,
        seeds: Sequence[int] | None,
    ) -> PolicyOutput:
        """A chunk per row; ``kept`` is what the replay holds of the images, empty where it holds
        nothing."""
        b, first = len(observation), self.first_trained
        x, step_noise, first_step = self._noises(b, deterministic, seeds)
        own, value = self._own_expert(observation, kept)
        path, log_prob = self._denoise(
            x[:, None], self._experts(own, observation, kept), step_noise, first_step
        )
        path, log_prob = path[:, :, 0], log_prob[:, :, 0]
        rows, span = torch.arange(b, device=self.device)[:, None], self.steps_per_likelihood
        segment = first_step[:, None] + torch.arange(span + 1, device=self.device)
        replay = {"chain": path[rows, segment], "first_step": first_step, **kept}
        if self.config.student_steps:
            replay["first_noise"] = path[:, 0]
        return PolicyOutput(
            chunk=self._chunk(path[:, -1]),
            behavior_log_prob=log_prob[rows, segment[:, :-1] - first],
            replay=replay,
            value=value,
        )

    def _noises(
        self, b: int, deterministic: bool, seeds: Sequence[int] | None
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Of ``b`` decisions the first noise [b h a], that of the stochastic steps [b E h a] or
        None, and the first of the steps that are stochastic [b]."""
        config, first, end = self.config, self.first_trained, self.end_stochastic
        first_step = torch.full((b,), first, device=self.device)
        if deterministic:
            return self._first_noise(seeds, b), None, first_step
        seeds, h, a = row_seeds(seeds, b), self.chunk_length, self.embodiment.action_dim
        x, step_noise = chunk_normals(seeds, end, h, a, config.noise_correlation)
        x, step_noise = x.to(self.device), step_noise.to(self.device)
        if config.noise_clip:
            step_noise = step_noise.clamp(-config.noise_clip, config.noise_clip)
        if config.stochastic_steps == "one":
            first_step = drawn_steps(seeds, first, end).to(self.device)
        return x, step_noise, first_step

    @property
    def guidable(self) -> bool:
        """See `vla_rl.interfaces.Policy`: the guidance is that of a flow."""
        return self.scheduler is None

    @torch.inference_mode(False)  # it needs a gradient, and may be called in that mode
    @torch.no_grad()
    def act_towards(
        self,
        observation: Observation,
        wanted: Tensor,
        weight: Tensor,
        most: float,
        *,
        deterministic: bool = False,
    ) -> ActionChunk:
        """See `vla_rl.interfaces.Policy`."""
        x, step_noise, first_step = self._noises(len(observation), deterministic, None)
        own, _ = self._own_expert(observation)
        wanted, weight = (
            self.normalize(wanted.to(self.device))[:, None],
            weight.to(self.device)[:, None, :, None],
        )
        guidance = Guidance(wanted, weight, most)
        path, _ = self._denoise(
            x[:, None], self._experts(own, observation), step_noise, first_step, guidance
        )
        return self._chunk(path[:, -1, 0])

    def _own_expert(
        self, observation: Observation, replay: Mapping[str, Tensor] | None = None
    ) -> tuple[_Expert, Tensor | None]:
        """This policy, ready to take steps, and the value."""
        cache, value = self.encode(observation, replay)
        return self.as_expert(cache), value

    def as_expert(self, cache: Cache) -> _Expert:
        return _Expert(self, cache, self.expert.modulate(self.chain_time))

    def _experts(
        self, own: _Expert, observation: Observation, replay: Mapping[str, Tensor] | None = None
    ) -> list[_Expert]:
        """Who takes each of the K steps: the frozen copy (where there is one) those before the
        trained ones."""
        early = own
        if self.frozen is not None and bool(self.is_frozen):
            early, _ = self.frozen._own_expert(observation, replay)
        return [early if i < self.first_trained else own for i in range(len(self.chain_time))]

    def _denoise(
        self,
        x: Tensor,
        experts: list[_Expert],
        step_noise: Tensor | None = None,
        first_step: Tensor | None = None,
        guidance: Guidance | None = None,
    ) -> tuple[Tensor, Tensor]:
        """All K steps from ``x`` [b s h a]: the path [b K+1 s h a], and the log-probs [b K' s h a]
        of the trainable ones.

        ``step_noise`` [b E h a] makes the first E steps stochastic; with ``stochastic_steps`` "one"
        only each row's ``first_step`` [b]. Without it the path is the deterministic one, which has
        no log-prob (0).
        """
        one = self.config.stochastic_steps == "one"
        path, log_probs = [x], []
        for i, (policy, cache, modulation) in enumerate(experts):
            mean, std, ode = policy._step(x, i, modulation[i], cache, guidance)
            after = ode
            if step_noise is not None and i < step_noise.shape[1]:
                after = mean + std * step_noise[:, i, None]
                if one:
                    assert first_step is not None, "first_step comes with step_noise"
                    after = torch.where((first_step == i)[:, None, None, None], after, ode)
            if self.first_trained <= i < self.end_stochastic:
                likely = step_noise is not None
                log_probs.append(
                    self._log_prob(after, mean, std) if likely else torch.zeros_like(after)
                )
            path.append(after)
            x = after
        return torch.stack(path, 1), torch.stack(log_probs, 1)

    def _from_noise(
        self, observation: Observation, noise: Tensor, replay: Mapping[str, Tensor] | None
    ) -> Tensor:
        own, _ = self._own_expert(observation, replay)
        return self._denoise(noise[:, None], self._experts(own, observation, replay))[0][:, -1, 0]

    def evaluate(self, observation: Observation, replay: Mapping[str, Tensor]) -> PolicyEvaluation:
        """Log-prob and entropy [b K' h a] of the stored chain's steps under the present weights,
        with gradient.

        ``advantage_weight`` and ``clip_scale`` carry the schedules over denoising steps, where they
        are not all 1.
        """
        path, first_step = replay["chain"].to(self.device), replay["first_step"].to(self.device)
        span = self.steps_per_likelihood
        index = first_step[:, None] + torch.arange(span, device=self.device)
        with torch.autocast(self.device.type, enabled=False):
            own, value = self._own_expert(observation, replay)
            mean, std, _ = self._step(path[:, :-1], index, own.modulation[index], own.cache)
            log_prob = self._log_prob(path[:, 1:], mean, std)
            entropy = chains.gaussian_entropy(std)
            auxiliary = None
            if self.config.student_steps:
                first_noise = replay["first_noise"].to(self.device)[:, None]
                auxiliary = self._student_loss(self._experts(own, observation, replay), first_noise)

        def schedule(column: Tensor) -> Tensor | None:
            if bool((column == 1.0).all()):
                return None
            return column[index - self.first_trained][..., None, None].expand_as(log_prob)

        return PolicyEvaluation(
            log_prob=log_prob,
            entropy=entropy,
            value=value,
            advantage_weight=schedule(self.discount),
            clip_scale=schedule(self.clip_scale),
            auxiliary_loss=auxiliary,
        )

    def imitation_loss(
        self,
        observation: Observation,
        actions: Tensor,
        valid: Tensor,
        features: Mapping[str, Tensor] | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        """Mean squared error of the prediction over valid control steps, ``noise_samples`` noisy
        chunks per row.

        Flow times are t = 0.999·Beta(1.5, 1) + 0.001 (π0, appendix B), diffusion timesteps uniform.
        Metrics: ``mse``, and ``mae``, how far x̂0 is from the action (mean over dimensions,
        physical units, at the sampled times).
        """
        config, h, a = self.config, self.chunk_length, self.embodiment.action_dim
        require_chunk(actions, h, self.embodiment)
        b, s = len(actions), config.noise_samples
        # (RL leaves the policy in eval mode); a validation loss repeats its noise
        learns = torch.is_grad_enabled()
        # each rank has rows, and noise, of its own
        stream = int(self.draws) * self.ranks + self.rank
        generator = torch.Generator().manual_seed(stream if learns else 0)
        self.draws += int(learns)
        target_action = self.normalize(actions.to(self.device))[:, None]
        epsilon = torch.randn(b, s, h, a, generator=generator).to(self.device)
        draw = torch.rand(b, s, generator=generator).to(self.device)
        if self.scheduler is None:
            # the inverse distribution function of Beta(1.5, 1)
            time = 0.999 * draw ** (1.0 / 1.5) + 0.001
            signal, noise = 1.0 - time, time
        else:
            timestep = (draw * config.train_timesteps).long().clamp(max=config.train_timesteps - 1)
            alpha = self.train_alphas[timestep]
            time, signal, noise = (
                (timestep + 1) / config.train_timesteps,
                alpha.sqrt(),
                (1.0 - alpha).sqrt(),
            )
        signal, noise = signal[..., None, None], noise[..., None, None]
        x = signal * target_action + noise * epsilon
        with self.pictures.learning(valid, self.training):
            cache, _ = self.encode(
                observation, None if features is None else self._tokens_of(features)
            )
        output, _ = self.run_expert(x, self.expert.modulate(time), cache)
        weight = valid.to(self.device, torch.float32)[:, None, :, None].expand_as(output)
        weight = weight / weight.sum().clamp(min=1.0)
        loss = (
            (output - chains.training_target(config.prediction, target_action, epsilon)).square()
            * weight
        ).sum()
        with torch.no_grad():
            guess, _ = chains.split_prediction(
                config.prediction, output, x, signal, noise, self._bounds()
            )
            mae = (
                (self.denormalize(guess) - actions.to(self.device)[:, None]).abs() * weight
            ).sum()
        return loss, dict(
            zip(("mse", "mae"), torch.stack([loss.detach(), mae]).tolist(), strict=True)
        )

    # ------------------------------------------------------------------------------ RL and students
    def prepare_for_rl(self) -> None:
        """As of the trunk; besides, what stays frozen and the student start as copies of the
        policy."""
        super().prepare_for_rl()
        if self.config.student_steps:
            teacher = self.config.prediction
            start = starting_weights(self.expert.state_dict(), teacher, prediction_beside(teacher))
            self.student.load_state_dict(start)
        if self.frozen is not None and not bool(self.is_frozen):
            own = self.state_dict()
            self.frozen.load_state_dict({name: own[name] for name in self.frozen.state_dict()})
            self.is_frozen.fill_(True)

    @torch.no_grad()
    def teach(self, observation: Observation, first_noise: Tensor) -> Tensor:
        """The deterministic path [b K+1 s h a] (normalised) from ``first_noise`` [b s h a]: what
        students learn from."""
        own, _ = self._own_expert(observation)
        return self._denoise(first_noise, self._experts(own, observation))[0]

    def _student_loss(self, experts: list[_Expert], first_noise: Tensor) -> Tensor:
        """Loss [b] of the student beside RL, times its weight: same first noise, on a prefix
        without gradient."""
        with torch.no_grad():
            target = self._denoise(first_noise, experts)[0][:, -1]
        cache = [(k.detach(), v.detach()) for k, v in experts[-1].cache]
        grid = Grid.straight(self.config.student_steps, self.device)
        prediction = prediction_beside(self.config.prediction)
        loss = same_noise_loss(self.student, prediction, grid, cache, first_noise, target)
        return self.config.student_coef * loss

    def completed(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `vla_rl.interfaces.Policy`: a student that a checkpoint has not starts as
        one of RL does."""
        given = dict(weights)
        if self.config.student_steps and not any(name.startswith("student.") for name in given):
            expert = {
                name.removeprefix("expert."): x
                for name, x in given.items()
                if name.startswith("expert.")
            }
            teacher = self.config.prediction
            made = starting_weights(expert, teacher, prediction_beside(teacher))
            given |= {f"student.{name}": x for name, x in made.items()}
        return given

    def make_student(self, steps: int, method: str = "same_noise") -> ConsistencyVLA:
        """A student policy with ``steps`` denoising steps on a copy of the trunk; only its expert
        is to be trained.

        ``method`` is how it will learn, one of `policies.denoising.settings.METHODS`. A student
        that learnt beside RL (``student_steps``) is taken over.
        """
        return make_student(self, steps, method)


class _Expert(NamedTuple):
    """One who takes steps: the policy, its prefix cache, and its modulation [K D] by the time of
    each step."""

    policy: DenoisingVLA
    cache: Cache
    modulation: Tensor
