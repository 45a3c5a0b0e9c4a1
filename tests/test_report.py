"""The report page and summary.json, from run folders of every degree of completeness."""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from typing import ClassVar

import numpy as np
import pytest

from vla_rl import build
from vla_rl.diagnostics import Alarm, Diagnostic
from vla_rl.display.charts import (
    Interval,
    Series,
    count_bars,
    episode_squares,
    interval_chart,
    line_chart,
    nice_ticks,
    percent,
    running_mean,
    short,
    stacked_bar,
    thin_out,
)
from vla_rl.errors import UserError
from vla_rl.evaluation.outcome import EpisodeOutcome, EvaluationResult
from vla_rl.evaluation.statistics import mean_interval, wilson_interval
from vla_rl.evaluation.video import Clip, have_video
from vla_rl.monitoring.metrics import MetricsLogger, write_json
from vla_rl.options import AlgorithmFigures, view
from vla_rl.reporting.diagnostics import warnings
from vla_rl.reporting.figures import learning_curve, paired, verdict
from vla_rl.reporting.page import summary, write_report
from vla_rl.reporting.runs import find_runs, load_run
from vla_rl.reporting.study import group_runs, median_curve, spread

TASKS = ("lift_cube", "stack <b>")


def evaluation(solved, episodes=50, tasks=TASKS, **changes):
    outcomes = [
        EpisodeOutcome(t, i, f"do {t}", i < solved, 30 + i, 5, 100.0)
        for t in tasks
        for i in range(episodes)
    ]
    values = {
        "split": "held_out",
        "seed": 0,
        "deterministic": True,
        "control_hz": 20.0,
        "jerk_unit": "m/s³",
    }
    values |= {"seconds": 9.0, "seconds_per_decision": 0.002, "latency_s": 0.011} | changes
    return EvaluationResult(outcomes, **values)


def make_run(path, before=20, after=45, seed=0, iterations=12, video=False, config=""):
    rng = random.Random(seed)
    path.mkdir(parents=True)
    if before is not None:
        evaluation(before).save(path / "eval_sft.json")
    if after is not None:
        evaluation(after).save(path / "eval_rl.json")
    with MetricsLogger(path) as logger:
        for step in range(10, 210, 10):
            logger.log("sft", step, {"sft/loss": 3 / step, "sft/learning_rate": 1e-3})
        for i in range(1, iterations + 1):
            values = {
                "rollout/success": min(1.0, i / iterations),
                "ppo/approx_kl": rng.random() / 100,
                "ppo/entropy": 1 - i / 20,
            }
            values |= {
                "ppo/clip_fraction": 0.1,
                "ppo/explained_variance": i / iterations,
                "ppo/skipped_updates": int(i > 3) * 2,
            }
            values |= {"episodes": 64 * i, "control_steps": 5000 * i}
            if i % 4 == 1:  # before iterations 1, 5 and 9
                values["eval/success"] = 0.4 + i / 100
                values["eval/success/lift_cube"] = 0.5 + i / 100
            values |= {
                "engine/retries": int(i == 2),
                "engine/seconds": 20.0,
                "engine/policy_seconds": 8.0,
                "time/update": 10.0,
            }
            logger.log("rl", i, values)
    phases = {
        "collect": {"seconds": 60.0, "complete": True, "episodes": 100, "control_steps": 4000},
        "sft": {"seconds": 120.0, "complete": True},
        "rl": {"seconds": 600.0, "complete": True, "episodes": 768, "control_steps": 60000},
        "peak_memory_bytes": 3 << 30,
    }
    write_json(path / "phases.json", phases)
    write_json(
        path / "versions.json",
        {"cpu": "Some CPU", "cpu_cores": 2, "packages": {"torch": "2.10"}, "git_commit": "abc"},
    )
    (path / "config.yaml").write_text(f"name: test\nseed: {seed}\nnote: a < b & c\n{config}")
    if video and have_video():
        from vla_rl.evaluation.clips import write_videos

        clip = Clip(np.full((6, 16, 16, 3), 90, np.uint8), 10.0, True, "lift_cube #0")
        write_videos(evaluation(20, clips=[clip]), path / "videos" / "sft.mp4")
        write_videos(evaluation(45, clips=[clip]), path / "videos" / "rl.mp4")
    return path


class Page(HTMLParser):
    """Checks that tags nest, and collects what the page would load."""

    VOID = frozenset({"meta", "br", "img", "link", "input", "line", "circle", "polyline"})

    def __init__(self, text):
        super().__init__()
        self.stack, self.sources, self.text, self.tags = [], [], [], []
        self.feed(text)
        assert self.stack == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.sources += [
            v for k, v in attrs if k in ("src", "href", "data", "poster", "action", "srcset") and v
        ]
        if tag not in self.VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.stack.pop() == tag

    def handle_data(self, data):
        if not self.stack or self.stack[-1] not in ("script", "style"):
            self.text.append(data.replace("\u00a0", " "))

    @property
    def words(self):
        return " ".join(" ".join(self.text).split())


# ----------------------------------------------------------------------------------------- the page
def test_page_of_a_whole_run(tmp_path):
    run = make_run(tmp_path / "quickstart", video=True)
    path = write_report(run)
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert (
        path == run / "report.html"
        and "RL raised success from 40 % to 90 % on 100 held-out episodes" in page.words
    )
    assert "+50 points on the same episodes" in page.words and "p < 0.0001" in page.words
    low, high = wilson_interval(90, 100)
    assert f"{low * 100:.1f} to {high * 100:.1f} %" in page.words
    for title in (
        "Success",
        "Learning",
        "SFT loss",
        "Entropy",
        "Tasks",
        "Where the time goes",
        "To repeat this run",
        "Some CPU",
    ):
        assert title in page.words
    assert (
        "2 updates of RL were skipped" in page.words and "1 episode of RL ran again" in page.words
    )
    assert "stack <b>" in page.words and "a < b & c" in page.words  # escaped: shown as written
    assert page.tags.count("svg") >= 8
    # nothing is fetched: every source is inside the page
    assert all(s.startswith("data:") for s in page.sources) and not re.search(
        r"url\(|@import|https?://", text
    )
    if have_video():
        assert (
            page.tags.count("video") == 2
            and sum(s.startswith("data:video/mp4;base64,") for s in page.sources) == 2
        )


def test_summary_for_scripts(tmp_path):
    run = make_run(tmp_path / "r")
    write_report(run)
    s = json.loads((run / "summary.json").read_text())
    assert s["verdict"] == "RL raised success from 40 % to 90 % on 100 held-out episodes"
    assert s["evaluations"]["sft"]["successes"] == 40 and s["evaluations"]["rl"]["rate"] == 0.9
    assert [s["evaluations"]["rl"][k] for k in ("low", "high")] == pytest.approx(
        wilson_interval(90, 100)
    )
    assert s["evaluations"]["rl"]["tasks"]["lift_cube"]["episodes"] == 50
    assert (
        s["comparison"]["difference"] == 0.5
        and s["comparison"]["only_b"] == 50
        and s["comparison"]["after"] == "rl"
    )
    assert s["seconds"] == 780 and s["control_steps"] == 64000 and s["peak_memory_bytes"] == 3 << 30
    assert s["seeds"] == [0] and s["runs"][0]["phases"]["rl"]["episodes"] == 768


def test_a_task_that_fell_is_named_and_seen_on_the_way(tmp_path):
    run = make_run(tmp_path / "r")
    after = evaluation(45)
    fallen = [replace(o, success=o.task_id == "lift_cube" and o.success) for o in after.outcomes]
    replace(after, outcomes=fallen).save(run / "eval_rl.json")
    page = page_of(run)
    assert (
        "Lower than before by more than chance explains: stack <b> (20 to 0 of 50)." in page.words
    )
    assert summary_of(run)["comparison"]["fallen_tasks"] == ["stack <b>"]
    assert (
        "on the way, %" in page.words and "51, 55, 59" in page.words and "41, 45, 49" in page.words
    )
    (run / "metrics.jsonl").unlink()
    assert "on the way" not in page_of(run).words


def phases_of(run):
    return json.loads((run / "phases.json").read_text())


def page_of(folder):
    return Page(write_report(folder).read_text(encoding="utf-8"))


def summary_of(folder):
    return json.loads((folder / "summary.json").read_text())


@pytest.mark.parametrize(
    "keep",
    [
        (),
        ("metrics.jsonl",),
        ("phases.json",),
        ("eval_rl.json",),
        ("metrics.jsonl", "eval_sft.json"),
    ],
)
def test_partial_runs_have_a_page_too(tmp_path, keep):
    run = make_run(tmp_path / "r")
    for path in list(run.iterdir()):
        if path.name not in keep:
            path.unlink()
    if not keep:
        with pytest.raises(UserError, match=r"not a run.*outputs"):
            write_report(run)
        return
    page = Page(write_report(run).read_text(encoding="utf-8"))
    expected = {
        "eval_rl.json": "The RL policy solves 90 %",
        "eval_sft.json": "The SFT policy solves 40 %",
    }
    assert next((expected[k] for k in keep if k in expected), "no evaluation yet") in page.words


def test_damaged_files_are_named_not_fatal(tmp_path):
    run = make_run(tmp_path / "r")
    (run / "eval_sft.json").write_text("{")
    (run / "versions.json").write_text("[")
    phases = json.loads((run / "phases.json").read_text())
    phases["rl"]["complete"] = False
    write_json(run / "phases.json", phases)
    page = Page(write_report(run).read_text(encoding="utf-8"))
    assert (
        "eval_sft.json is not an evaluation result" in page.words
        and "versions.json could not be read" in page.words
    )
    assert "Phase “rl” is not complete" in page.words
    with pytest.raises(UserError, match="not a run"):
        find_runs(tmp_path / "nowhere")


def test_verdicts(tmp_path):
    def of(before, after, **changes):
        run = tmp_path / f"{before}-{after}-{len(changes)}"
        make_run(run, before, after, iterations=2)
        if changes:
            evaluation(after, **changes).save(run / "eval_rl.json")
        return [text.replace("\u00a0", " ") for text in verdict(load_run(run))]

    worse, evidence = of(45, 20)
    assert worse == "RL lowered success from 90 % to 40 % on 100 held-out episodes"
    assert "−50 points" in evidence and "SFT alone 50" in evidence
    assert (
        of(25, 26)[0]
        == "RL moved success from 50 % to 52 % on 100 held-out episodes: no more than chance "
        "explains"
    )
    assert (
        of(25, 25)[0]
        == "RL left success at 50 % on 100 held-out episodes: no more than chance explains"
    )
    assert "cannot be compared pairwise" in of(20, 45, seed=3)[1]
    other = load_run(tmp_path / "20-45-1")
    assert paired(other) is None and summary(other)["comparison"] is None


def test_warnings_tell_what_to_do(tmp_path):
    run = tmp_path / "r"
    with MetricsLogger(run) as logger:
        for i in range(1, 5):
            logger.log(
                "rl",
                i,
                {"rollout/success": 0.0, "ppo/clip_fraction": 0.5, "ppo/explained_variance": -0.2},
            )
    write_json(run / "versions.json", {"git_commit": "abc +changes"})
    text = " ".join(warnings([load_run(run)])).replace("\u00a0", " ")
    for part in (
        "50 % of the ratios were clipped",
        "critic explains nothing",
        "No training episode ever succeeded",
        "no commit",
    ):
        assert part in text


@dataclass
class Juggling:
    """Options of an algorithm of a user's own."""

    diagnostics: ClassVar = (
        Diagnostic("juggling/balls", "Balls in the air", "More is braver."),
        Diagnostic(
            "juggling/drops",
            "Drops",
            "Share of balls.",
            share=True,
            alarm=Alarm("It dropped {value} of the balls: throw fewer.", above=0.25),
        ),
    )


class Juggler:
    Config = Juggling


def test_an_algorithm_brings_its_own_charts_and_alarms(tmp_path):
    def run(name, drops, kind):
        folder = make_run(tmp_path / name, config=f"algorithm: {{type: '{kind}'}}\n", iterations=0)
        with MetricsLogger(folder) as logger:
            for i in range(1, 31):  # an alarm looks at the last ten
                figures = {
                    "juggling/balls": i,
                    "juggling/drops": drops if i > 20 else 0.9,
                    "ppo/entropy": 1.0 / i,
                }
                logger.log("rl", i, {"rollout/success": 0.5, **figures})
        return folder

    own = f"{__name__}:Juggler"
    bad, good, other = run("bad", 0.5, own), run("good", 0.25, own), run("other", 0.5, "ppo")
    shown, below = page_of(bad).words.split("All other metrics")
    assert "Balls in the air More is braver." in shown and "juggling" not in below
    assert "ppo/entropy" in below and "Entropy" not in shown  # of another algorithm
    assert "It dropped 50 % of the balls: throw fewer." in shown
    assert "It dropped" not in page_of(good).words
    shown, below = page_of(other).words.split("All other metrics")
    assert "juggling/balls" in below and "Balls" not in shown and "Entropy" in shown
    gone = run("gone", 0.5, "nowhere.to_be:Found")
    assert "juggling/balls" in page_of(gone).words and "It dropped" not in page_of(gone).words


def test_every_algorithm_shows_figures_of_its_own():
    """An option class that inherits another's, as IQLThenSAC's does, has its own."""
    for name in build.names("algorithm"):
        declared = view(build.config_class("algorithm", name), AlgorithmFigures).diagnostics
        assert declared and {d.key.partition("/")[0] for d in declared} == {name}


def test_a_large_video_stays_outside(tmp_path, monkeypatch):
    from vla_rl.reporting import sections

    run = make_run(tmp_path / "r")
    (run / "videos").mkdir(exist_ok=True)
    (run / "videos" / "sft.mp4").write_bytes(b"x" * 100)
    monkeypatch.setattr(sections, "MAX_VIDEO_BYTES", 50)
    page = Page(write_report(run).read_text(encoding="utf-8"))
    assert "sft.mp4 is too large for this page" in page.words and "video" not in page.tags


# ---------------------------------------------------------------------- what SFT sees, how it fails
IMAGE_USE = {
    "validation/loss": 0.5,
    "validation/image_use": 0.3,
    "validation/image_use/front": 0.05,
    "validation/image_use/wrist": 0.25,
    "validation/instruction_use": -0.01,
    "validation/image_spread": 0.4,
}


def add_image_use(run, step=200, **changes):
    row = {
        "phase": "sft",
        "step": step,
        "time_s": 1.0,
        **IMAGE_USE,
        **{f"validation/{k}": v for k, v in changes.items()},
    }
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def test_image_use_is_shown_and_a_blind_policy_warned_about(tmp_path):
    run = make_run(tmp_path / "sees")
    add_image_use(run, 100, image_use=0.1)
    add_image_use(run)
    page, use = page_of(run), summary_of(run)["image_use"]
    assert use == {
        "loss": 0.5,
        "image_use": 0.3,
        "instruction_use": -0.01,
        "image_spread": 0.4,
        "cameras": {"front": 0.05, "wrist": 0.25},
        "update": 200,
        "warning": "",
    }
    assert (
        "Does it use its images?" in page.words
        and "Rise of the loss with other images" in page.words
    )
    for row in (
        "nothing 0.5",
        "all cameras 0.8 +0.3 60 %",
        "wrist alone 0.75 +0.25 50 %",
        "instruction 0.49 −0.01 −2 %",
    ):
        assert row in page.words
    assert "trained on held-out demonstrations" in page.words  # both losses in one chart
    assert "hardly looks" not in page.words and "does not look" not in page.words
    blind = make_run(tmp_path / "blind", seed=11)
    add_image_use(blind, image_use=0.001)
    text = write_report(blind).read_text(encoding="utf-8")
    assert text.index('class="notes alarm"') < text.index('class="tiles"')
    assert "The policy does not look at its images" in text
    assert "does not look at its images" in summary_of(blind)["image_use"]["warning"]
    without = make_run(tmp_path / "without")
    assert "its images" not in page_of(without).words and summary_of(without)["image_use"] is None


def add_failures(run, name, **kinds):
    path = run / f"eval_{name}.json"
    data = json.loads(path.read_text())
    data["total"]["failures"] = kinds
    data["tasks"]["lift_cube"]["failures"] = kinds
    path.write_text(json.dumps(data))


def test_failures_by_kind_before_and_after(tmp_path):
    run = make_run(tmp_path / "r")
    assert (
        "How it fails" not in page_of(run).words
        and summary_of(run)["evaluations"]["rl"]["failures"] == {}
    )
    add_failures(run, "sft", never_reached=10, missed_grasp=45, **{"not told": 5})
    add_failures(run, "rl", missed_grasp=4, out_of_time=6)
    (run / "videos").mkdir()
    for name in ("sft_failure_missed_grasp", "rl_failure_out_of_time", "rl"):
        (run / "videos" / f"{name}.mp4").write_bytes(name.encode())
    page, found = page_of(run), summary_of(run)["evaluations"]
    assert found["sft"]["failures"] == {"never_reached": 10, "missed_grasp": 45, "not told": 5}
    assert found["rl"]["tasks"]["lift_cube"]["failures"] == {"missed_grasp": 4, "out_of_time": 6}
    rows = page.words.partition("Kind SFT of 100 RL of 100 change")[2].partition(
        "One of each kind"
    )[0]
    assert rows.strip() == (
        "never reached 10 (10 %) 0 −10 missed grasp 45 (45 %) 4 (4 %) −41 out of time 0 6 (6 %) +6 "
        "not told 5 (5 %) 0 −5 all failures 60 (60 %) 10 (10 %) −50"
    )
    assert page.tags.count("video") == 3 and "missed grasp · SFT, 45 episodes" in page.words
    watched, _, clips = page.words.partition("How it fails")
    assert "out of time · RL, 6 episodes" in clips and "failure_" not in watched


def test_the_guard_is_heard(tmp_path):
    run = make_run(tmp_path / "r")
    phases = phases_of(run)
    phases["rl"]["guard"] = "1 of 640 episodes succeeded <so far>"
    write_json(run / "phases.json", phases)
    text = write_report(run).read_text(encoding="utf-8")
    assert (
        '<ul class="notes alarm"><li>1 of 640 episodes succeeded &lt;so far&gt;</li></ul>' in text
    )
    assert summary_of(run)["guard"] == "1 of 640 episodes succeeded <so far>"


def test_a_killed_run_shows_how_far_rl_came(tmp_path):
    run = make_run(tmp_path / "r", after=None, iterations=28, config="rl:\n  iterations: 50\n")
    phases = phases_of(run)
    del phases["rl"]  # written when a phase ends: a kill leaves none
    write_json(run / "phases.json", phases)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row in lines:  # iterations of 12 s from second 100 on
        row["time_s"] = 100 + 12 * row["step"] if row["phase"] == "rl" else 90
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    page, found = page_of(run), summary_of(run)
    assert "RL: 28 of 50 iterations, incomplete." in page.words
    assert "Success while training: 28 of 50 iterations, incomplete" in page.words
    assert (
        "Phase “rl” is not complete (28 of 50 iterations); the same command resumes it."
        in page.words
    )
    rl = found["runs"][0]["phases"]["rl"]
    assert rl == {
        "complete": False,
        "done": 28,
        "of": 50,
        "unit": "iterations",
        "episodes": 28 * 64,
        "control_steps": 140_000,
        "seconds": 28 * 12.0,
    }
    assert found["seconds"] == 180 + 28 * 12
    assert "RL 28 of 50 iterations, incomplete 5 min 36 s" in page.words
    assert found["learning_curve"][:2] == [
        {"episodes": 0.0, "success": 0.4},
        {"episodes": 256.0, "success": 0.45},
    ]
    # interrupted, not killed: the record is there, and the larger of both times counts
    write_json(run / "phases.json", {**phases, "rl": {"seconds": 400.0, "complete": False}})
    assert load_run(run).phases["rl"]["seconds"] == 400.0
    write_json(run / "phases.json", {**phases, "rl": {"seconds": 400.0, "complete": True}})
    assert load_run(run).phases["rl"] == {"seconds": 400.0, "complete": True}


# ------------------------------------------------------------------------------------------ studies
def test_seeds_are_shown_and_their_spread_is_over_seeds(tmp_path):
    folder = tmp_path / "all"
    for seed, after in ((0, 45), (1, 30), (10, 50)):
        run = make_run(folder / f"seed_{seed}", after=after, seed=seed)
        add_failures(run, "sft", never_reached=50, dropped=10)
        add_failures(run, "rl", dropped=100 - 2 * after)
        add_image_use(run, image_use=0.3 + seed / 100)
    assert [p.name for p in find_runs(folder)] == ["seed_0", "seed_1", "seed_10"]
    page, s = page_of(folder), summary_of(folder)
    (group,) = s["groups"]
    assert s["verdict"] == (
        "RL moved success from a median of 40 % to 90 % over 3 seeds (worst 60 %, best 100 %): no "
        "more than chance explains"
    )
    assert "Mean difference +43 points (95 % interval over seeds −8 to +95)" in page.words
    assert "RL ended above SFT in 3, below it in 0 of 3 runs" in page.words
    rl, change = group["evaluations"]["rl"], group["difference"]
    assert [rl[k] for k in ("median", "worst", "best", "runs", "episodes")] == [
        0.9,
        0.6,
        1.0,
        3,
        300,
    ]
    # Student's t with 2 degrees of freedom (table: 4.303): 0.8333 ± 4.303 · 0.2082 / √3, cut at 100
    # %
    assert (rl["mean"], rl["low"], rl["high"]) == pytest.approx((0.8333, 0.3162, 1.0), abs=2e-4)
    assert (change["mean"], change["low"], change["high"]) == pytest.approx(
        (0.4333, -0.0838, 0.9504), abs=2e-4
    )
    assert [change[k] for k in ("above", "below", "worst", "best")] == pytest.approx(
        [3, 0, 0.2, 0.6]
    )
    assert rl["tasks"]["lift_cube"]["median"] == 0.9 and rl["failures"] == {"dropped": 50}
    assert group["evaluations"]["sft"]["failures"] == {"never_reached": 150, "dropped": 30}
    assert group["image_use"] == {"median": 0.31, "worst": 0.3, "best": 0.4, "runs": 3}
    assert [r["comparison"]["difference"] for r in s["runs"]] == pytest.approx([0.5, 0.2, 0.6])
    assert [r["seed"] for r in s["runs"]] == s["seeds"] == group["seeds"] == [0, 1, 10]
    assert group["learning_curve"][1] == {"episodes": 256.0, "success": 0.45, "runs": 3}
    assert group["learning_curve"][-1] == {"episodes": 768.0, "success": 0.9, "runs": 3}
    for text in (
        "seed 0, 256 episodes: 45 %",
        "median of 3",
        "50 → 0 10 → 40",
        "mean, 95 % interval",
        "0.5 0.9 +0.4",
    ):
        assert text in page.words
    assert (
        sum("skipped" in note for note in warnings([load_run(p) for p in find_runs(folder)])) == 1
    )
    assert not [href for href in page.sources if not href.startswith("data:")]
    write_report(folder / "seed_1")
    # leads to the run's own page where there is one
    assert page_of(folder).sources == ["seed_1/report.html"]


def test_unlike_runs_stand_side_by_side(tmp_path):
    same = "output_dir: {0}\nthreads: {0}\ncheckpoint: /starts/v0/seed_{0}/sft\n"
    for seed in (0, 1):
        config = same.format(seed) + "algorithm: {type: ppo, clip: 0.2}\n"
        make_run(tmp_path / "ppo" / f"seed_{seed}", seed=seed, config=config)
    for name, clip, after in (("a", 0.1, 30), ("b", 0.3, 10)):
        make_run(
            tmp_path / name,
            after=after,
            config=same.format(0) + f"algorithm: {{type: grpo, clip: {clip}}}\n",
        )
    aside = make_run(tmp_path / "a.20250101-120000", after=0)
    assert aside not in find_runs(tmp_path) and len(find_runs(tmp_path)) == 4
    groups = group_runs([load_run(p) for p in find_runs(tmp_path)])
    assert [[r.path.name for r in g.runs] for g in groups] == [["a"], ["b"], ["seed_0", "seed_1"]]
    assert [g.settings for g in groups] == [
        {"algorithm.type": "grpo", "algorithm.clip": 0.1},
        {"algorithm.type": "grpo", "algorithm.clip": 0.3},
        {"algorithm.type": "ppo"},
    ]
    page, s = page_of(tmp_path), summary_of(tmp_path)
    assert s["verdict"] == "4 runs of 3 kinds, side by side"
    assert "They differ in algorithm.type, algorithm.clip" in page.words
    assert [g["evaluations"]["rl"]["median"] for g in s["groups"]] == [0.6, 0.2, 0.9]
    assert (
        s["groups"][0]["evaluations"]["rl"]["low"] is None
        and s["groups"][2]["evaluations"]["rl"]["low"] < 0.9
    )
    assert [r["group"] for r in s["runs"]] == [g["name"] for g in s["groups"] for _ in g["runs"]]
    assert "algorithm.type=grpo, algorithm.clip=0.3 1 40 % 20 % −20" in page.words


def test_what_makes_runs_of_a_study_doubtful(tmp_path):
    for name, commit in (("one", "abc"), ("two", "def")):
        run = make_run(tmp_path / name, seed=3)
        write_json(run / "versions.json", {"git_commit": commit})
    page = page_of(tmp_path)
    assert (
        "Seed 3 ran more than once" in page.words and "2 different commits: abc, def" in page.words
    )
    assert "over 2 runs" in page.words  # one seed twice is not two seeds


def test_runs_without_evaluations_are_a_study_too(tmp_path):
    for seed in (0, 1):
        make_run(tmp_path / f"seed_{seed}", None, None, seed=seed)
    assert "no evaluation yet" in page_of(tmp_path).words
    evaluation(20).save(tmp_path / "seed_1" / "eval_sft.json")
    page = page_of(tmp_path)
    assert (
        "The SFT policies solve a median of 40 % over 1 seed" in page.words
        and "Every seed" in page.words
    )


def test_interval_over_seeds_is_never_narrower_than_over_episodes():
    assert spread([1.0, 1.0, 1.0], wilson_interval(300, 300), 0.0, 1.0)["low"] == pytest.approx(
        0.9874, abs=1e-4
    )
    wide = spread([0.2, 0.9], wilson_interval(110, 200), 0.0, 1.0)
    assert (wide["low"], wide["high"]) == (0.0, 1.0)  # two seeds say little: ± 12.7 · 0.35
    assert mean_interval([0.5]) is None and spread([0.5], (0.4, 0.6), 0, 1)["high"] is None


def test_median_curve_joins_what_runs_reached():
    curves = [[(0, 0.0), (100, 1.0)], [(0, 0.2), (50, 0.4), (100, 0.4)], [(0, 0.1), (40, 0.1)]]
    assert median_curve(curves) == [
        (0, 0.1, 3),
        (40, pytest.approx(0.36), 3),
        (50, pytest.approx(0.45), 2),
        (100, pytest.approx(0.7), 2),
    ]
    assert median_curve([curves[0]]) == [] and median_curve([]) == []


def test_learning_curve_counts_the_episodes_before_an_evaluation(tmp_path):
    run = load_run(make_run(tmp_path / "r"))
    assert learning_curve(run) == [
        (0.0, 0.4),
        (256.0, 0.45),
        (512.0, pytest.approx(0.49)),
        (768.0, 0.9),
    ]


# ------------------------------------------------------------------------------------------- charts
def test_ticks_are_round_and_span():
    assert nice_ticks(0, 1) == [0, 0.25, 0.5, 0.75, 1.0]
    for low, high in ((0.013, 0.42), (-3, 17), (1e-6, 4e-6), (5, 5), (0, 0), (-1e7, 1e7)):
        ticks = nice_ticks(low, high)
        assert ticks[0] <= low + 1e-12 and ticks[-1] >= high - 1e-12 and 2 <= len(ticks) <= 8
        steps = np.diff(ticks)
        assert np.allclose(steps, steps[0])
    with pytest.raises(ValueError, match="finite"):
        nice_ticks(0, float("nan"))


def test_line_chart_places_points_and_leaves_gaps():
    chart = line_chart(
        [Series("a", [0, 1, 2, 3, 4], [0.0, 1.0, None, 0.5, 0.5])],
        width=200,
        height=100,
        y_range=(0, 1),
    )
    lines = re.findall(r'points="([^"]+)"', chart)
    assert len(lines) == 2 and all(len(line.split()) == 2 for line in lines)
    (x0, y0), (x1, y1) = (map(float, p.split(",")) for p in lines[0].split())
    assert x1 > x0 and y1 < y0  # up is up
    assert line_chart([]) == "" and line_chart([Series("a", [1], [None])]) == ""
    assert "<circle" in line_chart([Series("a", [3], [2.0])])  # a single point is still seen
    whisker = line_chart(
        [Series("a", [1], [0.5], kind="dots", intervals=[(0.2, 0.8)], notes=["<half>"])]
    )
    assert "whisker" in whisker and "&lt;half&gt;" in whisker


def test_small_helpers():
    assert running_mean([1, None, 3, 5], 2) == [1, 1, 3, 4]
    x, y = thin_out(list(range(1000)), [float(i) for i in range(1000)], 100)
    assert len(x) == len(y) == 100 and x == y and sum(y) / 100 == pytest.approx(499.5)
    assert [short(v) for v in (0, 0.25, 12345, 2.5e6, 0.0001)] == [
        "0",
        "0.25",
        "12.3k",
        "2.5M",
        "1.0e-4",
    ]
    assert [short(v) for v in (2000, 6400, 999.7, 999_700, -1234.5)] == [
        "2000",
        "6400",
        "1000",
        "1M",
        "-1234",
    ]
    assert percent(0.415) == "42\u00a0%"
    assert (
        stacked_bar([("a", 0.0, "")]) == ""
        and interval_chart([]) == ""
        and episode_squares([]) == ""
    )
    widths = [
        float(w)
        for w in re.findall(
            r'class="part[^>]*width="([\d.]+)"',
            stacked_bar([("a", 1, ""), ("b", 3, "")], width=100),
        )
    ]
    assert widths == pytest.approx([23.5, 73.5])
    assert interval_chart([Interval("x", 0.0, 0.0, 0.04, "before")]).count("<rect") == 1
    assert episode_squares([("won", "a")] * 70, columns=50).count("<rect") == 70
    bars = count_bars(
        [("x", [("before", 8, ""), ("after", 2, "")]), ("y", [("before", 0, ""), ("after", 4, "")])]
    )
    long = [float(w) for w in re.findall(r'<rect[^>]*width="([\d.]+)"', bars)]
    assert (
        long == pytest.approx([long[0], long[0] / 4, 1.5, long[0] / 2], abs=0.1) and long[0] > 600
    )
    assert count_bars([]) == ""
