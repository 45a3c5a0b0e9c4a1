"""The command line: ``vla-rl <command>``. Commands only compose; the work is in the modules they call."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from vla_rl import __version__
from vla_rl.errors import ConfigError, UserError


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status (2: bad input, 130: interrupted)."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    if rest and (not hasattr(arguments, "overrides") or any(r.startswith("-") for r in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:  # overrides that follow an option; argparse takes positional arguments in one go only
        arguments.overrides += rest
    if not hasattr(arguments, "function"):
        parser.print_help()
        return 2
    # Nothing here may reach for a hub or an account by itself.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        with _terminable():
            _check_numbers(arguments)
            _check_targets(arguments)
            return arguments.function(arguments) or 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (OSError, MemoryError) as error:
        from vla_rl.files import explained

        text = explained(error) if isinstance(error, OSError) else "there is not enough memory for these settings"
        if text is None:
            raise
        print(f"error: {text}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        resumes = arguments.function in (run_quickstart, run_train, run_collect)
        print("\ninterrupted" + ("; the same command resumes" if resumes else ""), file=sys.stderr)
        return 130


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM, a scheduler's way to stop a job, ends a command as Ctrl-C does: phases write their records."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


EVAL_EPISODES = 100  # of a checkpoint outside of its run
# What the numbers among the options may be, whatever the command (None: no limit).
_LIMITS: dict[str, tuple[float, float | None]] = {
    "episodes": (1, None), "episodes_per_task": (1, None), "seed": (0, 2**63 - 1), "seeds": (0, 2**63 - 1),
    "levels": (1, None), "rollouts": (0, None), "limit": (0, None), "videos": (0, None), "steps": (1, None),
    "updates": (0, None), "evaluate_episodes": (0, None), "learning_rate": (0, None), "chunk": (1, None),
    "workers": (1, 4096), "iterations": (1, None), "rounds": (1, None), "decisions": (1, None), "size": (1, 4096),
}  # fmt: skip


def _check_numbers(arguments: argparse.Namespace) -> None:
    """Raise `ConfigError` for a number among the options that is out of its range."""
    for name, (least, most) in _LIMITS.items():
        given = getattr(arguments, name, None)
        for value in given if isinstance(given, list) else [given]:
            if value is not None and not least <= value <= (sys.float_info.max if most is None else most):
                raise ConfigError(
                    f"--{name.replace('_', '-')} {value}: give {least} or more" + ("" if most is None else f", up to {most}")
                )


def _check_targets(arguments: argparse.Namespace) -> None:
    """Raise `UserError` where what a command is asked to write cannot be written: before it has worked for an hour."""
    named = {name: getattr(arguments, name, None) for name in ("json", "video", "preferences", "out", "folder")}
    if not any(named.values()):
        return
    from vla_rl.files import require_file_target, require_writable

    for name, path in named.items():
        if path is not None:
            key = f"FOLDER {path}" if name == "folder" else f"--{name} {path}"
            (require_writable if name in ("out", "folder") else require_file_target)(path, key)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="vla-rl", description="RL fine-tuning of vision-language-action policies")
    parser.add_argument("--version", action="version", version=f"vla-rl {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    def command(name: str, function: Any, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(function=function)
        return sub

    def with_overrides(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("overrides", nargs="*", metavar="key=value", help="config overrides, e.g. seed=1 rl.iterations=10")
        sub.add_argument("--fresh", action="store_true", help="start over; an earlier run folder is kept aside")
        sub.add_argument("--dry-run", action="store_true", help="print the config and what would run; write nothing")

    quickstart = command("quickstart", run_quickstart, "demonstrations, SFT, RL and report on the embedded simulator")
    quickstart.add_argument("--seeds", type=int, nargs="+", metavar="N", help="run these seeds one after the other")
    with_overrides(quickstart)
    with_overrides(command("train", run_train, "run the phases of a config: vla-rl train run=NAME"))
    with_overrides(command("collect", run_collect, "only collect scripted demonstrations"))

    evaluate = command("eval", run_eval, "success of a checkpoint, with intervals; a second one is compared pairwise")
    evaluate.add_argument("checkpoint", type=Path)
    evaluate.add_argument("--compare", type=Path, metavar="CHECKPOINT", help="a second checkpoint, same initial states")
    evaluate.add_argument(
        "--suite",
        metavar="ENV",
        help="env, or LIBERO suite (libero_spatial ...; with its own time limit), to evaluate on (default: that of the "
        "checkpoint's own run)",
    )
    evaluate.add_argument("--tasks", nargs="+", metavar="TASK", help="only these tasks")
    evaluate.add_argument(
        "--episodes", type=int, help="episodes in all, spread over the tasks (default: as the checkpoint's run, else 100)"
    )
    evaluate.add_argument("--episodes-per-task", type=int, metavar="N", help="this many for each task instead")
    evaluate.add_argument(
        "--perturb", metavar="FACTORS", help="the same episodes again, perturbed: all, or names such as camera,light"
    )
    evaluate.add_argument("--levels", type=int, nargs="+", metavar="N", help="of --perturb, spread over the episodes")
    evaluate.add_argument("--split", choices=["held_out", "train"], help="default: as the run, else held_out")
    evaluate.add_argument("--seed", type=int, help="default: as the run, else 0")
    evaluate.add_argument(
        "--sample", action=argparse.BooleanOptionalAction, help="sampled or most likely actions (default: as the run)"
    )
    evaluate.add_argument("--video", type=Path, metavar="FILE", help="write a grid of episodes as mp4")
    evaluate.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON")
    evaluate.add_argument("overrides", nargs="*", metavar="key=value", help="config overrides, e.g. slots.workers=1")

    distill = command("distill", run_distill, "train a faster student of a policy whose actions are denoised")
    distill.add_argument("checkpoint", type=Path)
    distill.add_argument("--steps", type=int, default=1, help="denoising steps of the student")
    distill.add_argument("--method", default="same_noise", help="same_noise | lcm: how the student learns")
    distill.add_argument("--episodes", type=int, default=100, help="episodes of the teacher to learn on")
    distill.add_argument("--updates", type=int, default=1000, help="0: take over a student that learnt beside RL")
    distill.add_argument("--learning-rate", type=float, default=5e-4)
    distill.add_argument("--evaluate-episodes", type=int, default=200, help="held-out episodes that compare both; 0: none")
    distill.add_argument("--seed", type=int, default=0)
    distill.add_argument("--out", type=Path, metavar="FOLDER", help="default: CHECKPOINT_student<steps>, beside it")
    distill.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON")
    distill.add_argument("overrides", nargs="*", metavar="key=value", help="config overrides, e.g. slots.workers=1")

    export = command("export", run_export, "write a checkpoint in the form that its policy's own project loads")
    export.add_argument("checkpoint", type=Path)
    export.add_argument("folder", type=Path, help="the folder to create")

    report = command("report", run_report, "write report.html and summary.json of a run folder, or of several runs")
    report.add_argument("run", type=Path, nargs="+", help="a run; or a folder of seeds, or of unlike runs, such as outputs")
    report.add_argument("--out", type=Path, metavar="FOLDER", help="of several: default 'comparison' beside the first")

    rerun = command("export-rerun", run_export_rerun, "write a dataset, a run's rollouts or rollouts for the Rerun viewer")
    rerun.add_argument("source", type=Path, help="a dataset, a run (its policy is rolled out once) or rollouts")
    rerun.add_argument("file", type=Path, help="the .rrd file to write: rerun FILE shows it")
    rerun.add_argument("--limit", type=int, default=20, metavar="N", help="episodes of a dataset (0: all)")
    rerun.add_argument("--episodes", type=int, default=20, metavar="N", help="rollouts of a run (kept in <run>/rollouts)")
    rerun.add_argument("--policy", default="", metavar="NAME", help="which checkpoint of a run acts: sft, rl or best")

    advise = command("advise", run_advise, "is the start of a run one that RL can learn from, and what to change if not?")
    advise.add_argument("run", type=Path)
    advise.add_argument("--rollouts", type=int, default=0, metavar="N", help="also run N episodes with sampled actions")
    advise.add_argument("--json", type=Path, metavar="FILE", help="write figures and verdicts as JSON")
    advise.add_argument("overrides", nargs="*", metavar="key=value", help="what if: config overrides, e.g. env.horizon=90")

    doctor = command("doctor", run_doctor, "what works on this machine, and how to fix what does not")
    doctor.add_argument("--json", type=Path, metavar="FILE", help="write the checks as JSON")

    reward = command("reward", None, "score trajectories, train a reward model, or judge whether one is worth training on")
    actions = reward.add_subparsers(title="actions", metavar="ACTION", required=True)
    for name, function, text in (
        ("score", run_reward_score, "curves, table and a video of what a reward model says of a dataset or run"),
        ("fit", run_reward_fit, "train a reward model on datasets and runs: data=FOLDER, more than once if need be"),
        ("quality", run_reward_quality, "is a reward model good enough to train on? exit status 1 for a bad verdict"),
    ):
        sub = actions.add_parser(name, help=text, description=text)
        sub.set_defaults(function=function)
        sub.add_argument("overrides", nargs="*", metavar="SOURCE|key=value", help="dataset, run, rollouts; reward=NAME ...")
        sub.add_argument("--out", type=Path, metavar="FOLDER", help="where to write (default: outputs/reward_<name>)")
        sub.add_argument("--episodes", type=int, default=64, help="rollouts of a run's policy (kept in <run>/rollouts)")
        sub.add_argument("--limit", type=int, default=0, help="demonstrations per dataset (0: all)")
        sub.add_argument("--policy", default="", metavar="NAME", help="which checkpoint of a run acts: sft or rl")
        if name == "score":
            sub.add_argument("--videos", type=int, default=8, help="episodes in the video")
            sub.add_argument("--preferences", type=Path, metavar="FILE", help="write comparisons for reward=preference")

    bench = command("bench", None, "measure against a baseline, in one run")
    kinds = bench.add_subparsers(title="benchmarks", metavar="KIND", required=True)
    sim = kinds.add_parser("sim", help="control steps/s of the simulator against its plain gym stepping")
    sim.set_defaults(function=run_bench_sim)
    sim.add_argument("--suite", default="tabletop", help="tabletop, libero_spatial, ...")
    sim.add_argument("--tasks", nargs="+", metavar="TASK", help="default: lift_cube, or the suite's first task")
    sim.add_argument("--look", choices=["light", "full"], help="of tabletop (default: light); LIBERO is measured in both")
    sim.add_argument("--chunk", type=int, default=8, help="control steps per decision")
    sim.add_argument("--steps", type=int, default=160, help="control steps per measurement")
    sim.add_argument("--workers", type=int, nargs="+", help="worker processes of the pool to measure (1 2; LIBERO: 1 2 4)")
    sim.add_argument("--json", type=Path, metavar="FILE")
    learn = kinds.add_parser("learn", help="how soon runs reached a success rate, and where their seconds went")
    learn.set_defaults(function=run_bench_learn)
    learn.add_argument("overrides", nargs="*", metavar="RUN|key=value", help="run folders; with --against, a config")
    learn.add_argument("--level", type=float, default=0.8, metavar="SHARE", help="of held-out episodes that succeed")
    learn.add_argument("--against", metavar="OVERRIDES", help="measure a config with and without these (a=1,b=2), in turns")
    learn.add_argument("--iterations", type=int, default=2, metavar="N", help="of RL that count, per side and round")
    learn.add_argument("--rounds", type=int, default=2, metavar="N", help="of --against")
    learn.add_argument("--json", type=Path, metavar="FILE")
    scoring = kinds.add_parser("reward", help="frames/s of reward models, and their share of a run's iterations")
    scoring.set_defaults(function=run_bench_reward)
    scoring.add_argument("overrides", nargs="*", metavar="key=value", help="reward=NAME ... (default: the usual ones)")
    scoring.add_argument("--episodes", type=int, default=64)
    scoring.add_argument("--decisions", type=int, default=6, help="decisions per episode")
    scoring.add_argument("--size", type=int, default=84, help="pixels of the camera")
    scoring.add_argument("--run", type=Path, help="a run with RL iterations to compare with")
    scoring.add_argument("--json", type=Path, metavar="FILE")
    policy = kinds.add_parser("policy", help="latency of acting and samples/s of learning")
    policy.set_defaults(function=run_bench_policy)
    policy.add_argument("--preset", default="nano", help="nano, small, 7b, openvla-nano or openvla-7b")
    policy.add_argument("--device", default="cpu")
    policy.add_argument("--compile", action="store_true", help="measure the heads with torch.compile too (minutes)")
    policy.add_argument("--dry-run", action="store_true", help="only estimate an OpenVLA's memory (preset or run)")
    policy.add_argument("--json", type=Path, metavar="FILE")
    policy.add_argument("overrides", nargs="*", metavar="key=value", help="with --dry-run: the run, e.g. run=NAME")
    return parser


# -------------------------------------------------------------------------------------------------------------- commands
def run_quickstart(arguments: argparse.Namespace) -> None:
    from vla_rl.config import compose

    overrides = ["run=quickstart", *arguments.overrides]
    if not arguments.seeds:
        _run(overrides, arguments)
        return
    name = compose(overrides).name
    if len(set(arguments.seeds)) < len(arguments.seeds):
        raise ConfigError(f"--seeds {' '.join(map(str, arguments.seeds))}: name each seed once")
    for seed in arguments.seeds:  # each in a folder of its own
        _run([*overrides, f"seed={seed}", f"name={name}-seed{seed}"], arguments)


def run_train(arguments: argparse.Namespace) -> None:
    _run(arguments.overrides, arguments)


def run_collect(arguments: argparse.Namespace) -> None:
    _run([*arguments.overrides, "phases=[collect]"], arguments, report=False)


def _run(overrides: Sequence[str], arguments: argparse.Namespace, report: bool = True) -> None:
    from vla_rl.config import compose
    from vla_rl.run import preflight

    config = compose(overrides)
    preflight.check(config, fresh=arguments.fresh)  # before the seconds that torch takes to import
    from vla_rl.run.pipeline import plan, run_pipeline

    if arguments.dry_run:
        print(plan(config, fresh=arguments.fresh))
        return
    folder = run_pipeline(config, fresh=arguments.fresh)
    print(f"open {folder / 'report.html'}" if report else f"wrote {folder / 'dataset'}")


def run_eval(arguments: argparse.Namespace) -> None:
    from vla_rl.run import preflight

    config = _eval_config(arguments.checkpoint, arguments.suite, arguments.overrides)
    own = arguments.suite is None and _recorded(arguments.checkpoint).is_file()
    held_out, config.held_out_tasks = config.held_out_tasks, []
    if arguments.tasks or arguments.suite:
        config.tasks = arguments.tasks or []
    elif config.tasks:  # what the run itself evaluates
        config.tasks = [*config.tasks, *held_out]
    if arguments.tasks and hasattr(config.env, "tasks"):  # an env that builds only the tasks it is asked for
        config.env.tasks = list(arguments.tasks)
    if arguments.suite and arguments.suite != config.env_type:  # a part of the env: a bare number may mean another's task
        held_out = [name for name in held_out if name.startswith(f"{arguments.suite}/")]
    _set_evaluation(config.evaluate, arguments)
    paths = [arguments.checkpoint] + ([arguments.compare] if arguments.compare else [])
    if arguments.levels and not arguments.perturb:
        raise ConfigError("--levels belongs to --perturb: add --perturb all, or leave it out")
    for path in paths:
        preflight.check_start(config, path)
    from vla_rl.evaluation.checkpoints import evaluate_checkpoints

    document = evaluate_checkpoints(
        config,
        paths,
        episodes=arguments.episodes or (None if own else EVAL_EPISODES),
        per_task=arguments.episodes_per_task,
        video=arguments.video,
        perturb=[name for name in (arguments.perturb or "").split(",") if name],
        levels=arguments.levels or (),
        held_out_tasks=held_out,
    )
    document["env"] = {"type": config.env_type, **dataclasses.asdict(config.env)}
    if hasattr(config.env, "initial_states"):
        document["initial_states"] = config.env.initial_states(config.evaluate.split)
        print(f"initial states: {document['initial_states']}")
    if hasattr(config.env, "describe"):
        document["conditions"] = config.env.describe()
        print(f"conditions: {document['conditions']}")
    _write(arguments.json, document)


def _set_evaluation(config: Any, arguments: argparse.Namespace) -> None:
    """What the command line says of an evaluation goes before what the checkpoint's run recorded."""
    if arguments.split is not None:
        config.split = arguments.split
    if arguments.seed is not None:
        config.seed = arguments.seed
    if arguments.sample is not None:
        config.deterministic = not arguments.sample


def _recorded(checkpoint: Path) -> Path:
    """The config of the run that a checkpoint belongs to, if it does."""
    return Path(os.path.realpath(checkpoint)).parent.parent / "config.yaml"


def _eval_config(checkpoint: Path, suite: str | None, overrides: Sequence[str]) -> Any:
    """The env as the checkpoint's own run recorded it; with a named suite, or outside of a run, that suite's defaults."""
    from vla_rl import build
    from vla_rl import config as configs

    recorded = _recorded(checkpoint)
    env, chosen = build.suite(suite) if suite else ("tabletop", [])
    if recorded.is_file():
        config = configs.load(recorded)
        config.policy_changes = {}  # the run's checkpoints hold them already, and a student may lack their keys
        # Cameras and control stay those it has learnt with.
        if suite is None or (chosen and config.env_type == env):
            return configs.override(config, [*chosen, *overrides])
    plain = [] if any(o.startswith("run=") for o in overrides) else ["~run"]
    return configs.compose([*plain, f"env={env}", *chosen, *overrides])


def run_distill(arguments: argparse.Namespace) -> None:
    from vla_rl.run import preflight
    from vla_rl.settings import DistillConfig

    names = ("steps", "method", "episodes", "updates", "learning_rate", "evaluate_episodes", "seed")
    settings = DistillConfig(**{name: getattr(arguments, name) for name in names})
    checkpoint = arguments.checkpoint
    folder = arguments.out or checkpoint.with_name(f"{checkpoint.name}_student{settings.steps}")
    config = _eval_config(checkpoint, None, arguments.overrides)
    preflight.check_start(config, checkpoint)
    from vla_rl.run.distill import distill

    document = distill(config, checkpoint, settings, folder)
    print(f"wrote {folder}")
    _write(arguments.json, document)


def run_export(arguments: argparse.Namespace) -> None:
    from vla_rl.files import check_checkpoint

    check_checkpoint(arguments.checkpoint)
    from vla_rl.run.opening import export_policy

    export_policy(arguments.checkpoint, arguments.folder)
    print(f"wrote {arguments.folder}")


def run_report(arguments: argparse.Namespace) -> None:
    from vla_rl.reporting.page import write_comparison, write_report

    if len(arguments.run) > 1:
        print(write_comparison(arguments.run, arguments.out or arguments.run[0].resolve().parent / "comparison"))
        return
    if arguments.out:
        raise ConfigError("--out belongs to several runs; the report of one is written into its folder")
    print(write_report(arguments.run[0]))


def run_export_rerun(arguments: argparse.Namespace) -> None:
    from vla_rl.data.rerun_export import export_rerun
    from vla_rl.rewards.sources import load_source

    if arguments.limit < 0 or arguments.episodes < 1:
        raise ConfigError("export-rerun needs --limit >= 0 and --episodes >= 1")
    reading = {"limit": arguments.limit, "episodes": arguments.episodes, "checkpoint": arguments.policy}
    source = load_source(arguments.source, stride=1, **reading)
    print(f"{source.what}\nwrote {export_rerun(source, arguments.file)}; show it with: rerun {arguments.file}")


def run_advise(arguments: argparse.Namespace) -> None:
    from vla_rl.evaluation.advise import advise

    _write(arguments.json, advise(arguments.run, rollouts=arguments.rollouts, overrides=arguments.overrides))


def run_doctor(arguments: argparse.Namespace) -> int:
    from vla_rl.doctor import doctor, exit_status, render

    checks = doctor()
    print(render(checks))
    _write(arguments.json, [vars(c) for c in checks])
    return exit_status(checks)


def run_bench_sim(arguments: argparse.Namespace) -> None:
    from vla_rl import build

    bench = build.env_entry(build.suite(arguments.suite)[0]).bench
    if not bench:
        known = ", ".join(name for name, env in build.suites().items() if build.env_entry(env).bench)
        raise ConfigError(f"--suite {arguments.suite} has no benchmark. Choose one of {known}")
    options = {"suite": arguments.suite, "chunk": arguments.chunk, "steps": arguments.steps}
    options |= {name: value for name in ("tasks", "workers", "look") if (value := getattr(arguments, name)) is not None}
    _write(arguments.json, build.attribute(bench)(**options))


def _reward_sources(arguments: argparse.Namespace) -> tuple[Any, list[Any]]:
    """The composed config of a reward command, and the sources that it names."""
    from vla_rl.config import compose

    folders = list(_sources_from(arguments.overrides))
    if not folders:
        raise UserError("name what to read: a dataset, a run or rollouts (vla-rl reward score FOLDER reward=NAME)")
    options = [o for o in arguments.overrides if "=" in o and not o.startswith("data=")]
    config = compose([*([] if any(o.startswith("run=") for o in options) else ["~run"]), *options])
    from vla_rl.rewards.sources import load_source

    reading = {"limit": arguments.limit, "episodes": arguments.episodes, "checkpoint": arguments.policy}
    return config, [load_source(folder, stride=config.reward_check.stride, **reading) for folder in folders]


def _sources_from(texts: Sequence[str]) -> Iterator[str]:
    """Source folders among command-line words: plain ones, and ``data=FOLDER``."""
    for text in texts:
        if text.startswith("data="):
            yield text.removeprefix("data=")
        elif "=" not in text and not text.startswith("~"):
            yield text


def _only(sources: Sequence[Any]) -> Any:
    if len(sources) > 1:
        raise UserError(f"score and quality read one source, got {len(sources)}: run the command once for each")
    return sources[0]


def _reward_folder(arguments: argparse.Namespace, config: Any) -> Path:
    return arguments.out or Path(config.output_dir) / f"reward_{config.reward_type.replace(':', '.')}"


def run_reward_score(arguments: argparse.Namespace) -> None:
    from vla_rl.rewards.tools import run_score

    config, sources = _reward_sources(arguments)
    options = {"videos": arguments.videos, "preferences": arguments.preferences}
    run_score(config.reward_type, config.reward, _only(sources), _reward_folder(arguments, config), **options)


def run_reward_fit(arguments: argparse.Namespace) -> None:
    from vla_rl.reporting.progress import Progress
    from vla_rl.rewards.build import fit_updates
    from vla_rl.rewards.tools import run_fit

    config, sources = _reward_sources(arguments)
    folder = _reward_folder(arguments, config)
    with Progress() as progress, progress.task("fit", fit_updates(config.reward)) as bar:

        def update(done: int, loss: float) -> None:
            bar.update(done, loss=loss)

        quality = run_fit(
            config.reward_type, config.reward, sources, folder, config.reward_check, seed=config.seed, progress=update
        )
    print(f"{config.reward_type}: trained on {', '.join(s.what for s in sources)}")
    print("not judged: no rollouts were given, only demonstrations (add data=RUN)" if quality is None else quality.text())
    print(f"use it: vla-rl train run=quickstart reward={config.reward_type} reward.checkpoint={folder}")


def run_reward_quality(arguments: argparse.Namespace) -> int:
    from vla_rl.rewards.tools import run_quality

    config, sources = _reward_sources(arguments)
    folder = _reward_folder(arguments, config)
    quality = run_quality(config.reward_type, config.reward, _only(sources), folder, config.reward_check)
    return int(quality.verdict == "bad")


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
    _write(arguments.json, document)


def run_bench_learn(arguments: argparse.Namespace) -> None:
    from vla_rl.evaluation.bench_learn import bench_against, bench_runs, split_overrides

    if arguments.against:
        against = split_overrides(arguments.against)
        document = bench_against(arguments.overrides, against, iterations=arguments.iterations, rounds=arguments.rounds)
    else:
        document = bench_runs([Path(word) for word in arguments.overrides], arguments.level)
    _write(arguments.json, document)


def run_bench_policy(arguments: argparse.Namespace) -> None:
    from vla_rl import build

    if not arguments.dry_run:
        if arguments.overrides:
            raise ConfigError(f"{arguments.overrides[0]}: config overrides describe a run, which goes with --dry-run")
        from vla_rl.devices import check_device, pick_device

        check_device(arguments.device, "--device")
        pick_device(arguments.device, "--device")
        bench = build.attribute("policies.bench:bench_policy")
        _write(arguments.json, bench(arguments.preset, device=arguments.device, compiled=arguments.compile))
        return
    options: dict[str, Any] = {}
    if arguments.overrides:
        from vla_rl.config import compose

        config = compose(arguments.overrides)
        if not hasattr(config.policy, "lora_rank"):
            raise ConfigError(f"--dry-run estimates OpenVLA policies, this run has policy.type={config.policy_type}")
        options = {"policy": config.policy, "policy_type": config.policy_type}
        options["offload_optimizer"] = getattr(config.algorithm, "offload_optimizer", False)
        options["micro_batch"] = getattr(config.algorithm, "micro_batch_size", None) or 8
        options["acting_batch"] = max(1, config.slots.workers) * config.slots.slots_per_worker
    _write(arguments.json, build.attribute("policies.bench:dry_run")(arguments.preset, **options))


def _write(path: Path | None, document: Any) -> None:
    if path is not None:
        from vla_rl.reporting.metrics import write_json

        write_json(path, document)
        print(f"wrote {path}")
