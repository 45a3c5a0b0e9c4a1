"""What a cluster holds and moves, against sums; and how bytes are read from a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from test_checkpoint import SPEC, Plain
from test_cluster_payload import Store, episode
from test_spread import STATE, write_parts

from vla_rl.checkpoint import save_checkpoint
from vla_rl.cli import main
from vla_rl.cluster.memory import GB, Node, Sizes, against, load, shares, sizes_of
from vla_rl.cluster.model import Setup
from vla_rl.cluster.packing import packed
from vla_rl.cluster.payload import handed_out, light_state, owners, stored
from vla_rl.errors import UserError

# a policy of 7.5 B parameters in bfloat16, all trained with float32 copies and Adam
FULL = Sizes(weights=15 * GB, sent=15 * GB, state=90 * GB, episode=7.5e6, light=2e5)
EIGHT = Setup(rollouts=8, slots=16, cores=16, batch=512, learners=8)


def test_what_is_spread_falls_with_the_ranks_and_the_driver_holds_none_of_it():
    found = load(FULL, EIGHT, Node())
    assert found.rank_disk == (15 + 90) / 8 * GB  # of weights and state
    assert found.rank_gpu == found.rank_disk + 15 / 8 * GB  # and gradients
    assert found.rank_in == 512 * (2e5 + 7.5e6 / 8)
    assert found.driver == 15 * GB + 3 * (15 * GB + 512 * 2e5)
    assert found.driver_out == 15 * GB + 512 * 2e5  # to one node of actors, and one of ranks
    many = load(FULL, Setup(64, 16, 16, 512, learners=64), Node())
    assert many.rank_disk == found.rank_disk / 8 and many.driver == found.driver
    assert many.driver_out == 8 * found.driver_out
    assert many.written == pytest.approx(found.written / 8)


def test_whole_checkpoints_pass_through_the_driver():
    parts, whole = load(FULL, EIGHT, Node()), load(FULL, EIGHT, Node(), whole=True)
    assert whole.driver - parts.driver == 3 * 90 * GB == whole.main_host - parts.main_host
    assert whole.rank_disk == 105 * GB and parts.rank_host - whole.rank_host == parts.rank_disk
    assert whole.pause > 20 * parts.pause


def test_what_takes_most_of_what_there_is():
    node = Node(gpu=24 * GB, host=500 * GB)
    found = shares(load(FULL, EIGHT, node), EIGHT, node, seconds=100.0, driver=0.25)
    assert found["memory of a learning GPU"] == pytest.approx(15 / 24)
    assert found["memory of an acting GPU"] == pytest.approx(15 / 24)
    assert found["time of the driver"] == 0.25
    assert found["writing a checkpoint each iteration"] == pytest.approx(105 / 2 / 100)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three iterations of eight episodes of 1000 bytes; the first one's figures do not count."""
    figures = {"bytes_published": 50, "bytes_episodes": 8000, "bytes_in": 80, "bytes_rank": 4080}
    rows = [
        {"phase": "rl", "step": i, "episodes": 8 * (i + 1)}
        | {f"cluster/{name}": value * (1 if i else 9) for name, value in figures.items()}
        | {"cluster/bytes_out": 100}
        for i in range(3)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "checkpoints").mkdir()
    write_parts(tmp_path / "checkpoints" / "rl", Plain(40, SPEC), 2)
    return tmp_path


def test_bytes_are_read_from_a_run_and_hold_for_its_own_setup(run: Path):
    """80 weights, 2 biases, 3 halves; of the state 15 moments and 6 halves are spread, and one
    step is not."""
    found = sizes_of(run, {})
    assert found == Sizes(82 * 4 + 3 * 2, 50, 15 * 4 + 6 * 2, 1000, 10, rest=4)
    pairs = against(found, Setup(2, 1, 1, batch=8, learners=2), run)
    largest = max(f.stat().st_size for f in (run / "checkpoints/rl").glob("model-*"))
    largest += max(f.stat().st_size for f in (run / "checkpoints/rl").glob("*/state-*"))
    part = pairs.pop("of a checkpoint's largest part")
    assert part[1] == largest and part[0] == (334 + 72) / 2 + 4  # (headers are most of it here)
    assert [predicted for predicted, _ in pairs.values()] == [seen for _, seen in pairs.values()]


def test_bytes_of_what_is_sent_are_predicted_from_a_smaller_setup():
    """Sizes of 8 episodes of some length, for 40 on four ranks: within 15 %."""
    few, many = ([episode(i, 4 + i % 5) for i in range(n)] for n in (8, 40))
    seen = sum(entry.nbytes for t in few for entry in handed_out([t])) / 8
    sizes = Sizes(1, 1, 1, episode=seen, light=packed(light_state(few)).nbytes / 8)
    found = load(sizes, Setup(2, 4, 4, batch=40, learners=4), Node())
    store = Store()
    told = stored(store, store.put, many)
    owner = torch.tensor(owners(told, 4))
    data = packed({**light_state(told), "owner": owner, "named": torch.zeros(240)})
    got = [data.nbytes] * 4
    for t, rank in zip(told, owner.tolist(), strict=True):
        got[rank] += store.get(t.payload.reference)[t.payload.place].nbytes
    assert found.rank_in == pytest.approx(max(got), rel=0.15)


def test_an_ordinary_checkpoint_tells_what_ranks_would_spread(run: Path):
    state = {"algorithm": STATE, "curriculum": {"weights": torch.ones(9)}}
    save_checkpoint(run / "checkpoints" / "rl", Plain(40, SPEC), state)
    found = sizes_of(run, {})
    assert found.state == 15 * 4 and found.rest == 6 * 2 + 4 and found.weights == 334


def test_a_run_without_ranks_does_not_say_its_bytes(run: Path):
    text = (run / "metrics.jsonl").read_text().replace("bytes_rank", "other")
    (run / "metrics.jsonl").write_text(text)
    with pytest.raises(
        UserError, match=r"--memory: .* cluster=ray cluster.learners=1 or more, or a"
    ):
        sizes_of(run, {})


def test_the_command(tmp_path: Path, capsys):
    """At 4096 GPUs the driver's link is what breaks."""
    times = {"chunk": [0.16], "decisions": [1], "act_fixed": 0.02, "act_row": 0.013, "update": 16}
    sizes = {"weights": 15e9, "sent": 15e9, "state": 90e9, "episode": 7.5e6}
    file = tmp_path / "times.json"
    file.write_text(json.dumps(times | {f"{name}_bytes": size for name, size in sizes.items()}))
    asked = ["cluster", "plan", "run=toy", "rl.episodes_per_iteration=4", "slots.workers=1"]
    asked += ["--times", str(file), "--gpus", "8", "4096", "--memory"]
    assert main(asked) == 2 and main([*asked, "--node", "8", "80", "0", "1", "1"]) == 2
    file.write_text(json.dumps(json.loads(file.read_text()) | {"light_bytes": 2e5}))
    assert main([*asked, "--json", str(tmp_path / "plan.json")]) == 0
    said = capsys.readouterr()
    assert "does not say light_bytes" in said.err and "--node" in said.err
    assert "link of the driver" in said.out.splitlines()[-2] and "(breaks)" in said.out
    rows = json.loads((tmp_path / "plan.json").read_text())["memory"]["rows"]
    assert rows[1]["first"] == "link of the driver" and rows[0]["shares"][rows[0]["first"]] < 1
