"""Actions that are learned as moves from the state in which a chunk begins: ``env.actions=delta``."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from test_recording import JOINTS, LENGTHS, SMALL, SPEC, foreign, in_memory, write

from policies.relative import RelativePolicy
from policies.settings import SmallConfig
from policies.small import SmallPolicy
from vla_rl import build
from vla_rl.algorithms.imitation import Imitation
from vla_rl.algorithms.validation import input_use
from vla_rl.checkpoint import load_policy, save_checkpoint
from vla_rl.cli import main
from vla_rl.config.imitation import ImitationConfig
from vla_rl.config.recording import RecordingConfig
from vla_rl.data.recording import moved
from vla_rl.errors import ConfigError
from vla_rl.interfaces import Policy
from vla_rl.types import ActionChunk, Observation, PolicyOutput

pytest.importorskip("pyarrow")
pytest.importorskip("PIL.Image")


class Moves:
    """Says the same chunk whatever it sees: joint 0 by 1 and then 3, the gripper to 40 and 60."""

    chunk_length = 2

    def __init__(self):
        self.told: list[torch.Tensor] = []

    def act(self, observation, *, deterministic=False, seeds=None):
        actions = torch.tensor([[1.0, 40.0], [3.0, 60.0]]).expand(len(observation), 2, 2)
        chunk = ActionChunk(actions, torch.ones(actions.shape[:2], dtype=torch.bool))
        return PolicyOutput(chunk, torch.zeros(len(actions)), {"x": actions})

    def imitation_loss(self, observation, actions, valid):
        self.told.append(actions)
        return actions.square().mean(), {}


def seen(*states: tuple[float, float], spec=SPEC) -> Observation:
    shown = {
        c.name: torch.zeros(len(states), c.height, c.width, 3, dtype=torch.uint8)
        for c in spec.cameras
    }
    return Observation(images=shown, proprio=torch.tensor(states), instruction=("x",) * len(states))


def test_a_chunk_counts_from_the_state_it_begins_in_by_hand():
    """Both steps from the same state; the gripper stays as it is; the robot's bounds hold."""
    policy = RelativePolicy(Moves(), SPEC, JOINTS[:1])
    out = policy.act(seen((10.0, 5.0), (88.0, 5.0)))
    assert out.chunk.actions.tolist() == [
        [[11.0, 40.0], [13.0, 60.0]],
        [[89.0, 40.0], [90.0, 60.0]],
    ]
    asked = torch.tensor([[[11.0, 40.0], [13.0, 60.0]], [[80.0, 1.0], [91.0, 2.0]]])
    told = policy.targets(seen((10.0, 5.0), (88.0, 5.0)), asked)
    assert told.tolist() == [[[1.0, 40.0], [3.0, 60.0]], [[-8.0, 1.0], [3.0, 2.0]]]
    assert asked[0, 0, 0] == 11.0, "what it was given stays"
    assert Policy.of(policy).can == {"imitation"}


def test_statistics_are_of_the_moves_by_hand():
    """A goal is 2 ahead of the state a row, and the state rises by 2 a row: the moves of a chunk of
    two are 2 and 4, but for the last row of an episode, which has 2 alone."""
    data = in_memory(LENGTHS)
    data.chunk_length = 2
    found = data.moves(JOINTS[:1])
    rows, ends = sum(LENGTHS), len(LENGTHS)
    mean = (2 * rows + 4 * (rows - ends)) / (2 * rows - ends)
    assert (found["low"], found["high"]) == ([2.0, 50.0], [4.0, 50.0])
    assert found["mean"] == pytest.approx([mean, 50.0]) and found["std"][1] == 0.0
    assert data.moves(JOINTS)["low"] == [2.0, 0.0]
    assert data.action_stats["low"] == [2.0, 50.0], "those of the dataset stay"


def test_what_is_hidden_or_exchanged_is_not_what_moves_count_from():
    data, base = in_memory(LENGTHS), Moves()
    data.chunk_length = 2
    base.weight = torch.nn.Parameter(torch.zeros(()))
    policy = RelativePolicy(base, SPEC, JOINTS)
    policy.register_parameter("weight", base.weight)
    base.imitation_loss = lambda o, a, v: (base.told.append(a), (base.weight + a.sum() * 0, {}))[1]

    class Same:
        def next_batch(self):
            return data.at(torch.arange(6))

    config = ImitationConfig(updates=1, batch_size=6)
    config.augment.proprio = 1.0
    Imitation(config, policy, Same()).update()
    assert base.told[0][:, 0, 0].tolist() == [2.0] * 6
    base.told.clear()
    use = input_use(policy, *data.at(torch.arange(6)))
    assert len(base.told) > 3 and use["proprio_use"] == 0.0
    assert all((told[:, 0, 0] == 2.0).all() for told in base.told)


def test_a_checkpoint_holds_the_policy_beneath_and_both_robots(tmp_path):
    moves = {"low": (-3.0, -1.0), "high": (3.0, 101.0)}
    spec = SPEC.__class__(**{**vars(SPEC), **{f"action_{k}": v for k, v in moves.items()}})
    base = SmallPolicy(SmallConfig(chunk_length=2, hidden=[8]), spec)
    policy = RelativePolicy(base, SPEC, JOINTS[:1])
    save_checkpoint(tmp_path / "c", policy)
    again = load_policy(tmp_path / "c", build.policy_class, SPEC)
    assert again.names == JOINTS[:1] and again.base.embodiment == spec
    one, two = (p.act(seen((50.0, 5.0)), deterministic=True).chunk.actions for p in (policy, again))
    assert torch.equal(one, two) and (one[..., 0] - 50.0).abs().max() <= 3.0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"actions": "delta", "keep": ["claw"]},
            r"env.keep has 'claw', and the actions are shoulder",
        ),
        ({"actions": "delta", "keep": list(JOINTS)}, r"no action is left to learn as a move"),
        ({"keep": ["gripper.pos"]}, r"env.keep=\['gripper.pos'\] is of env.actions=delta"),
        ({"actions": "relative"}, r"env.actions='relative', choose one of|env.actions"),
    ],
)
def test_what_is_no_move_is_said(options, said):
    with pytest.raises(ConfigError, match=said):
        moved(SPEC, RecordingConfig(**options))


def test_an_action_without_a_state_is_said(tmp_path):
    spec = SPEC.__class__(**{**vars(SPEC), "proprio_names": ("shoulder.pos", "claw")})
    with pytest.raises(
        ConfigError, match=r"delta: gripper.pos is no number of the state .*env.keep="
    ):
        moved(spec, RecordingConfig(actions="delta"))
    assert moved(spec, RecordingConfig(actions="delta", keep=["gripper.pos"])) == JOINTS[:1]


@pytest.mark.parametrize("policy", ["nano_toy", "small"])
def test_sft_in_moves_acts_goals(tmp_path, policy, capsys):
    data = foreign(write(tmp_path / "d"))
    run = [
        "train",
        "run=sft",
        f"dataset={data}",
        *SMALL,
        f"policy={policy}",
        "policy.chunk_length=4",
    ]
    run += ["env.actions=delta", "env.keep=[gripper.pos]", f"output_dir={tmp_path}", "name=m"]
    assert main(run) == 0
    stored = json.loads((tmp_path / "m" / "checkpoints" / "sft" / "config.json").read_text())
    below = stored["base"]["embodiment"]
    # moves of 2 … 8 degrees, wider by a tenth; the gripper's 50 as ever
    assert (below["action_low"][0], below["action_high"][0]) == pytest.approx((1.4, 8.6))
    assert below["action_high"][1] == 55.0 and stored["policy_type"] == "relative"
    found = json.loads((tmp_path / "m" / "actions.json").read_text())["sft"]
    # none of its goals is further off than its moves are from those that were done
    assert found["joints"][0]["policy"] < 8.0 < found["joints"][0]["mean"]
    assert np.isfinite(found["input_use"]["loss"])
    again = [*run[:-1], "name=again", f"checkpoint={tmp_path}/m/checkpoints/sft"]
    assert main([*again, "phases=[eval_actions,report]"]) == 0
    other = json.loads((tmp_path / "again" / "actions.json").read_text())["sft"]
    assert other["overall"] == found["overall"]

    # SFT goes on from there, as after a sitting: with its chunks and what it was normalised by
    more = [*run[:-1], "name=more", f"sft.start={tmp_path}/m/checkpoints/sft"]
    more = [o for o in more if "chunk_length" not in o]
    capsys.readouterr()
    assert main([*more, "sft.learning_rate=1e-9", "sft.updates=1"]) == 0
    assert "that this run did not train on" in capsys.readouterr().out
    assert json.loads((tmp_path / "more" / "checkpoints/sft/config.json").read_text()) == stored
    after = json.loads((tmp_path / "more" / "actions.json").read_text())["sft"]
    assert after["overall"] == pytest.approx(found["overall"], rel=1e-4)
    learned = load_policy(tmp_path / "m" / "checkpoints" / "sft", build.policy_class)
    assert ("likelihood" in learned.can) == (policy == "nano_toy")
    if policy == "nano_toy":  # RL's ratio is the base's, wherever its moves count from
        look = seen((10.0, 5.0), (60.0, 5.0), spec=learned.embodiment)
        out = learned.act(look, seeds=[1, 2])
        again = learned.evaluate(look, out.replay).log_prob
        assert torch.allclose(again, out.behavior_log_prob, atol=1e-4)
        assert again.requires_grad and learned.log_prob_axes == learned.base.log_prob_axes != ()
        moves = out.chunk.actions - learned.base.act(look, seeds=[1, 2]).chunk.actions
        assert torch.allclose(moves[:, :, 0], torch.tensor([[10.0], [60.0]]), atol=1e-4)
        assert set(learned.frame_features(look)) == set(learned.base.frame_features(look))
    capsys.readouterr()
    assert main([*more, "name=goals", "env.keep=[]", "env.actions=absolute"]) == 2
    told = capsys.readouterr().err
    assert f"sft.start={tmp_path}/m/checkpoints/sft holds a relative policy" in told
    assert "that moves shoulder.pos from where the robot is" in told
    assert "the data are read as moves of nothing" in told
    refused = [*run[:-1], "name=bad", "algorithm=iql", "rl.iterations=0", "phases=[sft,rl,report]"]
    assert main(refused) == 2
    assert "env.actions=delta is SFT's, and phases has RL" in capsys.readouterr().err


def test_it_learns_on_as_many_ranks_as_the_policy_beneath():
    class Spread(Moves):
        def blocks(self):
            return ["a block"]

        def learn_together(self, index, size, total):
            self.place = index, size, total

    base = Spread()
    policy = Policy.of(RelativePolicy(base, SPEC, JOINTS))
    assert policy.can == {"imitation", "ranks"} and list(policy.blocks()) == ["a block"]
    policy.learn_together(1, 2, torch.neg)
    assert base.place == (1, 2, torch.neg)


def test_a_policy_that_remembers_is_refused():
    class Remembers(Moves):
        def initial_memory(self):
            return None

    with pytest.raises(
        ConfigError, match=r"env.actions=delta goes with no Remembers that remembers"
    ):
        RelativePolicy(Remembers(), SPEC, JOINTS)
