"""Actors with eyes of their own: what is shifted when, who trains the trunk, checkpoints, and
that it learns to see."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from contracts import check_policy
from safetensors.torch import load_file
from test_actor_critic import STATS, Base, cut
from test_replay import SPEC, episode, seen

from policies.actors.direct import DirectActor
from policies.actors.residual import ACTION, ResidualPolicy
from policies.actors.settings import (
    DirectConfig,
    ImprovedConfig,
    OwnConfig,
    ResidualConfig,
    SteeredConfig,
)
from vla_rl import build
from vla_rl import config as configs
from vla_rl.algorithms import augmentation
from vla_rl.algorithms import picture_inputs as inputs_module
from vla_rl.algorithms.actor_critic import SAC, TD3
from vla_rl.algorithms.dagger import Dagger
from vla_rl.algorithms.iql import IQL
from vla_rl.algorithms.picture_inputs import PictureInputs
from vla_rl.checkpoint import load_policy, save_checkpoint
from vla_rl.checks.options import check_run
from vla_rl.config.replay_algorithms import (
    CriticsConfig,
    DaggerConfig,
    IQLConfig,
    SACConfig,
    TD3Config,
)
from vla_rl.data.replay import Replay
from vla_rl.errors import ConfigError
from vla_rl.monitoring.metrics import read_metrics
from vla_rl.run.pipeline import run_pipeline
from vla_rl.specs import CameraSpec
from vla_rl.types import Observation, Trajectory

TWO = dataclasses.replace(SPEC, cameras=(CameraSpec("top", 16, 16), CameraSpec("wrist", 8, 12)))
SMALL = {
    "hidden": [8],
    "encoder": 8,
    "channels": [4, 4],
    "stride": 4,
    "eyes": "pictures",
    "shift": 2,
}


class Plain(Base):
    """A frozen policy with two cameras, which counts how often it is asked for what it makes of
    images."""

    embodiment, encoded = TWO, 0

    def frame_features(self, observation):
        self.encoded += len(observation)
        return {**super().frame_features(observation), "text": torch.ones(len(observation), 3)}


class Blind(Plain):
    """One that can leave its images alone."""

    def blind_features(self, observation):
        return {"state": observation.proprio / 10.0, "text": torch.ones(len(observation), 3)}


def shown(first: int, count: int, generator: torch.Generator | None = None) -> Observation:
    """As `seen`, with noise for pictures of both cameras."""
    generator = generator or torch.Generator().manual_seed(first)
    images = {
        camera.name: torch.randint(
            0, 256, (count, camera.height, camera.width, 3), generator=generator, dtype=torch.uint8
        )
        for camera in TWO.cameras
    }
    return dataclasses.replace(seen(first, count), images=images)


def filmed(first: int, t: int, h: int) -> Trajectory:
    """As `episode`, with such pictures and ``h`` control steps a decision."""
    trajectory = cut(episode(first, t=t), h)
    actions = (trajectory.actions - first) / 10.0  # inside the bounds
    return dataclasses.replace(
        trajectory,
        observations=shown(first, t),
        final_observation=shown(first + t, 1),
        actions=actions,
    )


def actor(kind: str, **options):
    make, config = {
        "direct": (DirectActor, DirectConfig),
        "residual": (ResidualPolicy, ResidualConfig),
    }[kind]
    torch.manual_seed(0)
    return make(config(**{**SMALL, **options}), Blind())


def trainable(kind: str, algorithm: str):
    """An actor of the kind that ``algorithm`` trains."""
    return actor(kind, distribution="deterministic" if algorithm == "td3" else "gaussian")


def learner(kind: str, policy):
    common = {
        "critics": CriticsConfig(count=3, subset=2, hidden=[8]),
        "batch_size": 4,
        "actor_every": 2,
    }
    return TD3(TD3Config(**common), policy) if kind == "td3" else SAC(SACConfig(**common), policy)


def filled(algorithm, episodes: int = 1) -> Replay:
    replay, rewards = Replay(), torch.tensor([0.0, 1.0])
    for i in range(episodes):
        trajectory = filmed(10 * i, 2, algorithm.policy.chunk_length)
        replay.add(trajectory, rewards, extra=algorithm.annotate(trajectory, rewards))
    return replay


PAIRS = [("direct", "sac"), ("direct", "td3"), ("residual", "sac"), ("residual", "td3")]


# ----------------------------------------------------------------------------------------- shifting
def test_pictures_are_shifted_by_whole_pixels_with_their_edges_repeated(monkeypatch):
    spec = dataclasses.replace(SPEC, cameras=(CameraSpec("top", 3, 3),))
    base = Blind()
    base.embodiment = spec
    policy = DirectActor(DirectConfig(**{**SMALL, "stride": 1, "shift": 1}), base)
    picture = torch.arange(1, 10, dtype=torch.uint8).view(1, 3, 3, 1).expand(1, 3, 3, 3)
    observation = Observation({"top": picture}, torch.zeros(1, 2), ("go",))
    # down, left
    monkeypatch.setattr(
        torch, "randint", lambda low, high, size, generator: torch.tensor([[1, -1]])
    )
    found = PictureInputs(policy).seen({}, observation, torch.Generator())["picture0"]
    assert found[0, ..., 0].tolist() == [[2, 3, 3], [2, 3, 3], [5, 6, 6]]
    assert found.dtype == torch.uint8


def test_shifts_are_drawn_apart_for_s_and_for_what_follows_for_each_row_and_each_camera(
    monkeypatch,
):
    offsets, real = [], augmentation.random_shift

    def watched(images, drawn):
        offsets.append(drawn)
        return real(images, drawn)

    monkeypatch.setattr(augmentation, "random_shift", watched)
    algorithm = learner("sac", actor("direct"))
    replay = filled(algorithm)
    offsets.clear()
    drawn = {}

    def draw(count, **options):
        drawn["batch"] = replay.draw(16, torch.Generator().manual_seed(0), **options)
        return drawn["batch"]

    read, encode = [], algorithm.policy.encode
    monkeypatch.setattr(
        algorithm.policy, "encode", lambda frames: read.append(frames) or encode(frames)
    )
    algorithm.update(draw)
    assert [tuple(o.shape) for o in offsets] == [(16, 2)] * 4  # s: both cameras; s': both
    assert all(o.min() >= -2 and o.max() <= 2 and len(o.unique(dim=0)) > 4 for o in offsets)
    assert all(not torch.equal(a, b) for i, a in enumerate(offsets) for b in offsets[:i])
    now, later = read[0], next(frames for frames in read[1:] if frames is not read[0])
    for frames, observation, at in (
        (now, drawn["batch"].observations, 0),
        (later, drawn["batch"].next_observations, 2),
    ):
        for i, name in enumerate(("top", "wrist")):
            assert torch.equal(
                frames[f"picture{i}"], real(observation.images[name], offsets[at + i])
            )
    # one row by hand: inside, a pixel is where the shift took it from
    down, right = offsets[0][3].tolist()
    picture = drawn["batch"].observations.images["top"][3]
    assert torch.equal(now["picture0"][3, 8, 8], picture[8 - down, 8 - right])


@pytest.mark.parametrize("kind", ["direct", "residual"])
def test_acting_shows_pictures_as_they_are(kind, monkeypatch):
    policy = actor(kind, average=0.9)
    torch.nn.init.normal_(policy.actor[-1].weight)
    monkeypatch.setattr(inputs_module, "augment", lambda *_: pytest.fail("shifted while acting"))
    read = []
    policy.encoder.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))
    options = {"memory": [policy.initial_memory()] * 3} if kind == "residual" else {}
    observation = shown(0, 3)
    state = torch.get_rng_state()
    out = policy.act(observation, seeds=[1, 2, 3], **options)
    again = policy.act(observation, seeds=[1, 2, 3], **options)
    policy.act(observation, deterministic=True, **options)
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(out.chunk.actions, again.chunk.actions)
    for frames in read:
        assert torch.equal(frames["picture0"], observation.images["top"])
        assert torch.equal(frames["picture1"], observation.images["wrist"])
    assert set(out.replay) == {"state", "text"} | ({ACTION} if kind == "residual" else set()), (
        "pictures are kept once"
    )


def test_a_small_trunk_by_hand():
    """One convolution that copies red, from patches of two pixels: pictures are scaled to −½ …
    ½, then row by row."""
    policy = actor("direct", channels=[1], stride=1, encoder=16)
    trunk = policy.encoder.branches["picture0"]
    with torch.no_grad():
        trunk.convolutions[0].weight.zero_()
        # of a window of 2x2 that starts a pixel before
        trunk.convolutions[0].weight[0, 0, 1, 1] = 1.0
        trunk.convolutions[0].bias.zero_()
    picture = shown(0, 1).images["top"]
    red = (picture[0, ..., 0].float() / 255.0 - 0.5).clamp(min=0.0)
    with torch.no_grad():
        made = trunk.convolutions(picture.float().permute(0, 3, 1, 2) / 255.0 - 0.5)[0, 0]
        torch.testing.assert_close(made[:16, :16], red)
        torch.testing.assert_close(trunk(picture.float()), trunk.read(made.flatten()[None]))


# ---------------------------------------------------------------------------------- what is trained
@pytest.mark.parametrize(("kind", "algorithm"), PAIRS)
def test_the_critics_train_the_trunk_and_the_actors_loss_does_not(kind, algorithm):
    policy = trainable(kind, algorithm)
    own = learner(algorithm, policy)
    draw = functools.partial(filled(own).draw, generator=torch.Generator().manual_seed(0))
    trunk = [
        p for camera in (0, 1) for p in policy.encoder.branches[f"picture{camera}"].parameters()
    ]
    assert len(trunk) == 2 * 8  # two cameras of two convolutions, a linear layer and its norm
    got, stepped = {}, own._critic_guard.step

    def watched(optimizer, loss):
        got["critics"] = [p.grad.abs().sum().item() for p in trunk]
        return stepped(optimizer, loss)

    own._critic_guard.step = watched
    improve, before = own._improve, {}

    def watched_improve(batch, encoded, frames):
        assert not encoded.requires_grad
        before["trunk"] = [p.detach().clone() for p in trunk]
        figures = improve(batch, encoded, frames)
        assert all(p.grad is None for p in trunk)
        assert all(torch.equal(a, b) for a, b in zip(before["trunk"], trunk))
        return figures

    own._improve = watched_improve
    start = [p.detach().clone() for p in trunk]
    target = [p.clone() for p in own._target[0].parameters()]
    for _ in range(2):
        own.update(draw)
    assert before and all(size > 0 for size in got["critics"])
    assert all(not torch.equal(a, b) for a, b in zip(start, trunk))
    assert any(not torch.equal(a, b) for a, b in zip(target, own._target[0].parameters())), (
        "the targets' trunk follows"
    )


@pytest.mark.parametrize("algorithm", ["iql", "dagger"])
def test_imitation_trains_the_trunk_too(algorithm):
    policy = actor("direct")
    critics = CriticsConfig(count=2, hidden=[8])
    own = (
        IQL(IQLConfig(batch_size=4, critics=critics), policy)
        if algorithm == "iql"
        else Dagger(DaggerConfig(4), policy)
    )
    replay, trajectory, rewards = Replay(), filmed(0, 2, 1), torch.tensor([0.0, 1.0])
    replay.add(trajectory, rewards, "demonstrations", extra=own.annotate(trajectory, rewards))
    before = [p.detach().clone() for p in policy.encoder.branches["picture0"].parameters()]
    own.update(functools.partial(replay.draw, generator=torch.Generator().manual_seed(0)))
    own.update(functools.partial(replay.draw, generator=torch.Generator().manual_seed(0)))
    after = list(policy.encoder.branches["picture0"].parameters())
    assert any(not torch.equal(a, b) for a, b in zip(before, after))


@pytest.mark.parametrize("conservatism", ["none", "cal_ql"])
@pytest.mark.parametrize(("kind", "algorithm"), PAIRS)
def test_learning_goes_on_exactly_after_a_resume(kind, algorithm, conservatism, tmp_path):
    def fresh():
        own = learner(algorithm, trainable(kind, algorithm))
        own.config = dataclasses.replace(own.config, conservatism=conservatism, offline_updates=2)
        return own

    def learn(own, updates: int) -> None:
        replay = filled(own)
        for _ in range(updates):
            own.update(
                functools.partial(replay.draw, generator=torch.Generator().manual_seed(own.updates))
            )

    whole, first, second = fresh(), fresh(), fresh()
    learn(whole, 6)
    learn(first, 3)
    second.policy.load_state_dict(first.policy.state_dict())
    second.load_state_dict(first.state_dict())
    learn(second, 3)
    for a, b in zip(whole.policy.parameters(), second.policy.parameters(), strict=True):
        assert torch.equal(a, b)
    other = fresh()
    other.generator.manual_seed(1)  # the shifts are its: with others it learns something else
    learn(other, 6)
    pairs = zip(whole.policy.encoder.parameters(), other.policy.encoder.parameters())
    assert any(not torch.equal(a, b) for a, b in pairs)


def test_the_replay_is_asked_for_pictures_only_where_they_are_read():
    asked = {}
    for kind, options in (("features", {"eyes": "features"}), ("pictures", {})):
        own = learner("sac", actor("direct", **options))
        replay = filled(own)

        def draw(count, kind=kind, replay=replay, **options):
            asked[kind] = options["images"]
            return replay.draw(count, torch.Generator().manual_seed(0), **options)

        own.update(draw)
    assert asked == {"features": False, "pictures": True}


# ------------------------------------------------------------------------------------- what is kept
def test_the_frozen_policys_own_vision_is_left_alone():
    policy = actor("direct")
    trajectory = filmed(0, 3, 1)
    frames = policy.annotate(trajectory)
    policy.act(shown(0, 2))
    assert set(frames) == {"state", "text"} and policy.base.encoded == 0
    acted = dataclasses.replace(
        trajectory, replay={name: frame[:3] for name, frame in frames.items()}
    )
    for name, frame in policy.annotate(acted).items():
        assert torch.equal(frame, frames[name])
    plain = DirectActor(DirectConfig(**SMALL), Plain())
    for name, frame in plain.annotate(trajectory).items():
        assert torch.equal(frame, frames[name])
    assert plain.base.encoded  # it cannot but encode


@pytest.mark.parametrize("policy", ["nano_toy", "nano_flow_toy"])
def test_what_is_left_of_features_without_images_is_the_same(policy):
    config = configs.compose(["run=toy", f"policy={policy}"])
    base = build.implementation("policy", config.policy_type).from_statistics(
        config.policy, SPEC, STATS, STATS, seed=0
    )
    found, blind = base.frame_features(seen(0, 3)), base.blind_features(seen(0, 3))
    assert list(found) == ["visual", *blind]
    assert all(torch.equal(found[name], blind[name]) for name in blind)


# -------------------------------------------------------------------------------------- checkpoints
@pytest.mark.parametrize("kind", ["direct", "residual"])
def test_a_checkpoint_holds_the_trunk_and_one_from_before_there_was_any_loads(tmp_path, kind):
    options = ["actor.eyes=pictures", "actor.stride=2", "actor.average=0.9"]
    config = configs.compose(
        ["run=toy", "policy=nano_toy", f"actor={kind}", "algorithm=sac", *options]
    )
    torch.manual_seed(0)
    base = build.implementation("policy", config.policy_type).from_statistics(
        config.policy, SPEC, STATS, STATS, seed=0
    )
    built = build.implementation("actor", kind).from_base(config.actor, base)
    torch.nn.init.normal_(built.actor[-1].weight)
    observation = dataclasses.replace(seen(0, 3), images={"top": shown(0, 3).images["top"]})
    check_policy(built, observation)
    save_checkpoint(tmp_path / "c", built)
    again = load_policy(tmp_path / "c", build.policy_class, SPEC)
    a, b = (p.act(observation, seeds=[1, 2, 3]).chunk.actions for p in (built.eval(), again))
    assert torch.equal(a, b)
    darker = dataclasses.replace(observation, images={"top": observation.images["top"] // 2})
    assert not torch.equal(again.act(darker, seeds=[1, 2, 3]).chunk.actions, b), "it looks at them"

    old = build.implementation("actor", kind).from_base(
        dataclasses.replace(config.actor, eyes="features"), base
    )
    data = old.config_dict()
    for name in ("eyes", "channels", "stride", "shift"):
        del data["config"][name]
    loaded = type(old).from_config_dict(data, SPEC, old.extra_files(), base)
    loaded.load_state_dict(old.state_dict())
    assert not loaded.reads_pictures and set(loaded.annotate(cut(episode(0), 1))) >= {
        "visual",
        "state",
        "text",
    }


# ----------------------------------------------------------------------------------------- refusals
STATE = ["env=dualarm", "env.tasks=[lift_bar]", "tasks=[lift_bar]", "env.observe=state"]


@pytest.mark.parametrize(
    ("overrides", "error"),
    [
        (
            ["algorithm=parl"],
            r"actor\.eyes=pictures: this actor needs .* Set actor\.eyes=features, or actor=direct",
        ),
        (["algorithm=iql"], r"actor\.eyes=pictures: this actor needs"),
        (["algorithm=dsrl", "policy=nano_flow"], r"actor\.eyes=pictures: this actor needs"),
        (["algorithm=rlpd", *STATE], r"actor\.eyes=pictures, and env=dualarm shows none here"),
        (
            ["algorithm=rlpd", "actor.shift=84"],
            r"actor\.shift=84 is too much for pictures of 84 pixels",
        ),
        (["algorithm=rlpd", "actor.stride=84"], r"actor\.stride=84 is too much for pictures of 84"),
        (
            ["algorithm=rlpd", "actor.channels=[]"],
            r"actor\.channels=\[\] is empty: it must have 1 or more entries",
        ),
        (
            ["algorithm=rlpd", "actor.eyes=both"],
            r"actor\.eyes='both' .* one of features, pictures",
        ),
    ],
)
def test_what_cannot_see_is_refused_before_anything_runs(overrides, error):
    with pytest.raises(ConfigError, match=error):
        check_run(configs.compose(["run=quickstart", "actor.eyes=pictures", *overrides]))


def test_a_policy_without_cameras_and_pictures_too_small_are_refused():
    for config in (SteeredConfig, OwnConfig, ImprovedConfig):
        with pytest.raises(
            ConfigError, match="this actor needs what the frozen policy makes of images"
        ):
            config(eyes="pictures")
    base = Blind()
    base.embodiment = dataclasses.replace(SPEC, cameras=())
    with pytest.raises(ConfigError, match=r"actor\.eyes=pictures, and toy_reach has no camera"):
        DirectActor(DirectConfig(**SMALL), base)
    with pytest.raises(
        ConfigError, match=r"actor\.shift=8 is too much for the 8x12 pixels of camera wrist"
    ):
        actor("direct", shift=8)


# ----------------------------------------------------------------------------------------- learning
def test_it_learns_what_only_pictures_tell():
    """The rewarded action is −½ where the left half is bright and ½ where the right one is:
    episodes of one decision."""
    torch.manual_seed(0)
    options = {
        "hidden": [32],
        "encoder": 16,
        "channels": [8],
        "stride": 4,
        "shift": 1,
        "eyes": "pictures",
    }
    policy = DirectActor(DirectConfig(**options), Blind())
    config = SACConfig(
        batch_size=32,
        learning_rate=1e-3,
        actor_every=1,
        demonstration_share=0.0,
        temperature=0.01,
        target_entropy=-4.0,
        critics=CriticsConfig(count=2, hidden=[32], learning_rate=3e-3, tau=0.05),
    )
    algorithm, replay = SAC(config, policy), Replay()
    images = {c.name: torch.zeros(2, c.height, c.width, 3, dtype=torch.uint8) for c in TWO.cameras}
    images["top"][0, :, :8] = images["top"][1, :, 8:] = 255
    sides = dataclasses.replace(seen(0, 2), proprio=torch.zeros(2, 2), images=images)
    wanted = torch.tensor([-0.5, 0.5])

    def distance() -> float:
        return float(
            (policy.act(sides, deterministic=True).chunk.actions[:, 0, 0] - wanted).abs().mean()
        )

    before = distance()
    generator = torch.Generator().manual_seed(0)
    for number in range(12):
        rows = torch.tensor([0, 1] * 4)
        actions = policy.act(sides[rows], seeds=[100 * number + i for i in range(8)]).chunk.actions
        for i, row in enumerate(rows.tolist()):
            reward = 1.0 - 2.0 * (actions[i, :, 0] - wanted[row]).square()
            trajectory = dataclasses.replace(
                filmed(0, 1, 1),
                observations=sides[[row]],
                final_observation=sides[[row]],
                actions=actions[i : i + 1],
            )
            replay.add(trajectory, reward, extra=algorithm.annotate(trajectory, reward))
        for _ in range(30):
            algorithm.update(functools.partial(replay.draw, generator=generator))
    assert before == pytest.approx(0.5, abs=0.01) and distance() < 0.2, distance()


@pytest.mark.parametrize("kind", ["direct sac", "residual td3"])
def test_a_toy_run_acts_learns_and_goes_on_exactly(kind, tmp_path):
    """From demonstrations to a checkpoint by the pipeline; a run of two iterations is one that
    stopped after the first."""
    name, algorithm = kind.split()
    common = [
        "run=toy",
        "critic=none",
        f"output_dir={tmp_path}",
        "collect.episodes_per_task=4",
        "sft.updates=2",
    ]
    common += [
        "sft.warmup_updates=1",
        "sft.validation_episodes=1",
        "rl.episodes_per_iteration=2",
        "rl.guard=off",
    ]
    common += [
        f"actor={name}",
        f"algorithm={algorithm}",
        "actor.eyes=pictures",
        "actor.encoder=8",
        "actor.channels=[4]",
    ]
    common += [
        "algorithm.batch_size=8",
        "algorithm.start_decisions=1",
        "algorithm.updates_per_decision=0.2",
    ]
    sft = (
        run_pipeline(configs.compose([*common, "name=start", "phases=[collect,sft]"]))
        / "checkpoints"
        / "sft"
    )
    common += [f"checkpoint={sft}", f"dataset={tmp_path / 'start' / 'dataset'}", "phases=[rl]"]
    run_pipeline(configs.compose([*common, "name=parted", "rl.iterations=1"]))
    found = []
    for run in ("parted", "whole"):
        folder = run_pipeline(configs.compose([*common, f"name={run}", "rl.iterations=2"]))
        rows = [row for row in read_metrics(folder / "metrics.jsonl") if row["phase"] == "rl"]
        assert len(rows) == 2 and all(row["replay/updates"] > 0 for row in rows)
        found.append(load_file(folder / "checkpoints" / "rl" / "model.safetensors"))
    trunk = [weight for weight in found[0] if "encoder.branches.picture0" in weight]
    assert trunk and found[0].keys() == found[1].keys()
    assert all(torch.equal(value, found[1][weight]) for weight, value in found[0].items())
