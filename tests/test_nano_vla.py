"""The small VLA: its tokens, its two ways of decoding, its likelihoods, and that it learns."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from contracts import check_policy
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.nano_vla import NanoVLA, preset
from policies.normalization import VectorStats, bin_centers, decode_actions, encode_actions
from policies.settings import NanoVLAConfig
from policies.tokenizer import WordTokenizer
from policies.trunk.llama import LlamaTrunk, attend
from policies.trunk.noise import chunk_uniforms, counter_uniforms, sample_inverse_cdf
from policies.trunk.vision import FeatureNorm, FiLM, VisionTower, conditioned, merge_tokens
from vla_rl.checkpoint import load_policy, save_checkpoint
from vla_rl.config import compose
from vla_rl.errors import ConfigError, EmbodimentMismatch, UserError
from vla_rl.mirror import mirrored, mirrored_actions, mirrored_observation
from vla_rl.specs import Mirror
from vla_rl.types import CameraSpec, EmbodimentSpec, Observation

SPEC = EmbodimentSpec(
    name="arm",
    action_names=("dx", "dy", "gripper"),
    action_units=("m", "m", "1"),
    action_low=(-0.05, -0.04, -1.0),
    action_high=(0.05, 0.08, 1.0),
    frame="base",
    rotation="none",
    gripper="-1 open, +1 close",
    control_hz=20.0,
    cameras=(CameraSpec("front", 28, 28), CameraSpec("wrist", 28, 28)),
    proprio_names=("x", "y"),
)
TINY = NanoVLAConfig(
    chunk_length=3,
    action_bins=9,
    stem_channels=[8],
    stem_kernels=[4, 3],
    stem_strides=[4, 2],
    vit_width=16,
    vit_heads=2,
    instruction_tokens=2,
    instruction_length=6,
    llm_width=16,
    llm_depth=2,
    llm_heads=2,
    llm_mlp=24,
    precision="float32",
    soft_label_sigma=0.0,
)
# null: what suits the decoding
AUTOREGRESSIVE = {"decoding": "autoregressive", "noise_correlation": None}
VARIANTS = {
    "parallel_step": {},
    "parallel_dim": {"tokens_per_step": False},
    "autoregressive_step": AUTOREGRESSIVE,
    "autoregressive_dim": {**AUTOREGRESSIVE, "tokens_per_step": False},
    "binary_gripper": {**AUTOREGRESSIVE, "tokens_per_step": False, "binary_gripper": True},
    "patches": {
        "stem_channels": [],
        "patch_size": 7,
        "merge": 1,
        "instruction_tokens": 0,
        "use_proprio": False,
    },
    "two_towers": {"share_vision": False, "binary_gripper": True, "temperature": 0.7},
    "film": {"film": True},
    "film_two_towers": {"film": True, "share_vision": False, "stem_norm": "none"},
    "one_camera": {"cameras": ["wrist"], "value_head": False, "stem_norm": "none", "vit_depth": 0},
}


def make(spec: EmbodimentSpec = SPEC, scale: float = 0.3, **changes: object) -> NanoVLA:
    """A policy with random weights everywhere, so that no path is switched off by a zero
    initialisation."""
    policy = NanoVLA(dataclasses.replace(TINY, **changes), spec)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += (
                scale
                * parameter.new_empty(parameter.shape).normal_()
                / max(1, parameter.shape[-1]) ** 0.5
            )
    return policy.eval()


def observe(b: int, spec: EmbodimentSpec = SPEC, seed: int = 0) -> Observation:
    g = torch.Generator().manual_seed(seed)
    texts = (
        "pick up the red cube",
        "open the drawer",
        "zorble the quux now please and then stop again",
    )
    return Observation(
        images={
            c.name: torch.randint(0, 256, (b, c.height, c.width, 3), generator=g, dtype=torch.uint8)
            for c in spec.cameras
        },
        proprio=torch.randn(b, spec.proprio_dim, generator=g),
        instruction=tuple(texts[i % 3] for i in range(b)),
    )


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_contract_and_likelihood(changes: dict):
    policy = make(**changes)
    assert policy.can >= {"likelihood", "imitation"}
    observation = observe(5)
    check_policy(policy, observation, tolerance=1e-5)
    output = policy.act(observation, seeds=range(5))
    evaluation = policy.evaluate(observation, output.replay)
    ratio = (evaluation.log_prob - output.behavior_log_prob).exp()
    torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=0, atol=1e-5)
    assert evaluation.entropy.shape == (5, 3, 3) and (evaluation.entropy > 0).all()
    if policy.config.value_head:
        torch.testing.assert_close(evaluation.value, output.value, rtol=0, atol=1e-5)
    else:
        assert evaluation.value is None and output.value is None
    torch.testing.assert_close(
        policy.bins.encode(output.chunk.actions), output.replay["action_tokens"].long()
    )
    loss, metrics = policy.imitation_loss(observation, output.chunk.actions, output.chunk.valid)
    loss.backward()
    assert set(metrics) == {"nll", "accuracy", "mae", "entropy"} and metrics[
        "nll"
    ] == pytest.approx(loss.item())
    unused = [n for n, p in policy.named_parameters() if p.grad is None and "value" not in n]
    assert unused == []


@pytest.mark.parametrize("changes", [VARIANTS["autoregressive_step"], VARIANTS["binary_gripper"]])
def test_cached_decoding_equals_decoding_without_a_cache(changes: dict):
    policy = make(**changes)
    observation = observe(4)
    a, k = SPEC.action_dim, policy.config.action_bins
    uniforms = chunk_uniforms(range(4), 3, a, policy.config.noise_correlation).view(4, 9)
    tokens = torch.zeros(4, 9, dtype=torch.long)
    for position in range(9):  # each token from a whole forward over all those before it
        logits, _ = policy.logits_and_value(observation, tokens.view(4, 3, a))
        log_probs = policy._log_probs(logits).view(4, 9, k)[:, position]
        tokens[:, position] = sample_inverse_cdf(log_probs, uniforms[:, position])
    output = policy.act(observation, seeds=range(4))
    torch.testing.assert_close(output.replay["action_tokens"].long().view(4, 9), tokens)
    greedy = policy.act(observation, deterministic=True)
    logits, _ = policy.logits_and_value(observation, greedy.replay["action_tokens"])
    torch.testing.assert_close(logits.argmax(-1), greedy.replay["action_tokens"].long())


def test_autoregressive_tokens_depend_on_those_before_and_not_on_those_after():
    policy = make(**VARIANTS["autoregressive_dim"])
    tokens = torch.zeros(1, 3, 3, dtype=torch.long)
    changed = tokens.clone()
    changed[0, 1, 1] = 5
    with torch.no_grad():
        a, b = (policy.logits_and_value(observe(1), t)[0].view(9, -1) for t in (tokens, changed))
    assert torch.equal(a[:5], b[:5]) and not torch.allclose(a[5], b[5])


@pytest.mark.xdist_group("libraries")
@pytest.mark.parametrize("causal", [False, True])
def test_trunk_equals_the_llama_of_transformers(causal: bool):
    from transformers import LlamaConfig, LlamaModel

    trunk = LlamaTrunk(dataclasses.replace(TINY, llm_depth=2), 32, 7).eval()
    with torch.no_grad():
        for parameter in trunk.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
        x = torch.randn(2, 7, 16)
        ours, _ = trunk(x, causal)
        mask = torch.zeros(2, 1, 7, 7)
        if causal:
            mask = mask + torch.full((7, 7), -torch.inf).triu(1)
        stock = LlamaModel(
            LlamaConfig(
                vocab_size=32,
                hidden_size=TINY.llm_width,
                num_hidden_layers=TINY.llm_depth,
                intermediate_size=TINY.llm_mlp,
                num_attention_heads=TINY.llm_heads,
                num_key_value_heads=TINY.llm_heads,
                rope_theta=TINY.rope_theta,
                max_position_embeddings=16,
            )
        ).eval()
        stock.load_state_dict(trunk.llama.state_dict())
        theirs = stock(inputs_embeds=x, attention_mask=mask, use_cache=False).last_hidden_state
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.xdist_group("libraries")
def test_the_vision_tower_equals_timms():
    from timm.models.vision_transformer import VisionTransformer

    config = dataclasses.replace(
        TINY, stem_channels=[], stem_kernels=[4], stem_strides=[4], patch_size=8, vit_depth=2
    )
    tower = VisionTower(config, 16, 24).eval()
    with torch.no_grad():
        for parameter in tower.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    stock = VisionTransformer(
        img_size=(16, 24),
        patch_size=config.patch_size,
        embed_dim=config.vit_width,
        depth=2,
        num_heads=config.vit_heads,
        mlp_ratio=config.vit_mlp_ratio,
        num_classes=0,
        global_pool="",
        class_token=False,
    ).eval()
    stock.load_state_dict(tower.state_dict())
    pixels = torch.randn(2, 3, 16, 24)
    with torch.no_grad():
        torch.testing.assert_close(
            tower(pixels), stock.forward_features(pixels), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("causal", [False, True])
def test_plain_attention_equals_the_fused_one(causal: bool):
    q, k, v = torch.randn(3, 2, 2, 5, 4)
    fused = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    torch.testing.assert_close(attend(q, k, v, causal), fused, rtol=1e-5, atol=1e-5)


def test_gradient_checkpointing_changes_nothing():
    observation = observe(2)
    actions = torch.zeros(2, 3, 3)
    gradients = []
    for flag in (False, True):
        torch.manual_seed(1)
        policy = make(gradient_checkpointing=flag).train()
        policy.imitation_loss(observation, actions, torch.ones(2, 3, dtype=torch.bool))[
            0
        ].backward()
        gradients.append([p.grad for p in policy.parameters() if p.grad is not None])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


# ----------------------------------------------------------------------------------------- sampling
def test_noise_is_uniform_and_a_function_of_seed_and_index():
    u = counter_uniforms(range(2000), 8)
    assert u.dtype == np.float32 and u.min() > 0 and u.max() < 1
    np.testing.assert_array_equal(u[17:18], counter_uniforms([17], 8))
    np.testing.assert_array_equal(u[:, :3], counter_uniforms(range(2000), 3))
    histogram = np.histogram(u, 16, (0, 1))[0] / u.size
    assert abs(histogram - 1 / 16).max() < 0.006
    assert abs(np.corrcoef(u.T) - np.eye(8)).max() < 0.1
    assert np.isfinite(counter_uniforms([-1, 2**63, 2**64 + 5], 2)).all()


def test_sampling_follows_the_distribution_and_the_temperature():
    policy = make()
    observation = Observation(
        **{f.name: getattr(observe(1), f.name) for f in dataclasses.fields(Observation)}
    )
    many = observation[[0] * 4000]
    for temperature in (1.0, 0.5):
        policy.temperature = temperature
        logits, _ = policy.logits_and_value(observation)
        expected = (logits[0] / temperature).softmax(-1)
        tokens = policy.act(many, seeds=range(4000)).replay["action_tokens"].long()
        found = torch.nn.functional.one_hot(tokens, 9).float().mean(0)
        assert (found - expected).abs().max() < 0.04
        entropy = policy.evaluate(observation, {"action_tokens": tokens[:1]}).entropy
        torch.testing.assert_close(
            entropy[0], -(expected * expected.log()).sum(-1), rtol=1e-4, atol=1e-5
        )


def test_correlated_noise_moves_a_chunk_together_and_keeps_the_distribution_of_each_parallel_token():
    u = chunk_uniforms(range(4000), 4, 2, 0.8)
    assert u.shape == (4000, 4, 2) and u.min() > 0 and u.max() < 1
    histogram = np.histogram(u, 16, (0, 1))[0] / u.numel()
    assert abs(histogram - 1 / 16).max() < 0.006
    found = np.corrcoef(torch.special.ndtri(u.double()).reshape(4000, 8).T)
    same_dimension = np.kron(np.ones((4, 4)), np.eye(2)).astype(bool)
    assert abs(found[same_dimension & ~np.eye(8, dtype=bool)] - 0.8).max() < 0.03
    assert abs(found[~same_dimension]).max() < 0.06
    torch.testing.assert_close(u[7:9], chunk_uniforms([7, 8], 4, 2, 0.8))
    policy = make(noise_correlation=0.8)
    many = observe(1)[[0] * 4000]
    tokens = policy.act(many, seeds=range(4000)).replay["action_tokens"].long()
    expected = policy.logits_and_value(observe(1))[0][0].softmax(-1)
    assert (torch.nn.functional.one_hot(tokens, 9).float().mean(0) - expected).abs().max() < 0.04


def bias_of(policy: NanoVLA, correlation: float, rows: int = 4096) -> float:
    """Largest mean of (token − its probability) × (same dimension's token one control step before),
    in standard errors.

    That is what the gradient of a weight from the earlier to the later token has as its factor:
    with advantage 1 the policy gradient is 0, and so is this expectation, where each token follows
    its own distribution given those before.
    """
    many, bins = observe(1)[[0] * rows], policy.config.action_bins
    uniforms = chunk_uniforms(range(rows), 3, SPEC.action_dim, correlation)
    with torch.no_grad():
        tokens, log_probs, _ = policy._decode(
            policy._inputs(many), uniforms.view(rows, policy.slots, policy.group)
        )
    chosen = torch.nn.functional.one_hot(tokens, bins).float()
    # [rows 2 a bins bins]
    product = (chosen - log_probs.exp())[:, 1:, :, :, None] * chosen[:, :-1, :, None, :]
    seen = chosen[:, :-1].sum(0)[:, :, None, :] > 50  # enough for a normal distribution
    z = product.sum(0) / (product.square().sum(0).sqrt() + 1e-6)
    return float(z[seen.expand_as(z)].abs().max())


@pytest.mark.parametrize("name", ["autoregressive_step", "autoregressive_dim"])
def test_autoregressive_sampling_shares_no_noise_since_that_would_bias_the_gradient(name: str):
    policy = make(**VARIANTS[name])
    assert policy.config.noise_correlation == 0.0 and policy.correlated_axes == ()
    assert bias_of(policy, 0.0) < 5.0  # the largest of some 400 normal numbers
    assert bias_of(policy, 0.8) > 15.0  # what used to be drawn
    assert make().config.noise_correlation == 0.8 and make().correlated_axes == ("control_step",)
    assert make(noise_correlation=0.0).correlated_axes == make(chunk_length=1).correlated_axes == ()


def test_impossible_bins_have_no_probability_and_the_mean_mode_mixes():
    policy = make(binary_gripper=True, deterministic_mode="mean")
    output = policy.act(observe(64))
    assert (output.replay["action_tokens"][..., 2] < 2).all()
    assert set(output.chunk.actions[..., 2].unique().tolist()) == {-1.0, 1.0}
    mean = policy.act(observe(4), deterministic=True)
    logits, _ = policy.logits_and_value(observe(4))
    centers = policy.bins.centers.clone()
    centers[2, 2:] = 0
    torch.testing.assert_close(mean.chunk.actions, (logits.softmax(-1) * centers).sum(-1))
    assert torch.isfinite(mean.behavior_log_prob).all()


@pytest.mark.parametrize("decoding", ["parallel", "autoregressive"])
def test_in_mirror_mode_it_does_on_the_left_what_it_does_on_the_right(decoding: str):
    both = dataclasses.replace(
        SPEC,
        action_low=(-0.05, -0.08, -1.0),
        mirror=Mirror(negated=("dy", "y"), exchanged=(("red", "green"),)),
    )
    policy = make(both, deterministic_mode="mirror", decoding=decoding, noise_correlation=None)
    seen = observe(6, both)
    turned = mirrored_observation(seen, both)
    out, there = (policy.act(x, deterministic=True) for x in (seen, turned))
    back = mirrored_actions(there.chunk.actions, both)
    arm, hand = slice(0, 2), 2
    torch.testing.assert_close(out.chunk.actions[..., arm], back[..., arm])
    judged = policy.evaluate(seen, out.replay).log_prob
    torch.testing.assert_close(out.behavior_log_prob, judged)
    # by itself it is not like that; grippers stay as it chooses them
    policy.config.deterministic_mode = "argmax"
    likeliest = policy.act(seen, deterministic=True).chunk.actions
    assert (likeliest - out.chunk.actions)[..., arm].abs().max() > 0.01
    assert torch.equal(likeliest[..., hand], out.chunk.actions[..., hand])
    # sampling is as ever
    drawn = [policy.act(seen, seeds=range(6)).chunk.actions]
    policy.config.deterministic_mode = "mirror"
    drawn.append(policy.act(seen, seeds=range(6)).chunk.actions)
    assert torch.equal(*drawn)
    with pytest.raises(ConfigError, match=r"deterministic_mode=mirror.*arm declares no mirror"):
        make(deterministic_mode="mirror")


def test_a_symmetric_policy_does_on_the_left_what_it_does_on_the_right_and_learns_so():
    both = dataclasses.replace(
        SPEC,
        action_low=(-0.05, -0.08, -1.0),
        mirror=Mirror(negated=("dy", "y"), exchanged=(("red", "green"),)),
    )
    policy = make(both, symmetric=True)
    seen, rows = observe(6, both), torch.ones(6, dtype=torch.bool)
    for keeps in (False, True):
        if keeps:
            policy.prepare_for_rl()
        drawn = policy.act(seen, seeds=range(6))
        turned, actions = mirrored(seen, drawn.chunk.actions, both, rows)
        tokens = policy.bins.encode(actions)
        here = policy.evaluate(seen, drawn.replay)
        there = policy.evaluate(turned, {"action_tokens": tokens})
        torch.testing.assert_close(here.log_prob, drawn.behavior_log_prob)
        torch.testing.assert_close(here.log_prob, there.log_prob)
        torch.testing.assert_close(here.value, there.value)
    # no other policy is like that
    plain = make(both)
    drawn = plain.act(seen, seeds=range(6))
    turned, actions = mirrored(seen, drawn.chunk.actions, both, rows)
    there = plain.evaluate(turned, {"action_tokens": plain.bins.encode(actions)})
    assert (there.log_prob - drawn.behavior_log_prob).abs().max() > 0.1
    # what it imitates, it imitates on both sides, and features do for pictures
    policy, valid = make(both, symmetric=True), torch.ones(6, 3, dtype=torch.bool)
    turned, actions = mirrored(seen, drawn.chunk.actions, both, rows)
    losses = [
        policy.imitation_loss(seen, drawn.chunk.actions, valid)[0],
        policy.imitation_loss(turned, actions, valid)[0],
        policy.imitation_loss(
            seen, drawn.chunk.actions, valid, features=policy.frame_features(seen)
        )[0],
    ]
    torch.testing.assert_close(losses[0], losses[1])
    torch.testing.assert_close(losses[0], losses[2], rtol=1e-2, atol=1e-3)  # half precision
    with pytest.raises(ConfigError, match=r"symmetric=true.*arm declares no mirror"):
        make(symmetric=True)
    with pytest.raises(ConfigError, match=r"symmetric=true.*decoding=parallel"):
        make(both, symmetric=True, decoding="autoregressive", noise_correlation=None)
    data = VectorStats.from_bounds((-0.05, -0.01, -1.0), (0.05, 0.03, 1.0))
    with pytest.raises(ConfigError, match=r"bins of 'dy'.*bin_range=bounds"):
        NanoVLA(dataclasses.replace(TINY, symmetric=True, bin_range="quantile"), both, data)


def test_seeds_must_match_the_batch():
    with pytest.raises(ValueError, match="2 seeds for 3 observations"):
        make().act(observe(3), seeds=[1, 2])


# --------------------------------------------------------------------------------------------- bins
@settings(max_examples=30)
def stats_of(values: np.ndarray) -> VectorStats:
    """Statistics over all leading axes of ``values`` [... d]."""
    flat = values.reshape(-1, values.shape[-1])
    rows = (
        flat.min(0),
        flat.max(0),
        flat.mean(0),
        flat.std(0),
        *np.quantile(flat, (0.01, 0.99), axis=0),
    )
    return VectorStats(*(tuple(row.tolist()) for row in rows))


@given(
    bins=st.integers(2, 65),
    binary=st.booleans(),
    bin_range=st.sampled_from(["bounds", "minmax", "quantile"]),
    spacing=st.sampled_from(["uniform", "power"]),
)
def test_bins_round_trip(bins: int, binary: bool, bin_range: str, spacing: str):
    stats = stats_of(np.random.default_rng(0).normal(0, 0.02, (200, 3)))
    centers, counts = bin_centers(SPEC, stats, bins, bin_range, spacing, 1.5, binary)
    assert counts.tolist() == [bins, bins, 2 if binary else bins]
    for dim, count in enumerate(counts.tolist()):
        tokens = torch.zeros(count, 3, dtype=torch.long)
        tokens[:, dim] = torch.arange(count)
        assert torch.equal(encode_actions(decode_actions(tokens, centers), centers), tokens)
    assert centers[2, 0] == -1 and centers[2, counts[2] - 1] == 1, "the gripper's ends are exact"
    wild = torch.tensor([[9.0, -9.0, 9.0]])
    assert encode_actions(wild, centers).tolist() == [[bins - 1, 0, int(counts[2]) - 1]]


def test_encoding_picks_the_nearest_centre():
    centers, _ = bin_centers(SPEC, VectorStats.identity(3), 9, "bounds", "power", 2.0)
    actions = torch.rand(500, 3) * torch.tensor([0.1, 0.12, 2.0]) + torch.tensor(SPEC.action_low)
    nearest = (actions[..., None] - centers).abs().argmin(-1)
    assert torch.equal(encode_actions(actions, centers), nearest)


def test_statistics():
    data = np.random.default_rng(0).normal(3.0, 2.0, (10, 50, 2))
    stats = stats_of(data)
    np.testing.assert_allclose(stats.mean, data.reshape(-1, 2).mean(0))
    assert VectorStats.from_dict(stats.to_dict()) == stats
    constant = stats_of(np.ones((5, 2)))
    assert constant.mean_std()[1].tolist() == [1.0, 1.0]
    with pytest.raises(UserError, match="2 dimensions but embodiment arm has 3"):
        bin_centers(SPEC, constant, 9, "bounds")
    # A dimension that never moved in the data keeps the robot's range.
    flat = stats_of(np.zeros((5, 3)))
    assert bin_centers(SPEC, flat, 3, "minmax")[0][0].tolist() == pytest.approx([-0.05, 0.0, 0.05])


# ---------------------------------------------------------------------------------------- imitation
@pytest.mark.parametrize("changes", [{}, AUTOREGRESSIVE], ids=["parallel", "autoregressive"])
def test_overfits_a_small_batch(changes: dict):
    policy = NanoVLA(dataclasses.replace(TINY, **changes), SPEC)
    observation = observe(8)
    actions = decode_actions(torch.randint(0, 9, (8, 3, 3)), policy.bins.centers)
    valid = torch.ones(8, 3, dtype=torch.bool)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    for _ in range(120):
        loss, metrics = policy.imitation_loss(observation, actions, valid)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert metrics["accuracy"] > 0.95 and metrics["nll"] < 0.3
    torch.testing.assert_close(
        policy.act(observation, deterministic=True).chunk.actions, actions, rtol=0, atol=0.3 * 2 / 8
    )


def test_first_loss_is_that_of_a_uniform_guess():
    policy = NanoVLA(TINY, SPEC)
    _, metrics = policy.imitation_loss(
        observe(16), torch.zeros(16, 3, 3), torch.ones(16, 3, dtype=torch.bool)
    )
    assert metrics["nll"] == pytest.approx(np.log(9), abs=0.15)


def test_control_steps_that_are_not_valid_do_not_count():
    policy = make()
    actions = torch.zeros(2, 3, 3)
    valid = torch.tensor([[True, False, False], [True, True, False]])
    wild = torch.where(valid[..., None], actions, torch.full_like(actions, 0.04))
    a, b = (policy.imitation_loss(observe(2), x, valid)[0] for x in (actions, wild))
    assert torch.equal(a, b)
    assert policy.imitation_loss(observe(2), actions, torch.zeros_like(valid))[0].item() == 0.0


def test_soft_labels():
    policy = make(soft_label_sigma=1.0, binary_gripper=True)
    # half a bin up
    actions = torch.tensor([[[0.0, 0.02, 1.0]]]).expand(1, 3, 3) + torch.tensor([0.00625, 0.0, 0.0])
    soft = policy.bins.soft_labels(actions, policy.bins.encode(actions))
    torch.testing.assert_close(soft.sum(-1), torch.ones(1, 3, 3))
    assert soft[0, 0, 2].tolist() == [0.0, 1.0] + [0.0] * 7, "two bins get hard labels"
    torch.testing.assert_close(soft[0, 0, 0, 4], soft[0, 0, 0, 5])
    torch.testing.assert_close(soft[0, 0, 1], soft[0, 0, 1].flip(0))
    torch.testing.assert_close(soft[0, 0, 1, 5] / soft[0, 0, 1, 4], torch.tensor(-0.5).exp())
    loss, metrics = policy.imitation_loss(observe(1), actions, torch.ones(1, 3, dtype=torch.bool))
    assert loss.item() != pytest.approx(metrics["nll"])


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_own_decisions_have_hard_labels_at_the_temperature_they_were_sampled_at(smoothing):
    """Mixed rows: the mean of what each kind has alone; own rows: −log-likelihood as `evaluate`
    gives it."""
    policy = make(soft_label_sigma=1.0, temperature=0.5, label_smoothing=smoothing)
    seen = observe(4)
    acted = policy.act(seen, seeds=[1, 2, 3, 4])
    actions, valid = acted.chunk.actions, torch.ones(4, TINY.chunk_length, dtype=torch.bool)
    with torch.no_grad():
        alone = [
            policy.imitation_loss(
                seen[i : i + 1], actions[i : i + 1], valid[i : i + 1], own=torch.tensor([i < 2])
            )[0]
            for i in range(4)
        ]
        plain = [
            policy.imitation_loss(seen[i : i + 1], actions[i : i + 1], valid[i : i + 1])[0]
            for i in range(2, 4)
        ]
        mixed, _ = policy.imitation_loss(
            seen, actions, valid, own=torch.tensor([True, True, False, False])
        )
        log_prob = policy.evaluate(seen, acted.replay).log_prob
    torch.testing.assert_close(mixed, torch.stack(alone).mean())
    torch.testing.assert_close(torch.stack(alone[2:]), torch.stack(plain))
    torch.testing.assert_close(
        torch.stack(alone[:2]), -log_prob[:2].flatten(1).mean(1), rtol=1e-3, atol=1e-4
    )


def test_soft_labels_are_no_wider_than_the_data_in_that_dimension():
    """Else a hand that no demonstration turns is taught to turn at random, and sampled episodes
    fail."""
    wide = VectorStats.from_bounds(SPEC.action_low, SPEC.action_high)
    # none, half a bin of nine, more than a bin
    stats = dataclasses.replace(wide, std=(0.0, 0.5 * 0.015, wide.std[2]))
    policy = NanoVLA(dataclasses.replace(TINY, soft_label_sigma=1.0), SPEC, action_stats=stats)
    torch.testing.assert_close(policy.bins.label_sigma, torch.tensor([1e-3, 0.5, 1.0]))
    actions = torch.tensor([[[0.0, 0.02, 0.0]]]).expand(1, 3, 3)  # the middle of each
    soft = policy.bins.soft_labels(actions, policy.bins.encode(actions))[0, 0]
    assert soft[0].tolist() == [0.0] * 4 + [1.0] + [0.0] * 4, "what never moves has hard labels"
    torch.testing.assert_close(soft[1, 5] / soft[1, 4], torch.tensor(-2.0).exp())
    torch.testing.assert_close(soft[2, 5] / soft[2, 4], torch.tensor(-0.5).exp())


def test_label_smoothing_is_cross_entropy_with_smoothed_targets():
    policy = make(label_smoothing=0.2)
    observation, actions = observe(3), torch.zeros(3, 3, 3)
    loss, _ = policy.imitation_loss(observation, actions, torch.ones(3, 3, dtype=torch.bool))
    logits, _ = policy.logits_and_value(observation)
    expected = torch.nn.functional.cross_entropy(
        logits.flatten(0, 2), policy.bins.encode(actions).flatten(), label_smoothing=0.2
    )
    torch.testing.assert_close(loss, expected)


def test_value_gradient_can_be_kept_out_of_the_trunk():
    for flag in (True, False):
        policy = make(value_gradient=flag)
        output = policy.act(observe(2))
        policy.evaluate(observe(2), output.replay).value.sum().backward()
        assert (policy.trunk.llama.norm.weight.grad is not None) == flag
        assert policy.value_mlp[0].weight.grad is not None


# ----------------------------------------------------------------------------------- inputs, errors
def test_each_input_matters():
    policy = make()
    base = observe(1)
    with torch.no_grad():
        reference = policy.logits_and_value(base)[0]
        for name in ("front", "wrist"):
            images = dict(base.images)
            images[name] = 255 - images[name]
            assert not torch.allclose(
                policy.logits_and_value(dataclasses.replace(base, images=images))[0], reference
            )
        for change in ({"proprio": base.proprio + 1}, {"instruction": ("open the drawer",)}):
            assert not torch.allclose(
                policy.logits_and_value(dataclasses.replace(base, **change))[0], reference
            )


def test_merging_keeps_the_spatial_layout():
    x = torch.arange(16.0).view(1, 16, 1)
    assert merge_tokens(x, (4, 4), 2)[0].tolist() == [
        [0, 1, 4, 5],
        [2, 3, 6, 7],
        [8, 9, 12, 13],
        [10, 11, 14, 15],
    ]


def test_observations_of_another_robot():
    policy = make()
    base = observe(2)
    with pytest.raises(EmbodimentMismatch, match=r"reads camera wrist at 28x28x3.*'front'"):
        policy.act(dataclasses.replace(base, images={"front": base.images["front"]}))
    small = {name: image[:, :20, :20] for name, image in base.images.items()}
    with pytest.raises(EmbodimentMismatch, match=r"28x28x3.*\(20, 20, 3\)"):
        policy.act(dataclasses.replace(base, images=small))
    with pytest.raises(EmbodimentMismatch, match="2 proprio dimensions"):
        policy.act(dataclasses.replace(base, proprio=torch.zeros(2, 5)))
    with pytest.raises(EmbodimentMismatch, match="predicts chunks of 3 x 3"):
        policy.imitation_loss(base, torch.zeros(2, 4, 3), torch.ones(2, 4, dtype=torch.bool))
    with pytest.raises(EmbodimentMismatch, match="elbow"):
        make(cameras=["elbow"])
    with pytest.raises(EmbodimentMismatch, match="proprio statistics have 7"):
        NanoVLA(TINY, SPEC, None, VectorStats.identity(7))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decoding": "diffusion"}, "decoding='diffusion' .* one of parallel, autoregressive"),
        ({"bin_range": "x"}, "bin_range='x' .* one of bounds, minmax, quantile"),
        ({"action_bins": 1}, "action_bins=1 .* 2 or more"),
        ({"temperature": 0.0}, "above 0"),
        ({"noise_correlation": 1.0}, "below 1"),
        (
            {"noise_correlation": 0.8, "decoding": "autoregressive"},
            "noise_correlation=0, or policy.decoding=parallel",
        ),
        ({"llm_width": 18, "llm_heads": 4}, "llm_width=18 is not divisible by policy.llm_heads=4"),
        ({"llm_width": 18, "llm_heads": 6}, "even"),
        ({"stem_strides": [4]}, "need 2 each"),
        ({"chunk_length": 0}, "chunk_length=0 .* 1 or more"),
    ],
)
def test_config_errors(changes: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(TINY, **changes)


def test_image_sizes_must_fit_the_merging():
    spec = dataclasses.replace(SPEC, cameras=(CameraSpec("front", 28, 40),))
    with pytest.raises(ConfigError, match=r"front .*4x5 image tokens"):
        NanoVLA(TINY, spec)


def test_cameras_of_different_sizes():
    spec = dataclasses.replace(
        SPEC, cameras=(CameraSpec("front", 28, 28), CameraSpec("wrist", 16, 32))
    )
    policy = make(spec)
    assert len(policy.vision) == 2 and policy.camera_tokens == [4, 2]
    check_policy(policy, observe(3, spec), tolerance=1e-5)


def test_tokenizer():
    tokenizer = WordTokenizer(["pick", "cube"], hash_buckets=4)
    assert (
        tokenizer.encode("Pick the CUBE!", 6)[0] == 5
        and tokenizer.encode("Pick the CUBE!", 6)[2] == 6
    )
    assert tokenizer.encode("", 3) == [0, 0, 0] and len(tokenizer.encode("a b c d e", 3)) == 3
    unknown = tokenizer.encode("zorble ünïcode 42", 8)
    assert all(0 <= i < tokenizer.vocab_size for i in unknown) and unknown == tokenizer.encode(
        "zorble ünïcode 42", 8
    )
    again = WordTokenizer.from_json(tokenizer.to_json())
    assert again.encode("pick zorble", 3) == tokenizer.encode("pick zorble", 3)
    assert again.vocab_size == tokenizer.vocab_size == 7
    with pytest.raises(UserError, match="'bpe'"):
        WordTokenizer.from_json('{"type": "bpe"}')


def test_words_past_the_instruction_length_are_cut_and_padding_is_ignored():
    policy = make(instruction_length=3)
    base = observe(1)
    with torch.no_grad():
        a, b = (
            policy.logits_and_value(dataclasses.replace(base, instruction=(text,)))[0]
            for text in ("pick up cube", "pick up cube now")
        )
    assert torch.equal(a, b)
    assert torch.isfinite(
        policy.act(dataclasses.replace(base, instruction=("",))).chunk.actions
    ).all()


# ------------------------------------------------------------------------------- checkpoints, sizes
def test_save_and_load(tmp_path: Path):
    stats = stats_of(np.random.default_rng(0).normal(0, 0.02, (50, 3)))
    policy = NanoVLA(
        dataclasses.replace(TINY, bin_range="quantile"),
        SPEC,
        stats,
        VectorStats.identity(2),
        WordTokenizer(["cube"]),
    )
    save_checkpoint(tmp_path / "a", policy)
    loaded = load_policy(tmp_path / "a", {"nano_vla": NanoVLA}.__getitem__, SPEC)
    assert (
        loaded.config == policy.config
        and loaded.tokenizer.words == ("cube",)
        and loaded.action_stats == stats
    )
    a, b = (p.act(observe(4), seeds=range(4)) for p in (policy.eval(), loaded))
    assert torch.equal(a.chunk.actions, b.chunk.actions) and torch.equal(
        a.behavior_log_prob, b.behavior_log_prob
    )
    assert (tmp_path / "a" / "tokenizer.json").exists()
    data = policy.config_dict()
    data["config"]["from_the_future"] = 1
    with pytest.raises(ConfigError, match="from_the_future"):
        NanoVLA.from_config_dict(data, SPEC, policy.extra_files())


def test_new_policies_depend_on_their_seed_alone():
    stats = VectorStats.from_bounds(SPEC.action_low, SPEC.action_high).to_dict()
    weights = []
    for seed in (3, 3, 4):
        torch.rand(1)
        policy = NanoVLA.from_statistics(
            TINY, SPEC, stats, VectorStats.identity(2).to_dict(), seed=seed
        )
        weights.append(torch.cat([p.flatten() for p in policy.parameters()]))
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize(
    ("name", "low", "high"), [("nano", 0.8e6, 1.3e6), ("small", 5e6, 30e6), ("7b", 6.5e9, 7.5e9)]
)
def test_presets_have_their_sizes(name: str, low: float, high: float):
    cameras = tuple(
        CameraSpec(n, 224, 224) if name == "7b" else CameraSpec(n, 84, 84)
        for n in ("front", "wrist")
    )
    with torch.device("meta"):
        policy = NanoVLA(preset(name), dataclasses.replace(SPEC, cameras=cameras))
    assert low < policy.num_parameters() < high
    with pytest.raises(ConfigError, match="choose one of nano"):
        preset("huge")
    assert compose(["run=libero_small"]).policy == preset("small", temperature=0.5)


def test_bfloat16_agrees_with_itself():
    """Row by row the same log-probs when acting and when evaluating, in the precision used for
    training."""
    policy = make(precision="bfloat16")
    observation = observe(6)
    output = policy.act(observation, seeds=range(6))
    alone = policy.evaluate(observation[2:3], {k: v[2:3] for k, v in output.replay.items()})
    torch.testing.assert_close(alone.log_prob[0], output.behavior_log_prob[2], rtol=0, atol=0.02)
    assert output.behavior_log_prob.dtype == torch.float32


# ------------------------------------------------------------- features that follow the instruction
def test_film_by_hand():
    """Channel 0 is scaled by 1 + 2·3, channel 1 shifted by 5·3; without a condition nothing
    happens."""
    layer = FiLM(1, 2)
    with torch.no_grad():
        layer.linear.weight.copy_(torch.tensor([[2.0], [0.0], [0.0], [5.0]]))
    x = torch.ones(1, 2, 1, 3)
    assert torch.equal(layer(x), x)
    with conditioned(torch.nn.Sequential(layer), torch.tensor([[3.0]])):
        assert layer(x).tolist() == [[[[7.0] * 3], [[16.0] * 3]]]
    assert torch.equal(layer(x), x)


def test_only_words_that_were_learned_change_what_is_seen():
    policy = make(film=True)
    fresh = NanoVLA(dataclasses.replace(TINY, film=True), SPEC).film_words.weight
    assert not fresh.any()
    with torch.no_grad():
        policy.film_words.weight.copy_(fresh)

    def tokens(text: str) -> torch.Tensor:
        return policy.image_tokens(
            dataclasses.replace(observe(2), instruction=(text,) * 2)
        ).detach()

    assert torch.equal(tokens("lift the red cube"), tokens("lift the green cube"))
    shown = dataclasses.replace(observe(4), instruction=("red", "green", "red", "green"))
    optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)
    policy.imitation_loss(shown, torch.rand(4, 3, 3) * 0.04, torch.ones(4, 3, dtype=torch.bool))[
        0
    ].backward()
    optimizer.step()
    assert not torch.equal(tokens("red"), tokens("green"))
    assert torch.equal(tokens("please grab the red zorble"), tokens("red"))


def test_rl_leaves_what_the_instruction_does_to_images_alone():
    policy = make(film=True)
    policy.prepare_for_rl()
    assert not policy.film_words.weight.requires_grad and policy.action_head.weight.requires_grad
    with pytest.raises(ConfigError, match="stem_channels is empty"):
        make(film=True, stem_channels=[])


# ------------------------------------------------------------------------ standardised image tokens
def test_feature_norm_by_hand():
    """Two images of two tokens and one channel: [1, 10] and [3, 14]."""
    x = torch.tensor([[[1.0], [10.0]], [[3.0], [14.0]]])
    norm = FeatureNorm(tokens=2, width=1, kind="position", eps=0.0)
    assert torch.equal(norm(x), x)  # before any learning: the identity
    norm.learning = True
    scale = 2.5**0.5  # centred: -1, -2 and 1, 2; mean square (1 + 4 + 1 + 4) / 4
    expected = torch.tensor([[[-1.0], [-2.0]], [[1.0], [2.0]]]) / scale
    torch.testing.assert_close(norm(x), expected)
    norm.learning = False
    # one row alone: the running statistics, not its own
    torch.testing.assert_close(norm(x[:1]), expected[:1])
    pooled = FeatureNorm(tokens=2, width=1, kind="batch", eps=0.0)
    pooled.learning = True
    torch.testing.assert_close(pooled(x), (x - 7.0) / 27.5**0.5)  # (36 + 9 + 16 + 49) / 4


def test_feature_norm_averages_all_batches_at_first_and_then_forgets():
    norm = FeatureNorm(tokens=1, width=1, kind="position", momentum=0.25)
    norm.learning = True
    for value in (0.0, 2.0, 4.0, 6.0):
        norm(torch.full((3, 1, 1), value))
    assert float(norm.mean) == pytest.approx(3.0)  # the mean of four, as 1 / 4 is the momentum
    norm(torch.full((3, 1, 1), 7.0))
    assert float(norm.mean) == pytest.approx(0.75 * 3.0 + 0.25 * 7.0)


def test_what_all_images_share_cannot_be_learned():
    """Adding a constant to the projector's output changes nothing in SFT: that is how the
    features used to collapse."""
    policy = make().train()
    actions, valid = torch.zeros(6, 3, 3), torch.ones(6, 3, dtype=torch.bool)

    @torch.no_grad()
    def change(policy: NanoVLA) -> float:
        before = policy.imitation_loss(observe(6), actions, valid)[0]
        policy.projector[0][-1].bias += 5.0
        return abs(float(policy.imitation_loss(observe(6), actions, valid)[0] - before))

    assert change(policy) < 1e-5
    assert change(make(feature_norm="none").train()) > 1e-3


def test_only_sft_changes_the_statistics():
    policy = make().train()
    actions, valid = torch.zeros(6, 3, 3), torch.ones(6, 3, dtype=torch.bool)

    def statistics() -> torch.Tensor:
        return torch.cat([b.flatten().double() for b in policy.feature_norms.buffers()])

    start = statistics()
    policy.imitation_loss(observe(6), actions, valid)
    after = statistics()
    assert not torch.equal(start, after)
    output = policy.act(observe(6), seeds=range(6))
    policy.evaluate(observe(6), output.replay)
    policy.eval().imitation_loss(observe(6), actions, valid)
    assert torch.equal(statistics(), after)


def test_rl_keeps_image_tokens_and_never_encodes_an_image_again():
    policy, observation = make(), observe(5)
    policy.prepare_for_rl()
    output = policy.act(observation, seeds=range(5))
    black = dataclasses.replace(
        observation, images={k: torch.zeros_like(v) for k, v in observation.images.items()}
    )
    evaluation = policy.evaluate(black, output.replay)
    torch.testing.assert_close(evaluation.log_prob, output.behavior_log_prob)
    evaluation.log_prob.sum().backward()
    assert all(
        p.grad is None for part in (policy.vision, policy.projector) for p in part.parameters()
    )
    assert policy.image_positions.grad is not None and policy.action_head.weight.grad is not None
    trained = make(freeze_vision_in_rl=False)
    trained.prepare_for_rl()
    replay = trained.act(observation, seeds=range(5)).replay
    assert set(replay) == {"action_tokens"}
    trained.evaluate(observation, replay).log_prob.sum().backward()
    assert all(p.grad is not None for p in trained.vision.parameters())


def test_a_checkpoint_from_before_feature_norm_loads_without_it(tmp_path: Path):
    policy = make(feature_norm="none")
    save_checkpoint(tmp_path / "old", policy)
    file = tmp_path / "old" / "config.json"
    stored = json.loads(file.read_text())
    del stored["config"]["feature_norm"], stored["config"]["freeze_vision_in_rl"]
    file.write_text(json.dumps(stored))
    with pytest.warns(UserWarning, match="feature_norm"):
        loaded = load_policy(tmp_path / "old", lambda _: NanoVLA)
    assert loaded.config.feature_norm == "none" and not loaded.config.freeze_vision_in_rl
    torch.testing.assert_close(
        loaded.logits_and_value(observe(2))[0], policy.logits_and_value(observe(2))[0]
    )


def test_an_autoregressive_checkpoint_that_shared_noise_loads_without_it(tmp_path: Path):
    save_checkpoint(tmp_path / "old", make(**AUTOREGRESSIVE))
    file = tmp_path / "old" / "config.json"
    stored = json.loads(file.read_text())
    stored["config"]["noise_correlation"] = 0.8
    file.write_text(json.dumps(stored))
    assert load_policy(tmp_path / "old", lambda _: NanoVLA).config.noise_correlation == 0.0
