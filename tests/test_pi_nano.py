"""π0 and π0.5 at a size for two cores, and what lets it learn there: shared noise and prefixes."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lerobot_helpers import ACTIONS, CHUNK, PI0_SIZES, SPEC, STATS, observation, write_vlm

from policies.lerobot import policy as chains
from policies.lerobot.flows import kept, restored
from policies.lerobot.policy import LeRobotPolicy
from policies.lerobot.words import vocabulary, write
from policies.settings import NANO_WORDS, LeRobotConfig
from vla_rl.checkpoint import load_policy, save_checkpoint
from vla_rl.config import compose
from vla_rl.errors import ConfigError

pytest.importorskip("lerobot", reason="lerobot is not installed: pip install 'vla-rl[lerobot]'")
NEWER = pytest.mark.skipif(
    sys.version_info < (3, 12), reason="π0 needs lerobot 0.6, which needs Python 3.12"
)
TINY = {**PI0_SIZES, "vocabulary": 544}


def pi(family: str = "pi05", **config: Any) -> LeRobotPolicy:
    torch.manual_seed(0)
    options = [
        "max_action_dim:3",
        "max_state_dim:5",
        "num_inference_steps:3",
        "tokenizer_max_length:40",
        "image_resolution:[28, 28]",
    ]
    given = {"options": options, "sizes": TINY, "vlm": "nano", "chunk_length": CHUNK, **config}
    settings = LeRobotConfig(family=family, **given)
    policy = LeRobotPolicy.from_statistics(
        settings, SPEC, STATS["action"], STATS["observation.state"]
    ).eval()
    with torch.no_grad():
        for parameter in policy.parameters():
            if not parameter.any():
                parameter.normal_(std=0.1)
    return policy


def test_the_words_are_those_that_are_written(tmp_path: Path) -> None:
    write(tmp_path)
    theirs, ours = (
        json.loads((folder / "tokenizer.json").read_text()) for folder in (tmp_path, NANO_WORDS)
    )
    assert theirs["model"] == ours["model"] and theirs["added_tokens"] == ours["added_tokens"]
    assert len(vocabulary()) <= compose(["run=pi_nano_quickstart"]).policy.sizes["vocabulary"]


def test_numbers_and_known_words_are_one_token_and_others_are_spelt() -> None:
    from transformers import PreTrainedTokenizerFast

    words = PreTrainedTokenizerFast.from_pretrained(NANO_WORDS)
    said = words.tokenize("Task: lift the cube, State: -1 255;\nAction: ")
    assert said == [
        *("Task", ":", "lift", "the", "cube", ",", "State", ":"),
        *("-1", "255", ";", "Action", ":"),
    ]
    assert words.tokenize("lid") == ["l", "##i", "##d"]


@NEWER
def test_the_preset_is_a_million_weights_and_reads_every_instruction() -> None:
    config = compose(["run=pi_nano_quickstart"]).policy
    config.check_machine()
    policy = LeRobotPolicy.from_statistics(
        config, SPEC, STATS["action"], STATS["observation.state"]
    )
    assert 0.9e6 < policy.num_parameters() < 1.1e6
    mapping = policy.stored.settings["normalization_mapping"]
    assert mapping == {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MIN_MAX"}


@NEWER
def test_actions_are_in_units_of_the_bounds() -> None:
    """0 is the middle of the robot's range and 1 its end, whatever the demonstrations did."""
    policy = pi(action_range="bounds")
    sent = policy.postprocessor(torch.tensor([[[0.0] * ACTIONS, [1.0] * ACTIONS]]))
    torch.testing.assert_close(sent, torch.tensor([[[0.0] * ACTIONS, [1.0] * ACTIONS]]))


@NEWER
@pytest.mark.parametrize("family", ["pi0", "pi05"])
def test_noises_that_share_a_prefix_have_lerobots_loss(family: str) -> None:
    policy, seen = pi(family, noise_samples=2), observation()
    actions, valid = torch.randn(3, CHUNK, ACTIONS), torch.ones(3, CHUNK).bool()
    torch.manual_seed(3)
    loss, _ = policy.imitation_loss(seen, actions, valid)
    policy.head.noise_samples = 1
    torch.manual_seed(3)
    rows = [0, 0, 1, 1, 2, 2]
    own, _ = policy.imitation_loss(seen[rows], actions[rows], valid[rows])
    torch.testing.assert_close(loss, own)


@NEWER
def test_who_cannot_share_a_prefix_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="noise_samples is 2, and the loss of lerobot's act"):
        config = LeRobotConfig(family="act", noise_samples=2, options=["dim_model:16", "n_heads:2"])
        LeRobotPolicy.from_statistics(config, SPEC, STATS["action"], STATS["observation.state"])


@NEWER
def test_control_steps_share_noise() -> None:
    policy, seen = pi(noise_correlation=0.8, min_std=5.0), observation(1)
    assert policy.correlated_axes == ("control_step",)
    rows = [0] * 256
    with torch.no_grad():
        output = policy.act(seen[rows], seeds=list(range(256)))
        mean = policy.evaluate(seen[rows], output.replay).log_prob
    torch.testing.assert_close(mean, output.behavior_log_prob, rtol=0, atol=1e-4)
    last = output.replay["chain"][:, -1, :, 0]
    apart = torch.corrcoef(last.T)[0, 1:]
    assert apart.min() > 0.6
    policy.act(seen, deterministic=True, seeds=[1])
    free = pi(min_std=5.0).act(seen[rows], seeds=list(range(256))).replay["chain"][:, -1, :, 0]
    assert torch.corrcoef(free.T)[0, 1:].max() < 0.3


def frozen(family: str, folder: Path) -> LeRobotPolicy:
    if family != "smolvla":
        return pi(family, freeze_prefix=True)
    import test_lerobot_policies as older

    write_vlm(folder)
    return older.new_policy("smolvla", str(folder), freeze_prefix=True)


@NEWER
@pytest.mark.parametrize("family", ["pi0", "pi05", "smolvla"])
def test_a_frozen_prefix_is_read_once(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is kept with the decision, read from there, and gets no gradient; where it is too large
    it is read anew, to the same end."""
    policy, seen = frozen(family, tmp_path), observation()
    output = policy.act(seen, seeds=[1, 2, 3])
    assert any(name.startswith("prefix") for name in output.replay)
    condition = policy.head.condition(policy._batch(seen))
    again = restored(kept(condition))
    assert kept(again).keys() == kept(condition).keys()
    with monkeypatch.context() as patch:
        patch.setattr(policy.head, "condition", None)  # it is not asked again
        found = policy.evaluate(seen, output.replay).log_prob
    torch.testing.assert_close(found, output.behavior_log_prob, rtol=0, atol=1e-5)
    found.sum().backward()
    assert not any(
        p.grad is not None
        for name, p in policy.named_parameters()
        if ".paligemma." in name or ".vlm." in name
    )
    monkeypatch.setattr(chains, "KEPT_BYTES", 0)
    small = policy.act(seen, seeds=[1, 2, 3])
    assert list(small.replay) == ["chain"]
    torch.testing.assert_close(policy.evaluate(seen, small.replay).log_prob, found)


@NEWER
@pytest.mark.parametrize("family", ["pi0", "pi05"])
def test_one_random_step_a_decision_is_noisy_and_learned_from(family: str) -> None:
    """πRL's Flow-SDE: the other steps are those without noise, and only its transition is kept."""
    policy, seen = pi(family, stochastic_steps="one"), observation(1)
    rows = [0] * 32
    output = policy.act(seen[rows], seeds=list(range(32)))
    first, chain = output.replay["first_step"], output.replay["chain"]
    assert set(first.tolist()) == {0, 1, 2} and chain.shape[1] == 2
    assert output.behavior_log_prob.shape == (32, 1, CHUNK, ACTIONS)
    found = policy.evaluate(seen[rows], output.replay)
    torch.testing.assert_close(found.log_prob, output.behavior_log_prob, rtol=0, atol=1e-4)
    plain = policy.act(seen[rows], seeds=list(range(32)), deterministic=True)
    last = (first == 2).nonzero().flatten()  # until then the decision is the plain one
    torch.testing.assert_close(
        policy._walk(seen[rows], True, list(range(32))).path[2][last], chain[last, 0]
    )
    assert not torch.allclose(plain.chunk.actions, output.chunk.actions)


@NEWER
@pytest.mark.parametrize("family", ["pi0", "pi05"])
def test_flow_noise_learns_its_standard_deviations(family: str, tmp_path: Path) -> None:
    """Between the limits, with gradient to them, a mean over the three steps and the first noise;
    a checkpoint that imitated without them gets a new network."""
    policy, seen = pi(family, sampler="flow_noise"), observation()
    output = policy.act(seen, seeds=[1, 2, 3])
    found = policy.evaluate(seen, output.replay)
    torch.testing.assert_close(found.log_prob, output.behavior_log_prob, rtol=0, atol=1e-4)
    std = (found.entropy - 0.5 * math.log(2 * math.pi * math.e)).exp()
    assert 0.08 < std.min() < std.max() < 0.16
    (found.log_prob.sum() + found.entropy.sum()).backward()
    assert policy.noise_net is not None
    assert all(p.grad is not None and p.grad.any() for p in policy.noise_net.parameters())
    chain = output.replay["chain"]
    mean, own, _ = policy._step(policy.head.condition(policy._batch(seen)), chain[:, 0], 0)
    normal = torch.distributions.Normal(mean, own)
    torch.testing.assert_close(found.log_prob[:, 0], normal.log_prob(chain[:, 1]) / 4)
    save_checkpoint(tmp_path / "noise", policy)
    again = load_policy(tmp_path / "noise", lambda _: LeRobotPolicy)
    torch.testing.assert_close(again.act(seen, seeds=[1, 2, 3]).chunk.actions, output.chunk.actions)
    plain = pi(family)
    assert policy.completed(plain.state_dict()).keys() == policy.state_dict().keys()
    assert plain.completed(policy.state_dict()).keys() == plain.state_dict().keys()


def test_what_does_not_go_together_is_said() -> None:
    with pytest.raises(ConfigError, match="stochastic_steps=one does not go with"):
        LeRobotConfig(family="pi05", sampler="flow_noise", stochastic_steps="one")
    with pytest.raises(ConfigError, match="learned_std_low"):
        LeRobotConfig(family="pi05", learned_std_low=0.2)


@NEWER
@pytest.mark.parametrize("family", ["pi0", "pi05"])
def test_a_one_step_student_comes_nearer_to_its_teacher(family: str, tmp_path: Path) -> None:
    """It learns on the teacher's prefix, which stays; lerobot's sampler takes one step of it."""
    teacher, seen = pi(family), observation()
    student = teacher.make_student(1, "same_noise")
    learns = [name for name, p in student.named_parameters() if p.requires_grad]
    assert learns and not any(".paligemma." in name for name in learns)
    optimizer = torch.optim.Adam([p for p in student.parameters() if p.requires_grad], lr=3e-3)
    losses = []
    for step in range(30):
        generator = torch.Generator().manual_seed(step)
        loss, metrics = student.distillation_loss(seen, teacher, generator, 8)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(metrics["loss"])
    assert losses[-1] < 0.5 * losses[0]
    student.save_pretrained(tmp_path / "theirs")
    settings = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert settings["num_inference_steps"] == 1
    given = LeRobotConfig(checkpoint=str(tmp_path / "theirs"), chunk_length=CHUNK, vlm="nano")
    again = LeRobotPolicy.from_published(given, SPEC)
    chunks = [p.act(seen, deterministic=True, seeds=[1, 2, 3]).chunk for p in (student, again)]
    torch.testing.assert_close(chunks[0].actions, chunks[1].actions)
    with pytest.raises(ConfigError, match="same_noise alone"):
        teacher.make_student(1, "lcm")
