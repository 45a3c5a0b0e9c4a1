"""`vla-rl bench faults`: what it kills, what it counts, and a short soak."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from test_replay_store import episode

from benchmarks.learning.faults import (
    KINDS,
    Counted,
    CountedConfig,
    _accounts,
    _order,
    _Soak,
    measure,
    text,
)
from vla_rl import cli
from vla_rl.errors import UserError
from vla_rl.monitoring.metrics import write_json
from vla_rl.storage import save_state


def test_each_kind_is_killed_as_often_as_the_others():
    order = _order(("rollout", "rollout", "driver"), 9, 1)
    assert (
        Counter(order) == {"rollout": 6, "driver": 3}
        and order != ["rollout", "rollout", "driver"] * 3
    )
    assert order == _order(("rollout", "rollout", "driver"), 9, 1)


def test_what_counts_is_what_the_last_checkpoint_knows(tmp_path):
    """Of six episodes one is missing and one is there twice."""
    reward = Counted(CountedConfig())
    reward.score([episode(0), episode(1)])
    again = Counted(CountedConfig())
    again.load_state_dict(reward.state_dict())
    assert (
        len(again.score([episode(2)])) == 1 and len(again.ids) == 3 and reward.ids == again.ids[:2]
    )
    save_state(
        tmp_path / "checkpoints" / "rl" / "training_state",
        {"reward": {"ids": ["a", "b", "c", "d", "e", "a"]}},
    )
    rows = [{"phase": "rl", "step": i + 1, "cluster/restarts": i} for i in range(3)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_json(tmp_path / "eval_rl.json", {"total": {"successes": 3, "episodes": 4}})
    found = _accounts(tmp_path, 6)
    assert (found["learned_from"], found["lost"], found["twice"]) == (5, 1, 1)
    assert (
        found["iterations"] == 3
        and found["restarts"] == {"actors": 3, "ranks": 0}
        and found["successes"] == 3
    )


def test_a_process_is_found_by_what_it_is(tmp_path):
    """A tree of three: a node, an actor by its name, and the worker of its simulator."""
    code = "import subprocess, sys; p = subprocess.Popen(['bash', '-c', sys.argv[1]]); p.wait()"
    inner = "exec -a ray::RolloutActor.open bash -c 'exec -a spawn_main sleep 60 & wait'"
    with subprocess.Popen([sys.executable, "-c", code, inner]) as node:
        found: dict[str, list[int]] = {"simulator": [], "rollout": []}
        try:
            soak = _Soak([], tmp_path, None)
            soak._nodes = type("Nodes", (), {"pids": [node.pid], "second": node})
            soak._driver = node
            # once it goes by its own name, the tree changes no more
            while not soak._candidates("simulator"):
                pass
            found = {kind: soak._candidates(kind) for kind in KINDS}
            assert (
                len(found["rollout"]) == len(found["simulator"]) == 1
                and found["rollout"] != found["simulator"]
            )
            assert (
                found["driver"] == found["node"] == [node.pid]
                and found["rank"] == found["inference"] == []
            )
        finally:
            subprocess.run(
                ["kill", "-9", *map(str, [*found["simulator"], *found["rollout"], node.pid])],
                check=False,
            )


def test_what_a_run_has_not_cannot_be_killed():
    with pytest.raises(
        UserError, match="--kinds inference: this run has rollout, rank, simulator, driver, node"
    ):
        measure([], kinds=["inference"])
    with pytest.raises(
        UserError,
        match=r"--kills 3: rl.iterations=7 has room for 2, .*give rl.iterations=8 or fewer kills",
    ):
        measure(["rl.iterations=7"], kills=3)


def test_scoring_waits_at_the_gate(tmp_path):
    """A run that is ahead of the kills does not end before them."""
    gate = tmp_path / "gate"
    write_json(gate, 1)
    reward = Counted(CountedConfig(gate=str(gate)))
    reward.score([episode(0)])
    with ThreadPoolExecutor(1) as pool:
        later = pool.submit(reward.score, [episode(1)])
        with pytest.raises(TimeoutError):
            later.result(timeout=1)
        write_json(gate, 2)
        assert len(later.result(timeout=60)) == 1


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_a_short_soak_loses_nothing(tmp_path, capsys):
    target = tmp_path / "faults.json"
    words = [
        "collect.episodes_per_task=20",
        "sft.updates=10",
        "rl.iterations=8",
        "rl.episodes_per_iteration=16",
    ]
    words += ["evaluate.episodes_per_task=20", "slots.workers=0", "cluster.learners=0"]
    assert (
        cli.main(
            [
                "bench",
                "faults",
                *words,
                "--kills",
                "3",
                "--kinds",
                "rollout",
                "driver",
                "node",
                "--json",
                str(target),
            ]
        )
        == 0
    )
    found = json.loads(target.read_text())
    assert (
        found["killed"]["counts"] == {"rollout": 1, "driver": 1, "node": 1}
        and not found["calm"]["kills"]
    )
    for side in ("calm", "killed"):
        assert (found[side]["learned_from"], found[side]["lost"], found[side]["twice"]) == (
            8 * 16,
            0,
            0,
        )
        assert found[side]["iterations"] == 8
    assert "3 kills" in capsys.readouterr().out and "1 driver" in text(found)
