"""What every shipped learning run promises: there is time for skill, so that RL cannot win by
speed alone."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Iterable, Iterator
from statistics import mean
from typing import Any

import numpy as np
import pytest
from libero_reference import libero_problem

from vla_rl import build
from vla_rl.checks.options import check_given, check_run
from vla_rl.checks.planned import Planned
from vla_rl.config import RunConfig, compose
from vla_rl.errors import ConfigError, UserError
from vla_rl.monitoring.metrics import write_json
from vla_rl.paths import config_dir
from vla_rl.types import EpisodeSpec

RUNS = sorted(path.stem for path in (config_dir() / "run").glob("*.yaml"))
# what a run does not compose without
GIVEN = {name: ["dataset=recorded"] for name in ("sft", "pi05_rl_token", "smolvla_residual")}
ENVS = {name: compose([f"run={name}", *GIVEN.get(name, [])]).env_type for name in RUNS}
# not the recipe's limits with RoboTwin's own demonstrator, what is recorded, and any env of a user's
SCRIPTED = [name for name in RUNS if ENVS[name] not in ("robotwin", "dataset", "gym")]


MEASURED: dict[str, float] = {}  # a task that runs demonstrate alike is measured once


def lengths(
    config: RunConfig, per_task: int = 3, **same_motion: Any
) -> dict[str, tuple[float, int]]:
    """Per task: mean control steps of ``per_task`` successful demonstrations as the run collects
    them, and its limit. ``same_motion``: fields of its env that change neither."""
    limits = {
        t.task_id: t.horizon for t in build.implementation("env", config.env_type)(config.env).tasks
    }
    changes = same_motion | ({"horizon": config.collect.horizon} if config.collect.horizon else {})
    env = dataclasses.replace(config.env, **changes)
    options = {"noise_std": config.collect.action_noise}
    if config.collect.speed != 1.0:
        options["speed"] = config.collect.speed
    tasks = config.tasks or list(limits)
    keys = {task: repr((config.env_type, env, options, task, per_task)) for task in tasks}
    wanted = [task for task in tasks if keys[task] not in MEASURED]
    for task, steps in demonstrated_steps(config.env_type, env, options, wanted, per_task):
        MEASURED[keys[task]] = steps
    return {task: (MEASURED[keys[task]], limits[task]) for task in tasks}


def demonstrated_steps(
    env_type: str, env: Any, options: dict[str, float], tasks: list[str], per_task: int
) -> Iterator[tuple[str, float]]:
    """Each task with its mean control steps."""
    if not tasks:
        return
    simulator = build.implementation("env", env_type)(env)
    collect = build.attribute(build.env_entry(env_type).collect)
    for task in tasks:
        taken: list[int] = []
        for i in range(4 * per_task):
            episode = EpisodeSpec(task_id=task, init_state_id=i, split="train", seed=i)
            result = collect(simulator, episode, rng=np.random.default_rng(i), **options)
            taken += [len(result["actions"])] if result["success"] else []
            if len(taken) == per_task:
                break
        yield task, mean(taken)
    simulator.close()


def test_the_limit_of_every_run_is_looked_at():
    assert {ENVS[name] for name in SCRIPTED} == {
        "toy",
        "tabletop",
        "libero",
        "dualarm",
        "so101",
    }, "another env: give it a test below"
    others = [name for name in RUNS if name not in SCRIPTED]
    assert others == ["gym", "robotwin_openvla_oft", "sft"]


@pytest.mark.parametrize("name", [n for n in SCRIPTED if ENVS[n] == "toy"])
def test_a_toy_run_leaves_time_for_skill(name: str):
    for task, (demonstrated, limit) in lengths(compose([f"run={name}"])).items():
        assert limit >= 1.5 * demonstrated, (name, task)


@pytest.mark.real_sim
@pytest.mark.xdist_group("limits")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=() if n == "quickstart" else pytest.mark.slow)
        for n in SCRIPTED
        if ENVS[n] == "tabletop"
    ],
)
def test_a_tabletop_run_leaves_time_for_skill(name: str):
    for task, (demonstrated, limit) in lengths(compose([f"run={name}"])).items():
        assert limit >= 1.5 * demonstrated, (name, task)


@pytest.mark.real_sim
@pytest.mark.slow
@pytest.mark.xdist_group("limits_libero")
@pytest.mark.parametrize("name", [n for n in SCRIPTED if ENVS[n] == "libero"])
def test_a_libero_run_leaves_time_for_skill(name: str):
    """(A limit below the suite's own cuts no demonstration short that leaves time under it.)"""
    if problem := libero_problem():
        pytest.skip(f"needs LIBERO: {problem}")
    # (tests/test_libero_sim.py)
    same_motion = {"camera_size": 32, "look": "light", "controller": "fast"}
    same_motion |= {"cameras": ["agentview"], "tasks": [], "horizon": 0}
    for task, (demonstrated, limit) in lengths(
        compose([f"run={name}"]), per_task=1, **same_motion
    ).items():
        assert limit >= 1.5 * demonstrated, (name, task)


@pytest.mark.real_sim
@pytest.mark.parametrize("name", [n for n in SCRIPTED if ENVS[n] == "so101"])
def test_an_so101_run_leaves_time_for_skill(name: str):
    config = compose([f"run={name}"])
    try:
        config.env.check_machine()
    except UserError as error:
        pytest.skip(str(error))
    for task, (demonstrated, limit) in lengths(config).items():
        assert limit >= 1.5 * demonstrated, (name, task)


@pytest.mark.parametrize("name", [n for n in SCRIPTED if ENVS[n] == "dualarm"])
def test_a_dualarm_run_leaves_time_for_skill(name: str):
    pytest.importorskip("sapien")
    for task, (demonstrated, limit) in lengths(
        compose([f"run={name}", "env.observe=state", "env.cameras=[]"])
    ).items():
        assert limit >= 1.5 * demonstrated, (name, task)


def compatible(*overrides: str) -> str:
    """The reason why what is composed so is refused, or nothing."""
    try:
        return refusal(compose(overrides))
    except ConfigError as error:
        return str(error)


ALGORITHMS, POLICIES = (
    sorted(p.stem for p in (config_dir() / group).glob("*.yaml"))
    for group in ("algorithm", "policy")
)
PER_RUN = 6  # of the fast tier's sample


def sample(run: str) -> list[tuple[str, str]]:
    """(algorithm, policy): ``PER_RUN`` of each for a run, others for the next one, so that all
    of them are met."""
    at = RUNS.index(run)
    steps = range(at, len(ALGORITHMS) * PER_RUN + at, len(ALGORITHMS))
    return [
        (ALGORITHMS[(at + 6 * i) % len(ALGORITHMS)], POLICIES[step % len(POLICIES)])
        for i, step in enumerate(steps)
    ]


def refusals(run: str, algorithm: str, policy: str, compose_both: Any) -> dict[str, str]:
    """Why the run does not take that algorithm, that policy, and both; composed once where the
    composition is sound. ``compose_both``: `chosen` or `assembled`."""
    own, with_algorithm, with_policy = (
        [f"run={run}", *GIVEN.get(run, [])],
        f"algorithm={algorithm}",
        f"policy={policy}",
    )
    try:
        both = compose_both(run, algorithm, policy)
    except ConfigError:
        return {
            with_algorithm: compatible(*own, with_algorithm),
            with_policy: compatible(*own, with_policy),
            f"{with_algorithm} {with_policy}": compatible(*own, with_algorithm, with_policy),
        }
    # an algorithm's file may set keys of the whole run, a policy's sets the policy alone
    algorithm_alone = with_policy_of(both, composed(run))
    policy_alone = with_policy_of(composed(run), both)
    cases = {
        with_algorithm: algorithm_alone,
        with_policy: policy_alone,
        f"{with_algorithm} {with_policy}": both,
    }
    return {given: refusal(config) for given, config in cases.items()}


def chosen(run: str, algorithm: str, policy: str) -> RunConfig:
    return composed(run, f"algorithm={algorithm}", f"policy={policy}")


# the presets that set keys of the algorithm alone; the others those of the whole run
PLAIN = {
    path.stem
    for path in (config_dir() / "algorithm").glob("*.yaml")
    if not path.read_text().startswith("# @package _global_")
}


def assembled(run: str, algorithm: str, policy: str) -> RunConfig:
    """The same where both presets set their own component's keys alone, without a composition
    for every pair: no run's file sets a key of either."""
    if algorithm not in PLAIN:
        return chosen(run, algorithm, policy)
    with_policy = with_policy_of(
        composed(run, "algorithm=ppo"), composed("toy", f"policy={policy}")
    )
    learns = composed("toy", f"algorithm={algorithm}")
    return dataclasses.replace(
        with_policy, algorithm=learns.algorithm, algorithm_type=learns.algorithm_type
    )


def with_policy_of(config: RunConfig, other: RunConfig) -> RunConfig:
    return dataclasses.replace(config, policy=other.policy, policy_type=other.policy_type)


def refusal(config: RunConfig) -> str:
    try:
        check_run(config)
    except ConfigError as error:
        return str(error)
    return ""


@functools.cache
def composed(run: str, *choices: str) -> RunConfig:
    return compose([f"run={run}", *GIVEN.get(run, []), *choices])


def check_refusals(
    run: str, pairs: Iterable[tuple[str, str]], compose_both: Any = assembled
) -> None:
    """Never for a key that the run set for another component: tuning belongs to the component's
    own files."""
    assert not refusal(composed(run)), run
    for algorithm, policy in pairs:
        for given, reason in refusals(run, algorithm, policy, compose_both).items():
            place = f"run={run} algorithm={algorithm} policy={policy} ({given}): {reason}"
            assert "unknown config key" not in reason, place
            if reason:  # what is wrong and what to do
                assert any(word in reason for word in ("needs", "group_size")), place
                assert any(word in reason for word in (": use ", "Set ", "set ", ": give ")), place


@pytest.mark.xdist_group("compositions")
@pytest.mark.parametrize("run", RUNS)
def test_a_run_composes_with_algorithms_and_policies_or_says_why_not(run):
    check_refusals(run, sample(run), chosen)


@pytest.mark.xdist_group("compositions")
@pytest.mark.parametrize("run", RUNS)
def test_presets_that_set_their_components_keys_alone_can_be_put_together(run):
    """What the test of every pair builds on."""
    pairs = [(a, p) for a, p in sample(run) if a in PLAIN]
    assert pairs
    for algorithm, policy in pairs:
        try:
            expected = chosen(run, algorithm, policy)
        except ConfigError as error:
            with pytest.raises(ConfigError, match=re.escape(str(error))):
                assembled(run, algorithm, policy)
        else:
            assert assembled(run, algorithm, policy) == expected


@pytest.mark.slow
@pytest.mark.xdist_group("compositions")
@pytest.mark.parametrize("run", RUNS)
def test_a_run_composes_with_every_algorithm_and_policy_or_says_why_not(run):
    """(But those of the test above.)"""
    algorithms, policies = (
        [name for name in names if name not in looked_at]
        for names, looked_at in zip((ALGORITHMS, POLICIES), zip(*sample(run)), strict=True)
    )
    count = max(len(algorithms), len(policies))
    check_refusals(
        run, [(algorithms[i % len(algorithms)], policies[i % len(policies)]) for i in range(count)]
    )


def test_the_policy_that_a_run_is_given_fits_as_a_new_one_does(tmp_path):
    start = tmp_path / "sft"
    start.mkdir()

    def refused(kind: str, *overrides: str) -> str:
        write_json(start / "config.json", {"policy_type": kind})
        config = compose(["run=toy", f"output_dir={tmp_path}", *overrides])
        try:
            check_given(Planned(config))
        except ConfigError as error:
            return str(error)
        return ""

    assert not refused("nano_vla", f"sft.start={start}")
    assert not refused("residual", f"checkpoint={start}")  # an actor on one says so as it is opened
    told = refused("small", f"sft.start={start}")
    assert f"sft.start={start} holds a small policy: algorithm.type=ppo needs" in told
    assert "checkpoint=" in refused("small", f"checkpoint={start}")
    remote = refused("remote", f"sft.start={start}", "phases=[sft]")
    assert remote.endswith("holds a remote policy, which cannot be trained by imitation")


def test_where_sft_goes_on_from_needs_sft_and_no_other_policy():
    for more in (["checkpoint=b"], ["phases=[rl,eval_rl]"], ["phases=[random,rl]"]):
        with pytest.raises(ConfigError, match=r"sft\.start=a is where SFT goes on from.* or "):
            check_run(compose(["run=toy", "sft.start=a", *more]))
    assert compose(["run=toy", "sft.start=~/a"]).given == os.path.expanduser("~/a")
    assert not compose(["run=toy", "sft.start=a", "phases=[rl]"]).given


def test_the_pairs_that_a_user_would_try_first():
    assert not compatible("run=quickstart", "algorithm=filtered_bc") and not compatible(
        "run=toy", "algorithm=filtered_bc"
    )
    assert "rl.group_size=8" in compatible("run=quickstart", "algorithm=grpo")
    check_run(compose(["run=quickstart", "algorithm=grpo", "rl.group_size=8"]))
    assert (
        "set actor=residual or direct, which goes on top of it, or use policy=small"
        in compatible("run=quickstart", "algorithm=td3")
    )
    assert not compatible("run=quickstart", "algorithm=residual")
    assert not compatible("run=residual_quickstart", "algorithm=ppo")
    assert "or algorithm.type=filtered_bc or td3" in compatible("run=quickstart", "policy=small")
