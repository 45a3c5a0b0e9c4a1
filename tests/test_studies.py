"""Studies: frozen plans, runs that go on, what several seeds can and cannot say, and a method that
comes later."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from console_stub import until

from vla_rl import cli, splits
from vla_rl.config.episodes import FIRST_TEST_STATE, EvaluateConfig
from vla_rl.errors import ConfigError, UserError
from vla_rl.evaluation import verdict
from vla_rl.reporting import verdict as pages
from vla_rl.run import study, study_added, study_verdict

ROOT = Path(__file__).resolve().parent.parent
PLAN = {
    "name": "two",
    "run": "toy",
    "seeds": 3,
    "measure": "rl",
    "methods": {"ppo": [], "slow": ["algorithm.learning_rate=1e-4"]},
}


def plan(tmp_path: Path, **changes: object) -> Path:
    path = tmp_path / "two.yaml"
    path.write_text(json.dumps({**PLAN, **changes}))  # (JSON is YAML)
    return path


# --------------------------------------------------------------------------------------- statistics
def test_interquartile_means_are_rliables():
    """Numbers of rliable 1.2.0: metrics.aggregate_iqm, scipy's trim_mean of a quarter."""
    a = [0.1, 0.5, 0.55, 0.6, 0.9, 0.62, 0.3, 0.7, 0.71, 0.45]
    found = [float(verdict.interquartile_mean(np.array(a[:n]))) for n in (10, 5, 7)]
    assert found == pytest.approx([0.57, 0.55, 0.514])
    point, low, high = verdict.aggregate(np.array([[0, 1], [2, 3], [4, 9], [5, 5], [7, 8.0]]))
    assert point == pytest.approx(4 + 1 / 3) and low < point < high  # over runs and tasks
    assert verdict.aggregate(np.full((3, 2), 0.5)) == (0.5, 0.5, 0.5)


def test_the_probability_of_improvement_is_rliables():
    """0.68333 by metrics.probability_of_improvement; by hand 12 of 15 and 8.5 of 15 wins."""
    c, d = np.array([[0, 1], [2, 3], [4, 9], [5, 5], [7, 8.0]]), np.array([[1, 1], [2, 4], [4, 4]])
    point, low, high = verdict.improvement(c, d)
    assert point == pytest.approx(0.6833333) and low < point < high
    assert verdict.improvement(d, c)[0] == pytest.approx(1 - point)
    assert verdict.improvement(c + 10, d) == (1.0, 1.0, 1.0)
    assert verdict.improvement(d, d)[0] == 0.5


def test_a_stratified_bootstrap_draws_each_task_by_itself():
    drawn = verdict.resampled(np.array([[0.0, 10.0], [1.0, 11.0], [2.0, 12.0]]))
    assert set(drawn[..., 0].ravel()) == {0, 1, 2} and set(drawn[..., 1].ravel()) == {10, 11, 12}
    assert (drawn[..., 0] + 10 != drawn[..., 1]).any()  # not whole rows
    np.testing.assert_allclose(drawn.mean((0, 1)), [1, 11], atol=0.02)


def test_methods_that_were_looked_at_unlike_often_meet_on_one_grid():
    curves = {
        "often": {1: [(0, 0.0), (50, 0.5), (100, 1.0)], 2: [(0, 0.2), (100, 0.8)]},
        "once": {1: [(0, 0.1), (200, 0.9)], 2: [(0, 0.1), (80, 0.5)]},
    }
    found = verdict.on_a_grid(curves, points=2)
    assert found["grid"] == [0, 40, 80]  # as far as every run has gone
    often, once = found["methods"]["often"], found["methods"]["once"]
    assert often["success"] == pytest.approx([0.1, (0.4 + 0.44) / 2, (0.8 + 0.68) / 2])
    assert once["success"] == pytest.approx([0.1, (0.26 + 0.3) / 2, (0.42 + 0.5) / 2])
    assert (often["looks"], once["looks"]) == (2, 2) and once["low"][2] == pytest.approx(0.42)
    assert verdict.on_a_grid({"none": {}}) == {}


def test_signs_are_tested_exactly():
    assert verdict.sign_test([0.1, 0.2, 0.3]) == 2 / 8  # both ends of eight patterns
    assert verdict.sign_test([1.0, -1.0]) == 1.0
    # 1+2+3-… : of 16 patterns the sums 10, 8 and their negatives are as far out as 8
    assert verdict.sign_test([-1.0, 2.0, 3.0, 4.0]) == 4 / 16
    assert verdict.sign_test([0.01] * 20) < 1e-3


def test_holm_corrects_for_the_number_of_pairs():
    assert verdict.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert verdict.holm([]) == []


def test_two_seeds_are_not_enough_and_ten_are():
    def scores(n: int) -> dict[str, dict[int, list[float]]]:
        return {
            "a": {i: [0.5 + 0.01 * (i % 3)] for i in range(n)},
            "b": {i: [0.7 + 0.01 * (i % 2)] for i in range(n)},
            "c": {i: [0.5 + 0.01 * ((i + 1) % 3)] for i in range(n)},
        }

    assert {p.verdict for p in verdict.pairs(scores(2))} == {"not enough seeds"}
    found = {(p.a, p.b): p for p in verdict.pairs(scores(10))}
    assert found["a", "b"].verdict == "b is better" and found["a", "b"].better == 1.0
    assert found["a", "c"].verdict == "not told apart"
    assert found["b", "c"].verdict == "b is better" and found["b", "c"].difference < 0
    pair = found["a", "b"]
    assert pair.low < pair.difference < pair.high and pair.corrected == pytest.approx(3 * 2 / 2**10)
    assert verdict.pairs({"a": {1: [0.5]}, "b": {2: [0.5]}}) == []  # no seed in common
    new = verdict.pairs(scores(10), new="b")  # two comparisons, not three
    assert [(p.a, p.b) for p in new] == [("a", "b"), ("c", "b")]
    assert new[0].corrected == pytest.approx(2 * 2 / 2**10)


def test_power_is_what_the_formula_gives():
    # of many seeds the t test is the z test: Φ(√n d/s − 1.96)
    n, d, s = 50, 0.03, 0.1
    expected = 0.5 * (1 + math.erf((math.sqrt(n) * d / s - 1.96) / math.sqrt(2)))
    assert verdict.power(d, s, n) == pytest.approx(expected, abs=0.03)
    assert verdict.power(0.05, 0.08, 3) == 0 and 0.3 < verdict.power(0.05, 0.08, 10) < 0.6
    # by signs, five seeds yield p 2/32 at the least: not 5 %, and of six not a third of it
    assert verdict.power(1.0, 0.01, 5) == 0 and verdict.power(1.0, 0.01, 6) == 1
    assert verdict.power(1.0, 0.01, 6, pairs=3) == 0 and verdict.power(1.0, 0.01, 7, pairs=3) == 1
    # the two tests meet where one takes over from the other
    near = [verdict.power(0.06, 0.08, n) for n in (12, 13)]
    assert near[0] == pytest.approx(near[1], abs=0.06)


# ------------------------------------------------------------------------------------- the test set
def test_the_two_held_out_sets_share_no_state():
    """A hundred states each: of the toy as it starts, of the tabletop suite as it places things."""
    from sim.toy import ToyConfig, ToyReach
    from vla_rl.specs import EpisodeSpec

    config, toy = EvaluateConfig(), ToyReach(ToyConfig())
    tests = config.test_states(ToyConfig())
    assert tests == range(FIRST_TEST_STATE, FIRST_TEST_STATE + 100)
    task = toy.tasks[0].task_id

    def starts(states: range) -> set[bytes]:
        episodes = [EpisodeSpec(task, i, split="held_out") for i in states]
        return {toy.start(0, e).privileged.tobytes() for e in episodes}

    def placed(states: range) -> set[tuple[float, ...]]:
        draws = [splits.rng("lift_cube", i, "held_out") for i in states]
        return {tuple(splits.sample_xy(d, (-0.1, -0.1), (0.1, 0.1), "held_out")) for d in draws}

    for made in (starts, placed):
        choosing, unseen = made(range(config.episodes_per_task)), made(tests)
        assert len(choosing) == len(unseen) == 100 and not choosing & unseen


def test_of_fifty_official_states_the_test_set_has_the_last():
    from sim.libero.settings import LiberoConfig

    libero = LiberoConfig()
    half = EvaluateConfig(episodes_per_task=25, test_episodes=25)
    assert half.test_states(libero) == range(25, 50)
    assert half.test_states(LiberoConfig(init_states="sampled")).start == FIRST_TEST_STATE
    with pytest.raises(
        ConfigError, match=r"episodes_per_task=26 .*there are 50 of each task: choo"
    ):
        EvaluateConfig(episodes_per_task=26, test_episodes=25).test_states(libero)


def test_a_layout_of_libero_plus_has_no_second_state_for_a_test_set():
    from sim.libero.settings import LiberoConfig

    half = EvaluateConfig(episodes_per_task=25, test_episodes=25)
    assert half.test_states(LiberoConfig(suite="libero_plus_goal_camera")) == range(25, 50)
    with pytest.raises(ConfigError, match="there are 1 of each task"):
        half.test_states(LiberoConfig(suite="libero_plus_goal_layout"))


# -------------------------------------------------------------------------------------------- plans
def test_a_plan_is_frozen_once(tmp_path):
    found = study.read(plan(tmp_path))
    first = study.freeze(found, tmp_path / "two")
    assert study.freeze(study.read(plan(tmp_path)), tmp_path / "two") == first
    assert len({*first["seeds"]}) == 3 and min(first["seeds"]) >= study.FIRST_DRAWN
    other = study.read(plan(tmp_path, difference=0.1))
    with pytest.raises(ConfigError, match=r"another plan of this name .*give the new one another"):
        study.freeze(other, tmp_path / "two")
    assert "2 methods x 3 seeds = 6 runs" in study.described(found)
    given = study.freeze(study.read(plan(tmp_path, seeds=[4, 3])), tmp_path / "given")
    assert (given["seeds"], given["drawn"], first["drawn"]) == ([4, 3], False, True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"methods": {}}, "name one or more"),
        ({"methods": {"ppo": [], "start": []}}, "none of them 'start'"),
        ({"methods": {"ppo": [], "../x": []}}, r"'\.\./x' is no name of a folder"),
        ({"methods": {"ppo": [], "b": "x=1"}}, "b: give a list of overrides"),
        ({"methods": {"ppo": [], "b": ["rl.iteration=3"]}}, "methods.b: .*rl.iteration"),
        ({"methods": {"ppo": [], "b": ["evaluate.seed=1"]}}, "methods.b is judged by other episod"),
        ({"methods": ["ppo"]}, "a mapping with name and methods"),
        ({"seeds": 1}, "seeds=1: give 2 or more"),
        ({"seeds": [3, 3]}, r"seeds=\[3, 3\]: give each seed once"),
        ({"seeds": "many"}, "seeds='many' has to be of type int"),
        ({"difference": 5}, "difference=5: give a share"),
        ({"measure": "luck"}, "measure='luck': give test, test_best, sft"),
        ({"look_every": 100}, "look_every=100 is no multiple of rl.episodes_per_iteration=128"),
        ({"tuning": {"sac": "none"}}, "tuning speaks of 'sac', which is no method"),
        ({"seed": 3}, "unknown key 'seed'; its keys are name, methods"),
        ({"name": "a/b"}, "'a/b' is no name of a folder"),
    ],
)
def test_bad_plans_name_the_key(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        study.read(plan(tmp_path, **changes))


def test_a_file_that_is_no_yaml_is_named(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("methods: [")
    with pytest.raises(ConfigError, match=r"x\.yaml cannot be read as YAML"):
        study.read(path)
    with pytest.raises(ConfigError, match=r"none\.yaml cannot be read"):
        study.read(tmp_path / "none.yaml")


def test_all_methods_are_looked_at_after_as_many_episodes(tmp_path):
    """And the test set's phase is added to whatever phases a method has."""
    own = {"ppo": [], "small": ["rl.episodes_per_iteration=64", "phases=[rl,eval_rl,report]"]}
    found = study.read(plan(tmp_path, methods=own, look_every=256, measure="test"))
    large, small = (found.overrides(of) for of in own.values())
    assert "rl.eval_every=2" in large and "rl.eval_every=4" in small
    assert small[-2] == "phases=[rl,eval_rl,eval_test,report]"
    assert "eval_test" not in " ".join(study.read(plan(tmp_path)).overrides([]))  # measure=rl


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks" / "studies").glob("*.yaml")), ids=str)
def test_the_plans_of_this_project_are_plans(path):
    assert study.read(path).name == path.stem


# --------------------------------------------------------------------------------------------- runs
def test_runs_go_on_and_what_failed_is_named(tmp_path):
    folder = tmp_path / "two"
    frozen = study.freeze(study.read(plan(tmp_path)), folder)
    asked, said = [], []

    def train(overrides, log, cores, code):
        """Writes the run's evaluation; one run fails at first."""
        asked.append(list(overrides))
        name = next(o for o in overrides if o.startswith("name=")).partition("=")[2]
        if name == f"slow/seed_{frozen['seeds'][1]}" and len(said) < 4:
            return 1
        run = folder / name
        run.mkdir(parents=True)
        if name.startswith(study.START):
            (run / "eval_sft.json").touch()
            return 0
        wins = 3 if name.startswith("ppo") else 1
        outcomes = [{"task_id": "reach", "success": i < wins} for i in range(4)]
        (run / "eval_rl.json").write_text(json.dumps({"outcomes": outcomes}))
        return 0

    def make() -> None:
        study.make(frozen, folder, study.methods_of(frozen), say=said.append, train=train)

    with pytest.raises(UserError, match=r"1 runs failed.*slow, seed \d+ \(see .*log\)"):
        make()
    found = study_verdict.whole(frozen, folder, [])
    assert found["missing"] == 1 and "1 runs are missing" in pages.text(found)
    with pytest.raises(
        UserError, match=r"--least 0.5 in slow, seed \d+: 25%; .*1 runs are missing"
    ):
        study_verdict.require(found, 0.5)
    assert any(f"seed={seed}" in asked[0] for seed in frozen["seeds"])
    said += ["", ""]
    count = len(asked)
    make()
    assert count == 3 + 6 and len(asked) == count + 1  # the one run that was missing
    found = study_verdict.whole(frozen, folder, [])
    assert found["missing"] == 0 and [m["mean"] for m in found["methods"]] == [0.75, 0.25]
    (pair,) = found["pairs"]
    assert pair["difference"] == -0.5 and pair["verdict"] == "not enough seeds"  # of three: 2/8
    shown = pages.text(found)
    assert "slow - ppo" in shown and "not enough seeds" in shown and frozen["sha256"][:12] in shown
    assert "on the held-out states that also choose" in shown and "tuning not stated: ppo" in shown


def test_interrupted_it_begins_no_other_run(tmp_path, monkeypatch):
    frozen, begun = study.freeze(study.read(plan(tmp_path)), tmp_path / "two"), []

    def train(overrides, log, cores, code, stopped):
        begun.append(log)
        os.kill(os.getpid(), signal.SIGINT)
        assert stopped.wait(10.0)
        return 130

    monkeypatch.setattr(study, "run_alone", train)
    with pytest.raises(KeyboardInterrupt):
        study.make(frozen, tmp_path / "two", study.methods_of(frozen), say=begun.append)
    assert until(lambda: not any("ThreadPool" in t.name for t in threading.enumerate()))
    assert len(begun) == 2, "a run, and that it has failed"


def test_a_run_is_told_of_an_interrupt_by_the_study_alone(tmp_path, monkeypatch):
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setattr(study.sys, "executable", str(program))
    stopped = threading.Event()
    stopped.set()
    assert study.run_alone([], tmp_path / "log", [], stopped=stopped) == -signal.SIGTERM


def test_a_run_ends_with_a_study_that_was_killed(tmp_path):
    (tmp_path / "vla_rl").mkdir()
    (tmp_path / "vla_rl" / "__init__.py").touch()
    waits = (
        "import os, time\ndef main():\n    print(os.getpid(), flush=True)\n    time.sleep(300)\n"
    )
    (tmp_path / "vla_rl" / "cli.py").write_text(waits)
    log = tmp_path / "log"
    call = (
        "import sys, threading; from pathlib import Path; from vla_rl.run import study; "
        "study.run_alone([], Path(sys.argv[1]), [], Path(sys.argv[2]), stopped=threading.Event())"
    )
    words = [sys.executable, "-c", call, str(log), str(tmp_path)]
    with subprocess.Popen(words, cwd=ROOT) as killed:
        run = int(until(lambda: log.exists() and log.read_text().strip()))
        state = Path(f"/proc/{run}/stat")
        assert state.exists() and os.getsid(run) == run, "no Ctrl-C reaches it by itself"
        killed.kill()
    # (who is to fetch its exit status may take a while)
    assert until(lambda: not state.exists() or ") Z " in state.read_text())


def test_some_methods_first(tmp_path):
    frozen = study.freeze(study.read(plan(tmp_path)), tmp_path / "out")
    every = [method.name for method in study.methods_of(frozen)]
    assert [m.name for m in study.methods_of(frozen, every[1:])] == every[1:] != every
    with pytest.raises(UserError, match=f"no absent; it has {', '.join(every)}"):
        study.methods_of(frozen, [every[0], "absent"])


# ----------------------------------------------------------------------------- a method comes later
TINY = [
    "collect.episodes_per_task=6",
    "sft.updates=3",
    "sft.validation_episodes=1",
    "rl.iterations=1",
    "rl.episodes_per_iteration=8",
    "evaluate.episodes_per_task=4",
    "evaluate.test_episodes=5",
    "evaluate.video_episodes=0",
]


@pytest.mark.slow
def test_the_example_joins_a_frozen_study(tmp_path, monkeypatch, capsys):
    """From plan to verdict and page, then examples/my_algorithm.py on the same seeds and starts."""
    made = []

    def train(overrides, log, cores, code, stopped):
        """As `study.run_alone`, in this process."""
        made.append(next(o for o in overrides if o.startswith("name="))[5:])
        with pytest.MonkeyPatch.context() as patch:
            if code is not None:
                patch.syspath_prepend(code)
            return cli.main(["train", *overrides])

    monkeypatch.setattr(study, "run_alone", train)
    path = plan(tmp_path, seeds=2, measure="test", methods={"ppo": []}, common=TINY, look_every=8)
    where, kept = ["--output-dir", str(tmp_path / "out")], tmp_path / "v.json"
    assert not cli.main(["study", "run", str(path), *where])
    before, folder = list(made), tmp_path / "out" / "two"
    code = str(ROOT / "examples" / "my_algorithm.py")
    own = ["critic=none", "algorithm.start_decisions=8"]
    add = ["study", "add", code, str(path), *where, "--json", str(kept), *own]
    assert not cli.main(add), capsys.readouterr().err
    frozen = json.loads((folder / study.FROZEN).read_text())
    seeds = frozen["seeds"]
    assert before == [f"{name}/seed_{seed}" for seed in seeds for name in ("start", "ppo")]
    assert made[4:] == [f"my_algorithm/seed_{seed}" for seed in seeds]  # the starts are there

    found = json.loads(kept.read_text())
    assert found["set"] == "test" and found["missing"] == 0 and found["pairs"] == []
    (added,) = found["added"]
    assert added["of"] == found["sha256"] and added["class"] == "my_algorithm:ClonedSuccess"
    (pair,) = added["pairs"]
    assert (pair["a"], pair["b"], pair["verdict"]) == ("ppo", "my_algorithm", "not enough seeds")
    looks = {name: of["looks"] for name, of in added["curves"]["seconds"]["methods"].items()}
    assert looks == {"ppo": 2, "my_algorithm": 2}
    shown, page = capsys.readouterr().out, (folder / "report.html").read_text()
    for said in (shown, page):
        assert "was added after plan" in said and "whose states chose nothing" in said

    for name in ("ppo", "my_algorithm"):  # what was judged by what
        run = folder / name / f"seed_{seeds[0]}"
        sets = {}
        for stem in ("rl", "test", "test_best"):
            evaluation = json.loads((run / f"eval_{stem}.json").read_text())
            sets[stem] = {o["init_state_id"] for o in evaluation["outcomes"]}
            assert evaluation["set"] == ("held_out" if stem == "rl" else "test")
        assert len(sets["rl"]) == 4 and len(sets["test"]) == 5 and sets["test"] == sets["test_best"]
        assert not sets["rl"] & sets["test"]
        summary = json.loads((run / "summary.json").read_text())
        assert list(summary["tests"]) == ["test", "test_best"]
        assert (
            list(summary["evaluations"]) == ["sft", "rl"] and summary["comparison"]["trials"] == 4
        )
        assert "On the test set" in (run / "report.html").read_text()

    def again(file: str = code, **options: str) -> dict:
        return study_added.add(Path(file), frozen, folder, own, **options)

    assert again()["sha256"] == added["sha256"]
    with pytest.raises(ConfigError, match="what was added does not change"):
        again(tuning="three rates")
    with pytest.raises(ConfigError, match="the study has a 'ppo' already"):
        again(name="ppo")
    with pytest.raises(ConfigError, match=r"gone\.py cannot be read"):
        again("gone.py")


def test_only_the_runs_of_what_was_added_are_made(tmp_path):
    """And it is compared with each of the others, on their seeds, by a copy of its file."""
    folder, code = tmp_path / "two", ROOT / "examples" / "my_algorithm.py"
    frozen = study.freeze(study.read(plan(tmp_path, seeds=6)), folder)
    asked = []

    def train(overrides, log, cores, code):
        name = next(o for o in overrides if o.startswith("name=")).partition("=")[2]
        asked.append((name, list(overrides), code))
        (folder / name).mkdir(parents=True)
        if name.startswith(study.START):
            (folder / name / "eval_sft.json").touch()
        else:
            wins = {"ppo": 2, "slow": 1, "mine": 4}[name.partition("/")[0]]
            outcomes = [{"task_id": "reach", "success": i < wins} for i in range(4)]
            (folder / name / "eval_rl.json").write_text(json.dumps({"outcomes": outcomes}))
        return 0

    study.make(frozen, folder, study.methods_of(frozen), train=train)
    before = study_verdict.whole(frozen, folder, [])
    added = study_added.add(code, frozen, folder, ["critic=none"], name="mine")
    asked.clear()
    copy = study_added.copy_of(added, folder)
    with study_added.importable(copy):
        study.make(frozen, folder, [study_added.method_of(added, folder)], train=train)
    assert [name for name, *_ in asked] == [f"mine/seed_{seed}" for seed in frozen["seeds"]]
    _, overrides, place = asked[0]
    assert copy.read_text() == code.read_text() and place == copy.parent
    own = ["algorithm=ppo", "algorithm.type=my_algorithm:ClonedSuccess", "critic=none"]
    assert [o for o in overrides if o in own] == own
    assert f"checkpoint={folder}/start/seed_{frozen['seeds'][0]}/checkpoints/sft" in overrides

    found = study_verdict.whole(frozen, folder, study_added.all_of(frozen, folder))
    (one,) = found["added"]
    assert {k: found[k] for k in before if k != "added"} == {
        k: before[k] for k in before if k != "added"
    }
    assert [(p["a"], p["b"], p["difference"]) for p in one["pairs"]] == [
        ("ppo", "mine", 0.5),
        ("slow", "mine", 0.75),
    ]
    # of six seeds 2/64, twice
    assert [p["corrected"] for p in one["pairs"]] == [0.0625, 0.0625]
    assert one["of"] == frozen["sha256"] and "added after plan" in pages.text(found)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("mine.py", "x = 1\n", "there are: none"),
        ("mine.py", "class A:\n def score(self, t): pass\n", "there are: none"),  # no Config
        ("mine.py", "import nothing_such\n", "mine.py cannot be imported: .*nothing_such"),
        ("mine.py", "def (\n", "mine.py cannot be imported"),
        ("json.py", "x = 1\n", "another module called json"),
        ("torch.py", "x = 1\n", "another module called torch"),
        ("my-own.py", "x = 1\n", "name is a module's"),
    ],
)
def test_a_file_without_one_component_is_refused(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        study_added.component(tmp_path / name)


def test_what_fails_beside_a_file_is_not_called_its_import(tmp_path):
    (tmp_path / "mine.py").write_text("x = 1\n")
    with (
        pytest.raises(ImportError, match="another one"),
        study_added.importable(tmp_path / "mine.py") as module,
    ):
        assert module.x == 1
        raise ImportError("another one")
    assert "mine" not in sys.modules


def test_what_a_file_has_is_found_by_its_methods(tmp_path):
    assert study_added.component(ROOT / "examples" / "my_reward.py") == (
        "reward",
        "my_reward:CalmSuccess",
    )
    page = (ROOT / "docs" / "how_to" / "adding_your_own.md").read_text()
    code = page.partition("# my_policy.py\n")[2].partition("```")[0]
    (tmp_path / "my_policy.py").write_text(code)
    found = study_added.component(tmp_path / "my_policy.py")
    assert found == ("policy", "my_policy:GaussianPolicy")
    method = study_added.method_of(
        {"method": "p", "overrides": ["policy.type=x:Y"], "kind": found[0], "file": "x.py"},
        tmp_path,
    )
    own = study.read(plan(tmp_path, measure="test"))
    first, last = method.steps(own, own.overrides([], method.own_start), tmp_path, 7)
    assert "phases=[sft,eval_sft,reward,rl,eval_rl,eval_test,report]" in last  # it imitates itself
    assert f"dataset={tmp_path}/start/seed_7/dataset" in last and "checkpoint" not in " ".join(last)
    assert "phases=[collect,sft,eval_sft,report]" in first
