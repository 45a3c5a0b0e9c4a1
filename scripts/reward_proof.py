"""Which reward is worth training on: the same starting policies, several rewards, episodes to 80 % held-out success.

Runs `run=quickstart_hard` up to SFT once per seed, then RL from that checkpoint once per reward, and writes figures to
benchmarks/results/reward_proof.json after each run, in the end curves as .svg beside it. Runs that are complete are kept,
interrupted ones go on; with --at-most, those that have not arrived go on for longer. With --jobs 2 two run beside each
other, each on its share of the cores. A learned reward's judging episodes count as training episodes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from html import escape
from pathlib import Path
from queue import Queue

import yaml

from vla_rl.reporting.charts import Series, line_chart, percent

ROOT = Path(__file__).resolve().parent.parent
COMMAND = Path(sys.executable).with_name("vla-rl")
GOAL = 0.8
REWARDS = {  # further columns of the comparison are any overrides: name=override,override
    "success": [],
    "srpo": [
        "reward=srpo", "reward.cluster=nearest", "reward.reference_scope=buffer", "reward.demonstrations=64",
        "reward.all_fail=buffer",
    ],
    "pairwise": ["reward=pairwise", "reward.failure_pairs=false", "reward_check.on_bad=warn"],
    "process": ["reward=process", "reward.shaping.mode=delta", "reward_check.on_bad=warn"],
}  # fmt: skip


def train(name: str, overrides: list[str], cores: list[int]) -> Path:
    """Run, resume or lengthen the run ``name``; returns its folder. Raises SystemExit when the command fails."""
    folder = ROOT / "outputs" / name
    folder.mkdir(parents=True, exist_ok=True)
    command = ["taskset", "-c", ",".join(map(str, cores)), str(COMMAND), "train", "run=quickstart_hard", f"name={name}"]
    with (ROOT / "outputs" / f"{name}.log").open("w") as log:
        code = subprocess.run([*command, "wandb=false", *overrides], cwd=ROOT, stdout=log, stderr=log).returncode
    if code != 0:
        raise SystemExit(f"{name} ended with status {code}: see {log.name}")
    return folder


def lengthened(folder: Path, iterations: int) -> bool:
    """Whether a run has already been told to take ``iterations``."""
    path = folder / "config.yaml"
    return path.exists() and yaml.safe_load(path.read_text())["rl"]["iterations"] == iterations


def figures(folder: Path) -> dict:
    """Held-out success by training episodes, and how many were needed for `GOAL` (None: it was not reached)."""
    summary, phases = (json.loads((folder / name).read_text()) for name in ("summary.json", "phases.json"))
    judged = phases.get("reward", {}).get("episodes", 0)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    seen, curve, iterations = 0, [], []
    for row in rows:
        if row.get("phase") != "rl":
            continue
        if "eval/success" in row:  # of the policy before this iteration's episodes
            curve.append((seen + judged, row["eval/success"]))
            iterations.append(row["step"] - 1)
        seen, last = row.get("episodes", seen), row["step"]
    final = summary["evaluations"]["rl"]
    curve.append((seen + judged, final["rate"]))
    iterations.append(last)
    reached = [episodes for episodes, rate in curve if rate >= GOAL]
    return {
        "curve": curve, "iterations": iterations, "episodes_to_goal": reached[0] if reached else None,
        "final": final["rate"], "interval": [final["low"], final["high"]], "judging_episodes": judged,
        "seconds": sum(phase["seconds"] for phase in phases.values() if isinstance(phase, dict)),
    }  # fmt: skip


def totals(runs: list[dict], baseline: str = "success") -> dict[str, dict]:
    """Per reward, over its seeds: episodes to `GOAL`, as a share of what ``baseline`` needed for the same seeds.

    A run that never got there counts with all its episodes. So a share is an upper bound where only the baseline's runs
    did not arrive (``reached`` has both counts), and says nothing where the reward's did not.
    """

    def needed(run: dict) -> int:
        return run["curve"][-1][0] if run["episodes_to_goal"] is None else run["episodes_to_goal"]

    plain, out = {run["seed"]: run for run in runs if run["reward"] == baseline}, {}
    for reward in dict.fromkeys(run["reward"] for run in runs):
        own = [run for run in runs if run["reward"] == reward and run["seed"] in plain]
        if not own:
            continue
        others = [plain[run["seed"]] for run in own]
        finals = [sum(run["final"] for run in runs) / len(runs) for runs in (own, others)]
        out[reward] = {
            "seeds": len(own), "episodes": sum(map(needed, own)), "share": sum(map(needed, own)) / sum(map(needed, others)),
            "reached": sum(run["episodes_to_goal"] is not None for run in own),
            "baseline_reached": sum(run["episodes_to_goal"] is not None for run in others),
            "final": finals[0], "baseline_final": finals[1],
        }  # fmt: skip
    return out


def table(document: dict, every: int = 10) -> str:
    """Markdown: one row per reward and seed (success after each ``every`` iterations), then one per reward."""
    marks = range(every, max(run["iterations"][-1] for run in document["runs"]) + 1, every)
    columns = " | ".join(f"iteration {mark}" if mark == every else str(mark) for mark in marks)
    lines = [f"| reward | seed | start | {columns} | episodes to {GOAL:.0%} | at the end (95 %) |"]
    lines += ["|---" * (len(marks) + 5) + "|"]
    for run in document["runs"]:
        needed = run["episodes_to_goal"] if run["episodes_to_goal"] is not None else f"not in {run['curve'][-1][0]}"
        rates = {i: f"{rate:.0%}" for i, (_, rate) in zip(run["iterations"], run["curve"])}
        cells = " | ".join(rates.get(mark, "") for mark in marks)
        low, high = run["interval"]
        end = f"{run['final']:.0%} ({low:.0%} – {high:.0%})"
        start = document["start"][str(run["seed"])]
        lines.append(f"| {run['reward']} | {run['seed']} | {start:.0%} | {cells} | {needed} | {end} |")
    lines += ["", f"| reward | reached {GOAL:.0%} | episodes, all seeds | share of success alone | mean at the end |"]
    lines += ["|---|---|---|---|---|"]
    for reward, row in document["totals"].items():
        more = "" if row["reached"] == row["seeds"] else "more than "
        bound = "" if row["baseline_reached"] == row["seeds"] else "less than "
        share = "unknown" if more else f"{bound}{row['share']:.0%}"
        reached = f"{row['reached']} of {row['seeds']}"
        lines.append(f"| {reward} | {reached} | {more}{row['episodes']} | {share} | {row['final']:.0%} |")
    return "\n".join(lines)


COLOURS = ("#57606a", "#bc4c00", "#0969da", "#8250df", "#1a7f37", "#bf3989")


def chart(document: dict) -> str:
    """A standalone SVG of held-out success over training episodes: faint a seed each, thick the mean of a reward's seeds."""
    names = list(dict.fromkeys(run["reward"] for run in document["runs"]))
    faint, thick, legend = [], [], []
    for i, name in enumerate(names):
        curves = [run["curve"] for run in document["runs"] if run["reward"] == name]
        faint += [Series(name, *zip(*curve), style=f"s{i}", kind="faint") for curve in curves]
        means = [[sum(values) / len(curves) for values in zip(*points)] for points in zip(*curves)]  # as far as all went
        thick.append(Series(name, *zip(*means), style=f"s{i}"))
        legend.append(f'<text class="s{i}" x="{60 + 110 * i}" y="16">{escape(name)}</text>')
    goal = Series("goal", [0, max(curve.x[-1] for curve in thick)], [GOAL, GOAL], style="goal")
    body = line_chart([goal, *faint, *thick], width=720, height=320, y_format=percent, y_range=(0.0, 1.0),
                      x_label="training episodes, with those that judge the reward",
                      label="held-out success by training episodes, per reward")  # fmt: skip
    colours = "".join(f".s{i}{{stroke:{c}}}text.s{i}{{fill:{c};stroke:none}}" for i, c in enumerate(COLOURS))
    style = (
        "text{font:12px sans-serif;fill:#57606a}.grid{stroke:#d0d7de}.line{fill:none;stroke-width:2.5}"
        ".faint{stroke-width:1;opacity:.45}.goal{stroke:#57606a;stroke-width:1;stroke-dasharray:4 4}" + colours
    )
    head = '<svg xmlns="http://www.w3.org/2000/svg" width="720" height="344" viewBox="0 0 720 344">'
    body = body.replace("<svg ", '<svg y="24" width="720" height="320" ', 1)
    return f'{head}<style>{style}</style><rect width="720" height="344" fill="#fff"/>{"".join(legend)}{body}</svg>'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rewards", nargs="+", default=list(REWARDS), help=f"of {', '.join(REWARDS)}, or name=override,…")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--at-most", type=int, default=0, metavar="N",
                        help="runs that have not arrived after rl.iterations go on for up to N iterations")  # fmt: skip
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "reward_proof.json")
    parser.add_argument("overrides", nargs="*", help="passed on to every RL run (after --)")
    arguments = parser.parse_args()
    rewards = {}
    for text in arguments.rewards:
        name, _, own = text.partition("=")
        if not own and name not in REWARDS:
            parser.error(f"reward {name!r} is unknown: use {', '.join(REWARDS)}, or name=override,override")
        rewards[name] = own.split(",") if own else REWARDS[name]
    available = sorted(os.sched_getaffinity(0))
    share = max(1, len(available) // arguments.jobs)
    free: Queue[list[int]] = Queue()
    for job in range(arguments.jobs):
        free.put(available[job * share : (job + 1) * share] or available)

    def run(name: str, overrides: list[str]) -> Path:
        cores = free.get()
        try:
            longer = [*overrides, f"rl.iterations={arguments.at_most}"]
            if not arguments.at_most:
                return train(name, overrides, cores)
            if not lengthened(ROOT / "outputs" / name, arguments.at_most):
                folder = train(name, overrides, cores)
                if "rl" not in json.loads((folder / "phases.json").read_text()) or figures(folder)["episodes_to_goal"]:
                    return folder
            return train(name, longer, cores)
        finally:
            free.put(cores)

    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    document = {
        "command": " ".join(["scripts/reward_proof.py", *sys.argv[1:]]), "commit": commit, "cpu_cores": len(available),
        "jobs": arguments.jobs, "start": {}, "runs": [], "totals": {},
    }  # fmt: skip
    with ThreadPoolExecutor(arguments.jobs) as pool:
        phases = "phases=[collect,sft,eval_sft,report]"
        starts = {s: pool.submit(run, f"hard-sft-{s}", [f"seed={s}", phases]) for s in arguments.seeds}
        runs = {}
        for seed, start in starts.items():
            summary = json.loads((start.result() / "summary.json").read_text())
            document["start"][str(seed)] = summary["evaluations"]["sft"]["rate"]
            folder = f"outputs/hard-sft-{seed}"
            common = [
                f"seed={seed}", f"checkpoint={folder}/checkpoints/sft", f"dataset={folder}/dataset",
                "phases=[eval_sft,reward,rl,eval_rl,report]", *arguments.overrides,
            ]  # fmt: skip
            for reward, own in rewards.items():
                runs[reward, seed] = pool.submit(run, f"hard-{reward}-{seed}", [*common, *own])
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        for (reward, seed), future in runs.items():
            document["runs"].append({"reward": reward, "seed": seed, **figures(future.result())})
            document["totals"] = totals(document["runs"])
            arguments.output.write_text(json.dumps(document, indent=1) + "\n")  # after each: a late failure keeps them
    print(table(document))
    picture = arguments.output.with_suffix(".svg")
    picture.write_text(chart(document) + "\n")
    print(f"figures: {arguments.output}, curves: {picture}")


if __name__ == "__main__":
    main()
