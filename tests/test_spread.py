"""Checkpoints in the parts of several ranks: any number of ranks reads its rows of them, they become
ordinary ones, and what is not whole is refused."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from test_checkpoint import SPEC, Plain, factory, same_weights
from torch import Tensor

from vla_rl.checkpoint import (
    CheckpointError,
    keep_numbered,
    load_policy,
    load_training_state,
    load_weights,
    save_checkpoint,
)
from vla_rl.cli import main
from vla_rl.cluster.learner import GroupLearner
from vla_rl.cluster.packing import unpacked
from vla_rl.cluster.rank_actor import RankActor
from vla_rl.cluster.rank_group import RankLost
from vla_rl.errors import TrainingDiverged, UserError
from vla_rl.files import check_checkpoint
from vla_rl.ranks import Ranks as OneRank
from vla_rl.run.publish import package
from vla_rl.shards import Piece, Shards, TensorLayout, fill, rows_of, write_shard
from vla_rl.spread import Snapshot, Spread, Unfinished, merge, reshard
from vla_rl.storage import split_state

# of 5 rows over two or more ranks some have fewer, or none
STATE = {
    "moments": {"0": {"exp_avg": torch.randn(5, 3), "step": torch.tensor(7.0)}},
    "half": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
    "rate": 0.5,
}
WHOLE = ("step", "halves")  # that ranks do not spread


def write_parts(folder: Path, policy: Plain, ranks: int, state: Any = STATE, **rest: Any) -> None:
    """What a driver and so many ranks do, without any."""
    tensors: dict[str, Tensor] = {}
    structure = split_state({"algorithm": state}, tensors)

    def begin(unfinished: Unfinished) -> None:
        told = [
            [
                part(unfinished, rank, ranks, "model", policy.state_dict()),
                part(unfinished, rank, ranks, "training_state/state", tensors),
            ]
            for rank in range(ranks)
        ]
        unfinished.finish(told)

    save_checkpoint(folder, policy, {"algorithm": Spread(structure, begin), **rest})


def part(
    unfinished: Unfinished, rank: int, ranks: int, place: str, tensors: dict[str, Tensor]
) -> dict[str, Any]:
    pieces = {}
    for name, x in tensors.items():
        spread = not name.endswith(WHOLE)
        if spread or rank == 0:
            begin, end = rows_of(len(x), rank, ranks) if spread else (None, None)
            pieces[name] = Piece(
                TensorLayout(x.dtype, tuple(x.shape), spread), x[begin:end] if spread else x
            )
    path = unfinished.folder / place
    shard = write_shard(path.parent, path.name, pieces, rank, ranks, unfinished.save)
    return {"shard": shard, "tensors": {n: p.layout.told() for n, p in pieces.items()}}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return (
        a.keys() == b.keys() and all(same(a[k], b[k]) for k in a) if isinstance(a, dict) else a == b
    )


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, Plain]:
    """A checkpoint of three ranks: two have rows of the two of ``weight``, one none."""
    policy = Plain(40, SPEC, words="ho")
    write_parts(tmp_path / "parts", policy, 3, counters={"iteration": 4, "seen": torch.ones(2)})
    return tmp_path / "parts", policy


def test_the_parts_of_ranks_are_the_checkpoint_of_one_process(written, tmp_path: Path):
    folder, policy = written
    assert not (folder / "model.safetensors").exists()
    assert load_policy(folder, factory, SPEC).words == "ho" and check_checkpoint(folder) == SPEC
    assert same_weights(load_policy(folder, factory, SPEC), policy)
    found = load_training_state(folder)
    assert same(dict(found["algorithm"]), STATE)  # (a number and a bfloat16 too)
    assert found["counters"]["iteration"] == 4
    save_checkpoint(tmp_path / "own", policy, {**found, "algorithm": STATE})
    merge(folder, tmp_path / "merged")
    for name in ("model.safetensors", "training_state/state.safetensors"):
        own, merged = (safetensors.torch.load_file(tmp_path / p / name) for p in ("own", "merged"))
        assert same(own, merged)
    for name in ("config.json", "words.txt", "embodiment.json", "training_state/state.json"):
        assert (
            json.loads((tmp_path / "own" / name).read_text())
            == json.loads((tmp_path / "merged" / name).read_text())
            if name.endswith("json")
            else True
        )
    assert {p.name for p in (tmp_path / "merged").iterdir()} == {
        p.name for p in (tmp_path / "own").iterdir()
    }
    assert same(load_training_state(tmp_path / "merged")["algorithm"], STATE)


def test_an_index_of_parts_is_none_of_the_policys_text_files(written, tmp_path: Path):
    """A policy that hands on whatever lay beside it would write it into ordinary checkpoints."""

    class Keeps(Plain):
        @classmethod
        def from_config_dict(cls, data, embodiment, files):
            policy = super().from_config_dict(data, embodiment, files)
            policy.extra_files = lambda: files
            return policy

    folder, policy = written
    loaded = load_policy(folder, lambda name: Keeps)
    assert loaded.extra_files().keys() == {"words.txt"}
    save_checkpoint(tmp_path / "own", loaded)
    assert same_weights(load_policy(tmp_path / "own", factory), policy)


def test_any_number_of_ranks_reads_its_own_rows(written, tmp_path: Path):
    folder, _ = written
    state = Shards(folder / "training_state", "state")
    place = "/algorithm/moments/0/exp_avg"
    for ranks in (1, 2, 4, 7):
        parts = [state.read(place, i, ranks) for i in range(ranks)]
        expected = STATE["moments"]["0"]["exp_avg"].chunk(ranks)
        assert [len(p) for p in parts if len(p)] == [len(p) for p in expected]
        assert torch.equal(torch.cat(parts), torch.cat(expected))
    reshard(folder, 2, tmp_path / "two")
    write_parts(tmp_path / "as_two", load_policy(folder, factory), 2)
    for name in (
        "model-00001-of-00002.safetensors",
        "training_state/state-00000-of-00002.safetensors",
    ):
        made, expected = (
            safetensors.torch.load_file(tmp_path / p / name) for p in ("two", "as_two")
        )
        assert same(made, expected)
    assert same(dict(load_training_state(tmp_path / "two")["algorithm"]), STATE)


def test_the_files_that_a_rank_does_not_need_are_not_read(written):
    """(Their hash is not compared: the last one's was not looked at.)"""
    folder, _ = written
    file = folder / "training_state/state-00002-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    state = Shards(folder / "training_state", "state")
    place = "/algorithm/moments/0/exp_avg"
    assert torch.equal(state.read(place, 0, 2), STATE["moments"]["0"]["exp_avg"][:3])
    with pytest.raises(CheckpointError, match=r"state-00002-of-00003.safetensors was altered"):
        state.read(place, 1, 2)


def test_only_a_part_of_a_file_is_in_memory_where_forms_change(written, tmp_path, monkeypatch):
    monkeypatch.setattr("vla_rl.shards._BLOCK", 8)
    folder, policy = written
    blocks = list(Shards(folder, "model").blocks("weight"))
    assert max(map(len, blocks)) == 8 and sum(map(len, blocks)) == 320
    merge(folder, folder)  # in its place
    assert same_weights(load_policy(folder, factory), policy)
    with pytest.raises(UserError, match="an ordinary checkpoint already"):
        merge(folder, tmp_path / "again")


def _remove(folder: Path) -> None:
    (folder / "model-00001-of-00003.safetensors").unlink()


def _flip(folder: Path) -> None:
    file = folder / "model-00000-of-00003.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))


def _cut(folder: Path) -> None:
    file = folder / "model-00002-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-4])


def _other_save(folder: Path) -> None:
    other = folder.with_name("other")
    write_parts(other, Plain(40, SPEC), 3)
    shutil.copy(other / "model-00001-of-00003.safetensors", folder)


def _unknown_type(folder: Path) -> None:
    file = folder / "model-00002-of-00003.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"F32"', b'"X32"'))


def _wrong_length(folder: Path) -> None:
    file = folder / "model-00000-of-00003.safetensors"
    file.write_bytes(file.read_bytes().replace(b"[1, 40]", b"[9, 40]"))


def _no_index(folder: Path) -> None:
    (folder / "model.shards.json").unlink()  # which is written last


def _odd_index(folder: Path) -> None:
    (folder / "model.shards.json").write_text('{"format": 1, "save": "", "shards": []}')


def _newer(folder: Path) -> None:
    index = json.loads((folder / "model.shards.json").read_text())
    (folder / "model.shards.json").write_text(json.dumps({**index, "format": 9}))


def _lies(folder: Path) -> None:
    text = (folder / "model.shards.json").read_text()
    (folder / "model.shards.json").write_text(text.replace("40\n", "41\n"))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_remove, "model-00001-of-00003.safetensors is missing"),
        (_flip, "model-00000-of-00003.safetensors was altered: its contents have not the hash"),
        (_cut, "model-00002-of-00003.safetensors is damaged .it is cut short"),
        (_other_save, "model-00001-of-00003.safetensors is of another save than the index"),
        (_unknown_type, "model-00002-of-00003.safetensors is damaged .KeyError"),
        (_wrong_length, "model-00000-of-00003.safetensors is damaged .*weight has 160 bytes"),
        (_no_index, "model.safetensors is missing: the checkpoint is incomplete"),
        (_odd_index, "model.shards.json does not say which files hold which tensors"),
        (_newer, "has format 9, and this vla_rl reads up to 1: update"),
        (_lies, "model-00000-of-00003.safetensors was altered: it does not hold what"),
    ],
)
def test_what_is_not_whole_is_refused(written, damage, said):
    folder, _ = written
    damage(folder)
    with pytest.raises(CheckpointError, match=said):
        load_policy(folder, factory)


def test_the_checkpoint_of_another_model_is_refused(written):
    folder, _ = written
    other = Plain(30, SPEC)
    with pytest.raises(CheckpointError, match=r"weight is \[2, 40\] in the checkpoint, \[2, 30\]"):
        load_weights(folder, other)


def test_a_save_that_fails_leaves_the_one_before(written):
    folder, policy = written
    unfinished = Unfinished(folder, lambda part: (part / "config.json").write_text("{}"))
    assert unfinished.folder.is_dir()
    unfinished.abandon()
    assert not unfinished.folder.exists() and same_weights(load_policy(folder, factory), policy)

    def refuse(part: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match="the disk is full"):
        Unfinished(folder, refuse)
    assert [p.name for p in folder.parent.iterdir()] == ["parts"]


def test_a_rank_writes_no_weights_that_are_no_numbers(tmp_path: Path):
    policy = Plain(4, SPEC)
    with torch.no_grad():
        next(policy.parameters())[0] = torch.inf
    with pytest.raises(TrainingDiverged, match="not finite"):
        Snapshot(policy, STATE, OneRank()).write(tmp_path, "save")
    assert list(tmp_path.iterdir()) == []


class Learner(RankActor):
    """A rank whose update takes one from every weight."""

    def __init__(self) -> None:
        self._policy, self._ranks = Plain(4, SPEC), OneRank()

    def _build(self, run: Any) -> None: ...

    def _update(self) -> None:
        with torch.no_grad():
            for weights in self._policy.parameters():
                weights -= 1

    def _parts(self) -> dict[str, Any]:
        return {"algorithm": STATE}

    def _of_parts(self, stored: dict[str, Any]) -> Any:
        return stored["algorithm"]


def test_only_what_changes_the_weights_waits_for_their_copy(tmp_path: Path, monkeypatch):
    """A checkpoint has those of when it was asked for, and episodes go on at once."""
    rank, free = Learner(), threading.Event()
    before = {name: x.clone() for name, x in rank._policy.state_dict().items()}

    def copied(*given: Any) -> None:
        assert free.wait(20)
        fill(*given)

    monkeypatch.setattr("vla_rl.spread.fill", copied)
    assert json.loads(rank.snapshot() or "").keys() == {"algorithm"}
    update = threading.Thread(target=rank.update)
    update.start()
    update.join(0.2)
    assert update.is_alive(), "it would change what is being copied"
    free.set()
    update.join()
    rank.write(str(tmp_path), "save")
    kept = safetensors.torch.load_file(tmp_path / "model-00000-of-00001.safetensors")
    assert kept.keys() == before.keys()
    assert all(torch.equal(kept[name], x) for name, x in before.items())
    for name, x in rank._policy.named_parameters():
        assert torch.equal(x, before[name] - 1)
    assert rank._kept is None


def test_a_copy_that_fails_is_told_by_what_comes_next(monkeypatch):
    def full(*given: Any) -> Any:
        raise MemoryError("no room for a copy")

    monkeypatch.setattr("vla_rl.spread.fill", full)
    rank = Learner()
    rank.snapshot()
    with pytest.raises(MemoryError, match="no room"):
        rank.update()


def test_a_numbered_copy_of_parts_is_a_policy(written):
    folder, policy = written
    keep_numbered(folder, 4, 2)
    assert same_weights(load_policy(folder.with_name("parts_4"), factory), policy)


def test_the_commands(written, capsys, tmp_path: Path):
    folder, policy = written
    with pytest.raises(UserError, match=r"vla-rl checkpoint merge .* --out FOLDER"):
        package(folder, "me/it", [], "mit")
    assert main(["checkpoint", "reshard", str(folder), "0"]) == 2
    assert main(["checkpoint", "reshard", str(folder), "2", "--out", str(folder.parent)]) == 2
    assert main(["checkpoint", "reshard", str(folder), "5"]) == 0
    assert len(list(folder.glob("model-*-of-00005.safetensors"))) == 5
    assert not list(folder.glob("*-of-00003*"))
    assert main(["checkpoint", "merge", str(folder)]) == 0
    assert main(["checkpoint", "merge", str(folder)]) == 2
    said = capsys.readouterr()
    assert "error: 0 ranks: give 1 to" in said.err and "exists already" in said.err
    assert "wrote" in said.out and "an ordinary checkpoint already" in said.err
    assert same_weights(load_policy(folder, factory), policy)
    assert same(load_training_state(folder)["algorithm"], STATE)


# -------------------------------------------------------------------------- who leads it on a cluster
class Ranks(GroupLearner):
    """Two ranks that write hand-made parts; ``lost`` writes (by their number) end with a rank,
    ``full`` ones with a disk that is."""

    def __init__(self, *lost: int, full: int = 0, ahead: int = 0) -> None:
        self._policy = Plain(4, SPEC)
        self._lost, self._full, self.asked, self.said = lost, full, [], []
        self._state, self._folder, self._saving, self._hello = None, "", None, []
        self._actors = [None, None]
        self._made = self._kept = self._failures = self.restarts = 0
        self._ray, self._nodes = SimpleNamespace(nodes=lambda: []), frozenset()
        cluster = SimpleNamespace(max_failures=3, writes_parts=True, ahead=ahead)
        progress = SimpleNamespace(say=self.said.append)
        self._run = SimpleNamespace(config=SimpleNamespace(cluster=cluster), progress=progress)
        self.free = threading.Event()  # to write
        self.free.set()

    def learn(self) -> None:
        if not self._run.config.cluster.ahead:
            self.settle()
        self.asked.append("update")
        self._made += 1

    def _begin(self) -> None:
        self.asked.append("begin")

    def _end(self) -> None:
        pass

    def _put(self, data: Any) -> Any:
        return unpacked(data)

    def _all(self, method: str, *given: Any, limit: float = 0.0, group: str = "") -> list[Any]:
        self.asked.append(method)
        if method == "load":
            self.loaded = given
        if method == "snapshot":
            self._tensors: dict[str, Tensor] = {}
            state = {"algorithm": {**STATE, "made": self._made}}
            self._structure = split_state(state, self._tensors)
            return [json.dumps(self._structure), None]
        if method != "write":
            return []
        assert self.free.wait(20)
        number = self.asked.count("write")
        if number in self._lost:
            raise RankLost(1, "killed")
        if number == self._full:
            raise UserError("the disk is full")
        unfinished = SimpleNamespace(folder=Path(given[0]), save=given[1])
        sets = ("model", self._policy.state_dict()), ("training_state/state", self._tensors)
        return [[part(unfinished, rank, 2, *each) for each in sets] for rank in range(2)]


def saved(ranks: Ranks, folder: Path) -> int:
    """Updates of the checkpoint that is there."""
    load_weights(folder, Plain(4, SPEC))
    return load_training_state(folder)["algorithm"]["made"]


def test_a_checkpoint_is_written_while_other_things_go_on(tmp_path: Path):
    """The update after it waits for it, so that its end costs no more than one to do again; where
    rollouts run ahead, none waits."""
    for ahead in (0, 1):
        ranks, folder = Ranks(ahead=ahead), tmp_path / str(ahead)
        ranks.learn()
        ranks.free.clear()
        save_checkpoint(folder, ranks._policy, {"algorithm": ranks.state_dict()})
        assert not folder.exists() and ranks._saving.is_alive()  # (this goes on)
        if ahead:
            ranks.learn()
            assert not folder.exists()
        ranks.free.set()
        ranks.learn()
        ranks.finish(None)
        assert saved(ranks, folder) == 1 and ranks._kept == 1
        assert ranks.asked.index("write") < (len(ranks.asked) - 1) and ranks.restarts == 0
        ranks._surely(ranks._load)  # of a rank that is lost now
        _, weights, state = ranks.loaded
        assert ranks.loaded[0] == str(folder) and weights.keys() == {"weights"} and state is None


def test_ranks_go_on_from_their_own_parts(tmp_path: Path):
    """Nothing of weights or state comes from the driver where the checkpoint is the newest."""
    ranks = Ranks()
    save_checkpoint(tmp_path / "rl", ranks._policy, {"algorithm": ranks.state_dict()})
    ranks.settle()
    ranks._surely(ranks._load)
    assert ranks.loaded == (str(tmp_path / "rl"), None, None)
    again = Ranks()  # a run that goes on
    again.load_state_dict(load_training_state(tmp_path / "rl")["algorithm"])
    assert again.loaded == (str(tmp_path / "rl"), None, None)


def test_what_a_lost_rank_did_not_write_is_written_once_more(tmp_path: Path):
    ranks, folder = Ranks(1, 2), tmp_path / "rl"
    ranks.learn()
    save_checkpoint(folder, ranks._policy, {"algorithm": ranks.state_dict()})
    ranks.settle()
    assert saved(ranks, folder) == 1 and ranks.restarts == 2
    assert ranks.asked == [
        "update",
        "snapshot",
        "write",
        *["begin", "load", "snapshot", "write"] * 2,
    ]


def test_a_rank_that_is_lost_after_more_was_learned_costs_that_checkpoint(tmp_path: Path):
    ranks, folder = Ranks(2, ahead=1), tmp_path / "rl"
    for _ in range(2):
        ranks.learn()
        save_checkpoint(folder, ranks._policy, {"algorithm": ranks.state_dict()})
    ranks.learn()
    ranks.settle()
    assert saved(ranks, folder) == 1 and ranks._kept == 1 and "was not written" in ranks.said[-1]
    assert [p.name for p in tmp_path.iterdir()] == ["rl"]


def test_a_full_disk_ends_the_run_and_leaves_the_checkpoint_before(tmp_path: Path):
    ranks, folder = Ranks(full=2), tmp_path / "rl"
    save_checkpoint(folder, ranks._policy, {"algorithm": ranks.state_dict()})
    ranks.learn()
    save_checkpoint(folder, ranks._policy, {"algorithm": ranks.state_dict()})
    with pytest.raises(UserError, match="the disk is full"):
        ranks.learn()
    assert saved(ranks, folder) == 0
    ranks._saving = None
    save_checkpoint(folder, ranks._policy, {"algorithm": ranks.state_dict()})
    ranks._full = 4
    save_checkpoint(folder, ranks._policy, {"algorithm": ranks.state_dict()})
    ranks.close()  # (a run that ends for another reason)
    assert "could not be written: the disk is full" in ranks.said[-1]
    assert {p.name for p in tmp_path.iterdir()} == {"rl", "rl.last_good"}


def test_a_folder_that_a_rank_does_not_see_is_refused_before_anything_begins(tmp_path, monkeypatch):
    """Each is asked for a file that the driver has just made there."""
    ranks, asked = Ranks(), []
    ranks._run.dir, ranks._hello = tmp_path, [{"host": "head"}, {"host": "elsewhere"}]

    def sees(method: str, file: str) -> list[bool]:
        asked.append((method, Path(file).is_file()))
        return [True, len(asked) == 1]

    monkeypatch.setattr(ranks, "_all", sees)
    ranks._require_shared_folder()
    with pytest.raises(UserError, match=r"rank 1 on elsewhere does not see .*checkpoints=whole"):
        ranks._require_shared_folder()
    assert asked == [("sees", True)] * 2 and not [*tmp_path.iterdir()]
