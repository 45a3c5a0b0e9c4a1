"""The report page and summary.json, from run folders of every degree of completeness."""

from __future__ import annotations

import json
import random
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from vla_rl.charts import (
    Interval,
    Series,
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
from vla_rl.evaluate import EpisodeOutcome, EvaluationResult
from vla_rl.metrics import MetricsLogger, write_json
from vla_rl.report import find_runs, load_run, paired, summary, verdict, warnings, write_report
from vla_rl.statistics import wilson_interval
from vla_rl.video import Clip, have_video

TASKS = ("lift_cube", "stack <b>")


def evaluation(solved, episodes=50, tasks=TASKS, **changes):
    outcomes = [EpisodeOutcome(t, i, f"do {t}", i < solved, 30 + i, 5, 100.0) for t in tasks for i in range(episodes)]
    values = {"split": "held_out", "seed": 0, "deterministic": True, "control_hz": 20.0, "jerk_unit": "m/s³"}
    values |= {"seconds": 9.0, "seconds_per_decision": 0.002, "latency_s": 0.011} | changes
    return EvaluationResult(outcomes, **values)


def make_run(path, before=20, after=45, seed=0, iterations=12, video=False):
    rng = random.Random(seed)
    path.mkdir(parents=True)
    if before is not None:
        evaluation(before).save(path / "eval_sft.json")
    if after is not None:
        evaluation(after).save(path / "eval_rl.json")
    with MetricsLogger(path, wandb=False) as logger:
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
        path / "versions.json", {"cpu": "Some CPU", "cpu_cores": 2, "packages": {"torch": "2.10"}, "git_commit": "abc"}
    )
    (path / "config.yaml").write_text(f"name: test\nseed: {seed}\nnote: a < b & c\n")
    if video and have_video():
        from vla_rl.evaluate import write_videos

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
        self.sources += [v for k, v in attrs if k in ("src", "href", "data", "poster", "action", "srcset") and v]
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
        return " ".join(self.text)


# ------------------------------------------------------------------------------------------------------------- the page
def test_page_of_a_whole_run(tmp_path):
    run = make_run(tmp_path / "quickstart", video=True)
    path = write_report(run)
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert path == run / "report.html" and "RL raised success from 40 % to 90 % on 100 held-out episodes" in page.words
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
    assert "2 updates of RL were skipped" in page.words and "1 episode of RL ran again" in page.words
    assert "stack <b>" in page.words and "a < b & c" in page.words  # escaped: shown as written
    assert page.tags.count("svg") >= 8
    # nothing is fetched: every source is inside the page
    assert all(s.startswith("data:") for s in page.sources) and not re.search(r"url\(|@import|https?://", text)
    if have_video():
        assert page.tags.count("video") == 2 and sum(s.startswith("data:video/mp4;base64,") for s in page.sources) == 2


def test_summary_for_scripts(tmp_path):
    run = make_run(tmp_path / "r")
    write_report(run)
    s = json.loads((run / "summary.json").read_text())
    assert s["verdict"] == "RL raised success from 40 % to 90 % on 100 held-out episodes"
    assert s["evaluations"]["sft"]["successes"] == 40 and s["evaluations"]["rl"]["rate"] == 0.9
    assert [s["evaluations"]["rl"][k] for k in ("low", "high")] == pytest.approx(wilson_interval(90, 100))
    assert s["evaluations"]["rl"]["tasks"]["lift_cube"]["episodes"] == 50
    assert s["comparison"]["difference"] == 0.5 and s["comparison"]["only_b"] == 50 and s["comparison"]["after"] == "rl"
    assert s["seconds"] == 780 and s["control_steps"] == 64000 and s["peak_memory_bytes"] == 3 << 30
    assert s["seeds"] == [0] and s["runs"][0]["phases"]["rl"]["episodes"] == 768


def test_several_seeds_are_pooled(tmp_path):
    for seed, after in ((0, 45), (1, 40), (10, 50)):
        make_run(tmp_path / "all" / f"seed_{seed}", after=after, seed=seed)
    assert [p.name for p in find_runs(tmp_path / "all")] == ["seed_0", "seed_1", "seed_10"]
    page = Page(write_report(tmp_path / "all").read_text(encoding="utf-8"))
    assert "RL raised success from 40 % to 90 % on 300 held-out episodes (3 runs)" in page.words
    assert "seeds 0, 1, 10" in page.words and "seed 10, RL" in page.words
    s = json.loads((tmp_path / "all" / "summary.json").read_text())
    assert [r["evaluations"]["rl"]["successes"] for r in s["runs"]] == [90, 80, 100] and s["comparison"][
        "trials"
    ] == 300
    assert sum("skipped" in note for note in warnings([load_run(p) for p in find_runs(tmp_path / "all")])) == 1


@pytest.mark.parametrize(
    "keep", [(), ("metrics.jsonl",), ("phases.json",), ("eval_rl.json",), ("metrics.jsonl", "eval_sft.json")]
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
    expected = {"eval_rl.json": "The RL policy solves 90 %", "eval_sft.json": "The SFT policy solves 40 %"}
    assert next((expected[k] for k in keep if k in expected), "no evaluation yet") in page.words


def test_damaged_files_are_named_not_fatal(tmp_path):
    run = make_run(tmp_path / "r")
    (run / "eval_sft.json").write_text("{")
    (run / "versions.json").write_text("[")
    phases = json.loads((run / "phases.json").read_text())
    phases["rl"]["complete"] = False
    write_json(run / "phases.json", phases)
    page = Page(write_report(run).read_text(encoding="utf-8"))
    assert "eval_sft.json is not an evaluation result" in page.words and "versions.json could not be read" in page.words
    assert "Phase “rl” is not complete" in page.words
    with pytest.raises(UserError, match="not a run"):
        find_runs(tmp_path / "nowhere")


def test_verdicts(tmp_path):
    def of(before, after, **changes):
        run = tmp_path / f"{before}-{after}-{len(changes)}"
        make_run(run, before, after, iterations=2)
        if changes:
            evaluation(after, **changes).save(run / "eval_rl.json")
        return [text.replace("\u00a0", " ") for text in verdict([load_run(run)])]

    worse, evidence = of(45, 20)
    assert worse == "RL lowered success from 90 % to 40 % on 100 held-out episodes"
    assert "−50 points" in evidence and "SFT alone 50" in evidence
    assert of(25, 26)[0] == "RL moved success from 50 % to 52 % on 100 held-out episodes: no more than chance explains"
    assert of(25, 25)[0] == "RL left success at 50 % on 100 held-out episodes: no more than chance explains"
    assert "cannot be compared pairwise" in of(20, 45, seed=3)[1]
    other = load_run(tmp_path / "20-45-1")
    assert paired([other], "sft", "rl") is None and summary([other])["comparison"] is None


def test_warnings_tell_what_to_do(tmp_path):
    run = tmp_path / "r"
    with MetricsLogger(run, wandb=False) as logger:
        for i in range(1, 5):
            logger.log("rl", i, {"rollout/success": 0.0, "ppo/clip_fraction": 0.5, "ppo/explained_variance": -0.2})
    write_json(run / "versions.json", {"git_commit": "abc +changes"})
    text = " ".join(warnings([load_run(run)])).replace("\u00a0", " ")
    for part in (
        "50 % of the ratios were clipped",
        "critic explains nothing",
        "No training episode ever succeeded",
        "no commit",
    ):
        assert part in text


def test_a_large_video_stays_outside(tmp_path, monkeypatch):
    import vla_rl.report as module

    run = make_run(tmp_path / "r")
    (run / "videos").mkdir(exist_ok=True)
    (run / "videos" / "sft.mp4").write_bytes(b"x" * 100)
    monkeypatch.setattr(module, "MAX_VIDEO_BYTES", 50)
    page = Page(write_report(run).read_text(encoding="utf-8"))
    assert "sft.mp4 is too large for this page" in page.words and "video" not in page.tags


# --------------------------------------------------------------------------------------------------------------- charts
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
        [Series("a", [0, 1, 2, 3, 4], [0.0, 1.0, None, 0.5, 0.5])], width=200, height=100, y_range=(0, 1)
    )
    lines = re.findall(r'points="([^"]+)"', chart)
    assert len(lines) == 2 and all(len(line.split()) == 2 for line in lines)
    (x0, y0), (x1, y1) = (map(float, p.split(",")) for p in lines[0].split())
    assert x1 > x0 and y1 < y0  # up is up
    assert line_chart([]) == "" and line_chart([Series("a", [1], [None])]) == ""
    assert "<circle" in line_chart([Series("a", [3], [2.0])])  # a single point is still seen
    whisker = line_chart([Series("a", [1], [0.5], kind="dots", intervals=[(0.2, 0.8)], notes=["<half>"])])
    assert "whisker" in whisker and "&lt;half&gt;" in whisker


def test_small_helpers():
    assert running_mean([1, None, 3, 5], 2) == [1, 1, 3, 4]
    x, y = thin_out(list(range(1000)), [float(i) for i in range(1000)], 100)
    assert len(x) == len(y) == 100 and x == y and sum(y) / 100 == pytest.approx(499.5)
    assert [short(v) for v in (0, 0.25, 12345, 2.5e6, 0.0001)] == ["0", "0.25", "12.3k", "2.5M", "1.0e-4"]
    assert [short(v) for v in (2000, 6400, 999.7, 999_700, -1234.5)] == ["2000", "6400", "1000", "1M", "-1234"]
    assert percent(0.415) == "42\u00a0%"
    assert stacked_bar([("a", 0.0, "")]) == "" and interval_chart([]) == "" and episode_squares([]) == ""
    widths = [
        float(w)
        for w in re.findall(r'class="part[^>]*width="([\d.]+)"', stacked_bar([("a", 1, ""), ("b", 3, "")], width=100))
    ]
    assert widths == pytest.approx([23.5, 73.5])
    assert interval_chart([Interval("x", 0.0, 0.0, 0.04, "before")]).count("<rect") == 1
    assert episode_squares([("won", "a")] * 70, columns=50).count("<rect") == 70
