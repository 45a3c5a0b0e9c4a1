"""Presets that name a published recipe for flow VLAs: upstream's numbers, and one update each of a
small random checkpoint.

Upstream: RLinf `examples/embodiment/config/libero_*_ppo_openpi*.yaml` and
`openpi_action_model.py`; DSRL for π0, `examples/train_utils_sim.py`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from lerobot_helpers import PI0_SIZES, write_vlm

from benchmarks.learning.runs import rl_records
from policies.actors.base import FrameEncoder
from policies.actors.settings import ResidualConfig
from policies.actors.token import TokenBranch
from policies.denoising.chain import flow_chain
from policies.lerobot.policy import LeRobotPolicy
from policies.settings import LeRobotConfig
from sim.toy import ToyConfig, ToyReach
from vla_rl.checkpoint import load_policy
from vla_rl.checks import preflight
from vla_rl.config import compose
from vla_rl.errors import ConfigError
from vla_rl.run.pipeline import run_pipeline

pytest.importorskip("lerobot", reason="lerobot is not installed: pip install 'vla-rl[lerobot]'")
pytestmark = pytest.mark.skipif(
    sys.version_info < (3, 12), reason="π0.5 needs lerobot 0.6, which needs Python 3.12"
)
SIZES = {**PI0_SIZES, "vocabulary": 544}
SMOL = ["num_vlm_layers:2", "resize_imgs_with_padding:[32, 32]", "load_vlm_weights:false"]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    """{family: (checkpoint in lerobot's form for the toy's robot, folder of its words)}."""
    robot = ToyReach(ToyConfig()).embodiment
    found = {}
    for family in ("pi05", "smolvla"):
        folder, words = tmp_path_factory.mktemp(family), "nano"
        options = ["max_action_dim:4", "max_state_dim:4", "tokenizer_max_length:40"]
        sizes = SIZES
        if family == "smolvla":
            write_vlm(folder / "vlm")
            words, sizes, options = str(folder / "vlm"), {}, [*options, *SMOL]
        else:
            options.append("image_resolution:[28, 28]")
        config = LeRobotConfig(
            family=family, chunk_length=10, options=options, sizes=sizes, vlm=words
        )
        numbers = [[x] * n for n in (robot.action_dim, robot.proprio_dim) for x in (-1.0, 1.0, 0.5)]
        action, proprio = (
            {"low": low, "high": high, "q01": low, "q99": high, "mean": half, "std": half}
            for low, high, half in (numbers[:3], numbers[3:])
        )
        torch.manual_seed(0)
        LeRobotPolicy.from_statistics(config, robot, action, proprio).save_pretrained(
            folder / "theirs"
        )
        found[family] = (str(folder / "theirs"), words)
    return found


PIRL = {
    "gamma": 0.99,
    "gae_lambda": 0.95,
    "clip_low": 0.2,
    "clip_high": 0.2,
    "dual_clip": 3.0,
    "value_clip": 0.2,
    "ratio_level": "chunk",
    "epochs": 1,
    "minibatch_size": 2048,
    "micro_batch_size": 128,
    "learning_rate": 5e-6,
    "critic_learning_rate": 1e-4,
    "betas": [0.9, 0.95],
    "grad_clip": 1.0,
}


@pytest.mark.parametrize(
    ("overrides", "policy", "algorithm"),
    [
        (
            ["run=pi05_libero"],
            {"sampler": "flow_sde", "stochastic_steps": "one", "denoising_steps": 3},
            PIRL,
        ),
        (
            ["run=pi05_libero", "algorithm=pirl_grpo", "critic=none", "rl.group_size=8"],
            {"sampler": "flow_sde", "stochastic_steps": "one"},
            {"advantage": "grpo", "skip_zero_advantage": True, "learning_rate": 5e-6},
        ),
        (
            ["run=pi05_libero", "policy=pi05_pirl_noise", "algorithm=pirl_noise"],
            {"sampler": "flow_noise", "learned_std_low": 0.08, "learned_std_high": 0.16},
            {"entropy_coef": 0.005, "epochs": 5, "learning_rate": 7.91e-6},
        ),
        (
            ["run=pi05_steer"],
            {"family": "pi05"},
            {
                "updates_per_decision": 20.0,
                "start_decisions": 500,
                "gamma": 0.999,
                "learning_rate": 1e-4,
            },
        ),
        (
            ["run=pi05_rl_token"],
            {"family": "pi05"},
            {"gamma": 0.96, "action_penalty": 5 / 0.1, "conservatism": "none"},
        ),
        (
            ["run=smolvla_residual"],
            {"family": "smolvla"},
            {"n_step": 3, "actor_every": 4, "start_decisions": 1000, "learning_rate": 1e-5},
        ),
    ],
)
def test_what_upstream_says(overrides: list[str], policy: dict, algorithm: dict) -> None:
    config = compose(overrides)
    for part, said in ((config.policy, policy), (config.algorithm, algorithm)):
        assert {name: vars(part)[name] for name in said} == said
    if overrides[0] == "run=pi05_libero":
        assert config.rl.episodes_per_iteration == 512 and config.env.horizon == 240


def test_the_noise_of_pirls_steps() -> None:
    """Worked in the fact sheet for N = 4, a = 0.5; the floor of the preset touches none of any
    suite's."""
    chain = flow_chain(4, "flow_sde", 0.5)
    assert chain.weight_action.tolist() == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert chain.weight_noise.tolist() == pytest.approx([0.625, 0.375, 0.1875, -0.041667], abs=1e-6)
    assert chain.std.tolist() == pytest.approx([0.5, 0.433013, 0.25, 0.144338], abs=1e-6)
    floor = compose(["run=pi05_libero"]).policy.min_std
    for steps, level in ((3, 0.5), (5, 0.3), (5, 0.5), (8, 0.4)):
        assert flow_chain(steps, "flow_sde", level).std.min() > floor


ONE = [
    "wandb.mode=off",
    "threads=1",
    "slots.workers=0",
    "slots.slots_per_worker=16",
    "phases=[rl,report]",
    "rl.iterations=1",
    "rl.episodes_per_iteration=16",
    "rl.eval_every=0",
    "evaluate.episodes_per_task=2",
]


@pytest.mark.parametrize(
    ("family", "overrides", "moves"),
    [
        ("pi05", ["run=pi05_libero"], "policy"),
        (
            "pi05",
            ["run=pi05_libero", "algorithm=pirl_grpo", "critic=none", "rl.group_size=4"],
            "policy",
        ),
        (
            "pi05",
            ["run=pi05_libero", "policy=pi05_pirl_noise", "algorithm=pirl_noise"],
            "policy",
        ),
        ("pi05", ["run=pi05_steer"], "actor"),
        pytest.param("pi05", ["run=pi05_rl_token"], "actor", marks=pytest.mark.slow),
        pytest.param("smolvla", ["run=smolvla_residual"], "actor", marks=pytest.mark.slow),
    ],
    ids=["ppo", "grpo", "noise", "steer", "token", "residual"],
)
def test_a_small_checkpoint_makes_an_update(
    family: str,
    overrides: list[str],
    moves: str,
    checkpoints: dict[str, tuple[str, str]],
    tmp_path: Path,
) -> None:
    folder, words = checkpoints[family]
    small = [f"policy.checkpoint={folder}", f"policy.vlm={words}", "policy.chunk_length=10"]
    small += ["policy.cameras=[]"]
    if moves == "actor":  # published ones begin after hundreds of decisions
        small += ["algorithm.start_decisions=2", "algorithm.updates_per_decision=1"]
        small += ["algorithm.batch_size=8", "algorithm.critic_warmup=0"]
        small += ["algorithm.demonstration_share=0", "algorithm.offline_updates=0"]
    config = compose([*overrides, *small, *ONE, f"output_dir={tmp_path}"])
    config.env_type, config.env = "toy", ToyConfig(success_radius=0.07)
    config.tasks = ["reach_red"]
    before = LeRobotPolicy.from_published(config.policy, ToyReach().embodiment)
    preflight.check(config)
    run = run_pipeline(config)
    (row,) = rl_records(run)
    if moves == "actor":
        assert row["replay/updates"] > 0, sorted(row)
        return
    after = load_policy(run / "checkpoints" / "rl", lambda _: LeRobotPolicy)
    changed = [
        name
        for name, x in after.model.state_dict().items()
        if not torch.equal(x, before.model.state_dict()[name])
    ]
    assert changed and not any("paligemma." in name for name in changed)


def test_a_token_keeps_what_reconstruction_asks_for() -> None:
    """Who reads it moves nothing of it; its own loss falls."""
    torch.manual_seed(0)
    encoder = FrameEncoder({"visual": 40, "state": 4}, 32, token=6)
    frames = {"visual": torch.randn(64, 4) @ torch.randn(4, 40), "state": torch.randn(64, 4)}
    read = encoder(frames)
    assert read.shape == (64, encoder.width) == (64, 6 + 16)
    read.sum().backward()
    token = encoder.branches["visual"]
    assert isinstance(token, TokenBranch) and all(p.grad is None for p in token.parameters())
    optimizer = torch.optim.Adam(token.parameters(), lr=1e-3)
    losses = []
    for _ in range(200):
        loss = token.loss(frames["visual"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.1 * losses[0]
    with pytest.raises(ConfigError, match="token=8"):
        ResidualConfig(token=8, eyes="pictures")
