"""The model of a cluster against arithmetic, against another model's figures, and how its times
are read."""

from __future__ import annotations

import dataclasses
import heapq
import json
import random
import time
from pathlib import Path

import numpy as np
import pytest

from vla_rl import cli
from vla_rl import config as configs
from vla_rl.cluster.model import Setup, Times, best_split, simulate, useful_share
from vla_rl.cluster.status import StatusFile, find_status, status_text
from vla_rl.cluster.times import measured, slowest
from vla_rl.config import compose
from vla_rl.config.episodes import EPISODE_SECONDS
from vla_rl.errors import UserError
from vla_rl.reporting import cluster
from vla_rl.reporting.page import write_report
from vla_rl.reporting.runs import load_run

ONE = Times(
    chunk=(0.1,),
    decisions=(5,),
    act_fixed=0.02,
    act_row=0.01,
    update=0.2,
    reset=0.3,
    publish=0.4,
    pause=0.1,
)


def test_one_slot_by_turns_is_a_sum():
    """Four episodes after each other: reset 0.3, five times (call 0.03, chunk 0.1); update 4 ·
    0.2, pause, publish."""
    found = simulate(ONE, Setup(rollouts=1, slots=1, cores=1, batch=4))
    episode = 0.3 + 5 * (0.03 + 0.1)
    assert found.seconds == pytest.approx(4 * episode + 0.8 + 0.1 + 0.4)
    assert found.episodes_per_second == pytest.approx(4 / found.seconds)
    assert found.learner == pytest.approx(0.8 / found.seconds)
    assert found.cores == pytest.approx(4 * 0.8 / found.seconds)
    assert found.policies == pytest.approx(4 * 0.15 / found.seconds)
    assert found.staleness_max == 0


def test_overlapped_the_slower_side_counts():
    slow_learner = dataclasses.replace(ONE, update=2.0)
    found = simulate(slow_learner, Setup(1, 1, 1, batch=4, ahead=1))
    assert found.seconds == pytest.approx(
        8.0 + 0.1 + 0.4
    ) and found.staleness_mean == pytest.approx(1.0, abs=0.2)
    fast_learner = dataclasses.replace(ONE, update=0.01)
    found = simulate(fast_learner, Setup(1, 1, 1, batch=4, ahead=2), iterations=40)
    assert found.seconds == pytest.approx(4 * 0.95, rel=1e-3)
    two = simulate(fast_learner, Setup(2, 1, 1, batch=4, ahead=2), iterations=40)
    assert two.seconds == pytest.approx(2 * 0.95, rel=0.02)


def test_weights_on_their_way_hold_up_what_begins_behind_them():
    """By turns they are added; where episodes enough are under way the slower side hides them, and
    decisions are as much older."""
    far = dataclasses.replace(ONE, reach=1.5)
    near, setup = simulate(ONE, Setup(1, 1, 1, batch=4)), Setup(1, 1, 1, batch=4, ahead=1)
    assert simulate(far, Setup(1, 1, 1, batch=4)).seconds == pytest.approx(near.seconds + 1.5)
    slow = {"update": 2.0}
    hidden = simulate(dataclasses.replace(far, **slow), setup)
    assert hidden.seconds == pytest.approx(8.0 + 0.1 + 0.4)
    close = simulate(dataclasses.replace(ONE, **slow), setup)
    assert hidden.staleness_mean >= close.staleness_mean


def test_slots_share_cores_and_calls():
    """Two slots in lockstep: one call for both (0.04), chunks at once on two cores, after each
    other on one."""
    both = Setup(1, slots=2, cores=2, batch=2, serve_fraction=1.0)
    rest = 0.4 + 0.1 + 0.4
    assert simulate(ONE, both).seconds == pytest.approx(0.3 + 5 * 0.14 + rest)
    assert simulate(ONE, dataclasses.replace(both, cores=1)).seconds == pytest.approx(
        0.6 + 5 * 0.24 + rest
    )
    # Where each is served at once, the calls of one hide behind the other's chunks on a core of its
    # own.
    alone = simulate(ONE, dataclasses.replace(both, serve_fraction=0.0))
    assert alone.seconds < 0.3 + 5 * 0.14 + rest + 0.05


def test_one_driver_takes_the_episodes_of_all():
    """5 s for each of four, never during an update (0.8), its pause (0.1) and the publication
    (0.4); with twice the actors and episodes it has twice as much to do."""
    slow = dataclasses.replace(ONE, take=5.0)
    found = simulate(slow, Setup(4, 1, 1, batch=4, ahead=2), iterations=40)
    assert found.seconds == pytest.approx(4 * 5.0 + 0.8 + 0.1 + 0.4, rel=0.01)
    assert (
        found.driver == pytest.approx((4 * 5.0 + 0.1 + 0.4) / found.seconds, rel=0.01)
        and found.driver > 0.95
    )
    twice = simulate(
        slow, Setup(8, 1, 1, batch=8, ahead=2, learners=2, efficiency=1.0), iterations=40
    )
    assert twice.seconds == pytest.approx(8 * 5.0 + 0.8 + 0.1 + 0.4, rel=0.01)
    assert (
        slowest(found) == "the driver"
        and slowest(simulate(ONE, Setup(1, 1, 1, batch=4))) == "simulators"
    )


def test_learners_and_actors_beyond_those_played_out_scale():
    setup = Setup(4, 2, 1, batch=32, learners=4)
    assert setup.learner_speed == pytest.approx(4 * 0.95**2)
    small = simulate(ONE, Setup(8, 2, 1, batch=64, ahead=1, learners=2))
    large = simulate(ONE, Setup(64, 2, 1, batch=512, ahead=1, learners=16, efficiency=1.0))
    small_even = simulate(ONE, Setup(8, 2, 1, batch=64, ahead=1, learners=2, efficiency=1.0))
    assert (
        large.seconds == pytest.approx(small_even.seconds, rel=1e-6)
        and small.seconds >= small_even.seconds
    )
    assert large.episodes_per_second == pytest.approx(8 * small_even.episodes_per_second)


def test_the_figures_of_another_model():
    """One of 64 slots on 16 cores (chunks 0.12 s ± 30 %, 30 to 60 decisions, calls 0.045 + 0.004 b,
    20 s of learning), written apart from this one: 49.0 s an iteration by turns, 28.3 with
    staleness 1, 25.8 with 2; 21.1 with 2 on 32 cores."""
    rng = random.Random(0)
    chunk = tuple(rng.gammavariate(1 / 0.09, 0.12 * 0.09) for _ in range(1000))
    times = Times(chunk, tuple(range(30, 61)), 0.045, 0.004, update=20 / 64, reset=0.5, publish=1.0)
    for ahead, cores, seconds in ((0, 16, 49.0), (1, 16, 28.3), (2, 16, 25.8), (2, 32, 21.1)):
        found = simulate(times, Setup(1, 64, cores, 64, ahead))
        assert found.seconds == pytest.approx(seconds, rel=0.07), (ahead, cores)
        assert found.staleness_max <= ahead


def test_the_best_split_is_where_both_sides_work():
    """Learning takes three times the device time of acting, simulators are free: a quarter of 16
    devices acts."""
    times = Times((1e-6,), (3,), 0.0, 0.01, update=0.09)
    setup, outcome = best_split(times, Setup(1, 16, 16, batch=256, ahead=2, efficiency=1.0), 16)
    assert setup.rollouts + setup.learners == 16 and setup.rollouts in (4, 5)
    assert outcome.learner > 0.85


def test_failures_leave_a_share():
    """100 devices with 1000 hours each: one failure in 36 000 s. Checkpoints of 10 s every
    √(2·10·36000) = 849 s."""
    share, interval = useful_share(100, 1000.0, checkpoint=10.0, restart=60.0)
    assert interval == pytest.approx(848.5, abs=0.1)
    assert share == pytest.approx(1 - 10 / 848.5 - (848.5 / 2 + 60) / 36000, abs=1e-5)
    assert useful_share(100, 0.0, 10.0, 60.0) == (1.0, 0.0)


# ---------------------------------------------------------------------------------------- the times
def recorded(folder: Path, count: int = 8, **changes: float) -> Path:
    """A run of iterations of 8 episodes on two workers, after a first one that is unlike the
    others."""
    folder.mkdir()
    config = compose(
        ["run=toy", "slots.workers=2", "slots.slots_per_worker=4", "rl.episodes_per_iteration=8"]
    )
    configs.save(config, folder / "config.yaml")
    rows = []
    for i in range(count):
        batch = 4.0 if i % 2 else 2.0
        row = {
            "phase": "rl",
            "step": i + 1,
            "time_s": 0.0,
            "episodes": 8 * (i + 1),
            "engine/decisions": 40,
            "engine/seconds": 3.0,
            "engine/control_steps": 80,
            "engine/env_utilisation": 0.5,
            "engine/policy_batch": batch,
            "engine/policy_seconds": (0.01 + 0.005 * batch) * 40 / batch,
            "engine/wait_seconds": 1.0,
            "time/update": 0.8,
            "time/iteration": 4.0,
            "time/evaluate": 0.0,
            "rollout/success": 0.25,
            "rollout/control_steps": 10.0,
            "rollout/control_steps_to_success": 4.0,
            "rollout/learned_share": 1.0,
            **changes,
        }
        rows.append(row if i else row | {"time/update": 100.0})
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


def test_times_of_a_run_by_hand(tmp_path):
    found = measured(recorded(tmp_path / "run"))
    assert found.setup == Setup(1, 8, 2, 8, 0) and found.seconds == pytest.approx(4.0)
    # both workers, half of the time, 40 decisions
    assert found.times.chunk == pytest.approx((0.5 * 3.0 * 2 / 40,))
    assert (found.times.act_fixed, found.times.act_row) == pytest.approx((0.01, 0.005))
    assert found.times.update == pytest.approx(0.1) and found.times.pause == pytest.approx(0.2)
    # 5 decisions an episode; a quarter are successes of 2, so that the others have 6.
    assert sorted(set(found.times.decisions)) == pytest.approx([2.0, 6.0])
    assert sum(found.times.decisions) / len(found.times.decisions) == pytest.approx(5.0)
    assert found.times.take == 0.0
    driver = measured(
        recorded(tmp_path / "driver", **{"cluster/take_seconds": 0.08, "time/reward": 0.16})
    ).times
    assert (driver.take, driver.pause) == pytest.approx((0.03, 0.04))  # of 8 episodes
    same = measured(
        recorded(tmp_path / "alike", **{"engine/policy_batch": 4.0, "engine/policy_seconds": 0.4})
    ).times
    assert (same.act_fixed, same.act_row) == pytest.approx((0.0, 0.01))
    with pytest.raises(UserError, match="too few to read service times from"):
        measured(recorded(tmp_path / "short", count=3))


def test_the_commands(tmp_path, capsys):
    file = tmp_path / "times.json"
    file.write_text(
        json.dumps(
            {"chunk": [0.1], "decisions": [3, 6], "act_fixed": 0.01, "act_row": 0.01, "update": 1.0}
        )
    )
    out = tmp_path / "plan.json"
    words = [
        "cluster",
        "plan",
        "run=toy",
        "rl.episodes_per_iteration=8",
        "--times",
        str(file),
        "--gpus",
        "4",
        "16",
    ]
    words += ["--mtbf", "5000", "--json", str(out)]
    assert cli.main(words) == 0
    text, document = capsys.readouterr().out, json.loads(out.read_text())
    assert [row["gpus"] for row in document["rows"]] == [
        4,
        16,
    ] and "failures every 5000 hours" in text
    for row in document["rows"]:
        assert row["act"] + row["learn"] == row["gpus"] and row["ahead"]["staleness_max"] <= 1
        assert row["ahead"]["episodes_per_second"] > 0 and 0.9 < row["useful_share"] < 1
    assert (
        document["rows"][1]["ahead"]["episodes_per_second"]
        > 3 * document["rows"][0]["ahead"]["episodes_per_second"]
    )
    for wrong, part in (
        (["--gpus", "0"], "--gpus 0: give 2 or more"),
        (["--staleness", "-1"], "--staleness -1"),
        (["--times", str(tmp_path / "none")], "none"),
    ):
        assert cli.main([*words[:6], *wrong]) == 2 and part in capsys.readouterr().err
    file.write_text(json.dumps({"chunk": [0.1], "decision": [3]}))
    assert cli.main(words) == 2 and "Did you mean" in capsys.readouterr().err
    file.write_text(json.dumps({"chunk": [], "decisions": [3]}))
    assert cli.main(words) == 2 and "need samples above 0" in capsys.readouterr().err


def test_a_plan_from_a_run_is_for_the_setup_that_is_asked_for(tmp_path, capsys):
    """The run is of one actor with two workers; four of them do the same in less than half of
    the time."""
    run, out = recorded(tmp_path / "run"), tmp_path / "plan.json"
    words = ["cluster", "plan", "--times", str(run), "--gpus", "4", "--json", str(out)]
    assert cli.main(words) == 0
    alone, said = json.loads(out.read_text()), capsys.readouterr().out
    assert alone["asked"] == alone["setup"] and "asked for" not in said
    own = ["run=toy", "slots.workers=2", "slots.slots_per_worker=4", "rl.episodes_per_iteration=8"]
    assert cli.main([*words, *own]) == 0
    capsys.readouterr()
    assert json.loads(out.read_text())["asked"] == alone["setup"]
    assert (
        cli.main(
            [*words, *own, "cluster=ray", "cluster.rollouts=4", "rl.episodes_per_iteration=16"]
        )
        == 0
    )
    plan, said = json.loads(out.read_text()), capsys.readouterr().out
    assert (plan["asked"]["rollouts"], plan["asked"]["batch"]) == (4, 16) and plan[
        "predicted"
    ] == alone["predicted"]
    assert "the one asked for (rollouts 4, batch 16):" in said
    # twice the episodes
    assert plan["rows"][0]["alternate"]["seconds"] > alone["rows"][0]["alternate"]["seconds"]


def test_a_model_that_is_off_says_so(tmp_path, capsys):
    """Iterations took 4 s; of 9 s in which most was waiting for slow episodes the means know
    nothing."""
    assert (
        cli.main(["cluster", "plan", "--times", str(recorded(tmp_path / "fits")), "--gpus", "4"])
        == 0
    )
    fits = capsys.readouterr().out
    slow = recorded(
        tmp_path / "tails",
        **{"time/iteration": 9.0, "engine/seconds": 8.0, "engine/env_utilisation": 0.1},
    )
    assert cli.main(["cluster", "plan", "--times", str(slow), "--gpus", "4"]) == 0
    tails = capsys.readouterr().out
    print(fits, tails)
    assert "heavy tails" in tails and "% of what was measured" in tails


def test_the_report_says_how_busy_each_role_was_and_how_old_the_data(tmp_path):
    """Eight iterations of 4 s: actors at work for 3 of them, learning 0.8 (100 s in the first,
    so it is left out here)."""
    told = {
        "cluster/rollout_busy_seconds": 3.0,
        "cluster/inference_busy_seconds": 0.5,
        "cluster/learner_wait_seconds": 1.0,
        "cluster/restarts": 0.25,
        "cluster/bytes_in": 1e6,
        "cluster/bytes_out": 5e5,
        "cluster/staleness/0": 0.25,
        "cluster/staleness/1": 0.75,
        "cluster/take_seconds": 0.4,
        "cluster/publish_seconds": 0.02,
        "cluster/bytes_published": 4e6,
    }
    folder = recorded(tmp_path / "run", **told)
    run = load_run(folder)
    assert cluster.shares(run)["rollouts at work"] == pytest.approx(0.75)
    assert cluster.shares(run)["learner waiting for episodes"] == pytest.approx(0.25)
    assert cluster.shares(run)["inference at work"] == pytest.approx(0.125)
    assert cluster.at_work(run).startswith(
        "rollouts at work 75%, inference at work 12%, learner at work "
    )
    assert cluster.ages(run) == {0: 0.25, 1: 0.75}
    where = {"role": "rollout", "number": 1, "host": "host-b", "node": "0a0a0a0a0a", "pid": 42}
    placement = {"why": "hybrid (as it is <fast>)", "waits": "", "numbers": {"placement": "hybrid"}}
    told = {"restarts": ["rollout actor 1 <is> lost"], "seats": [where], "placement": placement}
    (folder / "cluster.json").write_text(json.dumps(told))
    page = write_report(folder).read_text()
    assert (
        "On the cluster" in page
        and "rollouts at work</td><td>75" in page
        and "1 version old: 75" in page
    )
    assert (
        "publish a MB of weights</td><td>5.0" in page
        and "driver fetching episodes</td><td>10" in page
    )
    assert "actors replaced</td><td>2" in page and "&lt;is&gt; lost" in page
    assert (
        "rollout 1</td><td>host-b, 0a0a0a0a" in page
        and "placement: hybrid (as it is &lt;fast&gt;)" in page
    )
    (folder / "cluster.json").write_text(json.dumps({"restarts": ["lost"]}))  # of an older version
    assert "were lost" in cluster.section(run) and "Where the actors were" not in cluster.section(
        run
    )
    (folder / "cluster.json").write_text("no JSON")
    assert "On the cluster" in cluster.section(run) and "were lost" not in cluster.section(run)
    assert not cluster.section(load_run(recorded(tmp_path / "local")))


def test_status_says_who_does_what(tmp_path, capsys, monkeypatch):
    described = {
        "version": 7,
        "waiting": 3,
        "ready": 11,
        "restarts": ["rollout actor 1 (process 5) is lost"],
        "dashboard": "",
        "staleness": {"0": 0.25, "1": 0.75},
        "actors": [
            {"number": 0, "state": "working", "open": 4, "decisions": 99, "idle_seconds": 0.2},
            {"number": 1, "state": "starting", "open": 0, "decisions": 0, "idle_seconds": 9.0},
        ],
        "seats": [
            {"role": "learner", "number": 0, "host": "host-c", "node": "c0ffee00aa", "pid": 40},
            {"role": "rollout", "number": 0, "host": "host-a", "node": "0a0a0a0a0a", "pid": 41},
            {"role": "rollout", "number": 1, "host": "host-b", "node": "", "pid": 42},
        ],
        "placement": {
            "why": "disaggregated (1 learner ranks, 2 rollout actors): 3",
            "waits": "a node is lost",
            "numbers": {"placement": "disaggregated"},
        },
    }
    asked = []
    file = StatusFile(
        tmp_path / "run" / "cluster.json", lambda: asked.append(1) or described, every=1000.0
    )
    file.end()
    assert not asked
    with pytest.raises(UserError, match=r"holds no cluster\.json"):
        find_status(tmp_path)
    file.look()
    file.look()
    assert len(asked) == 1
    assert cli.main(["cluster", "status", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert (
        "running; version 7, 3 episodes wait" in text
        and "11 for the learner" in text
        and "host-b" in text
    )
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert (
        "learner 0 host-c c0ffee00 40" in lines
        and "rollout 0 host-a 0a0a0a0a 41 working 4 99 0 s ago" in lines
    )
    assert (
        "placement: disaggregated (1 learner ranks, 2 rollout actors): 3" in lines
        and "a node is lost" in lines
    )
    assert "1 versions: 75%" in text and "restarts: 1" in text and "process 5" in text
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 100)
    assert "silent for 100 s" in status_text(tmp_path / "run" / "cluster.json")
    described["version"] = 9
    file.end()  # it looks once more
    text = status_text(tmp_path / "run" / "cluster.json")
    assert (
        "run: ended; version 9, nothing is under way" in text
        and "working" not in text
        and "wait for" not in text
    )
    assert "rollout 0 host-a 0a0a0a0a 41 ended 0 99" in " ".join(text.split())


# -------------------------------------------------------------------------------------- heavy tails
LENGTHS, CHUNK, CALL = (2, 6, 6, 6), 0.1, 0.001


def pareto(shape: float):
    """Factors with the mean 1."""
    return lambda rng: rng.paretovariate(shape) * (shape - 1.0) / shape


TAILS = {
    "none": lambda rng: 1.0,
    "lognormal": lambda rng: rng.lognormvariate(-0.5, 1.0),
    "Pareto 3": pareto(3.0),
    "Pareto 1.5": pareto(1.5),
    "Pareto 1.2": pareto(1.2),
}


def played(
    rng: random.Random, pace, slots: int, batch: int
) -> tuple[float, list[tuple[int, float]]]:
    """An iteration by turns, written apart from the model: slots with a core each that take the
    next episode as they are free, and are served at once. Its seconds, and (decisions, pace) of
    each episode."""
    episodes = [(rng.choice(LENGTHS), pace(rng)) for _ in range(batch)]
    free = [0.0] * slots
    for length, factor in episodes:
        heapq.heappush(free, heapq.heappop(free) + length * (CHUNK * factor + CALL))
    return max(free), episodes


def noted(
    folder: Path, rng: random.Random, pace, slots: int, batch: int, count: int
) -> tuple[Path, float]:
    """Such a run as its log has it, and the mean seconds of its iterations but the first."""
    folder.mkdir()
    given = [
        f"slots.workers={slots}",
        "slots.slots_per_worker=1",
        f"rl.episodes_per_iteration={batch}",
    ]
    configs.save(compose(["run=toy", "rollout.serve_fraction=0", *given]), folder / "config.yaml")
    rows, spent = [], []
    for i in range(count):
        seconds, episodes = played(rng, pace, slots, batch)
        decisions = sum(length for length, _ in episodes)
        took = [length * CHUNK * factor for length, factor in episodes]
        wins = sum(length == 2 for length, _ in episodes)
        rows.append(
            {
                "phase": "rl",
                "step": i + 1,
                "time_s": 0.0,
                "episodes": batch * (i + 1),
                "engine/decisions": decisions,
                "engine/seconds": seconds,
                "engine/control_steps": 2 * decisions,
                "engine/wait_seconds": 0.0,
                "engine/env_utilisation": sum(took) / (seconds * slots),
                "engine/policy_batch": 1.0,
                "engine/policy_seconds": CALL * decisions,
                "time/update": 0.5,
                "time/iteration": seconds + 0.5,
                "time/evaluate": 0.0,
                "rollout/success": wins / batch,
                "rollout/control_steps": 2 * decisions / batch,
                "rollout/control_steps_to_success": 4.0 if wins else None,
                **{f"engine/{n}": float(np.quantile(took, q)) for n, q in EPISODE_SECONDS.items()},
            }
        )
        spent.append(seconds + 0.5)
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder, sum(spent[count // 4 :]) / (count - count // 4)


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("slots, batch", [(4, 16), (8, 16), (4, 64)])
def test_a_plan_counts_heavy_tails_in(tmp_path, tail, slots, batch):
    """Within 15 % of what was measured, where everybody waits for the slowest episode; with one
    mean for all it was too little by up to half."""
    folder, seconds = noted(tmp_path / "run", random.Random(7), TAILS[tail], slots, batch, 60)
    found = measured(folder)
    assert found.seconds == pytest.approx(seconds)
    assert simulate(found.times, found.setup).seconds == pytest.approx(seconds, rel=0.15)
    flat = simulate(dataclasses.replace(found.times, pace=()), found.setup).seconds
    assert flat < 0.85 * seconds or tail in ("none", "lognormal", "Pareto 3")


@pytest.mark.parametrize("tail", ["lognormal", "Pareto 3", "Pareto 1.5"])
def test_so_does_the_plan_of_another_setup(tmp_path, tail):
    """From four slots and 16 episodes an iteration to twelve and 48, which were played out for
    comparison."""
    folder, _ = noted(tmp_path / "run", random.Random(3), TAILS[tail], 4, 16, 100)
    found, rng = measured(folder), random.Random(11)
    wanted = 0.5 * 3 + sum(played(rng, TAILS[tail], 12, 48)[0] for _ in range(2000)) / 2000
    asked = dataclasses.replace(found.setup, slots=12, cores=12, batch=48)
    assert simulate(found.times, asked).seconds == pytest.approx(wanted, rel=0.15)


def test_the_episodes_of_an_iteration_by_hand(tmp_path):
    """Eight, two of them successes of 2 decisions, the others of 6. All took 0.4 s: a decision
    three times as long in the short ones. One took 4 s; the seventh lies at 0.8125, before the rise
    from 0.9 on."""
    assert measured(recorded(tmp_path / "old")).times.pace == ()
    alike = {f"engine/{name}": 0.4 for name in EPISODE_SECONDS}
    times = measured(recorded(tmp_path / "alike", **alike)).times
    assert times.decisions == pytest.approx((2.0, 2.0, *(6.0,) * 6) * 6)
    # 0.2, 0.067 s of a decision; the mean is 0.08
    assert times.pace == pytest.approx((2.5, 2.5, *(2.5 / 3,) * 6) * 6)
    slow = measured(
        recorded(tmp_path / "slow", **alike | {"engine/episode_seconds_max": 4.0})
    ).times
    mean = (7 * 0.4 + 4.0) / 40
    assert slow.pace == pytest.approx(
        (*(0.2 / mean,) * 2, *(0.4 / 6 / mean,) * 5, 4.0 / 6 / mean) * 6
    )
    assert sum(n * pace for n, pace in zip(slow.decisions, slow.pace)) == pytest.approx(
        sum(slow.decisions)
    )
