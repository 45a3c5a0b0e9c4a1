"""Bad input, as a table: whatever a user gets wrong is one message that names value, place and
remedy; nothing is made.

Each row is a command line (or a damaged file and a command line) and parts of the message that it
must bring. `refused` asks for exit status 2, no traceback, and that no file or folder appeared,
vanished or changed.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from vla_rl import cli
from vla_rl.checks import preflight

TOY = [
    "run=toy",
    "collect.episodes_per_task=2",
    "sft.validation_episodes=1",
    "sft.updates=4",
    "slots.slots_per_worker=2",
    "evaluate.episodes_per_task=2",
    "evaluate.video_episodes=0",
]
TRAIN = ("train", *TOY, "output_dir={out}")


@pytest.fixture(scope="module")
def finished(finished_run) -> Path:
    """A toy run of SFT alone, on a handful of demonstrations."""
    return finished_run(*TOY, "phases=[collect,sft,eval_sft]")


@pytest.fixture
def places(finished, tmp_path) -> dict[str, Path]:
    """What the rows call by name: a run and its parts, and an empty place to write to."""
    (tmp_path / "out").mkdir()
    (tmp_path / "file").write_text("a file, not a folder")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    parts = {"run": finished, "sft": finished / "checkpoints" / "sft", "data": finished / "dataset"}
    return {name: tmp_path / name for name in ("out", "file", "loop", "missing")} | parts


def files_of(*folders: Path) -> dict[str, tuple[int, int]]:
    found = {}
    for folder in folders:
        for path in [folder, *folder.rglob("*")]:
            stat = path.lstat()
            found[str(path)] = (stat.st_size, 0 if path.is_dir() else stat.st_mtime_ns)
    return found


def refused(capsys: pytest.CaptureFixture[str], arguments: list[str], *folders: Path) -> str:
    """The message of a command that must fail; nothing in ``folders`` may change."""
    before = files_of(*folders)
    try:
        status = cli.main(arguments)
    except SystemExit as error:  # argparse
        status = error.code
    captured = capsys.readouterr()
    assert status == 2, captured
    assert captured.err.startswith(("error: ", "usage: ")) and captured.err.count("error: ") == 1, (
        captured.err
    )
    assert "Traceback" not in captured.err + captured.out
    after = files_of(*folders)
    assert {p: x for p, x in before.items() if not p.endswith(".lock")} == {
        p: x for p, x in after.items() if not p.endswith(".lock")
    }
    return captured.err


def filled(text: str, places: dict[str, Path]) -> str:
    for name, path in places.items():
        text = text.replace(f"{{{name}}}", str(path))
    return text


def holds(text: str, parts: tuple[str, ...]) -> None:
    assert all(part in text for part in parts), f"{text!r} lacks one of {parts}"


# ------------------------------------------------------------------------------- values of a config
VALUES: list[tuple[str, tuple[str, ...]]] = [
    # keys that do not exist, and words that are no overrides
    ("sede=1", ("'sede' (value 1)", "Did you mean 'seed'?")),
    ("rl.iteration=3", ("'rl.iteration'", "'rl.iterations'")),
    ("sft.augment.shfit=1", ("'sft.augment.shfit'", "'sft.augment.shift'")),
    ("env.imagesize=8", ("'env.imagesize'", "'env.image_size'")),
    ("rl.zzz=1", ("'rl.zzz'", "Known keys here")),
    ("seed", ("'seed' is not an override", "run=quickstart")),
    ("=5", ("'=5'", "run=quickstart")),
    ("tasks=[reach_red", ("[ is opened and not closed",)),
    ("~nothing", ("nothing",)),
    ("name=${nope}", ("nope",)),
    ("rl.iterations=1,2", ("rl.iterations=1,2 names several values",)),
    ("rl=3", ("rl is 3", "iterations")),
    ("policy=nnao", ("policy=nnao does not exist", "Did you mean policy=nano?")),
    ("env.type=nothing", ("env.type is 'nothing'", "toy")),
    (
        "env=dualarm ~run env.tasks=[juggle]",
        ("env.tasks=['juggle'] has 'juggle', which is not a choice", "hand_over"),
    ),
    ("reward.type=no_such_module:Reward", ("no module 'no_such_module'",)),
    # wrong types
    ("seed=abc", ("seed = 'abc'", "Integer")),
    ("seed=1.5", ("seed = 1.5", "Integer")),
    ("seed=null", ("seed = None",)),
    ("rl.iterations=[1]", ("rl.iterations", "[1]")),
    ("rl.iterations=true", ("rl.iterations = True", "Integer")),
    ("sft.learning_rate=fast", ("sft.learning_rate = 'fast'", "Float")),
    ("wandb=perhaps", ("wandb.mode='perhaps'", "one of auto, online, offline, off")),
    ("tasks=reach_red", ("tasks=[reach_red]", "brackets")),
    ("algorithm.learning_rate='1e-4x'", ("algorithm.learning_rate = '1e-4x'",)),
    # numbers that are not finite, or out of their range
    ("sft.learning_rate=nan", ("sft.learning_rate=nan",)),
    ("sft.learning_rate=inf", ("sft.learning_rate=inf is not finite",)),
    ("sft.weight_decay=inf", ("sft.weight_decay=inf is not finite",)),
    ("collect.action_noise=nan", ("collect.action_noise=nan is out of range", "0 or more")),
    ("env.success_radius=inf", ("env.success_radius=inf is not finite",)),
    ("reward.coefficient=nan", ("reward.coefficient=nan",)),
    ("rl.guard_success=nan", ("rl.guard_success=nan", "above 0 and at most 1")),
    ("sft.learning_rate=-1", ("sft.learning_rate=-1 is out of range", "0 or more")),
    ("sft.learning_rate=0", ("sft.learning_rate=0.0 trains nothing",)),
    ("sft.updates=0", ("sft.updates=0 is out of range", "1 or more")),
    ("sft.batch_size=-3", ("sft.batch_size=-3", "1 or more")),
    ("sft.grad_clip=0", ("sft.grad_clip=0 is out of range", "above 0, or null")),
    ("sft.betas=[0.9,1.5]", ("sft.betas=[0.9, 1.5]", "below 1")),
    ("sft.betas=[0.9]", ("sft.betas=[0.9] has one entry", "2 entries")),
    ("sft.augment.crop=2", ("sft.augment.crop=2 is out of range", "0 to 0.9")),
    ("sft.augment.shift=16", ("sft.augment.shift=16", "pictures of 16 pixels")),
    ("sft.seed=-4", ("sft.seed=-4 must be 0 or more",)),
    ("algorithm.gamma=1.5", ("algorithm.gamma=1.5 is out of range", "0 to 1")),
    ("algorithm.grad_clip=0", ("algorithm.grad_clip=0 is out of range", "above 0, or null")),
    ("algorithm.target_kl=0", ("algorithm.target_kl=0 is out of range", "above 0, or null")),
    ("algorithm.epochs=0", ("algorithm.epochs=0 is out of range", "1 or more")),
    ("algorithm.advantage=magic", ("algorithm.advantage='magic'", "grpo")),
    (
        "algorithm.reward_names=[success]",
        ("algorithm.reward_names=['success']", "one weight per name"),
    ),
    (
        "algorithm.memory.augment.crop=2",
        ("algorithm.memory.augment.crop=2 is out of range", "0 to 0.9"),
    ),
    (
        "algorithm.memory.episodes=8 algorithm.memory.augment.mirror=0.5",
        ("augment.mirror is set", "declares no mirror"),
    ),
    (
        "algorithm=filtered_bc algorithm.augment.crop=2",
        ("algorithm.augment.crop=2 is out of range", "0 to 0.9"),
    ),
    ("critic.hidden=[]", ("critic.hidden=[]", "1 or more entries")),
    ("critic.hidden=[0]", ("critic.hidden=[0] has 0", "each must be 1 or more")),
    ("curriculum.strategy=best", ("curriculum.strategy='best'", "frontier")),
    ("policy.temperature=0", ("policy.temperature=0", "above 0")),
    ("policy.chunk_length=0", ("policy.chunk_length=0", "1 or more")),
    ("policy.vit_depth=-1", ("policy.vit_depth=-1", "0 or more")),
    ("policy.rope_theta=0", ("policy.rope_theta=0", "above 0")),
    ("policy.dropout=1", ("policy.dropout=1", "0 or more and below 1")),
    ("policy.stem_strides=[2,0]", ("policy.stem_strides=[2, 0] has 0", "each must be 1 or more")),
    ("policy.bin_power=0", ("policy.bin_power=0", "above 0")),
    ("policy.label_smoothing=2", ("policy.label_smoothing=2", "0 or more and below 1")),
    ("policy.cameras=[top,top]", ("policy.cameras=['top', 'top']", "each once")),
    ("policy.llm_heads=3", ("policy.llm_width=64", "policy.llm_heads=3")),
    ("policy=pi05 policy.noise_samples=0", ("policy.noise_samples=0", "1 or more")),
    ("policy=pi05 policy.action_range=wide", ("policy.action_range='wide'", "data, bounds")),
    ("policy=pi05 policy.noise_correlation=1", ("policy.noise_correlation=1", "below 1")),
    ("policy=pi05 policy.stochastic_steps=two", ("policy.stochastic_steps='two'", "all, one")),
    (
        "policy=pi05_pirl_noise policy.stochastic_steps=one",
        ("policy.stochastic_steps=one", "joins all steps", "stochastic_steps=all"),
    ),
    ("policy=pi05 policy.learned_std_low=1", ("policy.learned_std_low=1", "lie below")),
    ("algorithm=residual actor.token=-1", ("actor.token=-1", "0 or more")),
    ("env.image_size=1", ("env.image_size=1", "4 to 2048")),
    ("env.image_size=99999", ("env.image_size=99999", "4 to 2048")),
    ("env.step_seconds=-1", ("env.step_seconds=-1", "0 or more")),
    ("env.fault=everything", ("env.fault='everything' is not a choice", "segfault")),
    ("slots.workers=-1", ("slots.workers=-1", "0 or more")),
    ("replay.ram_bytes=-1", ("replay.ram_bytes=-1", "0 or more")),
    ("collect.base_share=2", ("collect.base_share=2", "0 to 1", "0: never")),
    (
        "sft.base_part=false dataset={data}",
        ("sft.base_part=false", "do not say who acted", "collect.base_share"),
    ),
    ("sft.labels=noisy", ("sft.labels", "'noisy'", "clean, sent")),
    ("slots.workers=100000", ("slots.workers=100000", "processes")),
    ("slots.slots_per_worker=1000000", ("slots.slots_per_worker=1000000", "1 to 4096")),
    ("slots.hang_timeout=0", ("slots.hang_timeout=0", "above 0")),
    ("slots.max_restarts=-1", ("slots.max_restarts=-1", "0 or more")),
    (
        "slots.workers=1 slots.python=/no/such/python",
        ("slots.python=/no/such/python", "is no file"),
    ),
    (
        "slots.workers=1 slots.python=/bin/true",
        ("slots.python=/bin/true", "cannot run a simulator's worker"),
    ),
    ("slots.python=/bin/true slots.workers=0", ("slots.python=/bin/true", "slots.workers=0")),
    ("collect.episodes_per_task=0", ("collect.episodes_per_task=0", "1 or more")),
    ("collect.speed=2", ("collect.speed=2", "above 0 and at most 1")),
    ("collect.workers=0", ("collect.workers=0", "1 or more")),
    ("rollout.serve_fraction=2", ("rollout.serve_fraction=2", "0 to 1")),
    ("rollout.replan_steps=9", ("rollout.replan_steps=9", "policy.chunk_length=4")),
    ("evaluate.split=test", ("evaluate.split='test'", "train, held_out")),
    ("evaluate.episodes_per_task=-5", ("evaluate.episodes_per_task=-5", "1 or more")),
    ("rl.iterations=-1", ("rl.iterations=-1", "0 or more")),
    ("rl.iterations=0", ("rl.iterations=0 trains nothing", "phases=[...]")),
    ("rl.episodes_per_iteration=0", ("rl.episodes_per_iteration=0", "1 or more")),
    ("rl.episodes_per_iteration=-64", ("rl.episodes_per_iteration=-64", "1 or more")),
    ("rl.group_size=7", ("rl.group_size=7",)),
    ("rl.eval_every=-1", ("rl.eval_every=-1", "0 or more")),
    ("rl.checkpoint_every=0", ("rl.checkpoint_every=0", "1 or more")),
    ("rl.dynamic_sampling=true", ("rl.dynamic_sampling", "rl.group_size >= 2")),
    ("rl.rhythm=both", ("rl.rhythm='both'", "one of alternate, concurrent")),
    (
        "rl.rhythm=concurrent",
        ("rl.rhythm=concurrent: algorithm.type=ppo learns from", "rl.rhythm=alternate"),
    ),
    (
        "rl.rhythm=concurrent algorithm=parl",
        ("algorithm.type=parl chooses actions by its critics", "rl.rhythm=alternate"),
    ),
    (
        "rl.rhythm=concurrent rl.dynamic_sampling=true rl.group_size=8",
        ("rl.rhythm=concurrent", "rl.dynamic_sampling"),
    ),
    ("rl.concurrent.publish_every=0", ("rl.concurrent.publish_every=0", "must be 1 or more")),
    ("cluster.mode=async", ("cluster.mode=async", "add cluster=ray")),
    ("cluster=ray cluster.mode=often", ("cluster.mode", "often", "sync")),
    ("cluster=ray cluster.max_staleness=2", ("cluster.max_staleness=2", "cluster.mode=sync")),
    (
        "cluster=ray cluster.mode=async cluster.correction=half",
        ("cluster.correction", "half", "truncate"),
    ),
    (
        "cluster=ray cluster.mode=pipelined cluster.max_staleness=3",
        ("cluster.max_staleness=3", "cluster.mode=async"),
    ),
    (
        "cluster=ray cluster.mode=async rl.dynamic_sampling=true rl.group_size=2",
        ("cluster.mode=async", "dynamic_sampling"),
    ),
    ("cluster=ray cluster.rollouts=0", ("cluster.rollouts=0", "must be 1 or more")),
    ("cluster=ray cluster.address=head", ("cluster.address='head'", "HOST:PORT")),
    ("cluster=ray cluster.hang_timeout=0", ("cluster.hang_timeout=0", "above 0")),
    ("cluster=ray cluster.rollout=2", ("Did you mean 'cluster.rollouts'",)),
    ("cluster=ray cluster.placement=beside", ("'beside'", "free, colocated")),
    (
        "cluster=ray cluster.learners=2 sft.offload_optimizer=true",
        ("sft.offload_optimizer=true", "cluster.learners=2", "learner_mode=replicated"),
    ),
    (
        "cluster=ray cluster.placement=colocated",
        ("cluster.placement=colocated", "cluster.learners=1 or more"),
    ),
    (
        "cluster=ray cluster.placement=colocated cluster.learners=1 cluster.mode=async",
        ("take turns", "disaggregated"),
    ),
    (
        "cluster=ray cluster.placement=colocated cluster.learners=1 cluster.learner_gpus=1",
        ("cluster.learner_gpus out",),
    ),
    (
        "cluster=ray cluster.placement=hybrid cluster.learners=1 cluster.env_nodes=1",
        ("hybrid", "cluster.inference"),
    ),
    (
        "cluster=ray cluster.placement=hybrid cluster.learners=1 cluster.inference=1",
        ("hybrid", "cluster.env_nodes"),
    ),
    (
        "cluster=ray cluster.env_nodes=1",
        ("cluster.env_nodes=1 goes with cluster.placement=hybrid",),
    ),
    (
        "cluster=ray cluster.placement=auto",
        ("vla-rl train ... cluster=ray cluster.placement=free", "cluster.times="),
    ),
    ("cluster=ray cluster.placement=auto cluster.learners=2", ("leave cluster.learners out",)),
    ("cluster=ray cluster.times=runs", ("cluster.times=runs goes with cluster.placement=auto",)),
    (
        "cluster=ray cluster.rollout_cpus=1e6",
        ("the cluster is too small", "1e+06 CPUs each", "cluster.rollout_cpus"),
    ),
    ("cluster=slurm", ("cluster=slurm does not exist", "local, ray")),
    ("rl.concurrent.nice=-1", ("rl.concurrent.nice=-1", "0 to 19")),
    ("rl.guard=loud", ("rl.guard='loud'", "one of off, warn, stop")),
    ("rl.restarts.share=1.5", ("rl.restarts.share=1.5", "0 to 1")),
    ("rl.restarts.sources=[dreams]", ("rl.restarts.sources=['dreams']", "successes")),
    ("rl.fallback_reward={updates:3}", ("rl.fallback_reward", "rl.fallback=progress")),
    (
        "rl.fallback=progress rl.fallback_reward={done_weight:3}",
        ("rl.fallback_reward.done_weight=3", "0 to 1"),
    ),
    ("reward_check.on_bad=cry", ("reward_check.on_bad='cry'", "one of stop, warn")),
    ("reward_check.max_invalid=-1", ("reward_check.max_invalid=-1", "0 to 1")),
    ("reward.coefficient=-1", ("reward.coefficient=-1", "above 0", "pays for success")),
    ("reward.coefficient=0", ("reward.coefficient=0", "above 0", "pays for success")),
    ("reward=process reward.weight_decay=-1", ("reward.weight_decay=-1", "0 or more")),
    ("reward=process reward.device=gpu", ("reward.device=gpu is no device",)),
    (
        "reward=process reward.shaping.weight=0 reward.shaping.success_coefficient=0",
        ("nothing is paid",),
    ),
    (
        "reward=combined reward.parts.success.weight=0 reward.parts.srpo.weight=0",
        ("reward.parts success", "weight 0"),
    ),
    (
        "reward=combined reward.parts={success:{weight:much}}",
        ("reward.parts.success.weight is 'much'",),
    ),
    (
        "reward=combined reward.parts={srpo:{demonstrations:5}}",
        ("reward.parts.srpo.demonstrations", "reward.parts.srpo.all_fail=buffer"),
    ),
    ("offline.critics.low=2", ("offline.critics.low=2.0", "below offline.critics.high=1.0")),
    ("offline.critics.hidden=[0]", ("offline.critics.hidden=[0] has 0", "1 or more")),
    ("cluster=ray cluster.rollout_gpus=inf", ("cluster.rollout_gpus=inf", "whole GPUs")),
    ("reward=combined reward.parts={srpo:{scale:7}}", ("reward.parts.srpo.scale=7", "0 to 1")),
    ("seed=-1", ("seed=-1 is out of range", "0 or more", "2**63")),
    ("seed=99999999999999999999", ("seed=99999999999999999999", "2**63")),
    ("threads=-1", ("threads=-1", "0 or more", "all cores")),
    ("threads=100000", ("threads=100000 is more than the", "threads=0")),
    # devices and names
    ("device=gpu", ("device=gpu is no device", "device=cuda")),
    ("device=cuda:x", ("device=cuda:x is no device", "device=auto")),
    ("name=", ("name=''", "study/seed_1")),
    ("name=../x", ("name='../x'",)),
    ("name=/x", ("name='/x'",)),
    ("name=.", ("name='.'",)),
    ("name=" + 300 * "x", ("xxx… has 300 characters", "255")),
    ("output_dir=", ("output_dir is empty",)),
    ("output_dir={file}", ("output_dir={file}", "is a file, and a folder is needed")),
    ("output_dir={file}/below", ("{file} is a file",)),
    ("output_dir={loop}", ("output_dir={loop}", "lead in a circle")),
    # tasks and phases
    ("tasks=[reach_green]", ("'reach_green'", "reach_blue, reach_red")),
    ("tasks=['']", ("unknown task ''",)),
    (
        "tasks=[reach_red,reach_red]",
        ("tasks=['reach_red', 'reach_red'] has 'reach_red' more than once",),
    ),
    ("held_out_tasks=[reach_red]", ("reach_red", "held_out_tasks")),
    ("tasks=[] held_out_tasks=[reach_red,reach_blue]", ("leaves no task to train on",)),
    ("phases=[]", ("phases=[] runs nothing", "collect")),
    ("phases=[train]", ("['train']", "eval_rl")),
    ("phases=[eval_slf]", ("Did you mean eval_sft?",)),
    ("phases=[rl,rl]", ("must name each phase once", "phases=[rl]")),
    ("phases=[rl,sft]", ("in order: phases=[sft,rl]",)),
    ("phases=[sft]", ("phases has sft", "dataset=FOLDER")),
    ("phases=[rl]", ("phases has rl", "checkpoint=FOLDER")),
    ("phases=[eval_sft]", ("phases has eval_sft", "checkpoint=FOLDER")),
    ("phases=[eval_rl]", ("phases has eval_rl", "put rl before it")),
    # what belongs together
    (
        "algorithm=ppo_memory algorithm.memory.hindsight=true tasks=[reach_red]",
        ("algorithm.memory.hindsight", "reach_red"),
    ),
    (
        "run=so101_sim algorithm=ppo_memory algorithm.memory.hindsight=true",
        ("env=so101 does not", "algorithm.memory.hindsight=false"),
    ),
    (
        "algorithm=grpo rl.group_size=1 rl.dynamic_sampling=false",
        ("rl.group_size=1", "rl.group_size=8"),
    ),
    (
        "critic=none policy.value_head=false algorithm.critic_warmup_iterations=0",
        ("algorithm.advantage=gae", "value head"),
    ),
    ("reward_check.refit_every=2", ("reward_check.refit_every=2", "reward=pairwise")),
    (
        "reward=process phases=[collect,sft,rl]",
        ("reward=process is learned, and nothing trains it", "reward.checkpoint"),
    ),
    (
        "algorithm.reward_names=[speed] algorithm.reward_weights=[1]",
        ("algorithm.reward_names has 'speed'",),
    ),
    ("policy.cameras=[wrist]", ("policy.cameras has 'wrist'", "top")),
    ("policy.merge=3", ("policy.merge=3 does not divide", "image size")),
    (
        "algorithm.ratio_level=chunk policy.noise_correlation=0.5",
        ("algorithm.ratio_level=chunk", "noise_correlation=0"),
    ),
    # files that a config names
    ("checkpoint={missing}", ("checkpoint={missing}", "no such file or folder")),
    ("checkpoint={file}", ("{file} is not a checkpoint",)),
    ("checkpoint={loop}", ("checkpoint={loop}", "lead in a circle")),
    ("checkpoint={run}", ("{run} is not a checkpoint", "Did you mean {sft}?")),
    ("checkpoint={sft} env.image_size=12", ("height=16", "height=12", "{sft}")),
    ("checkpoint={sft} policy.heat=2", ("'policy.heat'",)),
    (
        "checkpoint={sft} rl.restarts.share=0.5 phases=[rl]",
        ("rl.restarts.share=0.5", "dataset=FOLDER", "restarts.sources"),
    ),
    (
        "rl.restarts.share=0.5 rl.episodes_per_iteration=8 rl.group_size=8",
        ("rl.restarts.share=0.5 of 1 groups",),
    ),
    ("rl.restarts.share=0.001", ("rl.restarts.share=0.001 of", "is none")),
    (
        "cluster=ray cluster.mode=async cluster.max_staleness=2 cluster.max_late=1 "
        "rl.restarts.share=0.5",
        ("max_late=0",),
    ),
    ("dataset={missing}", ("dataset={missing}", "no such file or folder")),
    ("dataset={run}", ("{run} is not a LeRobotDataset folder",)),
    ("dataset={file}", ("{file}", "not a LeRobotDataset folder")),
    ("dataset={data} env.image_size=8", ("camera top", "[8, 8, 3]", "[16, 16, 3]")),
    ("reward=process reward.checkpoint={missing}", ("reward.checkpoint={missing}", "no such file")),
    ("reward=preference reward.comparisons={missing}", ("reward.comparisons={missing}",)),
]


def some(rows: list[tuple], every: int = 3) -> list:
    """The rows as parameters: one of ``every`` in the fast tier, all of them in the slow one."""
    marks = [() if i % every == 0 else pytest.mark.slow for i in range(len(rows))]
    return [pytest.param(*row, id=row[0][:60], marks=mark) for row, mark in zip(rows, marks)]


@pytest.mark.parametrize(("words", "parts"), some(VALUES))
def test_values(words, parts, places, capsys):
    arguments = [filled(word, places) for word in (*TRAIN, *words.split(" "))]
    text = refused(capsys, arguments, places["out"].parent, places["run"])
    holds(text, tuple(filled(part, places) for part in parts))


# ----------------------------------------------------------------------------------- other commands
COMMANDS: list[tuple[str, tuple[str, ...]]] = [
    ("trian", ("invalid choice: 'trian'",)),
    ("train --frsh", ("unrecognized arguments: --frsh",)),
    ("quickstart --seeds 1 1", ("--seeds 1 1: name each seed once",)),
    ("quickstart --seeds -1", ("--seeds -1: give 0 or more",)),
    ("quickstart --seeds one", ("invalid int value: 'one'",)),
    (
        "train ~run env=toy policy=openvla policy.checkpoint={missing} phases=[eval_sft] "
        "output_dir={out}",
        ("policy.checkpoint={missing}", "no such file or folder"),
    ),
    ("collect run=toy collect.horizon=-1", ("collect.horizon=-1", "0 or more")),
    ("eval", ("checkpoint",)),
    ("eval {missing} --suite toy", ("there is no checkpoint at {missing}",)),
    ("eval {run}", ("Did you mean {sft}?",)),
    ("eval {file} --suite toy", ("{file} is not a checkpoint",)),
    ("eval {loop} --suite toy", ("{loop}",)),
    ("eval ws://localhost:1 --suite toy", ("ws://localhost:1 cannot be reached",)),
    ("eval policy=remote --suite toy", ("policy=remote policy.url=ws://HOST:PORT",)),
    ("eval run=toy --suite toy", ("run=toy: name a checkpoint before it",)),
    ("export {sft} {out}/x --form openpi", ("nano_vla policy, which openpi has no form for",)),
    ("export {sft} {sft}", ("{sft} exists already",)),
    ("serve {missing}", ("there is no checkpoint at {missing}",)),
    ("serve {sft} --port 70000", ("--port 70000",)),
    ("serve {sft} --connections 0", ("--connections 0",)),
    ("train run=toy policy=remote", ("policy.type=remote cannot be trained by imitation",)),
    ("eval {sft} --suite marble", ("--suite marble does not exist", "toy")),
    ("eval {sft} --tasks reach_green", ("'reach_green'", "reach_blue")),
    ("eval {sft} --episodes 0", ("--episodes 0: give 1 or more",)),
    ("eval {sft} --episodes-per-task -5", ("--episodes-per-task -5",)),
    ("eval {sft} --seed -1", ("--seed -1: give 0 or more",)),
    ("eval {sft} --split test", ("invalid choice: 'test'",)),
    ("eval {sft} --levels 1", ("--levels belongs to --perturb",)),
    ("eval {sft} --levels 0 --perturb all", ("--levels 0: give 1 or more",)),
    ("eval {sft} --perturb camera", ("--perturb", "toy has no perturbations")),
    ("eval {sft} --compare {missing}", ("there is no checkpoint at {missing}",)),
    ("eval {sft} --json {out}", ("--json {out}", "is a folder")),
    ("eval {sft} --json {file}/x.json", ("--json {file}/x.json", "is a file")),
    ("eval {sft} --video {out}", ("--video {out}", "is a folder")),
    ("eval {sft} device=gpu", ("device=gpu is no device",)),
    ("eval {sft} env.image_size=12", ("height=12",)),
    ("eval {sft} policy.heat=3", ("'policy.heat'",)),
    ("eval {sft} seed", ("'seed' is not an override",)),
    ("distill {missing}", ("there is no checkpoint at {missing}",)),
    ("distill {sft} --steps 0", ("--steps 0",)),
    ("distill {sft} --learning-rate nan", ("--learning-rate nan",)),
    ("distill {sft} --learning-rate inf", ("--learning-rate inf",)),
    ("distill {sft} --out {file}", ("--out {file}", "is a file")),
    ("distill {sft} --updates 1", ("makes no faster student",)),
    ("export {missing} {out}/x", ("there is no checkpoint at {missing}",)),
    ("export {sft} {out}", ("{out} exists already",)),
    ("export {sft} {out}/x", ("no form but this project's own",)),
    ("report {missing}", ("{missing} is not a run",)),
    ("report {out}", ("{out} is not a run", "metrics.jsonl")),
    ("report {file}", ("{file} is not a run",)),
    ("advise {out}", ("{out} is no run", "config.yaml")),
    ("advise {run} --rollouts -4", ("--rollouts -4",)),
    ("advise {run} env.horizn=3", ("'env.horizn'", "'env.horizon'")),
    ("advise {run} --json {out}", ("--json {out}", "is a folder")),
    ("doctor --json {out}", ("--json {out}", "is a folder")),
    ("robotwin", ("ACTION",)),
    (
        "robotwin seeds --task lift_pot --file {out}/seeds.json",
        ("env.root=FOLDER", "RLinf_support"),
    ),
    (
        "robotwin seeds --task lift_pot --file {out}/seeds.json env.root={out}",
        ("env.root={out}", "no checkout of RoboTwin"),
    ),
    (
        "robotwin seeds --task fold_towel --file {out}/seeds.json",
        ("env.tasks=['fold_towel'] has 'fold_towel'", "lift_pot"),
    ),
    ("reward", ("ACTION",)),
    ("reward score", ("name what to read",)),
    ("reward score {missing} reward=success", ("{missing}", "neither a dataset")),
    ("reward score {data} reward=magic", ("reward=magic does not exist",)),
    ("reward score {data} {data} reward=success --out {out}/x", ("one source, got 2",)),
    ("reward score {data} reward=success --limit -1", ("--limit -1",)),
    ("reward score {data} reward=success --out {file}", ("--out {file}",)),
    ("reward score {data} reward=process --out {out}/x", ("not trained",)),
    ("reward fit {data} reward=success --out {out}/x", ("reward=success has nothing to train",)),
    ("reward quality {run} reward=success --policy best --out {out}/x", ("no checkpoint best",)),
    ("reward quality {run} reward=success --episodes 0", ("--episodes 0",)),
    ("bench", ("KIND",)),
    ("bench sim --suite toy", ("--suite toy", "tabletop")),
    ("bench sim --steps 0", ("--steps 0",)),
    ("bench sim --workers 0", ("--workers 0",)),
    ("bench policy --preset huge", ("'huge'", "nano")),
    ("bench policy --device gpu", ("--device=gpu is no device",)),
    ("bench policy run=toy", ("run=toy", "--dry-run")),
    ("bench learn", ("name run folders",)),
    ("bench learn {run} --level 2", ("--level 2.0",)),
    ("bench learn {run} --level nan", ("--level nan",)),
    ("bench learn {run}", ("{run} has no iterations of RL",)),
    ("bench learn run=toy --against seed=1 --rounds 0", ("--rounds 0",)),
    ("bench rhythm run=toy", ("algorithm.type=ppo", "rl.rhythm=alternate")),
    ("bench rhythm run=toy_td3 --rounds 0", ("--rounds 0",)),
    ("bench reward --episodes 0", ("--episodes 0",)),
    ("bench replay --steps 0", ("--steps 0",)),
    ("bench replay --cameras 0", ("--cameras 0",)),
    ("bench replay --steps 1000000000000", ("--steps 1000000000000", "GB free", "--folder")),
    ("bench replay --steps 8 --folder {missing}", ("{missing}", "no such file or folder")),
    ("bench reward reward=success --run {run}", ("{run} has no iterations of RL",)),
]


@pytest.mark.parametrize(("words", "parts"), COMMANDS, ids=[words[:60] for words, _ in COMMANDS])
def test_commands(words, parts, places, capsys):
    text = refused(
        capsys,
        [filled(word, places) for word in words.split()],
        places["out"].parent,
        places["run"],
    )
    holds(text, tuple(filled(part, places) for part in parts))


# ------------------------------------------------------------------------------------ damaged files
def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def other(path: Path) -> None:
    path.write_bytes(b"\xff\xfe\x00 no text \x80")


def gone(path: Path) -> None:
    path.unlink()


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


def listed(path: Path) -> None:
    path.write_text("[1, 2]")


def nested(path: Path) -> None:
    path.write_text(100_000 * "[")


def key(name: str, value: object) -> Callable[[Path], None]:
    """An object in the file with one key (``a/b``) set, or removed for None."""

    def edit(path: Path) -> None:
        document = json.loads(path.read_text())
        *outer, last = name.split("/")
        inner = document
        for step in outer:
            inner = inner[int(step) if isinstance(inner, list) else step]
        if value is None:
            del inner[last]
        else:
            inner[last] = value
        path.write_text(json.dumps(document))

    edit.__name__ = f"{name}={value}"[:40]
    return edit


def line(text: str) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        path.write_text(path.read_text() + text)

    edit.__name__ = text.strip()[:40]
    return edit


SFT, EVAL = "checkpoints/sft", ("eval", "{run}/checkpoints/sft", "--episodes", "2")
AGAIN = ("train", *TOY, "output_dir={out}/..", "name=toy", "phases=[collect,sft,eval_sft]")
OPEN = "phases.json"
DAMAGE: list[tuple[str, Callable[[Path], None], tuple[str, ...], tuple[str, ...]]] = [
    *(
        (f"{SFT}/config.json", edit, EVAL, ("config.json", part))
        for edit, part in (
            (emptied, "damaged"),
            (cut, "damaged"),
            (other, "damaged"),
            (listed, "holds a list"),
            (nested, "damaged"),
            (folder, "is not a checkpoint"),
            (gone, "is not a checkpoint"),
            (loop, "is not a checkpoint"),
            (key("policy_type", None), "names no policy_type"),
            (key("policy_type", 3), "names no policy_type"),
            (key("policy_type", "magic"), "'magic'"),
            (key("format", 99), "update vla_rl"),
            (key("format", "x"), "format"),
            (key("config", None), "lacks 'config'"),
            (key("config", [1]), "damaged"),
            (key("config/heat", 2), "heat"),
            (key("config/llm_width", "wide"), "damaged"),
            (key("config/decoding", "magic"), "policy.decoding='magic'"),
            (key("action_stats/mean", [0.0]), "one length"),
            (key("action_stats", "x"), "damaged"),
        )
    ),
    *(
        (f"{SFT}/embodiment.json", edit, EVAL, ("embodiment.json", part))
        for edit, part in (
            (emptied, "damaged"),
            (listed, "holds a list"),
            (gone, "missing"),
            (folder, "is a folder"),
            (loop, "cannot be read"),
            (key("cameras", None), "lacks 'cameras'"),
            (key("cameras", 3), "describes no robot"),
            (key("cameras/0/height", -4), "above 0"),
            (key("control_hz", "often"), "must be numbers"),
            (key("action_low", [0.0]), "differ in number"),
            (key("wings", 2), "describes no robot"),
        )
    ),
    *(
        (f"{SFT}/model.safetensors", edit, EVAL, ("model.safetensors", part))
        for edit, part in (
            (emptied, "damaged"),
            (cut, "cut short"),
            (other, "damaged"),
            (gone, "missing"),
            (folder, "is a folder"),
        )
    ),
    (f"{SFT}/tokenizer.json", emptied, EVAL, ("checkpoints/sft", "damaged")),
    (f"{SFT}/tokenizer.json", gone, EVAL, ("checkpoints/sft lacks 'tokenizer.json'",)),
    (f"{SFT}/tokenizer.json", other, EVAL, ("checkpoints/sft", "damaged")),
    *(
        ("config.yaml", edit, EVAL, ("config.yaml", part))
        for edit, part in (
            (other, "cannot be read"),
            (emptied, "config.yaml"),
            (listed, "not a mapping"),
            (line("\nsede: 3\n"), "'sede'"),
            (line("\na: [\n"), "cannot be read"),
            (line("\nseed: many\n"), "cannot be read"),
        )
    ),
    *(
        ("phases.json", edit, AGAIN, ("phases.json", part))
        for edit, part in (
            (emptied, "damaged"),
            (cut, "damaged"),
            (other, "damaged"),
            (listed, "holds a list"),
            (folder, "is a folder"),
            (loop, "cannot be read"),
            (key("sft", 3), "phase sft"),
            (key("sft/seconds", "long"), "phase sft"),
            (key("sft/complete", "yes"), "phase sft"),
            (key("sft/seconds", None), "phase sft"),
            (key("peak_memory_bytes", "much"), "peak_memory_bytes"),
        )
    ),
    ("config.yaml", folder, AGAIN, ("config.yaml",)),
    ("eval_sft.json", cut, ("advise", "{run}"), ("eval_sft.json",)),
    ("eval_sft.json", listed, ("advise", "{run}"), ("eval_sft.json",)),
    (
        "eval_sft.json",
        key("outcomes/0/success", "yes"),
        ("advise", "{run}"),
        ("eval_sft.json", "no number"),
    ),
    (
        "eval_sft.json",
        key("outcomes/0/control_steps", "x"),
        ("advise", "{run}"),
        ("eval_sft.json",),
    ),
    ("metrics.jsonl", folder, ("report", "{run}"), ("metrics.jsonl", "this is a folder")),
    ("metrics.jsonl", loop, ("advise", "{run}"), ("metrics.jsonl",)),
    ("report.html", folder, ("report", "{run}"), ("report.html", "this is a folder")),
]
FROM_DATA = (
    "train",
    *TOY,
    "output_dir={out}",
    "name=other",
    "dataset={run}/dataset",
    "phases=[sft]",
)
DAMAGE += [
    (f"dataset/meta/{name}", edit, FROM_DATA, (part,))
    for name, edit, part in (
        ("info.json", emptied, "info.json is damaged"),
        ("info.json", listed, "info.json is damaged"),
        ("info.json", other, "info.json is damaged"),
        ("info.json", gone, "not a LeRobotDataset folder"),
        ("info.json", folder, "info.json is a folder"),
        ("info.json", key("features", [1]), "info.json is damaged"),
        (
            "info.json",
            key("codebase_version", "v2.1"),
            "v2.1, and this reads v3. Convert it: vla-rl",
        ),
        ("info.json", key("fps", "fast"), "incomplete or damaged"),
        ("info.json", key("features/action/names", ["up"]), "action names"),
        ("embodiment.json", emptied, "embodiment.json is damaged"),
        ("embodiment.json", key("cameras", 3), "describes no robot"),
        ("tasks.parquet", cut, "incomplete or damaged"),
        ("tasks.parquet", gone, "incomplete or damaged"),
    )
]
DAMAGE += [
    (f"dataset/{pattern}", edit, FROM_DATA, ("dataset",))
    for pattern, edit in (
        ("data/*/*.parquet", cut),
        ("data/*/*.parquet", gone),
        ("meta/episodes/*/*.parquet", cut),
    )
]


@pytest.mark.parametrize(
    ("name", "edit", "command", "parts"),
    DAMAGE,
    ids=[f"{n.rpartition('/')[2]}-{e.__name__}" for n, e, _, _ in DAMAGE],
)
def test_damaged_files(name, edit, command, parts, finished, tmp_path, capsys):
    run = Path(shutil.copytree(finished, tmp_path / finished.name))
    (out := tmp_path / "out").mkdir()
    edit(next(run.glob(name)))
    holds(refused(capsys, [filled(word, {"run": run, "out": out}) for word in command], out), parts)


STATE = f"{SFT}/training_state"
STATES = [
    ("state.json", emptied, "state.json is damaged"),
    ("state.json", listed, "state.json is damaged"),
    ("state.json", key("counters", None), "a training state of this run"),
    ("state.json", key("counters", {"laps": 3}), "a training state of this run"),
    ("state.json", key("sampler", "x"), "a training state of this run"),
    ("state.safetensors", cut, "state.safetensors is damaged"),
    ("state.safetensors", gone, "state.safetensors is missing"),
]


@pytest.mark.parametrize(
    ("name", "edit", "part"), STATES, ids=[f"{n}-{e.__name__}" for n, e, _ in STATES]
)
def test_damaged_state_of_a_run_that_goes_on(name, edit, part, finished, tmp_path, capsys):
    run = Path(shutil.copytree(finished, tmp_path / finished.name))
    key("sft/complete", False)(run / "phases.json")
    edit(run / STATE / name)
    arguments = [filled(word, {"out": run}) for word in AGAIN]
    holds(
        refused(capsys, arguments, run / "checkpoints", run / "dataset"),
        (part, str(Path(STATE).parent)),
    )


# -------------------------------------------------------------------------- what the system refuses
SYSTEM = [
    (errno.ENOSPC, "the disk is full"),
    (errno.EROFS, "read-only"),
    (errno.EACCES, "permission denied"),
    (errno.EDQUOT, "quota"),
    (errno.EIO, "the disk failed"),
    (errno.ENAMETOOLONG, "too long"),
    (errno.EMFILE, "ulimit -n"),
]


@pytest.mark.parametrize(("number", "part"), SYSTEM, ids=[errno.errorcode[n] for n, _ in SYSTEM])
def test_what_the_system_refuses_is_one_line(number, part, finished, tmp_path, capsys, monkeypatch):
    run = Path(shutil.copytree(finished, tmp_path / finished.name))
    plain = Path.write_text

    def failing(self, *arguments, **options):
        if self.name.startswith(".summary.json"):
            raise OSError(number, os.strerror(number), str(self))
        return plain(self, *arguments, **options)

    monkeypatch.setattr(Path, "write_text", failing)
    assert cli.main(["report", str(run)]) == 2
    text = capsys.readouterr().err
    holds(text, ("error: ", "summary.json", part))
    assert len(text.splitlines()) == 1


def test_an_error_of_the_system_that_no_user_caused_is_not_hidden(monkeypatch):
    def broken(*_, **__):
        raise OSError(errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr(preflight, "check", broken)
    with pytest.raises(OSError, match="Bad file"):
        cli.main(["train", "run=toy"])


def test_too_little_memory_is_named(monkeypatch, capsys):
    def hungry(*_, **__):
        raise MemoryError

    monkeypatch.setattr(preflight, "check", hungry)
    assert cli.main(["train", "run=toy"]) == 2
    assert "not enough memory" in capsys.readouterr().err


def test_a_place_that_may_not_be_written_is_named_before_anything_runs(places, capsys, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_, **__: False)  # (root may write everywhere)
    arguments = [filled(word, places) for word in TRAIN]
    holds(
        refused(capsys, arguments, places["out"]),
        (f"output_dir={places['out']}", "may not be written", "another place"),
    )


def test_too_little_room_is_named_before_anything_runs(places, capsys, monkeypatch):
    usage = shutil.disk_usage(places["out"])
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=5 * 10**6))
    text = refused(capsys, [filled(word, places) for word in TRAIN], places["out"])
    holds(text, ("5 MB free", "needs about 1", "output_dir=FOLDER"))


def test_a_report_shows_what_is_damaged_beside_it(finished, tmp_path, capsys):
    run = Path(shutil.copytree(finished, tmp_path / finished.name))
    key("sft/seconds", "long")(run / "phases.json")
    line('{"phase": "rl", "step": "first"}\n{"phase": "sft", "step": 9, "sft/loss": "low"}\n')(
        run / "metrics.jsonl"
    )
    emptied(run / "versions.json")
    other(run / "eval_sft.json")
    assert cli.main(["report", str(run)]) == 0
    page = (run / "report.html").read_text(encoding="utf-8")
    for part in (
        "seconds of phase sft is",
        "versions.json could not be read",
        "eval_sft.json is not an",
    ):
        assert part in page


FILES: list[tuple[bytes | None, str, tuple[str, ...]]] = [
    (None, "run=./mine.yaml", ("run=mine.yaml: ", "no such file")),
    (None, "run={out}", ("run={out}: ", "folder")),
    (b"", "run=mine.yaml", ("mine.yaml is empty", "seed: 1")),
    (b"- seed: 1\n", "run=mine.yaml", ("mine.yaml holds a sequence, not a mapping",)),
    (b"name: \xe4\n", "run=mine.yaml", ("mine.yaml is no text in UTF-8 (byte 6)",)),
    (
        b"seed: 1\nrl:\n  iteration: 3\n",
        "run=mine.yaml",
        ("mine.yaml, line 3", "'rl.iteration'", "'rl.iterations'"),
    ),
    (b"rl: [\n", "run=mine.yaml", ("mine.yaml, line 2 is no YAML",)),
    (b"seed: ${nope}\n", "run=mine.yaml", ("nope",)),
    (b"defaults: [mine]\n", "run=mine.yaml", ("run=mine does not exist", "mine.yaml, line 1")),
    (
        b"defaults: [{env: moon}]\n",
        "run=mine.yaml",
        ("env=moon does not exist", "mine.yaml, line 1"),
    ),
    (b"# @package _global_\ndefaults: [mine]\n", "run=mine", ("in a circle",)),
    (b"seed: 1\n", "run=toy --config-dir {missing}", ("--config-dir {missing} is no folder",)),
    (
        b"seed: 1\n",
        "run=toy --config-dir {out}",
        ("--config-dir {out} holds no configs", "{out}/run/mine.yaml"),
    ),
]


@pytest.mark.parametrize(
    ("content", "words", "parts"), FILES, ids=[f"{words}-{text!r}"[:60] for text, words, _ in FILES]
)
def test_config_files_of_ones_own(content, words, parts, places, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own" / "run").mkdir(parents=True)
    if content is not None:
        (tmp_path / "mine.yaml").write_bytes(content)
        (tmp_path / "own" / "run" / "mine.yaml").write_bytes(content)
    where = ["--config-dir", "own"] if words == "run=mine" else []
    text = refused(capsys, ["train", *filled(words, places).split(), *where], tmp_path)
    holds(text, tuple(filled(part, places) for part in parts))


def test_more_than_150_rows():
    assert len(VALUES) + len(COMMANDS) + len(DAMAGE) + len(STATES) + len(SYSTEM) >= 150
