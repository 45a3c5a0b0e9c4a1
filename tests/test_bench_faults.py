"""`vla-rl bench faults`: what it strikes, what it counts, and a short run that is struck."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_ppo import BanditPolicy, rollout

from benchmarks.learning.faults import (
    PER_RUN,
    Watched,
    WatchedConfig,
    measure,
    planned,
    text,
    wrong,
)
from benchmarks.learning.strikes import KINDS, WHOM, Strikes, fill
from vla_rl import cli
from vla_rl.errors import UserError
from vla_rl.monitoring.metrics import write_json


def test_each_kind_strikes_each_mode_as_often_as_the_others():
    plan = planned(("disk", "nan", "kill:rank"), ("sync", "async"), 24, 1)
    counts = Counter((mode, kind) for mode, own in plan for kind in own)
    assert len(counts) == 6 and {*counts.values()} == {4}
    assert max(len(own) for _, own in plan) == PER_RUN
    assert plan == planned(("disk", "nan", "kill:rank"), ("sync", "async"), 24, 1)
    assert plan != planned(("disk", "nan", "kill:rank"), ("sync", "async"), 24, 2)


def watched(tmp_path: Path, **options) -> Watched:
    """An algorithm of two iterations' worth of a gate."""
    write_json(tmp_path / "gate", 1)
    config = WatchedConfig(advantage="rloo", gate=str(tmp_path / "gate"), **options)
    return Watched(config, BanditPolicy())


def test_the_algorithm_keeps_what_it_learned_from_and_waits_at_the_gate(tmp_path):
    algorithm = watched(tmp_path)
    batch = rollout(algorithm.policy, 0)
    algorithm.update(batch)
    assert algorithm.ids == [episode.rollout_id for episode in batch.episodes]
    with ThreadPoolExecutor(1) as pool:
        later = pool.submit(algorithm.update, batch)
        with pytest.raises(TimeoutError):
            later.result(timeout=0.5)
        write_json(tmp_path / "gate", 2)
        later.result(timeout=60)
    again = watched(tmp_path)
    again.load_state_dict(algorithm.state_dict())
    assert len(again.ids) == 2 * len(batch.episodes) and again.ids == algorithm.ids


def test_an_update_is_poisoned_while_the_file_is_there(tmp_path):
    algorithm = watched(tmp_path, poison=str(tmp_path / "poison"))
    write_json(tmp_path / "poison", True)
    algorithm.update(rollout(algorithm.policy, 0))
    assert any(bool(p.isnan().any()) for p in algorithm.policy.parameters())


GOOD = {
    "kind": "kill:rank",
    "outcome": "went on",
    "then": "",
    "clear": True,
    "lost": 0,
    "twice": 0,
    "equal": True,
    "seconds": 2.0,
}


@pytest.mark.parametrize(
    "found, said",
    [
        ({}, ""),
        ({"equal": None}, ""),
        ({"kind": "disk", "outcome": "ended", "then": "went on"}, ""),
        ({"kind": "kill:driver", "outcome": "killed", "then": "went on"}, ""),
        ({"outcome": "hung"}, "the run stood still"),
        ({"outcome": "ended", "then": "went on"}, "it ended the run"),
        ({"kind": "nan"}, "learned from weights that are no numbers"),
        ({"kind": "nan", "outcome": "ended", "then": "ended"}, "the same command did not go on"),
        ({"kind": "disk", "outcome": "ended", "clear": False}, "no clear error"),
        ({"lost": 3, "twice": 1}, "3 episodes lost, 1 episodes twice"),
        ({"equal": False}, "other weights than undisturbed"),
    ],
)
def test_what_is_wrong_with_an_event_is_said(found, said):
    assert wrong(GOOD | found) == said


def test_the_table_counts_by_kind():
    rows = [GOOD, GOOD | {"seconds": 4.0}, GOOD | {"kind": "disk", "outcome": "ended"}]
    told = text({"events": rows, "planned": 4, "problems": ["run 0: it hung"]})
    lines = {line.split("  ")[0]: line.split() for line in told.splitlines()}
    assert lines["kill:rank"][1:] == ["2", "2", "0", "3", "0"]
    assert lines["disk"][1:4] == ["1", "0", "1"]
    assert "3 of 4 events; of 3 in synchronous runs 3 with" in told and "it hung" in told


def test_a_process_is_found_by_what_it_is(tmp_path):
    """A tree of three: a node, an actor by its name, and the worker of its simulator."""
    code = "import subprocess, sys; p = subprocess.Popen(['bash', '-c', sys.argv[1]]); p.wait()"
    inner = "exec -a ray::RolloutActor.open bash -c 'exec -a spawn_main sleep 60 & wait'"
    with subprocess.Popen([sys.executable, "-c", code, inner]) as node:
        found: dict[str, list[int]] = {"simulator": [], "rollout": []}
        nodes = SimpleNamespace(pids=[node.pid], second=node)
        strikes = Strikes(nodes, {}, lambda: node, tmp_path, tmp_path / "poison", 0.0)
        try:
            # once it goes by its own name, the tree changes no more
            while not strikes.candidates("simulator"):
                pass
            found = {whom: strikes.candidates(whom) for whom in WHOM if whom != "node"}
            assert len(found["rollout"]) == len(found["simulator"]) == 1
            assert found["rollout"] != found["simulator"] and found["driver"] == [node.pid]
            assert found["rank"] == found["inference"] == found["reward"] == found["raylet"] == []
            told, undo = strikes.strike("freeze:simulator", lambda pids: pids[0])
            state = Path(f"/proc/{found['simulator'][0]}/stat")
            assert told == f"simulator {found['simulator'][0]}"
            while state.read_text().rpartition(")")[2].split()[0] != "T":
                pass
            undo()
            while state.read_text().rpartition(")")[2].split()[0] == "T":
                pass
        finally:
            pids = [*found["simulator"], *found["rollout"], node.pid]
            subprocess.run(["kill", f"-{signal.SIGKILL.value}", *map(str, pids)], check=False)


def test_a_disk_is_filled_to_a_share(tmp_path, monkeypatch):
    """Of 100 blocks of 4 KiB 30 are free: 27 of them make it 97 % full."""
    disk = SimpleNamespace(f_frsize=4096, f_bavail=30, f_blocks=100)
    monkeypatch.setattr("benchmarks.learning.strikes.os.statvfs", lambda _: disk)
    fill(tmp_path / "filler", 0.97)
    assert abs((tmp_path / "filler").stat().st_size - 27 * 4096) <= 1


def test_what_a_run_has_not_cannot_be_struck(tmp_path):
    with pytest.raises(UserError, match=r"--kinds kill:simulator: these runs have kill:rollout"):
        measure([], kinds=["kill:simulator"], out=tmp_path)
    write_json(tmp_path / "plan.json", {"overrides": [], "runs": []})
    with pytest.raises(UserError, match="holds other events than these"):
        measure([], kinds=["nan"], out=tmp_path)
    assert "freeze:simulator" not in KINDS and "freeze:driver" in KINDS


@pytest.mark.slow
@pytest.mark.real_time
@pytest.mark.timeout(2400)
def test_a_run_that_is_struck_twice_loses_nothing(tmp_path, capsys):
    """A node is lost, and an update makes no numbers."""
    target = tmp_path / "faults.json"
    words = ["bench", "faults", "--modes", "async", "--events", "2", "--kinds", "kill:node", "nan"]
    words += ["--out", str(tmp_path / "out"), "--json", str(target)]
    assert cli.main(words) == 0, capsys.readouterr().out
    found = json.loads(target.read_text())
    outcomes = {row["kind"]: (row["outcome"], row["then"]) for row in found["events"]}
    assert outcomes == {"kill:node": ("went on", ""), "nan": ("ended", "went on")}
    assert {(row["lost"], row["twice"]) for row in found["events"]} == {(0, 0)}
    assert found["problems"] == [] and "2 of 2 events" in capsys.readouterr().out
    error = next(row["error"] for row in found["events"] if row["kind"] == "nan")
    assert error.startswith("error: ") and "not finite" in error
