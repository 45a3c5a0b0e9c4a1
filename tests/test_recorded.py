"""Episodes of other runs in a replay: read as they were kept, scored by this run's reward, drawn
by their share."""

from __future__ import annotations

import shutil

import pytest
import torch
from test_actor_critic import batch_of, small
from test_replay_store import SPEC, episode

from sim.toy import ToyReach
from vla_rl.algorithms.actor_critic import TD3
from vla_rl.config import compose
from vla_rl.config.replay_algorithms import CriticsConfig, TD3Config
from vla_rl.data.recorded import check_recorded, recorded
from vla_rl.data.replay import Replay
from vla_rl.errors import ConfigError, EmbodimentMismatch, UserError
from vla_rl.run.pipeline import run_pipeline
from vla_rl.types import FRESH

SOURCES = ["demonstrations", "online", "offline", "online", "online"]
TASKS = {"task 5": "lift"}  # (a replay knows instructions alone)


def write(folder, count: int = 5) -> Replay:
    replay = Replay(folder, embodiment=SPEC)
    for i in range(count):
        e = episode(i)
        large = {
            "features": torch.full((len(e) + 1, 2000), float(i)),
            "small": torch.full((len(e) + 1, 3), float(i)),
        }
        replay.add(e, torch.arange(len(e)) + 0.5, SOURCES[i], large)
    return replay


def files_of(folder) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name != ".lock"
    }


def test_episodes_come_back_as_they_were_kept_and_demonstrations_stay(tmp_path):
    writer = write(tmp_path / "replay")  # which still holds the folder's lock
    before = files_of(tmp_path / "replay")
    found = list(recorded(tmp_path / "replay", SPEC, 2, TASKS))
    assert [t.rollout_id for t in found] == ["offline/r1", "offline/r3", "offline/r4"]
    for i, got in zip((1, 3, 4), found):
        wanted = episode(i)
        for name in ("actions", "valid", "is_human"):
            assert torch.equal(getattr(got, name), getattr(wanted, name)), name
        assert (got.proposed is None) == (wanted.proposed is None)
        assert got.proposed is None or torch.equal(got.proposed, wanted.proposed)
        assert torch.equal(got.observations.proprio, wanted.observations.proprio)
        assert torch.equal(got.final_observation.proprio, wanted.final_observation.proprio)
        for camera in ("top", "hand"):
            assert torch.equal(got.observations.images[camera], wanted.observations.images[camera])
            assert torch.equal(
                got.final_observation.images[camera], wanted.final_observation.images[camera]
            )
        assert got.observations.instruction == wanted.observations.instruction
        for name in ("terminated", "truncated", "success", "policy_version"):
            assert getattr(got, name) == getattr(wanted, name), name
        assert got.rewards.nonzero().tolist() == ([[len(wanted) - 1, 0]] if wanted.success else [])
        assert got.episode.task_id == {1: "task 2", 3: "task 7", 4: "task 10"}[i]
        person = wanted.is_human.any(1).tolist()
        assert got.replay[FRESH].tolist() == [
            now or i == 0 or person[i - 1] for i, now in enumerate(person)
        ]
    assert files_of(tmp_path / "replay") == before
    writer.add(
        episode(5),
        torch.zeros(5),
        "online",
        {"features": torch.zeros(6, 2000), "small": torch.zeros(6, 3)},
    )
    assert len(list(recorded(tmp_path / "replay", SPEC, 2, TASKS))) == 4
    assert (
        next(recorded(tmp_path / "replay", SPEC, 2, {"task 2": "lift"})).episode.task_id == "lift"
    )


def test_what_a_killed_writer_left_is_not_read_and_not_removed(tmp_path):
    write(tmp_path / "replay")
    with (tmp_path / "replay" / "journal.jsonl").open("ab") as file:
        file.write(b"00000000 {half a rec")
    before = files_of(tmp_path / "replay")
    assert len(list(recorded(tmp_path / "replay", SPEC, 2, TASKS))) == 3
    assert files_of(tmp_path / "replay") == before


def test_a_replay_that_does_not_fit_is_refused(tmp_path):
    write(tmp_path / "replay")
    with pytest.raises(
        ConfigError,
        match=r"decisions in .*replay last 2 control steps and this run's 4.*actor\.hold",
    ):
        next(recorded(tmp_path / "replay", SPEC, 4, TASKS))
    with pytest.raises(EmbodimentMismatch):
        next(recorded(tmp_path / "replay", ToyReach().embodiment, 2, TASKS))
    journal = tmp_path / "replay" / "journal.jsonl"
    whole = journal.read_bytes()
    journal.write_bytes(whole.replace(b"r1", b"rX"))  # a line in the middle
    with pytest.raises(
        UserError, match=r"line 2 of journal\.jsonl.*leave it out of replay\.offline"
    ):
        next(recorded(tmp_path / "replay", SPEC, 2, TASKS))
    journal.write_bytes(whole)
    (tmp_path / "replay" / "decisions.rows").unlink()
    with pytest.raises(
        UserError, match=r"decisions\.rows is missing.*leave it out of replay\.offline"
    ):
        next(recorded(tmp_path / "replay", SPEC, 2, TASKS))


@pytest.mark.parametrize("kept", [1, 2])
def test_a_run_that_goes_back_while_its_replay_is_read_is_noticed(tmp_path, kept):
    """Its later episodes are others from then on: none is mixed of both, and nothing breaks."""
    write(tmp_path / "replay")
    found = recorded(tmp_path / "replay", SPEC, 2, TASKS)
    next(found)
    resumed = Replay(tmp_path / "replay", episodes=kept, embodiment=SPEC)
    extra = {"features": torch.zeros(6, 2000), "small": torch.zeros(6, 3)}
    resumed.add(episode(5), torch.zeros(5), "online", extra)
    with pytest.raises(
        UserError,
        match=r"episode 3 of .*replay is not as it was written; perhaps its run went back",
    ):
        next(found)


def test_what_is_named_must_be_another_run_that_acted_and_named_once(tmp_path):
    write(tmp_path / "a" / "replay")
    write(tmp_path / "b" / "replay", count=1)
    check_recorded([str(tmp_path / "a")], tmp_path / "own" / "replay", SPEC)
    for named, own, error in [
        (["a", "a/replay"], "own", r"a is named more than once"),
        (["a"], "a", r"a is this run's own"),
        (["a", "b"], "own", r"b holds no episode of that run itself"),
    ]:
        with pytest.raises(ConfigError, match=error):
            check_recorded(
                [str(tmp_path / name) for name in named], tmp_path / own / "replay", SPEC
            )


@pytest.mark.parametrize(
    ("online_too", "later"), [(True, (0.25, 0.5, 0.25)), (False, (0.0, 0.0, 1.0))]
)
def test_a_batch_is_shared_out_before_the_first_episode_and_after(online_too, later):
    config = TD3Config(
        batch_size=8,
        demonstration_share=0.25,
        offline_share=0.5,
        offline_updates=1,
        demonstrations_online=online_too,
        critics=CriticsConfig(hidden=[8]),
    )
    algorithm, asked = TD3(config, small()), []

    def draw(count, *, shares, **options):
        asked.append(
            tuple(
                shares[key]
                for key in [("demonstrations", "interventions"), ("offline",), ("online",)]
            )
        )
        return batch_of([0.0] * count, [0.9] * count, algorithm.policy)

    algorithm.update(draw)
    algorithm.update(draw)
    assert asked == [(0.25, 0.5, 0.25), later]


@pytest.fixture(scope="module")
def earlier(finished_run):
    """A short run whose replay is learned from below: its folder."""
    quick = [
        "rl.iterations=2",
        "rl.episodes_per_iteration=8",
        "rl.eval_every=0",
        "rl.guard=off",
        "slots.workers=0",
    ]
    return finished_run("run=toy_td3", "phases=[collect,sft,rl]", *quick)


def test_a_run_learns_from_what_others_did_before_its_own_first_episode(earlier, tmp_path):
    start = [
        f"checkpoint={earlier / 'checkpoints' / 'sft'}",
        f"dataset={earlier / 'dataset'}",
        f"output_dir={tmp_path}",
    ]
    own = [
        "run=toy_td3",
        "rl.iterations=1",
        "rl.episodes_per_iteration=4",
        "rl.eval_every=0",
        "rl.guard=off",
        "phases=[rl]",
    ]
    share = [
        f"replay.offline=[{earlier}]",
        "algorithm.offline_share=0.5",
        "algorithm.demonstration_share=0.25",
    ]
    reward = ["reward.coefficient=2.0", "slots.workers=0", "algorithm.offline_updates=20"]
    run_pipeline(compose([*own, *start, *share, *reward]))
    gone = (earlier / "replay").rename(earlier / "gone")  # who goes on has its episodes already
    try:
        run_pipeline(compose([*own, *start, *share, *reward, "rl.iterations=2"]))
    finally:
        gone.rename(earlier / "replay")
    with pytest.raises(UserError, match=r"replay\.offline: .*there, \['other'\] now"):
        run_pipeline(
            compose([*own, *start, *share, *reward, "rl.iterations=3", "replay.offline=[other]"])
        )
    with_sources = Replay(tmp_path / "toy_td3" / "replay", episodes=None)
    was = Replay(earlier / "replay", episodes=None)
    assert with_sources.count("offline") == was.count("online") > 0
    assert with_sources.count("demonstrations") == was.count("demonstrations") > 0
    assert with_sources.count("online") > 0
    of = {"generator": torch.Generator().manual_seed(0), "shares": {"offline": 1.0}}
    rewards = with_sources.draw(400, **of).rewards
    solved = was.draw(400, torch.Generator().manual_seed(0), shares={"online": 1.0}).rewards
    # what this run's reward gives, not what that one's gave
    assert solved.max() == 1.0 and rewards.max() == 2.0
    sources = with_sources.draw(
        100,
        torch.Generator().manual_seed(0),
        shares={("demonstrations", "interventions"): 0.25, ("offline",): 0.5, ("online",): 0.25},
    ).source
    assert [sources.count(name) for name in ("demonstrations", "offline", "online")] == [25, 50, 25]


def test_offline_updates_need_no_demonstrations_where_other_runs_are_there(earlier, tmp_path):
    config = compose(
        [
            "run=toy_td3",
            f"checkpoint={earlier / 'checkpoints' / 'sft'}",
            f"output_dir={tmp_path}",
            "rl.iterations=1",
            "rl.episodes_per_iteration=4",
            "rl.eval_every=0",
            "rl.guard=off",
            "phases=[rl]",
            "slots.workers=0",
            f"replay.offline=[{earlier / 'replay'}]",
            "algorithm.offline_share=1",
            "algorithm.demonstration_share=0",
            "algorithm.offline_updates=3",
        ]
    )
    run_pipeline(config)
    replay = Replay(tmp_path / "toy_td3" / "replay", episodes=None)
    assert replay.count("demonstrations") == 0 < replay.count("offline")


@pytest.mark.parametrize(
    ("overrides", "error"),
    [
        (
            ["replay.offline=[{run}]"],
            r"algorithm\.offline_share=0 draws none.*Set algorithm\.offline_share=0\.25",
        ),
        (
            ["algorithm.offline_share=0.2"],
            r"offline_share=0\.2 needs episodes of other runs: .*replay\.offline=\[outputs",
        ),
        (
            ["algorithm.offline_share=0.7"],
            r"demonstration_share=0\.5 and algorithm\.offline_share=0\.7 are more than a bat",
        ),
        (
            ["algorithm=ppo", "policy=nano_toy", "replay.offline=[{run}]"],
            r"type=ppo has none: use algorithm=rlpd",
        ),
    ],
)
def test_replays_that_nothing_would_learn_from_are_refused_before_anything_runs(
    earlier, overrides, error
):
    from vla_rl.checks.options import check_run

    named = [o.format(run=earlier) for o in overrides]
    with pytest.raises(ConfigError, match=error):
        check_run(compose(["run=toy_td3", *named]))


def test_another_robots_replay_or_none_is_refused_before_the_first_phase(earlier, tmp_path):
    write(tmp_path / "other" / "replay")
    for folder, error, text in [
        (tmp_path / "other", EmbodimentMismatch, "other"),
        (
            earlier / "dataset",
            ConfigError,
            r"replay\.offline: .*dataset has no replay: name the folder of a run",
        ),
    ]:
        config = compose(
            [
                "run=toy_td3",
                f"output_dir={tmp_path}",
                f"replay.offline=[{folder}]",
                "algorithm.offline_share=0.5",
                "slots.workers=0",
            ]
        )
        (tmp_path / "toy_td3" / "replay").mkdir(parents=True, exist_ok=True)
        # an older run's, set aside
        shutil.copy(earlier / "replay" / "header.json", tmp_path / "toy_td3" / "replay")
        with pytest.raises(error, match=text):
            run_pipeline(config, fresh=True)
        assert not (tmp_path / "toy_td3" / "dataset").exists()
