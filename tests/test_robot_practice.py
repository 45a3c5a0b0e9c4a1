"""Practice without a person: a task and the one that undoes it in turn, and when a person is
called."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from test_robot_learn import EXACT, FAKE, composed, start  # noqa: F401 (a fixture)

from real.acting import ActingConfig
from real.episodes import Conductor, Plan
from real.journal import journals, read
from real.lockstep import Lockstep
from real.messages import Event, Notice, Progress, Writer
from real.practice import GAVE_UP, Practice, Rounds
from real.tasks import Task
from vla_rl.config.robot import compose
from vla_rl.data.session_trajectory import session_trajectory
from vla_rl.errors import ConfigError
from vla_rl.monitoring.metrics import read_metrics
from vla_rl.robot import learning
from vla_rl.robot.operator import make_operator
from vla_rl.robot.session import SessionRequest, _check_practice, make_plan, summary

RAISE, LOWER = (
    Task("raise", "raise the point", horizon=40),
    Task("lower", "lower the point", horizon=40),
)
BOTH = dataclasses.replace(FAKE, options={"tasks": ["raise", "lower"]})
PATIENT = dataclasses.replace(EXACT, patience_s=1000.0)  # it never takes over by itself


def practised(folder, decide, episodes: int, config=BOTH, operator=PATIENT, **practice):
    """(the conductor, the journals) of ``episodes`` in virtual time."""
    session = Lockstep(folder, config)
    try:
        if operator is not None:
            session.watched(make_operator(operator, session.world))
        kind = Practice(LOWER, attended=operator is not None, **practice)
        plan = Plan((RAISE,), episodes, alone=True, practice=kind)
        done = session.run(plan, decide, "learned-0", ActingConfig(), lambda outcome: None)
    finally:
        session.close()
    return done, [read(path) for path in journals(folder)]


def both_ways(images, proprio, instruction, first):
    sign = {"raise the point": 1.0, "lower the point": -1.0}[instruction]
    return np.tile([[0.0, 0.0, sign * 0.04, -1.0]], (4, 1))


def test_a_task_and_its_reset_alternate_and_nothing_is_put_back(tmp_path):
    done, episodes = practised(tmp_path / "s", both_ways, 5)
    assert [o.task.name for o in done.outcomes] == ["raise", "lower", "raise", "lower", "raise"]
    assert (
        all(o.success and o.labelled_by == "simulator" for o in done.outcomes) and not done.problem
    )
    assert [e.header["task"].partition(":")[0] for e in episodes] == [
        "raise",
        "lower",
        "raise",
        "lower",
        "raise",
    ]
    heights = [(e.ticks[0]["pose"][2], e.ticks[-1]["pose"][2]) for e in episodes]
    assert heights[0][0] == pytest.approx(0.3, abs=0.01), (
        "the first starts where the simulator puts it"
    )
    for (_, end), (begin, _) in itertools.pairwise(heights):
        assert begin == pytest.approx(end, abs=0.03), "the others where the one before has ended"
    said = list(summary(done.outcomes))
    assert (
        said[0] == "resets: 2 of 2 succeeded (100 %)" and "autonomous: 3 of 3 episodes" in said[1]
    )


def only_up(images, proprio, instruction, first):
    return np.tile([[0.0, 0.0, 0.04 if instruction == "raise the point" else 0.0, -1.0]], (4, 1))


def test_after_resets_that_fail_a_person_is_called_and_practice_goes_on(tmp_path):
    done, episodes = practised(tmp_path / "s", only_up, 7, failures=2)
    names = [o.task.name for o in done.outcomes]
    assert names == ["raise", "lower", "lower", "raise", "lower", "lower", "raise"]
    assert done.rounds.calls == 2 and not done.problem
    starts = [e.ticks[0]["pose"][2] for e in episodes]
    assert starts[1] > 0.42 and starts[2] > 0.42, "two attempts from where the task ended"
    assert starts[3] == pytest.approx(0.3, abs=0.02), "then the person has put it back"
    assert any("help is wanted: 2 resets in a row have failed" in note for note in done.notes)


def test_where_nobody_comes_practice_ends(tmp_path):
    done, episodes = practised(tmp_path / "s", only_up, 7, failures=2, operator=None)
    assert (
        "nobody is there" in done.problem
        and "2 resets in a row" in done.problem
        and len(episodes) == 3
    )


def test_leaving_the_safe_set_holds_and_calls(tmp_path):
    """The policy drifts sideways while it raises; the safe set ends at 6 cm, the limits' box at
    30 cm."""

    def drifts(images, proprio, instruction, first):
        return both_ways(images, proprio, instruction, first) + np.array([0.03, 0.0, 0.0, 0.0])

    safe = {"safe_low": [-0.06, -0.06, 0.1], "safe_high": [0.06, 0.06, 0.5]}
    config = dataclasses.replace(BOTH, supervisor={**FAKE.supervisor, **safe})
    done, episodes = practised(tmp_path / "s", drifts, 2, config)
    assert done.rounds.calls >= 1 and any(
        "left the safe set: x is 0.06" in note for note in done.notes
    ), done.notes
    for episode in episodes:
        pushed = [t["pose"][0] for t in episode.ticks if t["mode"] == "AUTO" and t["policy"]]
        assert max(pushed) <= 0.06 + 0.4 * 0.011, "nothing is followed but the tick that sees it"
        assert max(t["pose"][0] for t in episode.ticks) < 0.06 + 0.4**2 / (2 * 20) + 0.01, (
            "a braking distance beyond"
        )
    first = episodes[0]
    paused = next(n for n in first.notices if n["name"] == "pause")
    assert paused["value"].startswith("left the safe set") and paused["by"] == "supervisor"
    after = [t["mode"] for t in first.ticks if t["tick"] > paused["tick"]]
    assert set(after[1:]) <= {"PAUSED", "READY"}, "it stays where it is until somebody came"
    assert session_trajectory(first, 4)[0].success is False, "whoever came called it a failure"


# ------------------------------------------------------------------------------------- when to call
def test_rounds():
    again = dataclasses.replace(RAISE, name="again")
    rounds = Rounds((RAISE, again), Practice(LOWER, failures=2))
    assert rounds.next == RAISE and not rounds.begun
    rounds.ended(RAISE, False)
    assert rounds.next == LOWER, "also where it failed: something may have moved"
    rounds.ended(LOWER, None)
    assert rounds.next == LOWER and not rounds.wanted
    rounds.ended(LOWER, True)
    assert rounds.next == again
    rounds.ended(again, True)
    rounds.ended(LOWER, False)
    assert not rounds.wanted, "one in a row"
    rounds.ended(LOWER, False)
    assert "2 resets" in rounds.wanted and rounds.calls == 1
    assert not rounds.control("", "console.1"), "nobody has come"
    assert not rounds.control("launcher", "launcher") and not rounds.control(
        "console.1", "console.1"
    )
    assert not rounds.control("", "supervisor"), "a lease that lapsed"
    assert rounds.control("", "console.1") and not rounds.wanted and rounds.next == RAISE


@pytest.mark.parametrize(
    "name, source", [("pause", "console.7"), ("stop", "console.7"), ("estop", "teleop.2")]
)
def test_what_a_person_stops_goes_on_by_nothing_but_a_person(name, source):
    conductor = Conductor(Plan((RAISE,), practice=Practice(LOWER)), 20.0)
    told = Writer(source, lambda: 1.0)
    conductor.hear(told.make(Event, name=name, value="", at=1.0, lease=""))
    assert conductor.rounds.wanted == f"{name} by {source}: it was pressed"
    conductor.rounds.control(source, source)
    conductor.hear(
        told.make(Event, name="pause", value="the operator's page was silent", at=1.0, lease="")
    )
    assert not conductor.rounds.control("", source), (
        "a page that froze gives control up, which is no word"
    )
    conductor.rounds.control(source, source)
    conductor.hear(told.make(Event, name="pause", value=GAVE_UP, at=1.0, lease=""))
    assert conductor.rounds.control("", source)
    again = Conductor(Plan((RAISE,), practice=Practice(LOWER)), 20.0)
    place = {"mode": "PAUSED", "epoch": 1, "tick": 1, "episode": 1}
    again.hear(told.make(Notice, name="release", value="", by="supervisor", **place))
    assert "let go" in again.rounds.wanted


def test_a_reward_that_is_confident_twice_running_has_seen_a_success():
    conductor = Conductor(
        Plan((RAISE,), leads=False, judged=False, practice=Practice(LOWER, confident=0.9)), 20.0
    )
    told, reward = Writer("supervisor", lambda: 1.0), Writer("reward", lambda: 1.0)
    place = {"mode": "AUTO", "epoch": 1, "tick": 1, "episode": 3}
    conductor.hear(told.make(Notice, name="begin", value=RAISE.text, by="x", **place))
    said = []
    for value, episode in ((0.95, 3), (0.5, 3), (0.95, 3), (0.95, 2), (0.95, 3), (0.91, 3)):
        conductor.hear(
            reward.make(Progress, model="classifier", episode=episode, step=4, value=value)
        )
        said.append(conductor._verdict.success)
    assert said == [False] * 5 + [True] and conductor._verdict.seer == "reward.confident"


@pytest.mark.real_sim
def test_on_the_table_another_task_begins_where_things_are():
    pytest.importorskip("robosuite")
    from sim.tabletop.arm import ArmConfig, TabletopArm

    arm = TabletopArm(
        ArmConfig(tasks=["lift_red", "lift_green"], cameras=["agentview"], camera_size=32)
    )
    try:
        arm.reset({"task": "lift_red/3"})
        for _ in range(10):
            arm.aim(
                arm.read()["position"] + arm.demonstrate(False)[:3], np.zeros(0), np.zeros(0), -1.0
            )
            arm.advance(0.05)
        before = arm._data.qpos.copy()
        towards = {}
        for name in ("lift_red", "lift_green"):
            arm.reset({"task": f"{name}: whatever", "stay": True})
            assert np.array_equal(arm._data.qpos, before)
            towards[name] = arm.demonstrate(True)[:2]
        assert not np.allclose(towards["lift_red"], towards["lift_green"]), (
            "the expert goes for the other cube"
        )
        assert {task["scene"] for task in arm.tasks.values()} == {"cubes"}
    finally:
        arm.close()


# -------------------------------------------------------------------------------------- the command
def test_practice_is_learned_from_and_the_frozen_reset_policy_is_not(start, tmp_path):  # noqa: F811
    given = [
        "robot.options.tasks=[raise,lower]",
        "robot.practice.reset=lower",
        "operator.patience_s=0.4",
    ]
    learning.learn(
        composed(start, tmp_path / "a", *given, "robot.tasks=[raise]", episodes=4),
        lambda text: None,
    )
    paths = journals(tmp_path / "a" / "sessions" / "0001")
    names = [read(path).header["task"].partition(":")[0] for path in paths]
    assert names[:2] == ["raise", "lower"] and len(names) == 4
    rows = [r for r in read_metrics(tmp_path / "a" / "metrics.jsonl") if r["phase"] == "robot"]
    assert len(rows) == 4 and rows[-1]["robot/episodes"] == 4, (
        "both are learned from: one policy does both"
    )

    said: list[str] = []
    own = composed(start, tmp_path / "b", *given, f"robot.practice.checkpoint={start}", episodes=2)
    learning.learn(own, said.append)
    episodes = [read(path) for path in journals(tmp_path / "b" / "sessions" / "0001")]
    versions = [
        {tick["policy_version"] for tick in episode.steps if tick["policy"]} for episode in episodes
    ]
    learned, frozen = versions
    assert all(name.startswith("learned-") for name in learned) and all(
        name.startswith("start@") for name in frozen
    )
    assert any(
        "not learned from" in text and "played by another policy (start@" in text for text in said
    )
    rows = [r for r in read_metrics(tmp_path / "b" / "metrics.jsonl") if r["phase"] == "robot"]
    assert rows[-1]["robot/episodes"] == 1


@pytest.mark.parametrize(
    "given, said",
    [
        (
            ["robot.practice.failures=2", "robot.practice.low=[0,0,0]"],
            "robot.practice.reset is empty",
        ),
        (["robot.practice.reset=lower", "robot.practice.failures=0"], "robot.practice.failures=0"),
        (["robot.practice.rest=lower"], "Did you mean robot.practice.reset?"),
        (["robot.practice=lower"], "robot.practice is 'lower', and keys are expected"),
    ],
)
def test_wrong_keys_of_practice_are_named(given, said):
    with pytest.raises(ConfigError) as error:
        compose(["robot=fake", *given])
    assert said in str(error.value)


def test_practice_that_could_not_go_on_is_refused():
    known = {
        name: {"instruction": name, "horizon": 9, "scene": name[0]}
        for name in ("raise", "rise", "lower")
    }
    settings = compose(["robot=fake", "robot.practice.reset=lower", "robot.tasks=[raise]"])
    for asked, tasks, world, said in [
        (SessionRequest(), ["raise"], known, "another scene"),
        (SessionRequest(), ["lower"], known, "one of robot.tasks too"),
        (SessionRequest(policy=False), ["raise"], {}, "--no-policy"),
        (SessionRequest(), ["raise"], {}, "robot.practice needs robot.horizon"),
    ]:
        with pytest.raises(ConfigError, match=said):
            _check_practice(settings, asked, tasks, world)
    settings.robot.horizon = 10
    with pytest.raises(ConfigError, match=r"robot.practice.confident=0: no simulator"):
        _check_practice(settings, SessionRequest(), ["raise"], {})
    with pytest.raises(ConfigError, match="does not know"):
        make_plan(settings, SessionRequest(), {"raise": known["raise"]})
    with pytest.raises(ConfigError, match="the low ones below the high"):
        from real.supervisor.settings import from_options

        from_options({"safe_low": [0, 0, 0], "safe_high": [1, 1]})
