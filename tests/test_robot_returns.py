"""Where episodes begin: new starts, back to where it failed, and there a person shows it."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from test_robot_learn import EXACT, FAKE, composed, start  # noqa: F401 (a fixture)

from real.acting import ActingConfig
from real.console.display import Display
from real.episodes import Conductor, Plan
from real.journal import journals, read
from real.lockstep import Lockstep
from real.messages import Event, Hello, Notice, Writer
from real.modes import Mode
from real.practice import CALL
from real.returns import SHOW, Returns, Starts, Tried
from real.tasks import Task, parse, spoken
from vla_rl.config.robot import compose
from vla_rl.data.journal import Journal
from vla_rl.errors import ConfigError
from vla_rl.robot import learning
from vla_rl.robot.episode_feed import LEDGER
from vla_rl.robot.operator import make_operator
from vla_rl.robot.session import SessionRequest, make_plan

RAISE, LOWER = (
    Task("raise", "raise the point", horizon=40),
    Task("lower", "lower the point", horizon=40),
)
PATIENT = dataclasses.replace(EXACT, patience_s=1000.0)  # it never takes over by itself


def played(starts: Starts, fails, count: int, helped=lambda task: False) -> list[tuple[str, int]]:
    """(name, number) of ``count`` episodes, which fail where ``fails`` says so."""
    found = []
    for _ in range(count):
        task = starts.next
        assert task == starts.next, "the same until an episode has counted"
        found.append((task.name, task.number))
        starts.ended(Tried(task, not fails(task), helped(task)))
    return found


def test_new_starts_are_counted_up_and_half_of_the_episodes_return_to_what_failed():
    starts = Starts((RAISE,), Returns(share=0.5))
    numbers = [number for _, number in played(starts, lambda task: task.number == 1, 8)]
    # 0 succeeds; 1 fails; from then on every other one begins where 1 did.
    assert numbers == [0, 1, 1, 2, 1, 3, 1, 4]
    assert [n for _, n in played(Starts((RAISE,), Returns(share=0.5)), lambda task: False, 4)] == [
        0,
        1,
        2,
        3,
    ]
    quarter = [
        n
        for _, n in played(Starts((RAISE,), Returns(share=0.25)), lambda task: task.number == 0, 9)
    ]
    assert quarter.count(0) == 3 and quarter[0] == 0


def test_the_start_that_failed_most_comes_first_and_one_that_is_mastered_no_more():
    starts = Starts((RAISE,), Returns(share=0.9, mastered=2))
    for number, successes in ((0, [False]), (1, [False, False]), (2, [False])):
        for success in successes:
            starts.ended(Tried(dataclasses.replace(RAISE, number=number), success, False))
    order = [n for _, n in played(starts, lambda task: False, 12)]
    # 1 failed twice; a success makes that none, so then the one that was not tried for longest; two
    # in a row end it.
    assert [n for n in order if n < 3] == [1, 0, 2, 1, 0, 2] and not starts._open
    assert order[0] == 3, "nothing is owed to returns yet"
    assert starts.next.number == max(order) + 1 and starts.note == ""


def test_what_was_shown_is_no_success_of_the_policy():
    starts = Starts((RAISE,), Returns(share=0.5, shown=2, mastered=1))
    at = dataclasses.replace(RAISE, number=0)
    assert not starts.is_shown(at)
    starts.ended(Tried(at, False, False))
    assert not starts.is_shown(at)
    starts.ended(Tried(at, False, False))
    assert starts.is_shown(at) and starts.note == "" and starts.next.number == 1
    starts.ended(Tried(starts.next, True, False))
    assert starts.next == at and starts.note == "back to start raise/0, 2 failures running"
    starts.ended(Tried(at, True, True))
    assert not starts.is_shown(at) and starts._open, "it is tried again, without a person"
    starts.ended(Tried(at, True, False))
    assert not starts._open
    starts.ended(Tried(dataclasses.replace(RAISE, number=2), True, True))
    starts.ended(Tried(starts.next, True, False))
    assert starts.next.number == 2 and starts.note.endswith("which needed help")
    never = Starts((RAISE,), Returns(shown=0))
    for _ in range(9):
        never.ended(Tried(at, False, False))
    assert not never.is_shown(at)


def test_tasks_take_turns_and_earlier_sessions_count():
    past = (
        Tried(Task("raise", "", 6), False, False),
        Tried(Task("gone", "", 2), False, False),
        Tried(Task("lower", "", -1), False, False),
    )
    starts = Starts((RAISE, LOWER), Returns(share=0.5), past)
    found = played(starts, lambda task: task.number == 6, 5)
    assert found == [("lower", 0), ("raise", 6), ("raise", 7), ("raise", 6), ("lower", 1)]
    assert starts.tasks == (RAISE, LOWER) and {key[0] for key in starts._open} == {"raise"}
    assert next(iter(starts._open.values())).task.instruction == "raise the point"


# -------------------------------------------------------------------------------------- the session
def test_a_session_returns_and_the_operator_shows_all_of_an_episode(tmp_path):
    """A policy that does nothing: its first start fails twice, then a person does it from the
    beginning."""
    session = Lockstep(tmp_path / "s", FAKE)
    try:
        session.watched(make_operator(PATIENT, session.world))
        plan = Plan((RAISE,), 5, alone=True, returns=Returns(share=0.9, shown=2))
        still = lambda *seen: np.tile([[0.0, 0.0, 0.0, -1.0]], (4, 1))  # noqa: E731
        done = session.run(plan, still, "v", ActingConfig(), lambda outcome: None)
    finally:
        session.close()
    numbers = [o.task.number for o in done.outcomes]
    assert numbers[:4] == [0, 0, 1, 0]
    shown = [o for o in done.outcomes if o.human_steps]
    assert shown and all(o.success and o.human_steps > 0.5 * o.steps for o in shown), done.outcomes
    assert any(note.startswith(f"{SHOW}: raise/") for note in done.notes)
    first = done.outcomes.index(shown[0])
    same = [o.success for o in done.outcomes[:first] if o.task.number == shown[0].task.number]
    assert same == [False, False], "two failures from there came before"
    headers = [parse(read(path).header["task"]) for path in journals(tmp_path / "s")]
    assert [task.number for task in headers] == numbers


def test_a_person_who_leads_is_told_each_time_where_the_next_one_begins():
    """Whoever has control: also where it is the same start again, and after an episode that does
    not count."""
    conductor = Conductor(Plan((RAISE,), leads=False, judged=False, returns=Returns()), 20.0)
    told = Writer("supervisor", lambda: 1.0)
    ready = conductor._state = SimpleNamespace(mode="READY", holder="console.1", step_done=False)
    place = {"mode": "AUTO", "epoch": 1, "tick": 1, "episode": 1, "by": "x"}

    def announced() -> str:
        said = conductor.due(1.0)
        assert [fields["name"] for _, _, fields in said] == ["task", "note"] and conductor.due(
            2.0
        ) == [], "once"
        return said[0][2]["value"]

    for label, following in (
        ("", 0),
        ("failure", 0),
        ("success", 1),
        ("discard", 1),
        ("success", 0),
    ):
        task = announced()
        conductor.hear(told.make(Notice, name="begin", value=task, **place))
        ready.mode = "AUTO"
        if label in ("success", "failure"):
            conductor.hear(told.make(Event, name="label", value=label, at=1.0, lease=""))
        conductor.hear(
            told.make(
                Notice, name="discard" if label == "discard" else "end_episode", value="", **place
            )
        )
        ready.mode = "READY"
        assert parse(conductor.starts.next.text).number == following, (label, task)
    assert announced() == "raise/0: raise the point"


def test_on_a_real_arm_the_supervisor_takes_the_start_from_its_launcher_while_a_person_has_control(
    tmp_path,
):
    session = Lockstep(tmp_path / "s", FAKE)
    try:
        supervisor = session.supervisor
        supervisor.session.modes.mode = Mode.READY
        for source, value in (
            ("launcher", "raise/3: raise the point"),
            ("simulator", "raise/7: no"),
        ):
            session.send(
                source, Hello, role="launcher" if source == "launcher" else "viewer", pid=1
            )
            session.send(source, Event, name="task", value=value, at=1.0, lease="")
        assert supervisor.session.task == "raise/3: raise the point"
        supervisor.session.modes.mode = Mode.AUTO
        session.send(
            "launcher", Event, name="task", value="raise/4: raise the point", at=1.0, lease=""
        )
        assert supervisor.session.task == "raise/3: raise the point", (
            "not in the middle of an episode"
        )
    finally:
        session.close()


def test_an_instruction_of_several_words_survives_as_a_start():
    task = spoken("put the red cup on the on/off switch: now", 60)
    numbered = dataclasses.replace(task, number=4)
    assert parse(numbered.text) == dataclasses.replace(numbered, horizon=0) and " " not in task.name
    starts = Starts((task,), Returns())
    starts.ended(Tried(dataclasses.replace(parse(numbered.text)), False, False))
    assert starts._open and next(iter(starts._open.values())).task.instruction == task.instruction
    assert (
        make_plan(compose(["robot=fake", "robot.tasks=[fold the towel]"]), SessionRequest(), {})
        .tasks[0]
        .name
        == "fold_the_towel"
    )


def test_the_console_asks_until_a_person_shows_it():
    now = [10.0]
    display = Display(SimpleNamespace(folder=""), lambda: now[0])
    display.hear_note(f"{SHOW}: raise/3: raise the point")
    assert (
        display.call()
        == "Show it from here: raise/3: raise the point. Take control and do all of it."
    )
    for mode, asks in (("AUTO", True), ("HUMAN", False), ("AUTO", True), ("READY", False)):
        now[0] += 1.0
        display.state, display.state_at = SimpleNamespace(mode=mode), now[0]
        assert bool(display.call()) is asks, mode
    display.hear_note(f"{CALL}: somebody")
    now[0] += 1.0
    display.state_at = now[0]
    assert "somebody" in display.call(), (
        "another call, for which a person at the controls is no answer yet"
    )


# -------------------------------------------------------------------------------------- the command
def test_learning_goes_on_from_where_it_failed_in_the_session_before(start, tmp_path):  # noqa: F811
    given = ["robot.returns.share=0.5", "operator.patience_s=1000", "robot.horizon=12"]
    first = composed(start, tmp_path / "a", *given, episodes=2)
    learning.learn(first, lambda text: None)
    failed = [
        parse(read(p).header["task"]).number for p in journals(tmp_path / "a" / "sessions" / "0001")
    ]
    assert failed == [0, 1] or failed == [0, 0]
    learning.learn(dataclasses.replace(first, episodes=4), lambda text: None)
    again = [
        parse(read(p).header["task"]).number for p in journals(tmp_path / "a" / "sessions" / "0002")
    ]
    assert len(again) == 2 and {*again} & {*failed} and max(again) <= max(failed) + 1
    kept = [record["start"] for record in Journal(tmp_path / "a" / LEDGER).read()]
    assert kept == [["raise", number] for number in [*failed, *again]]
    learning.learn(composed(start, tmp_path / "b", *given[1:], episodes=1), lambda text: None)
    assert "start" not in Journal(tmp_path / "b" / LEDGER).read()[0], "that world chose by itself"


@pytest.mark.parametrize(
    ("words", "asked", "steps"),
    [
        ([], SessionRequest(), [80, 140]),  # each task's own
        ([], SessionRequest(learns=True), [200, 350]),  # 2.5 times that: time for a person
        (["operator=stuck"], SessionRequest(console=False), [200, 350]),
        (["robot.horizon=90"], SessionRequest(learns=True), [90, 90]),
    ],
)
def test_an_episode_that_is_helped_has_time_for_it(words, asked, steps):
    """Of the tabletop arm as it is configured, as the documented commands start it."""
    own = {"lift_cube": 80, "place_can": 140}
    known = {
        name: {"instruction": name, "horizon": limit, "scene": ""} for name, limit in own.items()
    }
    plan = make_plan(compose(["robot.tasks=[lift_cube,place_can]", *words]), asked, known)
    assert [task.horizon for task in plan.tasks] == steps
    # on a real arm: none
    assert make_plan(compose(["robot=fake", "robot.tasks=[fold]"]), asked, {}).tasks[0].horizon == 0


@pytest.mark.parametrize(
    "given, said",
    [
        (["robot.returns.share=1.0"], r"robot.returns.share=1.0 .* 0 or more and below 1"),
        (["robot.returns.share=0.5", "robot.practice.reset=lower"], "nobody puts things back"),
        (["robot.returns.shre=0.5"], r"Did you mean robot.returns.share\?"),
    ],
)
def test_wrong_keys_are_named(given, said):
    with pytest.raises(ConfigError, match=said):
        compose(["robot=fake", *given])
