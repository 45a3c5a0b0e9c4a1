"""Checkpoints: what is saved comes back bit for bit, and what goes wrong leaves the old one and
says so."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import multiprocessing
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import nn

from vla_rl import checkpoint, storage
from vla_rl.checkpoint import (
    CheckpointError,
    keep_numbered,
    load_policy,
    load_training_state,
    load_weights,
    save_checkpoint,
)
from vla_rl.errors import (
    ConfigError,
    DiskFull,
    EmbodimentMismatch,
    TrainingDiverged,
    UserError,
)
from vla_rl.lock import RunLock
from vla_rl.storage import load_state, save_state
from vla_rl.types import CameraSpec, EmbodimentSpec

SPEC = EmbodimentSpec(
    name="one_joint",
    action_names=("turn",),
    action_units=("rad",),
    action_low=(-1.0,),
    action_high=(1.0,),
    frame="base",
    rotation="none",
    gripper="none",
    control_hz=20.0,
    cameras=(CameraSpec("top", 8, 8),),
    proprio_names=("angle",),
)


class Plain(nn.Linear):
    """The least that can be saved."""

    policy_type = "plain"

    def __init__(self, width: int, embodiment: EmbodimentSpec, words: str = "hello"):
        super().__init__(width, 2)
        self.embodiment, self.words = embodiment, words
        self.register_buffer("halves", torch.arange(3, dtype=torch.bfloat16))

    def config_dict(self) -> dict[str, Any]:
        return {"config": {"width": self.in_features}}

    def extra_files(self) -> dict[str, str]:
        return {"words.txt": self.words}

    @classmethod
    def from_config_dict(
        cls, data: dict[str, Any], embodiment: EmbodimentSpec, files: dict[str, str]
    ) -> Plain:
        return cls(data["config"]["width"], embodiment, files["words.txt"])


def factory(name: str) -> type[Plain]:
    assert name == "plain"
    return Plain


def same_weights(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values()))


@pytest.mark.parametrize("shard", [5_000_000_000, 40])
def test_policy_round_trip(tmp_path: Path, shard: int, monkeypatch):
    monkeypatch.setattr("vla_rl.storage.SHARD_BYTES", shard)
    policy = Plain(5, SPEC, "two words")
    save_checkpoint(tmp_path / "a", policy)
    loaded = load_policy(tmp_path / "a", factory, expected_embodiment=SPEC)
    assert (
        same_weights(policy, loaded) and loaded.embodiment == SPEC and loaded.words == "two words"
    )
    assert not loaded.training and loaded.halves.dtype == torch.bfloat16
    assert (tmp_path / "a" / checkpoint.WEIGHTS_INDEX).exists() == (shard == 40)
    assert json.loads((tmp_path / "a" / "config.json").read_text())["policy_type"] == "plain"


def test_keys_of_a_stored_policy_can_be_changed_as_far_as_its_weights_allow(tmp_path: Path):
    path = tmp_path / "a"
    save_checkpoint(path, Plain(5, SPEC))
    assert load_policy(path, factory, changes={"width": 5}).in_features == 5
    with pytest.raises(
        CheckpointError, match=r"weight is \[2, 5\] in the checkpoint, \[2, 6\] in the policy"
    ):
        load_policy(path, factory, changes={"width": 6})
    with pytest.raises(
        ConfigError, match=r"policy\.heat=2 changes nothing: .*type 'plain'.*Its keys: width"
    ):
        load_policy(path, factory, changes={"heat": 2})


def test_state_round_trip_keeps_types_and_values(tmp_path: Path):
    base = torch.arange(12.0).reshape(3, 4)
    state = {
        "step": 2**70,
        "rate": 0.1,
        "odd": [math.inf, math.nan],
        "name": "ü",
        "flag": True,
        "none": None,
        "empty": {},
        "nested": {
            "a": [{"b": base.T}, base, base[1]],
            "scalar": torch.tensor(3),
            "void": torch.zeros(0, 2),
        },
        "rng": torch.get_rng_state(),
    }
    save_state(tmp_path / "s", state)
    back = load_state(tmp_path / "s")
    assert (
        back["step"] == 2**70
        and back["rate"] == 0.1
        and back["name"] == "ü"
        and back["flag"] is True
    )
    assert (
        back["odd"][0] == math.inf
        and math.isnan(back["odd"][1])
        and back["none"] is None
        and back["empty"] == {}
    )
    a = back["nested"]["a"]
    assert torch.equal(a[0]["b"], base.T) and torch.equal(a[1], base) and torch.equal(a[2], base[1])
    assert back["nested"]["scalar"].item() == 3 and back["nested"]["scalar"].dtype == torch.int64
    assert back["nested"]["void"].shape == (0, 2) and torch.equal(back["rng"], state["rng"])


@pytest.mark.parametrize("state", [{"a": {3: 1}}, {"a": {"x": object()}}])
def test_state_refuses_what_it_cannot_restore(tmp_path: Path, state: dict):
    with pytest.raises(TypeError, match="'/a"):
        save_state(tmp_path / "s", state)


def test_a_second_save_replaces_and_keeps_last_good(tmp_path: Path):
    first, second = Plain(5, SPEC), Plain(5, SPEC)
    save_checkpoint(tmp_path / "a", first, {"iteration": 1})
    save_checkpoint(tmp_path / "a", second, {"iteration": 2})
    assert load_training_state(tmp_path / "a") == {"iteration": 2}
    assert same_weights(load_policy(tmp_path / "a", factory), second)
    assert same_weights(load_policy(tmp_path / "a.last_good", factory), first)
    save_checkpoint(tmp_path / "a", first, keep_last_good=False)
    assert load_training_state(tmp_path / "a.last_good") == {"iteration": 1}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "a.last_good"]


def test_without_an_atomic_exchange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(storage, "_exchange", lambda a, b: False)
    first, second = Plain(5, SPEC), Plain(5, SPEC)
    save_checkpoint(tmp_path / "a", first)
    save_checkpoint(tmp_path / "a", second)
    assert same_weights(load_policy(tmp_path / "a", factory), second)
    # A crash between the two renames leaves last_good alone, which is then what loads.
    (tmp_path / "a").rename(tmp_path / "gone")
    assert same_weights(load_policy(tmp_path / "a", factory), first)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk_leaves_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
):
    policy = Plain(5, SPEC)
    save_checkpoint(tmp_path / "a", policy, {"iteration": 1})
    real, calls = os.fsync, []

    def full(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 3:
            raise OSError(number, os.strerror(number))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        DiskFull, match=r"(disk is full|quota is used up): .*a could not be written.*unchanged"
    ):
        save_checkpoint(tmp_path / "a", Plain(5, SPEC), {"iteration": 2})
    assert same_weights(load_policy(tmp_path / "a", factory), policy)
    assert load_training_state(tmp_path / "a") == {"iteration": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_weights_that_are_no_numbers_leave_the_old_checkpoint(tmp_path: Path):
    policy, broken = Plain(5, SPEC), Plain(5, SPEC)
    save_checkpoint(tmp_path / "a", policy, {"iteration": 1})
    with torch.no_grad():
        next(broken.parameters())[0] = torch.nan
    with pytest.raises(TrainingDiverged, match=r"1 of the weights .*\(the first: \w+.*last one is"):
        save_checkpoint(tmp_path / "a", broken, {"iteration": 2})
    assert same_weights(load_policy(tmp_path / "a", factory), policy)
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_full_disk_inside_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The library gives the system's error number in its text only (as met on a full tmpfs,
    safetensors 0.6)."""

    def full(*_: Any, **__: Any) -> None:
        raise SafetensorError(
            "Error while serializing: I/O error: No space left on device (os error 28)"
        )

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(DiskFull, match="disk is full"):
        save_checkpoint(tmp_path / "a", Plain(5, SPEC))
    assert list(tmp_path.iterdir()) == []


def test_leftovers_of_a_killed_save_are_removed(tmp_path: Path):
    (tmp_path / ".a.part-1").mkdir()
    (tmp_path / ".a.part-1" / "model.safetensors").write_text("half")
    save_checkpoint(tmp_path / "a", Plain(5, SPEC))
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


# ------------------------------------------------------------------------------ frozen base weights
class OnTop(Plain):
    """Its checkpoints hold the bias alone; the weight is that of another checkpoint."""

    policy_type, base_key = "on_top", "base"

    def __init__(self, base: str, embodiment: EmbodimentSpec):
        super().__init__(3, embodiment)
        self.base = base
        self.weight.data = safetensors.torch.load_file(Path(base) / "model.safetensors")["weight"]

    def base_folder(self) -> Path | None:
        return Path(self.base) if self.base else None

    def config_dict(self) -> dict[str, Any]:
        return {"config": {"base": self.base}}

    @classmethod
    def from_config_dict(
        cls, data: dict[str, Any], embodiment: EmbodimentSpec, files: dict[str, str]
    ) -> OnTop:
        return cls(data["config"]["base"], embodiment)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {"bias": super().state_dict(*args, **kwargs)["bias"]}

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict(state_dict, strict=False)


def on_base(run: Path, base: Path) -> tuple[OnTop, Path]:
    """A policy on the checkpoint ``base``, and where it was saved."""
    save_checkpoint(base, Plain(3, SPEC))
    policy = OnTop(str(base), SPEC)
    save_checkpoint(run / "rl", policy, {"iteration": 1})
    return policy, run / "rl"


def on_top(path: Path, **changes: Any) -> OnTop:
    return load_policy(path, lambda name: OnTop, SPEC, changes)


def test_a_base_beside_the_checkpoint_moves_with_it(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    policy, saved = on_base(Path("run"), Path("run/sft"))
    assert json.loads((saved / "config.json").read_text())["frozen_base"]["path"] == "../sft"
    save_checkpoint(saved, policy)
    keep_numbered(saved, 7, 1)
    shutil.copytree("run", "copied/run")
    shutil.rmtree("run")
    monkeypatch.chdir("/")
    for name in ("rl", "rl.last_good", "rl_7"):
        loaded = on_top(tmp_path / "copied/run" / name)
        assert same_weights(loaded, policy) and torch.equal(loaded.weight, policy.weight)
        assert loaded.base == str(tmp_path / "copied/run/sft")


def test_a_base_elsewhere_is_named_by_its_place_and_checked(tmp_path: Path):
    policy, saved = on_base(tmp_path / "run", tmp_path / "published")
    assert torch.equal(on_top(saved).weight, policy.weight)
    (tmp_path / "published").rename(tmp_path / "away")
    with pytest.raises(
        CheckpointError,
        match=f"frozen weights, which are not at {tmp_path}/published.*frozen_base.path",
    ):
        on_top(saved)
    assert torch.equal(on_top(saved, base=str(tmp_path / "away")).weight, policy.weight)
    with pytest.raises(CheckpointError, match="no weights"):
        (tmp_path / "published").mkdir()
        on_top(saved)
    save_checkpoint(tmp_path / "other", Plain(3, SPEC))
    with pytest.raises(
        CheckpointError, match=r"other holds other weights than those that .*rl was trained on"
    ):
        on_top(saved, base=str(tmp_path / "other"))
    # a run that goes on, whose start was put elsewhere
    with pytest.raises(CheckpointError, match="holds other weights"):
        load_weights(saved, OnTop(str(tmp_path / "other"), SPEC))


@pytest.mark.parametrize(
    "name", ["model.safetensors", "head--5_checkpoint.pt", "pytorch_model.bin"]
)
def test_a_fingerprint_sees_every_tensor(tmp_path: Path, name: str):
    first = {"small": torch.zeros(3), "large": torch.zeros(50_000), "middle": torch.zeros(100, 40)}
    seen = set()
    for change in (None, "small", "large", "middle"):
        weights = {k: torch.full_like(x, 1e-6) if k == change else x for k, x in first.items()}
        (safetensors.torch.save_file if name.endswith("tensors") else torch.save)(
            weights, tmp_path / name
        )
        seen.add(checkpoint.fingerprint(tmp_path))
        os.utime(tmp_path / name, ns=(0, 0))
        assert checkpoint.fingerprint(tmp_path) in seen  # what it is, not when it was written
    assert len(seen) == 4


# what env, dataset and checkpoints of this project said before `FRAMES`, `ROTATIONS` and `GRIPPERS`
FORMER = [
    (("world", "none", "none"), ("world", "none", "none")),
    (("world", "fixed, hand down", "-1 opens, +1 closes"), ("world", "none", "-1 open, +1 close")),
    (
        (
            "world",
            "rotation vector, relative to the present orientation, world frame",
            "-1 opens, +1 closes",
        ),
        ("world", "axis_angle_delta", "-1 open, +1 close"),
    ),
    (
        ("world", "rotation vector, relative to the present orientation", "-1 opens, +1 closes"),
        ("world", "axis_angle_delta", "-1 open, +1 close"),
    ),
    (
        ("world", "rotation vector, world frame", "-1 opens, +1 closes"),
        ("world", "axis_angle", "-1 open, +1 close"),
    ),
    (
        ("my table", "roll first", "1 is shut"),
        ("other: my table", "other: roll first", "other: 1 is shut"),
    ),
]


@pytest.mark.parametrize("former, present", FORMER)
def test_a_checkpoint_from_before_there_were_words_fits_its_robot(tmp_path: Path, former, present):
    names = ("frame", "rotation", "gripper")
    now = dataclasses.replace(SPEC, **dict(zip(names, present)))
    save_checkpoint(tmp_path / "a", Plain(3, SPEC))
    file = tmp_path / "a" / "embodiment.json"
    file.write_text(json.dumps(SPEC.to_dict() | dict(zip(names, former))))
    assert load_policy(tmp_path / "a", factory, expected_embodiment=now).embodiment == now
    assert EmbodimentSpec.from_dict(now.to_dict()) == now


@pytest.mark.parametrize(
    "field, value, choices",
    [
        ("frame", "wolrd", ["'world'", "'base'", "'tool'", "FRAMES"]),
        (
            "rotation",
            "axis angle",
            ["'axis_angle'", "'euler_xyz'", "'quaternion_xyzw'", "ROTATIONS"],
        ),
        ("gripper", "-1 opens, +1 closes", ["'-1 open, +1 close'", "'width'", "GRIPPERS"]),
        ("gripper", "other: ", ["'other: ' and your own words"]),
    ],
)
def test_a_robot_is_described_in_known_words(tmp_path: Path, field, value, choices):
    with pytest.raises(ConfigError) as caught:
        dataclasses.replace(SPEC, **{field: value})
    assert all(
        part in str(caught.value) for part in ("'one_joint'", f"{field}={value!r}", *choices)
    )
    save_checkpoint(tmp_path / "a", Plain(3, SPEC))
    (tmp_path / "a" / "embodiment.json").write_text(json.dumps(SPEC.to_dict() | {field: ""}))
    with pytest.raises(CheckpointError, match=f"embodiment.json describes no robot .*{field}"):
        load_policy(tmp_path / "a", factory)


def test_another_embodiment(tmp_path: Path):
    save_checkpoint(tmp_path / "a", Plain(5, SPEC))
    other = EmbodimentSpec.from_dict(SPEC.to_dict() | {"control_hz": 10.0})
    with pytest.raises(EmbodimentMismatch, match=r"control_hz: 10.0 != 20.0"):
        load_policy(tmp_path / "a", factory, expected_embodiment=other)


def test_weights_that_do_not_fit_are_named_and_change_nothing(tmp_path: Path):
    save_checkpoint(tmp_path / "a", Plain(5, SPEC))
    target = Plain(6, SPEC)
    target.register_buffer("more", torch.zeros(1))
    del target.halves
    before = {k: v.clone() for k, v in target.state_dict().items()}
    with pytest.raises(CheckpointError) as error:
        load_weights(tmp_path / "a", target)
    text = str(error.value)
    assert "misshapen: weight is [2, 5] in the checkpoint, [2, 6] in the policy" in text
    assert "missing: more [1]" in text and "unexpected: halves [3]" in text
    assert all(torch.equal(before[k], v) for k, v in target.state_dict().items())


def test_missing_and_damaged_checkpoints(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"there is no checkpoint at .*nowhere"):
        load_policy(tmp_path / "nowhere", factory)
    (tmp_path / "folder").mkdir()
    with pytest.raises(
        CheckpointError, match=r"folder is not a checkpoint: it has no config\.json"
    ):
        load_policy(tmp_path / "folder", factory)
    path = tmp_path / "a"
    save_checkpoint(path, Plain(5, SPEC))
    with pytest.raises(CheckpointError, match="no training_state/"):
        load_training_state(path)
    whole = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(whole[:-5])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        load_policy(path, factory)
    (path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors is missing"):
        load_policy(path, factory)
    (path / "words.txt").unlink()
    with pytest.raises(CheckpointError, match=r"lacks 'words.txt'"):
        load_policy(path, factory)
    (path / "config.json").write_text('{"format": 99, "vla_rl_version": "9"}')
    with pytest.raises(CheckpointError, match="update vla_rl"):
        load_policy(path, factory)
    (path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json is damaged"):
        load_policy(path, factory)


def _hold(folder: Path, ready: Any, leave: Any) -> None:
    with RunLock(folder):
        ready.set()
        leave.wait(240)


def test_run_lock_between_processes(tmp_path: Path):
    context = multiprocessing.get_context("fork")
    ready, leave = context.Event(), context.Event()
    holder = context.Process(target=_hold, args=(tmp_path, ready, leave))
    holder.start()
    assert ready.wait(240)
    with pytest.raises(UserError, match=rf"in use by process {holder.pid} "):
        RunLock(tmp_path).acquire()
    holder.kill()  # a lock dies with its owner
    holder.join()
    with RunLock(tmp_path), pytest.raises(UserError, match=f"process {os.getpid()} "):
        RunLock(tmp_path).acquire()
    with RunLock(tmp_path):
        assert (tmp_path / RunLock.FILE).exists()


def test_numbered_copies_keep_their_weights_and_the_older_ones_go(tmp_path: Path):
    policies = {number: Plain(5, SPEC) for number in (9, 10, 11)}
    other = tmp_path / "rl_student1"
    other.mkdir()
    for number, policy in policies.items():
        save_checkpoint(tmp_path / "rl", policy, {"step": number})
        keep_numbered(tmp_path / "rl", number, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "rl",
        "rl.last_good",
        "rl_10",
        "rl_11",
        "rl_student1",
    ]
    for number in (10, 11):
        assert same_weights(load_policy(tmp_path / f"rl_{number}", factory), policies[number])
        assert not (tmp_path / f"rl_{number}" / "training_state").exists()


def test_a_numbered_copy_where_files_cannot_be_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def no_links(*_: Any) -> None:
        raise OSError(errno.EXDEV, "no links here")

    policy = Plain(5, SPEC)
    save_checkpoint(tmp_path / "rl", policy)
    monkeypatch.setattr(os, "link", no_links)
    keep_numbered(tmp_path / "rl", 1, keep=1)
    assert same_weights(load_policy(tmp_path / "rl_1", factory), policy)


def test_a_lock_leaves_no_empty_folder(tmp_path: Path):
    with RunLock(tmp_path / "nothing"):
        pass
    with RunLock(tmp_path / "something"):
        (tmp_path / "something" / "x").touch()
    assert [p.name for p in tmp_path.iterdir()] == ["something"]
    folder = tmp_path / "linked"
    folder.symlink_to(tmp_path / "something")
    (folder / "x").unlink()
    with RunLock(folder):
        pass
    assert folder.is_symlink() and (folder / RunLock.FILE).exists()
