"""Two processes that learn together, with their weights spread (FSDP2) or whole (data parallel), do
what one does.

This file is run as a script, which forks two ranks (gloo, on this machine) and one process that is
alone: what torch and transformers import is imported once. The tests compare what they wrote.

Tolerance: what differs is the order in which float32 numbers are added, 1e-7 of a number, so
metrics agree to 1e-5, and so does each weight tensor (norm of the difference by its norm). Adam
divides by a gradient's own size: what has no effect on the loss has a gradient of nothing but
rounding and still moves by up to the learning rate (`NO_EFFECT`).
"""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import test_denoising
import test_openvla
import test_ppo
import torch
import torch.distributed as dist
from openvla_checkpoints import write_checkpoint
from safetensors.torch import load_file
from test_nano_vla import SPEC, TINY, observe
from torch import Tensor, nn
from torch.utils import _pytree

from policies.nano_vla import NanoVLA
from vla_rl.algorithms.imitation import Imitation
from vla_rl.algorithms.ppo import PPO, PPOConfig
from vla_rl.checkpoint import CheckpointError, load_training_state, load_weights, save_checkpoint
from vla_rl.config.imitation import AugmentConfig, ImitationConfig
from vla_rl.errors import ConfigError, NoGradient, UserError
from vla_rl.ranks import MODES, Ranks, full_state, gathered_state, is_sharded, mesh_of, shard
from vla_rl.spread import Snapshot, Spread, Unfinished, merge
from vla_rl.storage import load_state, save_state
from vla_rl.types import (
    ActionChunk,
    EpisodeSpec,
    Held,
    Observation,
    PolicyEvaluation,
    PolicyOutput,
    RolloutBatch,
    Trajectory,
)

UPDATES, PPO_UPDATES = 20, 8
ALONE, OPENVLA = "alone", "openvla"  # folders
# seconds that the ranks wait for each other; about 40 seconds of computing in all, half of it
# imports
LIMIT = 300
PPO_SETTINGS = PPOConfig(
    epochs=2,
    minibatch_size=8,
    micro_batch_size=3,
    learning_rate=3e-4,
    target_kl=2e-4,
    entropy_coef=0.01,
    success_imitation_coef=0.1,
    grad_clip=0.5,
)
GROUPED = PPOConfig(
    advantage="grpo",
    normalize_advantage="minibatch",
    minibatch_unit="trajectory",
    loss_aggregation="trajectory",
    epochs=2,
    minibatch_size=3,
    skip_zero_advantage=True,
    ratio_level="step",
    learning_rate=1e-4,
)
# on the loss in SFT: what every token has in common is subtracted, and softmax ignores a bias of
# its keys
NO_EFFECT = (
    "projector.0.2.bias",
    "feature_norms.0.mean",
    "feature_norms.1.mean",
    "vision.0.blocks.0.attn.qkv.bias",
)
NO_VALUES = PPOConfig(advantage="rloo", minibatch_size=64, epochs=1, learning_rate=1e-3)


# ----------------------------------------------------------------------------- what every rank does
def make(seed: int = 0, **changes: Any) -> NanoVLA:
    """A tiny policy with random weights everywhere, so that no path is switched off by a zero
    initialisation."""
    torch.manual_seed(seed)
    policy = NanoVLA(dataclasses.replace(TINY, noise_correlation=0.0, **changes), SPEC)
    with torch.no_grad():
        for p in policy.parameters():
            p += 0.3 * torch.randn_like(p) / max(1, p.shape[-1]) ** 0.5
    return policy.eval()


def recorded(policy: Any = None, observe: Callable[..., Observation] = observe) -> RolloutBatch:
    return RolloutBatch.from_trajectories(episodes(policy, observe))


def in_parts(ranks: Ranks) -> RolloutBatch:
    """`recorded`, of which each of two ranks holds images and replay of some episodes alone: 13 of
    the 17 decisions lie on the first one, so that many a minibatch has none of the other's."""
    every = episodes()
    if ranks.size == 1:
        return RolloutBatch.from_trajectories(every)
    owner = torch.tensor([0, 0, 1, 0, 0, 0, 1, 0, 0])
    batch = RolloutBatch.from_trajectories([episode.light() for episode in every])
    own = (episode for episode, rank in zip(every, owner.tolist()) if rank == ranks.index)
    held = Held.of(owner, batch.lengths, ranks.index, own)
    assert len(held.observations) == int(batch.lengths[owner == ranks.index].sum()) < 17
    return dataclasses.replace(batch, held=held)


def episodes(policy: Any = None, observe: Callable[..., Observation] = observe) -> list[Trajectory]:
    """17 decisions (an odd number) of 9 episodes in groups of 3, chosen by ``policy`` (the one
    of seed 0)."""
    policy, out = make() if policy is None else policy, []
    torch.manual_seed(0)
    for i in range(9):
        t = 1 + (i * 2) % 3 if i < 8 else 1
        observation, last = observe(t, seed=i), observe(1, seed=100 + i)
        acted = policy.act(observation, seeds=range(10 * i, 10 * i + t))
        valid = torch.ones(acted.chunk.valid.shape, dtype=torch.bool)
        valid[-1, 1 + i % 2 :] = False
        out.append(
            Trajectory(
                episode=EpisodeSpec("reach", i // 3, group_id=i // 3),
                observations=observation,
                final_observation=last,
                actions=acted.chunk.actions,
                valid=valid,
                rewards=torch.rand(valid.shape) * valid,
                behavior_log_prob=acted.behavior_log_prob,
                replay=acted.replay,
                terminated=i % 2 == 0,
                truncated=i % 2 == 1,
                success=i % 3 == 0,
            )
        )
    return out


def parts_updates(ranks: Ranks, mode: str, folder: Path) -> dict[str, Any]:
    """Eight updates by a value head, each rank with its own part of the batch."""
    policy, batch = shard(make(), ranks, mode), in_parts(ranks)
    ppo = PPO(dataclasses.replace(PPO_SETTINGS, target_kl=None), policy, ranks=ranks)
    return {"metrics": [ppo.update(batch) for _ in range(8)], "weights": full_state(policy, ranks)}


def grouped_parts(ranks: Ranks, mode: str, folder: Path) -> dict[str, Any]:
    policy, batch = shard(make(), ranks, mode), in_parts(ranks)
    ppo = PPO(GROUPED, policy, ranks=ranks)
    return {"metrics": [ppo.update(batch) for _ in range(3)], "weights": full_state(policy, ranks)}


def ppo_updates(ranks: Ranks, mode: str, folder: Path) -> dict[str, Any]:
    """Eight updates; half-way, several ranks save, and go on from the files with another policy
    and another PPO."""
    batch, metrics = recorded(), []
    policy = shard(make(), ranks, mode)
    ppo = PPO(PPO_SETTINGS, policy, ranks=ranks)
    for i in range(PPO_UPDATES):
        if i == PPO_UPDATES // 2 and ranks.size > 1:
            save_checkpoint(folder, policy, {"algorithm": ppo.state_dict()})
            if mode == "sharded":  # as the ranks of a cluster save, and go on
                folder = folder.with_name("parts")
                save_in_parts(folder, policy, {"algorithm": ppo.state_dict()}, ranks)
            policy = shard(make(seed=1), ranks, mode)
            ppo = PPO(PPO_SETTINGS, policy, ranks=ranks)
            load_weights(folder, policy)
            state = load_training_state(folder)["algorithm"]
            ppo.load_state_dict(state.on(mesh_of(policy)) if mode == "sharded" else state)
        metrics.append(ppo.update(batch))
    return {"metrics": metrics, "weights": full_state(policy, ranks)}


def save_in_parts(folder: Path, policy: Any, state: dict[str, Any], ranks: Ranks) -> None:
    """The main rank does what a cluster's driver does besides."""
    snapshot = Snapshot(policy, state, ranks)

    def write(folder: str, save: str) -> list[Any]:
        place, told = [folder, save], [None] * ranks.size
        dist.broadcast_object_list(place)
        dist.all_gather_object(told, snapshot.write(Path(place[0]), place[1]))
        return told

    def begin(unfinished: Unfinished) -> None:
        unfinished.finish(write(str(unfinished.folder), unfinished.save))

    if ranks.is_main:
        save_checkpoint(folder, policy, {"algorithm": Spread(snapshot.structure, begin)})
    else:
        write("", "")
    ranks.all(True)  # (the others wait until it is there)


def grouped_updates(ranks: Ranks, mode: str, folder: Path) -> dict[str, Any]:
    policy = shard(make(), ranks, mode)
    ppo = PPO(GROUPED, policy, reference_policy=None, ranks=ranks)
    batch = recorded()
    return {"metrics": [ppo.update(batch) for _ in range(3)], "weights": full_state(policy, ranks)}


class Demonstrations:
    """Seven rows (an odd number), others at every update."""

    def __init__(self) -> None:
        self.position = 0

    def next_batch(self) -> tuple[Observation, Tensor, Tensor]:
        self.position += 1
        generator = torch.Generator().manual_seed(self.position)
        low, high = torch.tensor(SPEC.action_low), torch.tensor(SPEC.action_high)
        valid = torch.ones(7, 3, dtype=torch.bool)
        valid[self.position % 7, 1:] = False
        actions = low + (high - low) * torch.rand(7, 3, SPEC.action_dim, generator=generator)
        return observe(7, seed=self.position), actions, valid


def sft_updates(ranks: Ranks, mode: str, folder: Path) -> dict[str, Any]:
    policy = shard(make(), ranks, mode).train()
    config = ImitationConfig(
        updates=UPDATES, learning_rate=1e-4, warmup_updates=2, augment=AugmentConfig(shift=2)
    )
    imitation = Imitation(config, policy, Demonstrations(), ranks)
    return {
        "metrics": [imitation.update() for _ in range(UPDATES)],
        "weights": full_state(policy, ranks),
    }


def bad_update(ranks: Ranks, mode: str, folder: Path) -> dict[str, Any]:
    """One row's numbers are not finite, so that one rank alone sees them; then a good update."""
    batch = recorded()
    proprio = batch.observations.proprio.clone()
    proprio[0] = torch.nan
    bad = dataclasses.replace(
        batch, observations=dataclasses.replace(batch.observations, proprio=proprio)
    )
    policy, saw = shard(make(), ranks, mode), []
    evaluate = policy.evaluate

    def watched(*inputs: Any) -> PolicyEvaluation:
        out = evaluate(*inputs)
        if torch.is_grad_enabled():
            saw.append(not bool(torch.isfinite(out.log_prob).all()))
        return out

    policy.evaluate = watched
    ppo = PPO(NO_VALUES, policy, ranks=ranks)
    metrics = [ppo.update(bad)]
    between = {name: x.clone() for name, x in full_state(policy, ranks).items()}
    metrics.append(ppo.update(batch))
    return {
        "saw": saw,
        "metrics": metrics,
        "between": between,
        "weights": full_state(policy, ranks),
    }


def half_precision(ranks: Ranks, mode: str, folder: Path) -> dict[str, Any]:
    """`make_adamw` in bfloat16 on spread weights: a line fitted to this rank's rows."""
    from vla_rl.algorithms.optim import GuardedStep, make_adamw, optimizer_state

    net = nn.Linear(3, 5, dtype=torch.bfloat16)
    with torch.no_grad():
        net.weight.copy_(torch.linspace(-1, 1, 15).view(5, 3))
        net.bias.zero_()
    net = shard(net, ranks, mode)
    optimizer = make_adamw([(net.parameters(), 1e-3)], [0.9, 0.99], 0.01)
    guard = GuardedStep(1, 1.0, ranks)
    x = torch.linspace(-1, 1, 12).view(4, 3).bfloat16()
    for _ in range(5):
        rows, real = ranks.share(4)
        loss = (net(x[rows]).float().square().sum(1) * real).sum()
        loss.backward()
        guard.step(optimizer, ranks.sum(loss.detach()))
    return {
        "weights": full_state(net, ranks),
        "optimizer": gathered_state(optimizer_state(optimizer)["state"]["0"]),
    }


def policy_without_blocks(ranks: Ranks, mode: str, folder: Path) -> dict[str, Any]:
    """A policy that says nothing of its structure (float64, so that there is no rounding to speak
    of); its value head, with a learning rate of its own, is trained alone in the first
    iteration."""
    policy = test_ppo.BanditPolicy(head=True)
    batch = test_ppo.rollout(policy, 0)
    ppo = PPO(
        PPOConfig(critic_warmup_iterations=1, minibatch_size=7, learning_rate=0.01),
        shard(policy, ranks, mode),
        ranks=ranks,
    )
    return {"metrics": [ppo.update(batch) for _ in range(3)], "weights": full_state(policy, ranks)}


@dataclasses.dataclass(frozen=True)
class Unregistered:
    """What `PolicyEvaluation` would be if torch did not know it."""

    log_prob: Tensor
    entropy: Tensor
    value: None = None
    advantage_weight: None = None
    clip_scale: None = None
    auxiliary_loss: None = None


class Hidden(test_ppo.BanditPolicy):
    def evaluate(self, observation: Observation, replay: Any) -> Any:
        out = super().evaluate(observation, replay)
        return Unregistered(out.log_prob, out.entropy)


def other_policies(ranks: Ranks, mode: str, folder: Path) -> dict[str, Any]:
    """Two updates of a policy that denoises (with frozen steps and a student), of OpenVLA, and
    of OpenVLA with LoRA."""
    torch.manual_seed(0)
    denoising = test_denoising.make(**test_denoising.FORMS["dppo"], student_steps=1)
    published = folder.parents[1] / OPENVLA
    whole = test_openvla.load(
        published, value_head=True, decoding="autoregressive", gradient_checkpointing=True
    )
    lora = test_openvla.load(
        published, value_head=True, lora_rank=2, weights="bfloat16", freeze_vision=True
    )
    out = {}
    for name, policy, look in (
        ("denoising", denoising, test_denoising.observe),
        ("openvla", whole, lambda t, seed: test_openvla.observe(t)),
        ("lora", lora, lambda t, seed: test_openvla.observe(t)),
    ):
        advantage = "rloo" if name == "denoising" else "gae"
        batch, settings = (
            recorded(policy, look),
            dataclasses.replace(NO_VALUES, advantage=advantage, learning_rate=1e-4),
        )
        ppo = PPO(settings, shard(policy, ranks, mode), ranks=ranks)
        out[name] = [ppo.update(batch) for _ in range(2)]
    return out


def refusals(ranks: Ranks, mode: str, folder: Path) -> dict[str, Any]:
    """What several ranks must say instead of going on."""
    policy = make()
    stale = PPO(NO_VALUES, policy, ranks=ranks)  # built before the policy's weights were spread
    shard(policy, ranks, mode)
    batch, said = recorded(), {}
    if mode == "sharded":
        with pytest.raises(NoGradient, match="shard it first") as error:
            stale.update(batch)
        said["stale"] = str(error.value)
        hidden = Hidden()
        spread = test_ppo.rollout(hidden, 0)
        with pytest.raises(NoGradient, match="no registered pytree") as error:
            PPO(NO_VALUES, shard(hidden, ranks, mode), ranks=ranks).update(spread)
        said["hidden"] = str(error.value)
    other = dataclasses.replace(batch, behavior_log_prob=batch.behavior_log_prob - ranks.index)
    with pytest.raises(UserError, match="2 ranks were given different batches") as error:
        PPO(NO_VALUES, policy, ranks=ranks).update(other)
    said["other"] = str(error.value)
    occupied = folder / f"file_{ranks.index}"
    occupied.parent.mkdir(parents=True, exist_ok=True)
    occupied.touch()
    with pytest.raises((CheckpointError, FileExistsError)) as error:
        save_checkpoint(occupied / "checkpoint", policy)
    return {**said, "unwritable": str(error.value)}


PARTS = {
    f.__name__: f
    for f in (
        parts_updates,
        grouped_parts,
        ppo_updates,
        grouped_updates,
        sft_updates,
        bad_update,
        half_precision,
        policy_without_blocks,
        other_policies,
        refusals,
    )
}


def rank(index: int, folder: Path) -> None:
    """One of two ranks."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=index,
        world_size=2,
        timeout=timedelta(seconds=LIMIT),
    )
    try:
        for mode in MODES:
            for name, part in PARTS.items():
                save_state(
                    folder / mode / name / str(index),
                    part(Ranks.present(), mode, folder / mode / "checkpoint"),
                )
    finally:
        dist.destroy_process_group()


def one(folder: Path) -> None:
    """The same by one rank."""
    for name, part in PARTS.items():
        if name != "refusals":
            save_state(
                folder / ALONE / name, part(Ranks(), "sharded", folder / ALONE / "checkpoint")
            )


def main(folder: Path) -> int:
    """The exit status; where one process fails, the others end too."""
    torch.set_num_threads(1)
    test_openvla.load(write_checkpoint(folder / OPENVLA))
    left = set()
    for run in (lambda: one(folder), lambda: rank(0, folder), lambda: rank(1, folder)):
        left.add(os.fork())
        if 0 in left:
            try:
                torch.set_num_threads(1)  # a fork's first pool: two threads that make it race
                run()
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
    while left:
        pid, status = os.wait()
        left.remove(pid)
        if status:
            for other in left:
                os.kill(other, signal.SIGKILL)
            return 1
    return 0


# ---------------------------------------------------------------------------------------- the tests
@pytest.fixture(scope="module")
def together(tmp_path_factory) -> Path:
    """Where two ranks left what they did, and one alone: ``MODE/PART/RANK``, ``alone/PART``."""
    folder = tmp_path_factory.mktemp("ranks")
    paths = [
        str(Path(__file__).parents[1]),
        str(Path(__file__).parent),
        os.environ.get("PYTHONPATH", ""),
    ]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join(paths),
    }
    ran = subprocess.run(
        [sys.executable, __file__, str(folder)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=3 * LIMIT,
    )
    assert ran.returncode == 0, ran.stdout.decode()
    return folder


@pytest.fixture(scope="module")
def alone(together) -> dict[str, Any]:
    """The same by one rank."""
    return {name: load_state(together / ALONE / name) for name in PARTS if name != "refusals"}


def assert_equal_metrics(found: list[dict], expected: list[dict], tolerance: float = 1e-5) -> None:
    """Relative, or of one; of ``ratio_std`` its square, which is a difference of float32 numbers
    near 1."""
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.keys() == b.keys()
        for name in b:
            power = 2 if name.endswith("ratio_std") else 1
            assert a[name] ** power == pytest.approx(
                b[name] ** power, rel=tolerance, abs=tolerance, nan_ok=True
            ), name


def assert_equal_weights(
    found: dict[str, Tensor], expected: dict[str, Tensor], loose: tuple[str, ...] = ()
) -> None:
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        distance = (found[name].double() - x.double()).norm() / x.double().norm().clamp(min=1e-12)
        assert distance <= (1e-3 if name in loose else 1e-5), (name, float(distance))


def of_both(together: Path, mode: str, part: str) -> list[dict[str, Any]]:
    return [load_state(together / mode / part / str(i)) for i in range(2)]


slow = pytest.mark.slow
pytestmark = pytest.mark.xdist_group("ranks")  # one worker makes what all of them compare
pair = pytest.mark.timeout(4 * LIMIT)
both_modes = pytest.mark.parametrize("mode", MODES)


@slow
@pair
@both_modes
@pytest.mark.parametrize(
    "part", ["ppo_updates", "grouped_updates", "sft_updates", "parts_updates", "grouped_parts"]
)
def test_two_ranks_equal_one(together: Path, alone: dict[str, Any], part: str, mode: str):
    main_rank, other = of_both(together, mode, part)
    # stops, steps and skips are the same on both, bit for bit
    assert main_rank["metrics"] == other["metrics"]
    assert_equal_metrics(main_rank["metrics"], alone[part]["metrics"])
    assert_equal_weights(
        main_rank["weights"], alone[part]["weights"], NO_EFFECT if part == "sft_updates" else ()
    )
    assert other["weights"] == {}
    if part == "ppo_updates":
        stopped = [m["ppo/early_stop"] for m in main_rank["metrics"]]
        assert 0 < sum(stopped) < PPO_UPDATES and all(
            m["ppo/grad_norm"] > 0 for m in main_rank["metrics"]
        )


@slow
@pair
@both_modes
def test_numbers_that_one_rank_finds_not_finite_skip_the_step_on_both(
    together: Path, alone: dict[str, Any], mode: str
):
    ranks, start = of_both(together, mode, "bad_update"), make().state_dict()
    assert sorted(rank["saw"][0] for rank in ranks) == [False, True] and not any(
        rank["saw"][1] for rank in ranks
    )
    for rank in ranks:
        assert [m["ppo/skipped_updates"] for m in rank["metrics"]] == [1.0, 1.0]
        assert [m["ppo/updates_total"] for m in rank["metrics"]] == [0.0, 1.0]
    assert all(torch.equal(x, start[name]) for name, x in ranks[0]["between"].items())
    assert_equal_weights(ranks[0]["weights"], alone["bad_update"]["weights"])


@slow
@pair
@both_modes
def test_a_checkpoint_of_several_ranks_is_an_ordinary_one(together: Path, mode: str):
    """(That several ranks go on from it exactly is part of the eight updates.) One in their own
    parts becomes the same."""
    policy, folder = make(seed=2), together / mode / "checkpoint"
    if mode == "sharded":
        merge(parts := folder.with_name("parts"), merged := folder.with_name("merged"))
        for name in ("model.safetensors", "training_state/state.safetensors"):
            own, of_parts = (load_file(place / name) for place in (folder, merged))
            assert own.keys() == of_parts.keys()
            assert all(torch.equal(x, of_parts[key]) for key, x in own.items())
        told = [(p / "training_state/state.json").read_text() for p in (folder, merged)]
        assert told[0] == told[1]
        folder = parts
    load_weights(folder, policy)
    ppo = PPO(PPO_SETTINGS, policy, ranks=Ranks())
    ppo.load_state_dict(load_training_state(folder)["algorithm"])
    assert ppo.optimizer.state and all(
        m["exp_avg"].shape == p.shape for p, m in ppo.optimizer.state.items()
    )
    found = ppo.update(recorded())
    assert_equal_metrics(
        [found], [of_both(together, mode, "ppo_updates")[0]["metrics"][PPO_UPDATES // 2]]
    )


@slow
@pair
@both_modes
def test_float32_copies_of_bfloat16_weights_on_two_ranks(
    together: Path, alone: dict[str, Any], mode: str
):
    """Each rank's gradient is rounded to bfloat16 (2⁻⁹) before the sum, so the steps agree to
    about that."""
    found, expected = of_both(together, mode, "half_precision")[0], alone["half_precision"]
    assert found["optimizer"]["master"].dtype == torch.float32
    start = torch.linspace(-1, 1, 15).view(5, 3).bfloat16().float()
    moved, wanted = (s["optimizer"]["master"] - start for s in (found, expected))
    assert wanted.abs().mean() > 4e-3
    torch.testing.assert_close(moved, wanted, rtol=0.01, atol=1e-5)


@slow
@pair
@both_modes
def test_a_policy_that_names_no_blocks_on_two_ranks(
    together: Path, alone: dict[str, Any], mode: str
):
    found, expected = (
        of_both(together, mode, "policy_without_blocks")[0],
        alone["policy_without_blocks"],
    )
    assert_equal_metrics(found["metrics"], expected["metrics"])
    for name, x in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], x, rtol=1e-9, atol=1e-10)


@slow
@pair
@both_modes
def test_other_policies_on_two_ranks(together: Path, alone: dict[str, Any], mode: str):
    found, expected = of_both(together, mode, "other_policies")[0], alone["other_policies"]
    assert_equal_metrics(found["denoising"], expected["denoising"], 1e-4)
    assert_equal_metrics(found["openvla"], expected["openvla"], 1e-4)
    for a, b in zip(found["lora"], expected["lora"], strict=True):  # computed in bfloat16
        assert (
            a["ppo/grad_norm"] == pytest.approx(b["ppo/grad_norm"], rel=0.05)
            and a["ppo/grad_norm"] > 0
        )


@slow
@pair
@both_modes
def test_what_several_ranks_refuse(together: Path, mode: str):
    main_rank, other = of_both(together, mode, "refusals")
    assert (
        "File exists" in main_rank["unwritable"]
        and "main rank could not write" in other["unwritable"]
    )
    for said in (main_rank, other):
        assert "give all ranks the same data and seeds" in said["other"]
        assert ({"stale", "hidden"} <= said.keys()) == (mode == "sharded")


def test_one_process_is_one_rank():
    ranks, x = Ranks.present(), torch.tensor([1.0, 2.0], requires_grad=True)
    assert (ranks.index, ranks.size, ranks.is_main) == (0, 1, True)
    assert all(f(x) is x for f in (ranks.sum, ranks.mean, ranks.total, ranks.gather, ranks.main))
    assert ranks.all(True) and not ranks.all(False)
    rows, real = ranks.share(5)
    assert rows.tolist() == [0, 1, 2, 3, 4] and real.all()
    policy = nn.Linear(2, 2)
    assert shard(policy, ranks) is policy and not is_sharded(policy.weight)
    assert full_state(policy).keys() == policy.state_dict().keys()
    with pytest.raises(ConfigError, match="sharded, replicated"):
        shard(policy, ranks, "split")


def test_shares_have_one_length_and_cover_every_row_once():
    for count in range(1, 9):
        found = []
        for index in range(3):
            ranks = Ranks()
            ranks.index, ranks.size = index, 3
            rows, real = ranks.share(count)
            assert len(rows) == len(real) == math.ceil(count / 3)
            assert int(rows.max()) < count
            found += rows[real].tolist()
        assert found == list(range(count))


def test_outputs_of_a_policy_are_trees_of_tensors():
    """What FSDP2 finds in an output is what it can hang its backward on."""
    x = torch.zeros(2, 3, requires_grad=True)
    evaluation = PolicyEvaluation(log_prob=x, entropy=2 * x, value=x.sum(1))
    leaves, _ = _pytree.tree_flatten(evaluation)
    assert [
        t is evaluation.log_prob or t is evaluation.entropy or t is evaluation.value
        for t in leaves[:3]
    ] == [True] * 3
    chunk = ActionChunk(torch.zeros(2, 3, 1), torch.ones(2, 3, dtype=torch.bool))
    output = PolicyOutput(chunk, x, {"tokens": x})
    copied = _pytree.tree_map(torch.clone, output)
    assert isinstance(copied.chunk, ActionChunk) and copied.replay["tokens"].shape == x.shape


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
