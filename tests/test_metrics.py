"""Metrics log, progress on screen, memory watch and versions."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vla_rl.monitoring import machine
from vla_rl.monitoring import progress as progress_module
from vla_rl.monitoring.machine import MemoryWatch, memory_bytes, versions
from vla_rl.monitoring.metrics import MetricsLogger, finite, read_metrics, write_json
from vla_rl.monitoring.progress import Progress


def lines(folder):
    return [(r["phase"], r["step"]) for r in read_metrics(folder / "metrics.jsonl")]


def test_log_appends_lines_that_any_json_reader_takes(tmp_path):
    with MetricsLogger(tmp_path) as logger:
        logger.log("sft", 1, {"loss": 0.5, "norm": math.inf})
        assert lines(tmp_path) == [("sft", 1)]  # on disk at once
        logger.log("rl", 1, {"success": math.nan})
    raw = [
        json.loads(line, parse_constant=pytest.fail)
        for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
    ]
    assert (
        raw[0]["loss"] == 0.5
        and raw[0]["norm"] is None
        and raw[1]["success"] is None
        and raw[1]["time_s"] >= 0
    )


def test_resuming_repeats_no_step(tmp_path):
    with MetricsLogger(tmp_path) as logger:
        for step in (1, 2, 3):
            logger.log("sft", step, {"loss": step})
        for step in (1, 2, 3, 4):
            logger.log("rl", step, {"x": step})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"phase": "rl", "step": 5, "x"')  # the crash
    with MetricsLogger(tmp_path) as logger:
        before = read_metrics(tmp_path / "metrics.jsonl")[-1]["time_s"]
        logger.log("rl", 3, {"x": 30})
        logger.log("rl", 4, {"x": 40})
        logger.log("eval", 0, {"y": 1})
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert lines(tmp_path) == [
        ("sft", 1),
        ("sft", 2),
        ("sft", 3),
        ("rl", 1),
        ("rl", 2),
        ("rl", 3),
        ("rl", 4),
        ("eval", 0),
    ]
    assert [r["x"] for r in records if r["phase"] == "rl"] == [1, 2, 30, 40]
    assert records[-1]["time_s"] >= before  # time goes on where the earlier session stopped


def test_reading_is_tolerant(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert read_metrics(path) == []
    path.write_text(
        '{"phase": "a", "step": 1}\nnot json\n[1]\n{"phase": "a"}\n{"phase": "a", "step": 2}\n{"pha'
    )
    assert [r["step"] for r in read_metrics(path)] == [1, 2]


def test_write_json_is_whole_or_absent(tmp_path):
    path = tmp_path / "a" / "b.json"
    write_json(path, {"x": math.nan, "y": (1, 2.5), "z": None, "t": True})
    assert json.loads(path.read_text()) == {"x": None, "y": [1, 2.5], "z": None, "t": True}
    with pytest.raises((TypeError, ValueError)):
        write_json(path, {"x": object()})
    assert json.loads(path.read_text())["y"] == [1, 2.5] and [
        p.name for p in path.parent.iterdir()
    ] == ["b.json"]
    import torch

    assert finite({"a": torch.tensor(2.0), 3: [torch.tensor(math.inf)]}) == {"a": 2.0, "3": [None]}


# ----------------------------------------------------------------------------------------- progress
def test_plain_lines_without_a_terminal():
    stream = io.StringIO()
    with Progress(every=0.0, stream=stream) as progress:
        progress.say("sft: fine-tuning")
        with progress.task("RL", 4, start=1) as bar:
            bar.inner(8, 64, 2)
            bar.inner(16, 64, 4)
            bar.update(2, success=0.25)
            bar.update(4)
    text = stream.getvalue().splitlines()
    assert text[0] == "sft: fine-tuning"
    assert "to go" not in text[1]
    assert "1/4" in text[2] and "[16/64 episodes, 25% success]" in text[2] and "to go" in text[2]
    assert (
        "50%" in text[3]
        and "2/4" in text[3]
        and "success 0.25" in text[3]
        and "episodes" not in text[3]
    )
    assert "100%" in text[4] and "to go" not in text[4] and len(text) == 5


def test_lines_are_rare_and_the_end_is_always_shown():
    stream = io.StringIO()
    with Progress(every=1000.0, stream=stream) as progress, progress.task("collect", 100) as bar:
        for i in range(70):
            bar.update(i + 1, 100, i)
    assert len(stream.getvalue().splitlines()) == 1 and "69/70 = 99%" in stream.getvalue()


def test_eta_counts_this_session_without_its_start(monkeypatch):
    """30 s until the first sign of progress say nothing of the pace; half a step in 10 s after
    it does."""
    now = [100.0]
    monkeypatch.setattr(progress_module.time, "perf_counter", lambda: now[0])
    stream = io.StringIO()
    with Progress(every=0.0, stream=stream) as progress, progress.task("RL", 20, start=10) as bar:
        assert bar.eta_s is None
        now[0] += 30
        bar.inner(1, 2, 0)
        assert bar.eta_s is None and "to go" not in stream.getvalue()
        now[0] += 10
        bar.update(11)
        assert bar.eta_s == pytest.approx(10 / 0.5 * 9)
        now[0] += 15
        bar.inner(1, 4, 0)
        assert bar.eta_s == pytest.approx(25 / 0.75 * 8.75)


def test_a_bar_of_episodes_ends_at_their_count():
    stream = io.StringIO()
    with (
        Progress(every=1000.0, stream=stream) as progress,
        progress.task("evaluate sft", 50) as bar,
    ):
        for i in range(50):
            bar.update(i + 1, 50, 11)
    assert (
        stream.getvalue().split()[:4] == ["evaluate", "sft", "100%", "50/50"]
        and "11/50 = 22%" in stream.getvalue()
    )


def test_rich_bars_on_a_terminal(monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm")

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    with Progress(stream=stream) as progress:
        with progress.task("RL", 2) as bar:
            bar.inner(1, 2, 1)
            bar.update(2, success=0.5)
        progress.say("[not markup]")
    text = stream.getvalue()
    assert "\x1b[" in text and "RL" in text and "success 0.5" in text and "[not markup]" in text


# --------------------------------------------------------------------------------- memory, versions
def test_memory_peak_is_kept():
    values = iter([5, 80, 20])
    with MemoryWatch(initial=7, every=0.001, measure=lambda: next(values, 20)) as watch:
        deadline = time.monotonic() + 60
        while watch.peak < 80 and time.monotonic() < deadline:
            time.sleep(0.002)
    assert watch.peak == 80
    with MemoryWatch(initial=10**15) as watch:
        pass
    assert watch.peak == 10**15


def test_memory_is_sampled_before_the_first_interval_is_over():
    values = iter([5, 9])
    with MemoryWatch(every=3600.0, measure=lambda: next(values, 7)) as watch:
        assert watch.peak == 5 and watch.sample() == 9
    assert watch.peak == 9


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_counts_children():
    import subprocess

    alone = memory_bytes()
    code = "x = bytearray(b'1' * (60 << 20)); print('ready', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        child.stdout.readline()
        assert memory_bytes() > alone + (50 << 20) > 50 << 20
        child.communicate(b"\n")


def test_versions_are_json_and_name_no_path():
    found = versions()
    assert {"torch", "numpy"} <= set(found["packages"]) and found["cpu_cores"] >= 1
    text = json.dumps(found)
    assert str(Path.home()) + "/" not in text and str(Path(machine.__file__).parent) not in text


def test_a_containers_quota_and_omp_num_threads_limit_the_threads(tmp_path, monkeypatch):
    assert machine.cgroup_quota(tmp_path) == 0.0  # no cgroup: no limit
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert machine.cgroup_quota(tmp_path) == 0.0
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("150000\n")
    assert machine.cgroup_quota(tmp_path) == 1.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert machine.cgroup_quota(tmp_path) == 0.0
    (tmp_path / "cpu.max").write_text("250000 100000\n")
    assert machine.cgroup_quota(tmp_path) == 2.5
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: range(16), raising=False)
    monkeypatch.setattr(machine, "cgroup_quota", lambda _: 2.5)
    assert machine.available_cores() == 3
    for text, threads in (("", 3), ("1", 1), ("8", 3), ("2,1", 2), ("0", 3), ("many", 3)):
        monkeypatch.setenv("OMP_NUM_THREADS", text)
        assert machine.default_threads() == threads


def test_the_commit_is_that_of_the_checkout():
    """It was looked for in the package's folder, and so was empty in every run."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        pytest.skip("no checkout: there is no commit to find")
    head = subprocess.run(
        ["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    )
    assert machine.git_commit().removesuffix(" +changes") == head.stdout.strip() != ""
