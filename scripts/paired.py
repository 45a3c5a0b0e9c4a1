"""Is one checkout slower than another? The same work in both, in turns, with the ratio pair by
pair.

    git worktree add ../before COMMIT
    python scripts/paired.py ../before . --rounds 20 --json out.json

Each tree gets a process that imports its code and stays; the two repeat each piece of work
alternately, A B B A, so that a drift of the machine meets both. A ratio is B over A of neighbouring
repetitions. CPU seconds count on a machine that others use too, wall seconds on a quiet one. Both
sides return a number made of their results: equal ones tell that the work was.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CASES = ("compose", "act_1", "act_16", "sft", "engine", "ppo", "simulator", "iteration")


# ------------------------------------------------------------------------------ in a tree's process
def work(name: str) -> Callable[[], float]:
    """A piece of work of that name; each call does it once and returns a number made of its
    result."""
    return globals()[f"_{name.partition('_')[0]}"](*map(int, name.split("_")[1:]))


def _compose() -> Callable[[], float]:
    from vla_rl.config import compose

    return lambda: float(compose(["run=quickstart"]).rl.iterations)


def _nano() -> tuple[Any, Any]:
    """The policy of the quickstart's size, and the module that makes observations for it."""
    from policies.nano_vla import NanoVLA, preset

    try:
        from benchmarks.policy import nano as bench
    except ImportError:  # of before the benchmarks had a room
        import policies.bench as bench

    return NanoVLA(preset("nano"), bench.bench_embodiment()).eval(), bench


def _act(rows: int) -> Callable[[], float]:
    """Sampled decisions of ``rows`` slots at a time."""
    policy, bench = _nano()
    observation = bench.bench_observation(policy.embodiment, rows)
    return lambda: float(policy.act(observation, seeds=range(rows)).chunk.actions.double().sum())


def _sft() -> Callable[[], float]:
    """Updates of 32 rows with two pictures of 84 pixels, augmented."""
    import torch

    from vla_rl.algorithms.imitation import Imitation
    from vla_rl.config import compose

    policy, bench = _nano()

    class Fixed:
        def next_batch(self) -> Any:
            shape = (32, policy.chunk_length, policy.embodiment.action_dim)
            seen = bench.bench_observation(policy.embodiment, 32)
            return seen, torch.zeros(shape), torch.ones(shape[:2], dtype=torch.bool)

    imitation = Imitation(compose(["run=toy"]).sft, policy.train(), Fixed())
    return lambda: imitation.update()["sft/loss"]


def _rollout(
    words: list[str], env_type: str, episodes: int, slots: int
) -> tuple[Any, Callable[[], Any]]:
    """A config, and a function that rolls out that many episodes of its untrained policy."""
    from sim.inline import InlineEnv
    from vla_rl import build
    from vla_rl.config import compose
    from vla_rl.types import EpisodeSpec

    try:
        from vla_rl.rollout.engine import RolloutEngine
    except ImportError:  # of before the rooms
        from vla_rl.rollout import RolloutEngine

    config = compose(words)
    env = InlineEnv(build.implementation("env", env_type)(config.env), num_slots=slots)
    policy = build.implementation("policy", "nano_vla")(config.policy, env.embodiment)
    engine = RolloutEngine(env, policy.eval(), config.rollout)
    specs = [
        EpisodeSpec(env.tasks[0].task_id, i, seed=i, group_id=i, rollout_id=str(i))
        for i in range(episodes)
    ]
    collect = engine.collect if hasattr(engine, "collect") else engine.run  # (likewise)
    return (config, env, policy), lambda: collect(specs).trajectories


def _toy() -> tuple[Any, Callable[[], Any]]:
    return _rollout(["run=toy"], "toy", 64, 32)


def _engine() -> Callable[[], float]:
    """64 episodes of the toy task, 32 at a time, in this process."""
    rollout = _toy()[1]
    return lambda: float(sum(t.actions.double().sum() for t in rollout()))


def _learner(parts: Any) -> Callable[[Any], float]:
    """PPO with its critic: an update on trajectories, and a number that came of it."""
    from vla_rl import build
    from vla_rl.types import RolloutBatch

    config, env, policy = parts
    config.algorithm.critic_warmup_iterations = 0
    critic = build.implementation("critic", "privileged")(env.privileged_dim, config.critic)
    ppo = build.implementation("algorithm", "ppo")(config.algorithm, policy, critic)
    return lambda trajectories: ppo.update(RolloutBatch.from_trajectories(trajectories))["ppo/loss"]


def _ppo() -> Callable[[], float]:
    """Updates on those 64 episodes: log-probs, critic, advantages, three epochs."""
    parts, rollout = _toy()
    learn, trajectories = _learner(parts), rollout()
    return lambda: learn(trajectories)


def _iteration() -> Callable[[], float]:
    """One of RL on the quickstart's task: 32 episodes of 80 control steps, and PPO on their 320
    decisions."""
    words = ["run=quickstart", "env.horizon=80", "rl.episodes_per_iteration=32"]
    parts, rollout = _rollout(words, "tabletop", 32, 8)
    learn = _learner(parts)

    def run() -> float:
        trajectories = rollout()
        learn(trajectories)
        return float(sum(t.actions.double().sum() for t in trajectories))

    return run


def _simulator() -> Callable[[], float]:
    """A control step in chunks of eight, and a picture of each camera after every chunk."""
    from sim.tabletop.simulator import TabletopConfig, TabletopSimulator

    try:
        from benchmarks.simulator import tabletop as bench
    except ImportError:  # (likewise)
        from sim import bench

    simulator = TabletopSimulator(TabletopConfig(tasks=["lift_cube"], look="light"))
    episode, actions = next(iter(bench.record(simulator, "lift_cube", 80)))

    def run() -> float:
        simulator.start(0, episode)
        steps = [simulator.step(0, actions[i : i + 8]) for i in range(0, len(actions), 8)]
        return float(sum(step.observation.proprio.sum() for step in steps))

    return run


def serve() -> None:
    """Answer lines of "case repetitions" with CPU seconds, wall seconds and the last result."""
    import torch

    torch.set_num_threads(1)
    known: dict[str, Callable[[], float]] = {}
    for line in sys.stdin:
        name, repetitions = line.split()
        if name not in known:
            torch.manual_seed(0)
            known[name] = work(name)
        cpu, wall = time.process_time(), time.perf_counter()
        for _ in range(int(repetitions)):
            result = known[name]()
        print(
            json.dumps([time.process_time() - cpu, time.perf_counter() - wall, result]),
            file=sys.__stdout__,
            flush=True,
        )


# ---------------------------------------------------------------------------------- the two of them
class Side:
    def __init__(self, tree: Path) -> None:
        self.tree = tree.resolve()
        env = os.environ | {"PYTHONPATH": str(self.tree), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(Path(__file__).resolve()), "--serve"]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
            cwd=self.tree,
        )

    @property
    def commit(self) -> str:
        done = subprocess.run(
            ["git", "-C", str(self.tree), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout.strip()

    def do(self, case: str, repetitions: int) -> tuple[float, float, float]:
        """(CPU seconds, wall seconds, result) of one piece of work, the mean over
        ``repetitions``."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{case} {repetitions}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.tree} failed at {case}")
        cpu, wall, result = json.loads(line)
        return cpu / repetitions, wall / repetitions, result

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def spread(values: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return {
        "median": middle,
        "quarter": low,
        "three_quarters": high,
        "min": min(values),
        "max": max(values),
    }


def shown(ratio: dict[str, float]) -> str:
    return f"{ratio['median']:.3f} ({ratio['quarter']:.3f} to {ratio['three_quarters']:.3f})"


def compare(a: Side, b: Side, case: str, rounds: int, seconds: float) -> dict[str, Any]:
    """``rounds`` pairs of about ``seconds`` a side; the ratios B/A."""
    a.do(case, 1), b.do(case, 1)  # sets up
    first = a.do(case, 1)
    same = first[2] == b.do(case, 1)[2]
    repetitions = max(1, round(seconds / max(first[0], 1e-6)))
    pairs = []
    for number in range(rounds):
        if number % 2:
            of_b, of_a = b.do(case, repetitions), a.do(case, repetitions)
        else:
            of_a, of_b = a.do(case, repetitions), b.do(case, repetitions)
        same = same and of_a[2] == of_b[2]
        pairs.append((of_a, of_b))
    return {
        "repetitions": repetitions,
        "rounds": rounds,
        "same_results": same,
        "cpu_ms": [statistics.median(pair[side][0] for pair in pairs) * 1e3 for side in (0, 1)],
        "cpu_ratio": spread([y[0] / x[0] for x, y in pairs]),
        "wall_ratio": spread([y[1] / x[1] for x, y in pairs]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "trees", nargs="*", type=Path, metavar="TREE", help="A and B: checkouts of this project"
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--rounds", type=int, default=20, help="pairs of each case")
    parser.add_argument("--seconds", type=float, default=0.25, help="of work a side and round")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        return serve()
    if len(arguments.trees) != 2 or arguments.rounds < 2:
        parser.error("name two trees, and at least two rounds")
    sides = [Side(tree) for tree in arguments.trees]
    document: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "a": sides[0].commit,
        "b": sides[1].commit,
        "rounds": arguments.rounds,
        "cases": {},
    }
    print(
        f"{'case':<10} {'A ms':>8} {'B ms':>8}  CPU B/A (half of the rounds)  wall B/A (half)     "
        "   same results"
    )
    for case in arguments.cases:
        found = document["cases"][case] = compare(*sides, case, arguments.rounds, arguments.seconds)
        cpu, wall = (shown(found[name]) for name in ("cpu_ratio", "wall_ratio"))
        same = "yes" if found["same_results"] else "no"
        print(
            f"{case:<10} {found['cpu_ms'][0]:>8.2f} {found['cpu_ms'][1]:>8.2f}  {cpu:<28}  "
            f"{wall:<22}  {same}",
            flush=True,
        )
    for side in sides:
        side.close()
    if arguments.json:
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
