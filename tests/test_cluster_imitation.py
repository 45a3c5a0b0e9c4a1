"""SFT on several ranks: the updates of one process, each rank reading its own rows alone; and a rank
may die."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from test_cluster import TOY
from test_nano_vla import SPEC
from test_ranks import NO_EFFECT, UPDATES, assert_equal_metrics, assert_equal_weights, make
from torch import Tensor

from policies.relative import RelativePolicy
from vla_rl.algorithms.imitation import Imitation
from vla_rl.cluster.imitation import GroupImitation
from vla_rl.cluster.packing import packed, unpacked
from vla_rl.cluster.rank_group import RankLost
from vla_rl.config import compose
from vla_rl.config.imitation import AugmentConfig, ImitationConfig
from vla_rl.data.demonstrations import DatasetSampler, DemonstrationDataset, dataset_of_episodes
from vla_rl.errors import UserError
from vla_rl.monitoring.metrics import read_metrics
from vla_rl.ranks import Ranks
from vla_rl.run import sft_phase
from vla_rl.run.pipeline import run_pipeline
from vla_rl.spread import merge

BATCH = 7  # an odd number: the last row of the second rank only fills up


def demonstrations() -> DemonstrationDataset:
    """Five episodes of 3 to 7 control steps with random pictures."""
    rng = np.random.default_rng(0)
    low, high = np.array(SPEC.action_low), np.array(SPEC.action_high)
    episodes = []
    for i in range(5):
        n = 3 + i
        shapes = {c.name: (n, c.height, c.width, 3) for c in SPEC.cameras}
        episodes.append(
            {
                "images": {k: rng.integers(0, 256, s, dtype=np.uint8) for k, s in shapes.items()},
                "proprio": rng.normal(size=(n, SPEC.proprio_dim)).astype(np.float32),
                "actions": rng.uniform(low, high, (n, len(low))).astype(np.float32),
                "instruction": f"task {i % 2}",
                "task_id": f"t{i % 2}",
                "init_state_id": i,
                "success": True,
            }
        )
    return dataset_of_episodes(episodes, SPEC, 3)


class ThreadRank(Ranks):
    """A rank of gloo that is a thread of this process."""

    def __init__(self, gloo: Any, index: int) -> None:
        super().__init__()
        self.gloo, self.index, self.size = gloo, index, 2

    def sum(self, x: Tensor) -> Tensor:
        out = x.detach().clone().contiguous()
        self.gloo.allreduce([out]).wait()
        return out

    def gather(self, x: Tensor, count: int | None = None) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self.gloo.allgather([parts], [x.detach().contiguous()]).wait()
        return torch.cat(parts)[:count]


class Counted(DemonstrationDataset):
    """Notes which rows are read."""

    def at(self, index: Tensor) -> Any:
        self.read.append(index.tolist())
        return super().at(index)


def updates(ranks: Ranks, policy: Any) -> dict[str, Any]:
    """Twenty updates with all that changes rows; what was read, the figures and the weights."""
    dataset = demonstrations()
    dataset.__class__, dataset.read = Counted, []
    policy.train()
    if ranks.size > 1:
        policy.learn_together(ranks.index, ranks.size, ranks.total)
    config = ImitationConfig(
        updates=UPDATES,
        learning_rate=1e-4,
        warmup_updates=2,
        augment=AugmentConfig(shift=2, crop=0.1, proprio=0.3),
    )
    imitation = Imitation(config, policy, DatasetSampler(dataset, BATCH, 3, 0.2), ranks)
    metrics = [imitation.update() for _ in range(UPDATES)]
    return {"metrics": metrics, "weights": policy.state_dict(), "read": dataset.read}


@pytest.mark.parametrize("around", [False, True], ids=["alone", "in_another"])
def test_two_ranks_make_the_updates_of_one_and_each_reads_its_own_rows(tmp_path, around):
    """So do they where the policy stands in another (``env.actions=delta``): what it standardises
    by is of all rows there too."""
    store, found = dist.FileStore(str(tmp_path / "store"), 2), {}
    policies = [make() for _ in range(3)]  # (whose seed is the process's)
    if around:
        policies = [RelativePolicy(policy, SPEC, ()) for policy in policies]
    loose = tuple(f"base.{name}" for name in NO_EFFECT) if around else NO_EFFECT

    def rank(index: int) -> None:
        gloo = dist.ProcessGroupGloo(store, index, 2)
        found[index] = updates(ThreadRank(gloo, index), policies[index])

    threads = [threading.Thread(target=rank, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    alone = updates(Ranks(), policies[2])
    for thread in threads:
        thread.join()
    assert found[0]["metrics"] == found[1]["metrics"]  # bit for bit
    assert_equal_metrics(found[0]["metrics"], alone["metrics"])
    for side in found.values():
        assert_equal_weights(side["weights"], alone["weights"], loose)
    assert [*map(len, alone["read"])] == [BATCH] * UPDATES
    for one, other, whole in zip(found[0]["read"], found[1]["read"], alone["read"], strict=True):
        assert len(one) == len(other) == 4 and [*one, *other] == [*whole, whole[-1]]


class Played(GroupImitation):
    """Ranks whose weights are the number of updates that made them; those in ``lost`` (how many
    were ever asked for) end with a rank."""

    def __init__(self, *lost: int, most: int = 3) -> None:
        self.lost, self.asked, self.at, self.said = lost, 0, 0.0, []
        self._policy = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(self._policy.weight)
        self._state, self._actors, self._hello = None, [], []
        self._failures = self.restarts = self._asked = self._made = self._kept = self._taken = 0
        self._saving, self._folder = None, ""
        self._ray = SimpleNamespace(nodes=lambda: [])
        self._nodes = frozenset()
        cluster = SimpleNamespace(max_failures=most, writes_parts=False)
        self._run = SimpleNamespace(
            config=SimpleNamespace(cluster=cluster), progress=SimpleNamespace(say=self.said.append)
        )

    def _begin(self) -> None:
        self.at = -1e9  # (until weights are loaded)

    def _put(self, data: Any) -> Any:
        return data

    def _all(self, method: str, *given: Any, limit: float = 0.0) -> list[Any]:
        if method == "load":
            self.at = float(unpacked(given[1])["weights"]["weight"])
            assert (
                given[2] is None or unpacked(given[2])["state"]["algorithm"]["updates"] == self.at
            )
            return []
        if method == "state":
            state = {"algorithm": {"updates": int(self.at)}, "sampler": {}}
            return [packed({"weights": {"weight": torch.full((1, 1), self.at)}, "state": state})]
        self.asked += 1
        if self.asked in self.lost:
            raise RankLost(1, "killed")
        self.at += 1
        return [{"sft/loss": self.at}]


def test_the_driver_lets_go_of_demonstrations_that_ranks_read_themselves(monkeypatch):
    class Shown:
        episodes = (SimpleNamespace(task_id="a"), SimpleNamespace(task_id="b"))

    def learned(learner, *, tasks, **_):
        assert learner == "ranks" and tasks == 2 and dataset() is None
        return SimpleNamespace(iteration=7, seconds=1.0)

    def imitating(run):
        nonlocal dataset
        shown = Shown()
        dataset = weakref.ref(shown)
        return None, shown, None, {}

    dataset: Any = None
    monkeypatch.setattr(sft_phase, "imitating", imitating)
    monkeypatch.setattr(sft_phase, "train_sft", learned)
    monkeypatch.setattr(
        "vla_rl.cluster.imitation.ranks_for_sft", lambda *_: contextlib.nullcontext("ranks")
    )
    config = SimpleNamespace(
        checkpoint="", cluster_type="ray", cluster=SimpleNamespace(has_ranks=True)
    )
    run = SimpleNamespace(config=config, env=None, dir=Path(), logger=None, progress=None)
    assert sft_phase.phase_sft(run) == {"updates": 7, "seconds": 1.0}


def test_ranks_that_are_lost_make_the_updates_since_the_checkpoint_again():
    learner = Played(4, 9, 15)
    assert [learner.update()["sft/loss"] for _ in range(5)] == [1, 2, 3, 4, 5]
    assert learner.asked == 5 + 1 + 3 + 1 + 4  # the 4th was lost, and the 5th
    assert learner.policy.weight.item() == 5 and learner.state_dict()["algorithm"]["updates"] == 5
    assert learner.update()["sft/loss"] == 6 and learner.asked == 14 + 2  # on from the checkpoint
    assert learner.restarts == 3 and "from the last checkpoint" in learner.said[0]


def test_ranks_that_are_lost_at_one_update_again_and_again_end_the_run():
    learner = Played(3, 6, 9, 12)  # after two updates, each time
    learner.update(), learner.update()
    with pytest.raises(UserError, match=r"failed 3 times in a row \(cluster.max_failures=3\)"):
        learner.update()
    assert learner.asked == 9


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_sft_on_ranks_of_ray_is_a_local_runs_and_a_rank_may_die(ray_here, tmp_path, monkeypatch):
    """Twenty updates with a checkpoint after ten; the second rank is killed before the 13th."""
    own = [*TOY, "phases=[collect,sft]", "collect.episodes_per_task=6", f"output_dir={tmp_path}"]
    own += ["sft.updates=20", "sft.checkpoint_every=10", "sft.batch_size=15"]
    own += ["sft.validation_episodes=1", "policy.precision=float32"]
    update, killed = GroupImitation.update, []

    def killing(self: GroupImitation) -> dict[str, float]:
        if self._asked == 12:
            killed.append(self.pids[1])
            os.kill(self.pids[1], signal.SIGKILL)
        return update(self)

    monkeypatch.setattr(GroupImitation, "update", killing)
    rows, weights = [], []
    for name, more in {"alone": [], "two": ["cluster=ray", "cluster.learners=2"]}.items():
        folder = run_pipeline(compose([*own, f"name={name}", *more]))
        found = [r for r in read_metrics(folder / "metrics.jsonl") if r["phase"] == "sft"]
        rows.append([{k: row[k] for k in row.keys() - {"phase", "time_s"}} for row in found])
        checkpoint = folder / "checkpoints" / "sft"
        if name == "two":  # (of the ranks' parts)
            merge(checkpoint, checkpoint := tmp_path / "merged")
        weights.append(load_file(checkpoint / "model.safetensors"))
    assert len(killed) == 1 and len(rows[0]) == 4
    assert_equal_metrics(rows[1], rows[0])
    whole, parts = (torch.cat([x.double().flatten() for x in w.values()]) for w in weights)
    assert weights[0].keys() == weights[1].keys()
    assert (parts - whole).norm() < 1e-5 * whole.norm()
