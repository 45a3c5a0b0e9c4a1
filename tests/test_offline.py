"""Offline rounds (RL-100): the model, the estimate, the gate and PPO on stored states; the phase
and its report."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from test_pipeline import assert_same_weights, interrupt, weights
from test_replay import SPEC, episode, seen

from vla_rl import build
from vla_rl import config as configs
from vla_rl.algorithms.dynamics import Dynamics, StateCodec
from vla_rl.algorithms.iql import IQL
from vla_rl.algorithms.offline_chain import OfflineChain, accepts
from vla_rl.algorithms.ppo import PPO
from vla_rl.checkpoint import load_policy, load_training_state
from vla_rl.checks.options import check_run
from vla_rl.config import RunConfig
from vla_rl.config.offline import DynamicsConfig, OfflineConfig
from vla_rl.config.replay_algorithms import CriticsConfig
from vla_rl.errors import ConfigError, UserError
from vla_rl.learning.learners import ReplayLearner
from vla_rl.learning.offline import OfflineRounds
from vla_rl.monitoring.metrics import MetricsLogger, read_metrics
from vla_rl.monitoring.progress import Progress
from vla_rl.reporting.page import write_report
from vla_rl.run.pipeline import run_pipeline
from vla_rl.types import Transitions

ENDS = {
    name: [sign, sign]
    for names, sign in (("low q01", -1.0), ("high q99", 1.0))
    for name in names.split()
}
STATS = {"mean": [0.0, 0.0], "std": [1.0, 1.0], **ENDS}
TINY = OfflineConfig(
    rounds=1,
    episodes=2,
    critics=CriticsConfig(hidden=[16]),
    critic_updates=2,
    batch_size=8,
    candidates=2,
    states=16,
    minibatch_size=8,
    learning_rate=1e-3,
    clip=0.2,
    horizon=2,
    gate_states=8,
    dynamics=DynamicsConfig(count=3, elites=2, hidden=[16], components=8, updates=5, batch_size=8),
)


# ---------------------------------------------------------------------------------------- the model
def test_states_keep_narrow_frames_and_what_wide_ones_vary_in():
    generator = torch.Generator().manual_seed(0)
    hidden, mixing = (
        torch.randn(50, 3, generator=generator),
        torch.randn(3, 40, generator=generator),
    )
    frames = {"visual": hidden @ mixing + 5.0, "state": torch.randn(50, 2, generator=generator)}
    proprio = 100.0 * torch.randn(50, 4, generator=generator)
    codec = StateCodec.fit(frames, proprio, 6)
    state = codec.encode(frames, proprio)
    assert state.shape == (50, 6 + 2 + 4) and codec.explained == pytest.approx(1.0, abs=1e-4)
    again, places = codec.decode(state)
    torch.testing.assert_close(again["visual"], frames["visual"], rtol=0, atol=1e-3)
    torch.testing.assert_close(again["state"], frames["state"], rtol=0, atol=1e-5)
    torch.testing.assert_close(places, proprio, rtol=0, atol=1e-3)
    assert float(state.abs().amax()) < 6.0  # of about unit scale
    assert StateCodec.fit(frames, proprio, 2).explained < 0.99


def known(n: int) -> Transitions:
    """x' = x + 0.5·a in proprio's first number; reward and end where x' > 1; the frame never
    changes."""
    generator = torch.Generator().manual_seed(0)
    x, a = (
        2.0 * torch.rand(n, 1, generator=generator) - 1.0,
        2.0 * torch.rand(n, 1, 1, generator=generator) - 1.0,
    )
    after = x + 0.5 * a[:, 0]
    over = after[:, 0] > 1.0
    valid, frame = torch.ones(n, 1, dtype=torch.bool), {"state": torch.ones(n, 2)}
    before, then = (
        dataclasses.replace(seen(0, n), proprio=torch.cat([v, -torch.ones(n, 1)], 1))
        for v in (x, after)
    )
    return Transitions(
        before, a, valid, ~valid, over.float(), (~over).float(), then, frame, frame, ("online",) * n
    )


def test_the_model_learns_what_follows():
    data = known(400)
    codec = StateCodec.fit(data.extra, data.observations.proprio, 8)
    config = DynamicsConfig(
        count=3, elites=2, hidden=[64], updates=800, batch_size=64, learning_rate=3e-3
    )
    model = Dynamics(config, codec, 1, torch.device("cpu"), 0)
    figures = model.fit(data, data.actions[:, 0], torch.Generator().manual_seed(0))
    assert figures["dynamics/unexplained_change"] < 0.02 and len(model.elites) == 2
    start = torch.tensor([[0.25, -1.0], [0.9, -1.0]])
    members = model.members(2, torch.Generator().manual_seed(0))
    assert set(members.tolist()) <= set(model.elites.tolist())
    state, reward, ends = model.step(
        codec.encode({"state": torch.ones(2, 2)}, start), torch.tensor([[0.8], [0.9]]), members
    )
    frames, proprio = codec.decode(state)
    torch.testing.assert_close(
        proprio, torch.tensor([[0.65, -1.0], [1.35, -1.0]]), rtol=0, atol=0.06
    )
    assert torch.equal(frames["state"], torch.ones(2, 2)), "what never changed in the data does not"
    torch.testing.assert_close(reward, torch.tensor([0.0, 1.0]), rtol=0, atol=0.25)
    assert ends.tolist() == [False, True]
    again = Dynamics.from_state(config, model.state_dict(), torch.device("cpu"))
    for one, other in zip(
        again.step(state, torch.zeros(2, 1), members), model.step(state, torch.zeros(2, 1), members)
    ):
        assert torch.equal(one, other)


# ---------------------------------------------------------------------------- chain, gate, estimate
def made(config: OfflineConfig = TINY, **changes: object) -> tuple[OfflineChain, ReplayLearner]:
    """A flow policy of some thousand weights, and two episodes to learn from, neither of them a
    success."""
    run = configs.compose(["run=toy_flow", *(f"policy.{k}={v}" for k, v in changes.items())])
    policy = build.implementation("policy", run.policy_type).from_statistics(
        run.policy, SPEC, STATS, STATS, seed=0
    )
    torch.manual_seed(0)
    actor = build.implementation("actor", "own").from_base(
        build.config_class("actor", "own")(encoder=8), policy.eval()
    )
    chain = OfflineChain(config, run.algorithm, policy, actor, 0)
    data = ReplayLearner(chain.iql, None, 0)
    for first in (0, 5):
        data.add(
            dataclasses.replace(episode(first), success=False),
            torch.tensor([0.0, 0.0, 1.0]),
            "online",
        )
    return chain, data


def learned(chain: OfflineChain, data: ReplayLearner) -> None:
    chain.learn_values(data.replay, torch.Generator().manual_seed(0))
    chain.learn_dynamics(data.replay, torch.Generator().manual_seed(0), 0)


def test_the_gate_asks_for_a_share_of_what_there_is():
    assert accepts(1.0, 1.05, 0.05) and not accepts(1.0, 1.049, 0.05)
    # of its size, whatever its sign
    assert accepts(-2.0, -1.9, 0.05) and not accepts(-2.0, -1.95, 0.05)
    assert accepts(0.0, 0.0, 0.05)


def test_a_sampled_decision_from_kept_frames_is_that_from_images():
    chain, _ = made()
    observation = seen(0, 3)
    frames = chain.policy.frame_features(observation)
    bare = dataclasses.replace(observation, images={})
    a, b = (
        chain.policy.act(observation, seeds=[1, 2, 3]),
        chain.policy.sample(bare, frames, [1, 2, 3]),
    )
    # (frames are kept in half precision)
    torch.testing.assert_close(a.chunk.actions, b.chunk.actions, rtol=0, atol=1e-2)
    again = chain.policy.evaluate(bare, b.replay)
    torch.testing.assert_close(again.log_prob, b.behavior_log_prob, rtol=1e-4, atol=1e-4)


def test_the_estimate_is_the_mean_value_and_an_end_keeps_its_reward(monkeypatch):
    chain, data = made(dataclasses.replace(TINY, horizon=4))
    learned(chain, data)
    values = iter([0.5, 0.25, 0.75, 0.125])
    monkeypatch.setattr(
        chain.iql, "action_values", lambda frames, taken: torch.full((len(taken),), next(values))
    )
    # what comes after an end is nothing
    ends = iter([[False, False], [True, False], [True, False], [False, False]])
    rewards = iter([[0.0, 0.0], [1.0, 0.0], [9.0, 0.0], [0.0, 0.0]])

    def step(state, taken, members):
        return state, torch.tensor(next(rewards)), torch.tensor(next(ends))

    monkeypatch.setattr(chain.dynamics, "step", step)
    found = chain.estimate(data.replay.take(torch.tensor([0, 1]), images=False), 0)
    assert found.tolist() == [(0.5 + 0.25 + 1.0 + 1.0) / 4, (0.5 + 0.25 + 0.75 + 0.125) / 4]


def test_both_policies_of_a_gate_begin_at_the_same_states_with_the_same_noise():
    chain, data = made()
    learned(chain, data)
    states = chain.gate_states(data.replay, 3)
    assert torch.equal(
        states.observations.proprio, chain.gate_states(data.replay, 3).observations.proprio
    )
    assert torch.equal(chain.estimate(states, 4), chain.estimate(states, 4))
    assert not torch.equal(chain.estimate(states, 4), chain.estimate(states, 5))
    first = OfflineChain.gate_states(
        type(chain)(dataclasses.replace(TINY, starts="first"), *_parts(chain)), data.replay, 3
    )
    assert set(first.observations.proprio[:, 0].tolist()) == {0.0, 5.0}


def _parts(chain: OfflineChain) -> tuple:
    return configs.compose(["run=toy_flow"]).algorithm, chain.policy, chain.actor, 0


def test_ppo_on_stored_states_raises_what_the_critics_prefer(monkeypatch):
    """Without any env: the critics like first actions near 0.5."""
    torch.manual_seed(0)
    chain, data = made(
        dataclasses.replace(TINY, states=128, minibatch_size=64, epochs=3, learning_rate=3e-3)
    )

    def judged(frames, taken):
        return -(taken[:, 0] - 0.5).square()

    monkeypatch.setattr(chain.iql, "advantages", judged)
    generator = torch.Generator().manual_seed(0)
    before = chain.decisions(data.replay, torch.Generator().manual_seed(9))[1].mean()
    vision = [p.detach().clone() for p in chain.policy.vision.parameters()]
    for _ in range(6):
        chain.improve(data.replay, generator, 0.2)
    after = chain.decisions(data.replay, torch.Generator().manual_seed(9))[1].mean()
    assert float(after) > float(before) + 0.1 * abs(float(before)), (before, after)
    assert all(torch.equal(a, b) for a, b in zip(vision, chain.policy.vision.parameters()))


def test_imitation_learns_from_demonstrations_and_what_was_solved_alone(monkeypatch):
    chain, data = made(
        dataclasses.replace(
            TINY, imitation_updates=30, imitation_batch=8, imitation_learning_rate=3e-3
        )
    )
    assert chain.imitate(data.replay, torch.Generator()) == {}, "two episodes that failed"
    for first, source in ((20, "demonstrations"), (40, "online")):
        data.add(
            dataclasses.replace(episode(first), success=True), torch.tensor([0.0, 0.0, 1.0]), source
        )
    shown, plain = [], chain.policy.imitation_loss

    def spied(seen, actions, valid, features):
        shown.append((seen.proprio[:, 0], not seen.images))
        return plain(seen, actions, valid, features=features)

    monkeypatch.setattr(chain.policy, "imitation_loss", spied)
    before = {name: x.clone() for name, x in chain.policy.state_dict().items()}
    kept = chain.policy.frame_features(episode(0).observations)
    losses = [
        chain.imitate(data.replay, torch.Generator().manual_seed(i))["offline/imitation_loss"]
        for i in range(4)
    ]
    assert losses[-1] < 0.8 * losses[0]
    assert {int(x) for proprio, _ in shown for x in proprio} == {20, 21, 22, 40, 41, 42} and all(
        bare for _, bare in shown
    )
    after = chain.policy.state_dict()
    vision = [name for name in after if name.startswith("vision.")]
    assert vision and all(torch.equal(before[name], after[name]) for name in vision)
    again = chain.policy.frame_features(episode(0).observations)
    assert all(torch.equal(kept[name], again[name]) for name in kept), "frames stay true"


def in_rounds(config: OfflineConfig) -> OfflineRounds:
    chain, data = made(config)
    found = OfflineRounds(config, chain, data, None, None, [], 0)  # type: ignore[arg-type]
    found._at.part = "values"
    with Progress() as progress:
        found._values(progress)
    return found


def flat(state: object) -> list:
    if isinstance(state, torch.Tensor):
        return state.flatten().tolist()
    if isinstance(state, dict):
        return [x for key in sorted(state, key=str) for x in flat(state[key])]
    return [x for part in state for x in flat(part)] if isinstance(state, list | tuple) else [state]


def test_what_the_gate_sends_back_leaves_weights_and_optimiser_bit_for_bit():
    """A first candidate is accepted, so that the optimiser has moments; the second one is not."""
    found = in_rounds(dataclasses.replace(TINY, min_gain=0.0, gate=False))
    with Progress() as progress:
        start = {name: x.clone() for name, x in found.chain.policy.state_dict().items()}
        first = found._candidate(progress)
        kept, state = found.chain.snapshot()["weights"], flat(found.chain.ppo.state_dict())
        assert first["gate/accepted"] == 1.0 and any(
            not torch.equal(start[name], x) for name, x in kept.items()
        )
        found.config = dataclasses.replace(found.config, gate=True, min_gain=1e6)
        second = found._candidate(progress)
    assert (
        second["gate/accepted"] == 0.0 and second["ppo/updates_total"] > first["ppo/updates_total"]
    ), "it did learn"
    assert_same_weights(kept, found.chain.policy.state_dict())
    assert flat(found.chain.ppo.state_dict()) == state
    assert (
        second["gate/before"] == first["gate/after"] and found._at.estimate == second["gate/before"]
    )
    assert (found._at.candidate, found._at.accepted, found._at.part) == (2, 1, "episodes")


@pytest.mark.parametrize("gate", [True, False])
def test_a_candidate_that_is_not_finite_is_sent_back(gate, monkeypatch):
    """It said to lower what had nothing to do with it, kept the ruined weights, and met them
    again after a resume."""
    found = in_rounds(dataclasses.replace(TINY, min_gain=0.0, gate=gate))
    kept, plain = found.chain.snapshot()["weights"], found.chain.improve

    def ruined(*arguments):
        metrics = plain(*arguments)
        with torch.no_grad():
            next(iter(found.chain.policy.blocks()[-1].parameters())).fill_(float("nan"))
        return metrics

    monkeypatch.setattr(found.chain, "improve", ruined)
    with Progress() as progress:
        figures = found._candidate(progress)
    assert (
        figures["gate/accepted"] == 0.0
        and math.isnan(figures["gate/after"])
        and math.isfinite(found._at.estimate)
    )
    assert_same_weights(kept, found.chain.policy.state_dict())
    monkeypatch.setattr(found.chain, "estimate", lambda states, seed: torch.tensor([float("inf")]))
    found._judged = None
    with (
        pytest.raises(UserError, match=r"present policy .* offline\.critics\.learning_rate"),
        Progress() as progress,
    ):
        found._candidate(progress)


def test_a_candidate_after_a_reverted_one_is_another_one():
    found = in_rounds(dataclasses.replace(TINY, min_gain=1e6))
    with Progress() as progress:
        estimates = [found._candidate(progress)["gate/after"] for _ in range(2)]
    assert estimates[0] != estimates[1]


def test_the_clip_range_falls_over_the_phase(monkeypatch):
    found, clips = in_rounds(dataclasses.replace(TINY, candidates=4)), []
    plain = found.chain.improve
    monkeypatch.setattr(found.chain, "improve", lambda *a: clips.append(a[2]) or plain(*a))
    with Progress() as progress:
        for _ in range(4):
            found._candidate(progress)
    assert clips == pytest.approx([0.2, 0.15, 0.1, 0.05])


# ------------------------------------------------------------------------------------ the whole job
def options(**changes: object) -> list[str]:
    values = {
        "collect.episodes_per_task": 6,
        "sft.updates": 3,
        "sft.validation_episodes": 1,
        "rl.iterations": 1,
        "rl.episodes_per_iteration": 8,
        "evaluate.episodes_per_task": 4,
        "evaluate.video_episodes": 0,
        "evaluate.sampled_too": "false",
        "policy.student_steps": 1,
        "offline.rounds": 2,
        "offline.start_episodes": 4,
        "offline.episodes": 4,
        "offline.critic_updates": 5,
        "offline.batch_size": 16,
        "offline.candidates": 2,
        "offline.states": 16,
        "offline.minibatch_size": 8,
        "offline.gate_states": 8,
        "offline.min_gain": 0.0,
        "offline.imitation_updates": 2,
        "offline.dynamics.updates": 5,
        "offline.dynamics.hidden": "[16]",
        "offline.critics.hidden": "[16]",
        **changes,
    }
    return [
        "run=toy_flow",
        "algorithm=rl100_quickstart",
        "name=stages",
        *(f"{k}={v}" for k, v in values.items()),
    ]


def small(output: Path, **changes: object) -> RunConfig:
    return configs.compose([*options(**changes), f"output_dir={output}"])


@pytest.fixture(scope="module")
def whole(finished_run) -> Path:
    return finished_run(*options())


def test_every_stage_leaves_its_result_and_the_report_says_what_the_gate_did(whole):
    names = {p.name for p in (whole / "checkpoints").iterdir()}
    assert {"sft", "offline", "rl", "student"} <= names
    summary = json.loads((whole / "summary.json").read_text())
    assert list(summary["evaluations"]) == ["sft", "offline", "student", "rl"]
    found = summary["offline"]
    assert [entry["round"] for entry in found] == [0, 1, 2] and [
        len(entry["gates"]) for entry in found
    ] == [0, 2, 2]
    assert found[0]["estimate"] is not None and all(entry["success"] is not None for entry in found)
    (imitated,) = [
        r
        for r in read_metrics(whole / "metrics.jsonl")
        if r.get("round") == 1 and "ope/imitated" in r
    ]
    assert found[0]["estimate"] == imitated["ope/value"], (
        "the policy as it began, before it imitated"
    )
    gate = found[1]["gates"][0]
    assert gate["before"] == imitated["ope/imitated"]
    assert gate["accepted"] == (gate["after"] >= gate["before"])  # min_gain is 0 here
    page = (whole / "report.html").read_text()
    assert "Offline rounds" in page and "estimate in the learned model" in page
    record = json.loads((whole / "phases.json").read_text())["offline"]
    assert (record["rounds"], record["gates"], record["episodes"]) == (2, 4, 12)
    student = load_policy(whole / "checkpoints" / "student", build.policy_class)
    assert student.policy_type == "consistency_vla"


def test_online_rl_goes_on_with_policy_and_student_of_the_offline_rounds(whole):
    sft, offline, rl = (weights(whole, name) for name in ("sft", "offline", "rl"))
    expert = next(name for name in offline if name.startswith("student."))
    assert not torch.equal(offline[expert], sft[expert.replace("student.", "expert.")])
    # one iteration of online RL moves the student a little; anew, it would be the expert's copy
    near = float((rl[expert] - offline[expert]).abs().max())
    anew = float((offline[expert] - offline[expert.replace("student.", "expert.")]).abs().max())
    assert near < anew


def test_the_student_of_a_policy_that_was_changed_on_the_command_line_is_judged(whole, tmp_path):
    """policy.student_steps=1 is its teacher's key, which a student does not have."""
    start = {
        "checkpoint": whole / "checkpoints" / "rl",
        "dataset": whole / "dataset",
        "phases": "[rl,eval_student,report]",
    }
    config = small(tmp_path, **start)
    assert config.policy_changes == {"student_steps": 1}
    assert (run_pipeline(config) / "eval_student.json").exists()


@pytest.mark.parametrize(
    ("owner", "method", "call"),
    [(IQL, "update", 8), (PPO, "update", 2), (ReplayLearner, "add", 12)],
    ids=lambda x: str(x),
)
def test_interrupted_rounds_go_on_as_if_nothing_had_happened(
    owner, method, call, whole, tmp_path, monkeypatch
):
    """In the critics of round 2, in the second candidate, and in the middle of storing episodes."""
    folder = Path(shutil.copytree(whole, tmp_path / whole.name))
    for name in ("offline", "offline.last_good", "rl", "rl.last_good", "student", "best"):
        shutil.rmtree(folder / "checkpoints" / name, ignore_errors=True)
    shutil.rmtree(folder / "replay")
    (folder / "checkpoints" / "best.json").unlink(missing_ok=True)
    phases = json.loads((folder / "phases.json").read_text())
    kept = {name: phases[name] for name in ("collect", "sft", "eval_sft")}
    (folder / "phases.json").write_text(json.dumps(kept))
    config = dataclasses.replace(
        small(tmp_path), phases=["collect", "sft", "eval_sft", "offline", "report"]
    )
    with monkeypatch.context() as patch:
        interrupt(patch, owner, method, call, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            run_pipeline(config)
    run_pipeline(config)
    assert_same_weights(weights(whole, "offline"), weights(folder, "offline"))
    theirs, mine = (load_training_state(f / "checkpoints" / "offline") for f in (whole, folder))
    for state in (theirs, mine):
        state["counters"].pop("seconds")
    assert flat(theirs) == flat(mine)
    steps = [r["step"] for r in read_metrics(folder / "metrics.jsonl") if r["phase"] == "offline"]
    assert steps == list(range(1, len(steps) + 1))


def test_the_rounds_of_a_killed_run_are_reported(tmp_path):
    with MetricsLogger(tmp_path) as logger:
        logger.log("offline", 1, {"round": 0, "rollout/episodes": 10, "rollout/success": 0.4})
        logger.log("offline", 2, {"round": 1, "ope/value": 0.25})
        logger.log(
            "offline",
            3,
            {
                "round": 1,
                "gate/before": 0.25,
                "gate/after": 0.3,
                "gate/needed": 0.0125,
                "gate/gain_error": 0.01,
                "gate/accepted": 1.0,
            },
        )
    page = write_report(tmp_path).read_text()
    found = json.loads((tmp_path / "summary.json").read_text())["offline"]
    assert "1 of 1 candidates were accepted" in page
    assert (found[0]["estimate"], found[0]["success"], found[0]["episodes"]) == (0.25, 0.4, 10)
    assert found[1]["success"] is None and found[1]["gates"][0]["accepted"] is True


# ---------------------------------------------------------------------------------------- bad input
@pytest.mark.parametrize(
    ("overrides", "error"),
    [
        (
            ["policy=nano_toy"],
            r"denoising chain of this project, and policy.type=nano_vla has none: use policy=nano_flow",
        ),
        (["offline.rounds=0"], r"offline.rounds=0 trains nothing: set offline.rounds=3"),
        (
            ["algorithm=iql", "offline.rounds=1"],
            r"needs algorithm.type=ppo, and this is iql: set algorithm=rl100",
        ),
        (["offline.dynamics.elites=9"], r"offline.dynamics.elites=9 .* offline.dynamics.count=5"),
        (["offline.imitation_updates=-1"], r"offline.imitation_updates=-1"),
        (["offline.critics.count=0"], r"offline.critics.count=0 .* 1 or more"),
        (
            ["offline.starts=last"],
            r"offline.starts='last' is not a choice: it must be one of any, first",
        ),
        (
            ["offline.expectile=1"],
            r"offline.expectile=1 is out of range: it must be above 0 and below 1",
        ),
    ],
)
def test_what_cannot_learn_offline_is_refused_before_anything_runs(overrides, error):
    phases = "phases=[collect,sft,offline,report]"
    with pytest.raises(ConfigError, match=error):
        own = [] if overrides[0].startswith("algorithm=") else ["algorithm=rl100_quickstart"]
        check_run(configs.compose(["run=toy_flow", *own, *overrides, phases]))


def test_a_policy_that_denoises_nothing_is_refused():
    with pytest.raises(
        ConfigError, match=r"steps of a denoising chain, and SmallPolicy has none.*algorithm=iql"
    ):
        policy = build.implementation("policy", "small")(
            build.config_class("policy", "small")(), SPEC
        )
        OfflineChain(TINY, configs.compose(["run=toy_flow"]).algorithm, policy, policy, 0)


def test_imitation_of_steps_that_never_learn_is_refused():
    with pytest.raises(
        ConfigError, match=r"offline.imitation_updates=5 .*policy.freeze_untrained=true"
    ):
        made(
            dataclasses.replace(TINY, imitation_updates=5), trained_steps=1, freeze_untrained="true"
        )


def test_rounds_without_any_data_are_refused(tmp_path):
    chain, data = made()
    data = ReplayLearner(chain.iql, tmp_path / "replay", 0)
    found = OfflineRounds(TINY, chain, data, None, None, [], 0)  # type: ignore[arg-type]
    refused = pytest.raises(ConfigError, match=r"from data, and there is none: .*start_episodes=64")
    with MetricsLogger(tmp_path) as logger, Progress() as progress, refused:
        found.run(tmp_path / "c", logger, progress)
