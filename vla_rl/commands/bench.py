"""``vla-rl bench``: measurements against a baseline, in one run."""

from __future__ import annotations

import argparse
import functools
import math
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vla_rl.asked import AlgorithmOptions, PolicyOptions, asked
from vla_rl.commands.shared import Add, Names, add_overrides, write_result
from vla_rl.errors import ConfigError

JSON: dict[str, Any] = {"type": Path, "metavar": "FILE", "help": "write the result as JSON"}
WAYS = ("none", "coupled", "truncate", "mask", "vtrace")  # of `benchmarks.learning.staleness`


def add(command: Add) -> None:
    """``vla-rl bench sim``, ``learn`` and the others."""
    bench = command("bench", None, "measure against a baseline, in one run")
    kinds = bench.add_subparsers(title="benchmarks", metavar="KIND", required=True)

    sim = kinds.add_parser("sim", help="control steps/s of the simulator against its plain gym stepping")
    sim.set_defaults(function=run_bench_sim)
    sim.add_argument("--suite", default="tabletop", help="tabletop, libero_spatial, ...")
    sim.add_argument("--tasks", nargs="+", action=Names, metavar="TASK", help="default: lift_cube, or the suite's first")
    sim.add_argument("--look", choices=["light", "full"], help="of tabletop (default: light); LIBERO is measured in both")
    sim.add_argument("--chunk", type=int, help="control steps per decision (8; 25 of dualarm and robotwin)")
    sim.add_argument("--steps", type=int, help="control steps per measurement (160; 50 of dualarm and robotwin)")
    sim.add_argument("--workers", type=int, nargs="+", help="worker processes of the pool to measure (1 2; LIBERO: 1 2 4)")
    add_overrides(sim, "of dualarm and robotwin: env.root=FOLDER ...")
    sim.add_argument("--json", **JSON)

    _add_learning(kinds)
    scoring = kinds.add_parser("reward", help="frames/s of reward models, and their share of a run's iterations")
    scoring.set_defaults(function=run_bench_reward)
    add_overrides(scoring, "reward=NAME ... (default: the usual ones)")
    scoring.add_argument("--episodes", type=int, default=64, help="synthetic episodes to score")
    scoring.add_argument("--decisions", type=int, default=6, help="decisions per episode")
    scoring.add_argument("--size", type=int, default=84, help="pixels of the camera")
    scoring.add_argument("--run", type=Path, help="a run with RL iterations to compare with")
    scoring.add_argument("--json", **JSON)

    policy = kinds.add_parser("policy", help="latency of acting and samples/s of learning")
    policy.set_defaults(function=run_bench_policy)
    policy.add_argument("--preset", default="nano", help="nano, small, 7b, openvla-nano or openvla-7b")
    policy.add_argument("--device", default="cpu", help="cpu, cuda, or auto: cuda where there is one")
    policy.add_argument("--compile", action="store_true", help="measure the heads with torch.compile too (minutes)")
    policy.add_argument("--dry-run", action="store_true", help="only estimate an OpenVLA's memory (preset or run)")
    policy.add_argument("--json", **JSON)
    add_overrides(policy, "with --dry-run: the run, e.g. run=NAME")

    replay = kinds.add_parser("replay", help="batches/s of the replay against shuffled tuples in RAM")
    replay.set_defaults(function=run_bench_replay)
    replay.add_argument("--steps", type=int, default=20_000, help="control steps")
    replay.add_argument("--size", type=int, default=128, help="pixels of a camera")
    replay.add_argument("--cameras", type=int, default=2, help="pictures in each observation")
    replay.add_argument("--chunk", type=int, default=1, help="control steps per decision, each of which has a frame")
    replay.add_argument("--folder", type=Path, help="where to make a temporary folder (default: the system's place)")
    replay.add_argument("--json", **JSON)

    _add_robot(kinds)
    _add_hil(kinds)


def _add_learning(kinds: Any) -> None:
    learn = kinds.add_parser("learn", help="how soon runs reached a success rate, and where their seconds went")
    learn.set_defaults(function=run_bench_learn)
    add_overrides(learn, "run folders; with --against, a config", "RUN|key=value")
    learn.add_argument("--start", type=Path, metavar="CKPT", help="run methods from this policy, then compare them")
    learn.add_argument("--methods", metavar="A,B", help="of --start: ppo, residual, steer, rlpd, wsrl, parl")
    learn.add_argument("--seeds", type=int, nargs="+", default=[0], metavar="N", help="of --start, for each method")
    learn.add_argument("--out", type=Path, metavar="FOLDER", help="of --start: the runs' place (outputs/bench_learn)")
    learn.add_argument("--level", type=float, default=0.8, metavar="SHARE", help="of held-out episodes that succeed")
    learn.add_argument("--against", metavar="OVERRIDES", help="measure a config with and without these (a=1,b=2), in turns")
    learn.add_argument("--iterations", type=int, default=2, metavar="N", help="of RL that count, per side and round")
    learn.add_argument("--rounds", type=int, default=2, metavar="N", help="of --against")
    learn.add_argument("--figure", type=Path, metavar="FILE", help="an HTML page with the runs' curves")
    learn.add_argument("--json", **JSON)

    stale = kinds.add_parser("staleness", help="success after RL on episodes that an older policy played")
    stale.set_defaults(function=run_bench_staleness)
    add_overrides(stale, "default: run=toy and settings that move it fast")
    stale.add_argument("--lags", type=int, nargs="+", default=[0, 8], metavar="N", help="iterations that episodes are old")
    stale.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="to learn from them (default: all)")
    stale.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="N", help="of the runs at every lag")
    stale.add_argument("--json", **JSON)

    update = kinds.add_parser("update", help="ms of an update from a replay: kept features, images encoded anew, own eyes")
    update.set_defaults(function=run_bench_update)
    add_overrides(update, "default: run=residual_quickstart")
    update.add_argument("--batch", type=int, default=256, metavar="N", help="decisions")
    update.add_argument("--size", type=int, default=84, help="pixels of each of two cameras")
    update.add_argument("--json", **JSON)

    rhythm = kinds.add_parser("rhythm", help="control steps/s of an actor and a learner at once against by turns")
    rhythm.set_defaults(function=run_bench_rhythm)
    add_overrides(rhythm, "a config that learns from a replay")
    rhythm.add_argument("--iterations", type=int, default=20, metavar="N", help="of RL, per side and round")
    rhythm.add_argument("--rounds", type=int, default=2, metavar="N", help="of both rhythms, in turn")
    rhythm.add_argument("--as-given", action="store_true", help="keep algorithm.updates_per_decision, else balanced")
    rhythm.add_argument("--json", **JSON)

    overlap = kinds.add_parser("overlap", help="episodes/s of rolling out while learning on Ray, against by turns")
    overlap.set_defaults(function=run_bench_overlap)
    add_overrides(overlap, "default: run=toy, which sleeps")
    overlap.add_argument("--iterations", type=int, default=20, metavar="N", help="of RL, per side and round")
    overlap.add_argument("--rounds", type=int, default=2, metavar="N", help="of both ways, in turn")
    overlap.add_argument("--json", **JSON)

    faults = kinds.add_parser("faults", help="a run on two Ray nodes whose processes are killed, against one in peace")
    faults.set_defaults(function=run_bench_faults)
    add_overrides(faults, "default: run=toy with rollout actors and ranks")
    faults.add_argument("--kills", type=int, default=24, metavar="N", help="processes to kill in all")
    faults.add_argument("--kinds", nargs="+", default=[], metavar="KIND", help="default: all that the run has")
    faults.add_argument("--seed", type=int, default=0, help="of what is killed, and when")
    faults.add_argument("--json", **JSON)


def _add_robot(kinds: Any) -> None:
    robot = kinds.add_parser("robot", help="a session with a simulated arm: kills and freezes, lateness, takeover, the gate")
    robot.set_defaults(function=run_bench_robot)
    robot.add_argument("--world", default="fake", help="fake or tabletop")
    robot.add_argument("--limits", type=Path, metavar="FILE", help="default: the world's own in configs/limits")
    robot.add_argument("--trials", type=int, default=3, help="of each kind of kill and freeze")
    robot.add_argument("--victims", nargs="+", default=[], metavar="PROCESS", help="of those (default: all)")
    robot.add_argument("--steps", type=int, default=10_000, metavar="N", help="adversarial actions against the gate")
    robot.add_argument("--seconds", type=float, default=20.0, help="of measuring the loop's lateness")
    robot.add_argument("--busy", type=int, default=1, help="processes that compute meanwhile")
    robot.add_argument("--cameras", type=int, default=2, help="of 640 x 480 at 30 Hz, recorded and shown meanwhile")
    robot.add_argument("--real-time", type=int, default=0, metavar="PRIORITY", help="SCHED_FIFO, if permitted")
    robot.add_argument("--json", **JSON)

    soak = kinds.add_parser("soak", help="hours of sessions in virtual time, with a random fault every half minute")
    soak.set_defaults(function=run_bench_soak)
    soak.add_argument("--world", default="fake", help="fake or tabletop")
    soak.add_argument("--limits", type=Path, metavar="FILE", help="default: the world's own in configs/limits")
    soak.add_argument("--minutes", type=float, default=120.0, help="of virtual time")
    soak.add_argument("--wall", type=float, default=float("inf"), metavar="MINUTES", help="end earlier, after so long")
    soak.add_argument("--every", type=float, default=30.0, metavar="SECONDS", help="between two faults")
    soak.add_argument("--seed", type=int, default=0, help="of the faults and of what the person does")
    soak.add_argument("--keep", type=Path, metavar="FOLDER", help="for the journals in which something is wrong")
    soak.add_argument("--json", **JSON)

    acting = kinds.add_parser("acting", help="jumps where chunks meet: synchronous, asynchronous, ensemble, rtc")
    acting.set_defaults(function=run_bench_acting)
    add_overrides(acting, "checkpoint=CKPT robot.KEY=... (a toy flow)")
    acting.add_argument("--episodes", type=int, default=5, metavar="N", help="in each way")
    acting.add_argument("--thinking", type=float, default=0.12, metavar="SECONDS", help="that a decision takes, virtually")
    acting.add_argument("--seed", type=int, default=0, help="of the episodes")
    acting.add_argument("--json", **JSON)


def _add_hil(kinds: Any) -> None:
    hil = kinds.add_parser("hil", help="ways to learn from a person on an arm, with a scripted one in virtual time")
    hil.set_defaults(function=run_bench_hil)
    hil.add_argument("--start", type=Path, required=True, metavar="CKPT", help="the policy that all start from")
    hil.add_argument("--methods", default="hil_serl,hil_dagger,bc,hil_residual", metavar="A,B", help="residual_alone too")
    hil.add_argument("--episodes", type=int, default=200, metavar="N", help="of each method")
    hil.add_argument("--every", type=int, default=20, metavar="N", help="episodes between judgements")
    hil.add_argument("--judge", type=int, default=50, metavar="N", help="held-out episodes a judgement, without help")
    hil.add_argument("--out", type=Path, default=Path("outputs/bench_hil"), metavar="FOLDER", help="the runs' place")
    hil.add_argument("--figure", type=Path, metavar="FILE", help="an HTML page with the curves")
    hil.add_argument("--json", **JSON)
    add_overrides(hil, "dataset=DEMOS robot.KEY=... operator.KEY=... ...")


def run_bench_hil(arguments: argparse.Namespace) -> None:
    from benchmarks.robot.hil import Effort, bench_hil

    a = arguments
    document = bench_hil(
        a.start, [name for name in a.methods.split(",") if name], a.overrides, Effort(a.episodes, a.every, a.judge),
        out=a.out, figure=a.figure, say=lambda text: print(text, flush=True),
    )  # fmt: skip
    write_result(a.json, document)


def _limits(arguments: argparse.Namespace) -> Path:
    from vla_rl.paths import config_dir

    names = {"fake": "fake_point", "tabletop": "tabletop"}
    if arguments.limits is None and arguments.world not in names:
        raise ConfigError(f"--world {arguments.world} needs --limits; those of {', '.join(names)} are known")
    return Path(arguments.limits or config_dir() / "limits" / f"{names[arguments.world]}.yaml")


def run_bench_soak(arguments: argparse.Namespace) -> int:
    """Exit status 1 where something is wrong."""
    from vla_rl import build

    a = arguments
    if not (a.minutes > 0 and a.every > 0):
        raise ConfigError(f"--minutes {a.minutes:g} --every {a.every:g}: give more than 0")
    bench = build.attribute("benchmarks.robot.soak:bench_soak")
    say = functools.partial(print, flush=True)
    document = bench(a.world, _limits(a), a.minutes, a.every, a.seed, say=say, folder=a.keep, wall=a.wall)
    write_result(a.json, document)
    return int(bool(document["problems"]))


def run_bench_robot(arguments: argparse.Namespace) -> None:
    from vla_rl import build

    a, report = arguments, "benchmarks.robot.report"
    known = list(dict.fromkeys(v for v, _ in (*build.attribute(f"{report}:VICTIMS"), *build.attribute(f"{report}:LEARNER"))))
    if unknown := [victim for victim in a.victims if victim not in known]:
        raise ConfigError(f"--victims {unknown[0]}: use some of {', '.join(known)}")
    options = {"trials": a.trials, "victims": a.victims, "actions": a.steps, "seconds": a.seconds}
    options |= {"busy": a.busy, "cameras": a.cameras}
    with tempfile.TemporaryDirectory(prefix="starts") as place:
        starts = _starts(Path(place)) if a.trials else {}
        say = functools.partial(print, flush=True, file=sys.stderr)
        bench = build.attribute(f"{report}:bench_robot")
        write_result(a.json, bench(a.world, _limits(a), options, real_time=a.real_time, starts=starts, say=say))


def _starts(folder: Path) -> dict[str, Path]:
    """Checkpoints of the point robot: one that moves its hand in a circle of 4 cm, and a small one to learn from."""
    import torch

    from vla_rl import build
    from vla_rl.checkpoint import save_checkpoint
    from vla_rl.robot.replay import Recorded

    robot = build.attribute("real.robots.world:PointWorld")().embodiment
    turns = torch.arange(2000) * 2 * math.pi / robot.control_hz
    rows = torch.stack([0.048 * turns.cos(), 0.048 * turns.sin(), 0 * turns, -torch.ones_like(turns)], dim=1)
    save_checkpoint(folder / "launcher", Recorded(robot, rows, [10] * 200))
    small = build.attribute("policies.settings:SmallConfig")(chunk_length=4, hidden=[16])
    save_checkpoint(folder / "learner", build.attribute("policies.small:SmallPolicy")(small, robot))
    return {name: folder / name for name in ("launcher", "learner")}


def run_bench_acting(arguments: argparse.Namespace) -> None:
    from benchmarks.robot.acting import bench_acting

    a = arguments
    write_result(a.json, bench_acting(a.overrides, episodes=a.episodes, thinking=a.thinking, seed=a.seed))


def run_bench_sim(arguments: argparse.Namespace) -> None:
    from vla_rl import build

    env = build.suite(arguments.suite)[0]
    entry = build.env_entry(env)
    if not entry.bench:
        known = ", ".join(name for name, env in build.suites().items() if build.env_entry(env).bench)
        raise ConfigError(f"--suite {arguments.suite} has no benchmark. Choose one of {known}")
    given = ("chunk", "steps", "workers", "tasks", "look")
    options = {name: value for name in given if (value := getattr(arguments, name)) is not None}
    if entry.bench_overrides is None:
        if arguments.overrides:
            raise ConfigError(f"{arguments.overrides[0]}: the benchmark of {arguments.suite} takes no key=value")
        options["suite"] = arguments.suite
    else:
        options |= _configured(env, entry.bench_overrides, options.pop("tasks", ()), options.pop("look", ""), arguments)
    write_result(arguments.json, build.attribute(entry.bench)(**options))


def _configured(
    env: str, fixed: Sequence[str], tasks: Sequence[str], look: str, arguments: argparse.Namespace
) -> dict[str, Any]:
    """The config that such a benchmark measures, and the Python of its workers."""
    from vla_rl.config import compose

    if look:
        raise ConfigError(f"--look {look}: say it with env.look=... for --suite {arguments.suite}")
    chosen = [f"env.tasks=[{','.join(tasks)}]"] if tasks else []
    config = compose(["~run", f"env={env}", *fixed, *chosen, *arguments.overrides])
    return {"config": config.env, "python": config.slots.python}


def run_bench_learn(arguments: argparse.Namespace) -> None:
    from benchmarks.learning.learn import bench_against, bench_runs, split_overrides

    if bool(arguments.start) != bool(arguments.methods) or (arguments.start and arguments.against):
        raise ConfigError("--start CKPT goes with --methods A,B (and --seeds, --out), and without --against")
    if arguments.start:
        from benchmarks.learning.methods import bench_methods

        document = bench_methods(
            arguments.start,
            [name for name in arguments.methods.split(",") if name],
            arguments.overrides,
            seeds=arguments.seeds,
            level=arguments.level,
            out=arguments.out or Path("outputs/bench_learn"),
            figure=arguments.figure,
        )
    elif arguments.against:
        against = split_overrides(arguments.against)
        document = bench_against(arguments.overrides, against, iterations=arguments.iterations, rounds=arguments.rounds)
    else:
        document = bench_runs([Path(word) for word in arguments.overrides], arguments.level, arguments.figure)
    write_result(arguments.json, document)


def run_bench_staleness(arguments: argparse.Namespace) -> None:
    from benchmarks.learning.staleness import bench_staleness

    a = arguments
    write_result(a.json, bench_staleness(a.overrides, lags=a.lags, ways=a.ways, seeds=a.seeds))


def run_bench_rhythm(arguments: argparse.Namespace) -> None:
    from benchmarks.learning.rhythm import bench_rhythm

    options = {"iterations": arguments.iterations, "rounds": arguments.rounds, "balance": not arguments.as_given}
    write_result(arguments.json, bench_rhythm(arguments.overrides, **options))


def run_bench_overlap(arguments: argparse.Namespace) -> None:
    from benchmarks.learning.overlap import bench_overlap

    a = arguments
    write_result(a.json, bench_overlap(a.overrides, iterations=a.iterations, rounds=a.rounds))


def run_bench_faults(arguments: argparse.Namespace) -> None:
    from benchmarks.learning.faults import bench_faults

    a = arguments
    write_result(a.json, bench_faults(a.overrides, kills=a.kills, kinds=a.kinds, seed=a.seed))


def run_bench_update(arguments: argparse.Namespace) -> None:
    from benchmarks.learning.update import bench_update

    write_result(arguments.json, bench_update(arguments.overrides, batch=arguments.batch, size=arguments.size))


def run_bench_reward(arguments: argparse.Namespace) -> None:
    from vla_rl.config import compose
    from vla_rl.rewards.tools import BENCHED, bench_reward

    named = [o for o in arguments.overrides if o.startswith("reward=")]
    options = [o for o in arguments.overrides if not o.startswith("reward=")]
    chosen = named or [f"reward={name}" for name in BENCHED]
    configs = [compose(["~run", choice, *options]) for choice in chosen]
    document = bench_reward(
        [(c.reward_type, c.reward) for c in configs],
        episodes=arguments.episodes,
        decisions=arguments.decisions,
        size=arguments.size,
        run=arguments.run,
    )
    write_result(arguments.json, document)


def run_bench_replay(arguments: argparse.Namespace) -> None:
    from benchmarks.learning.replay import Sizes, bench_replay

    sizes = Sizes(arguments.steps, arguments.size, arguments.cameras, arguments.chunk)
    write_result(arguments.json, bench_replay(sizes, folder=arguments.folder))


def run_bench_policy(arguments: argparse.Namespace) -> None:
    from vla_rl import build

    if not arguments.dry_run:
        if arguments.overrides:
            raise ConfigError(f"{arguments.overrides[0]}: config overrides describe a run, which goes with --dry-run")
        from vla_rl.devices import check_device, pick_device

        check_device(arguments.device, "--device")
        pick_device(arguments.device, "--device")
        bench = build.attribute("benchmarks.policy.nano:bench_policy")
        write_result(arguments.json, bench(arguments.preset, device=arguments.device, compiled=arguments.compile))
        return
    options: dict[str, Any] = {}
    if arguments.overrides:
        from vla_rl.config import compose

        config = compose(arguments.overrides)
        if asked(config.policy, PolicyOptions).lora_rank is None:
            raise ConfigError(f"--dry-run estimates OpenVLA policies, this run has policy.type={config.policy_type}")
        options = {"policy": config.policy, "policy_type": config.policy_type}
        algorithm = asked(config.algorithm, AlgorithmOptions)
        options["offload_optimizer"] = algorithm.offload_optimizer
        options["micro_batch"] = algorithm.micro_batch_size or 8
        options["acting_batch"] = max(1, config.slots.workers) * config.slots.slots_per_worker
    write_result(arguments.json, build.attribute("benchmarks.policy.nano:dry_run")(arguments.preset, **options))
