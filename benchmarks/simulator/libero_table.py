"""The figures of `benchmarks.simulator.libero` as ratios, and as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.measuring import table

BOTH = ["agentview", "robot0_eye_in_hand"]
VARIANTS: dict[str, dict[str, Any]] = {
    "exact": {},
    "exact, agentview only": {"cameras": BOTH[:1]},
    "light": {"look": "light"},
    "light, fast control": {"look": "light", "controller": "fast"},
}
# What the ratios should at least be in a single process with a chunk of 8, on a CPU renderer.
WANTED = {
    "exact": 5.0,
    "exact, agentview only": 8.0,
    "light": 12.0,
    "reset": 20.0,
    "task change": 10.0,
    "control, fast": 2.5,
}


def ratios(document: dict[str, Any]) -> dict[str, Any]:
    """How many times faster, or smaller, ours is; "share" is how near stepping is to the
    physical limit."""
    ms, control, reset = document["ms_per_step"], document["control"], document["ms_reset"]
    change, memory, limits = document["ms_task_change"], document["mb_per_slot"], document["limit"]
    pool = {n: figures["ms_per_step"] for n, figures in document["pool"].items()}
    processes = document["ms_per_step_lerobot_processes"]
    return {
        "against_lerobot": {name: ms["lerobot"] / ms[name] for name in VARIANTS},
        "against_lerobot_by_chunk": {
            name: {length: ms["lerobot"] / value for length, value in values.items()}
            for name, values in document["ms_per_step_by_chunk"].items()
        },
        "against_rebuilding": {name: ms["rebuilding"] / ms[name] for name in VARIANTS},
        "share_of_limit": {
            name: (limits[name]["ms_physics"] + limits[name]["ms_look"]) / ms[name]
            for name in VARIANTS
        },
        "control": {
            name: control["ms_robosuite"] / control[f"ms_{name}"] for name in ("exact", "fast")
        },
        "reset": {
            "against_lerobot": reset["lerobot"] / reset["ours"],
            "cached_against_lerobot": reset["lerobot"] / reset["ours cached"],
            "against_rebuilding": reset["rebuilding"] / reset["ours"],
            "limit_against_lerobot": reset["lerobot"] / reset["limit"],
            "light_against_lerobot": reset["lerobot"] / reset["light"],
            "light_cached_against_lerobot": reset["lerobot"] / reset["light cached"],
        },
        "task_change": {
            "first_time_against_lerobot": change["lerobot builds"] / change["ours builds"],
            "against_lerobot": change["lerobot"] / change["ours"],
            "cached_against_lerobot": change["lerobot"] / change["ours cached"],
        },
        "memory_per_slot": memory["lerobot"] / max(memory["ours"], 0.1),
        "pool_against_as_many_lerobots": {n: processes[n] / value for n, value in pool.items()},
        "pool_scaling": {n: next(iter(pool.values())) / value for n, value in pool.items()},
    }


def text(document: Mapping[str, Any]) -> str:
    r, processes = document["ratios"], document["ms_per_step_lerobot_processes"]
    rows = [
        [
            "stepping",
            "ms/step",
            "steps/s",
            "x lerobot",
            "wanted",
            "x rebuild",
            "of limit",
            "x lerobot at chunks of",
        ]
    ]
    for name, value in document["ms_per_step"].items():
        row = [name, f"{value:.2f}", f"{1e3 / value:.1f}"]
        if name in VARIANTS:
            row += [
                f"{r['against_lerobot'][name]:.1f}",
                f"{WANTED[name]:.0f}" if name in WANTED else "",
            ]
            row += [f"{r['against_rebuilding'][name]:.1f}", f"{r['share_of_limit'][name]:.0%}"]
            row.append(
                "   ".join(
                    f"{n}: {times:.1f}" for n, times in r["against_lerobot_by_chunk"][name].items()
                )
            )
        rows.append(row)
    for n, figures in document["pool"].items():
        row = [
            f"exact, {n} workers",
            f"{figures['ms_per_step']:.2f}",
            f"{figures['steps_per_second']:.1f}",
        ]
        against = (
            f"scaling {r['pool_scaling'][n]:.2f}, against {n} lerobot processes "
            f"({processes[n]:.2f} ms/step)"
        )
        rows.append([*row, f"{r['pool_against_as_many_lerobots'][n]:.1f}", "", "", "", against])
    lines = [
        f"{', '.join(document['tasks'])} · chunk {document['chunk']} · {len(BOTH)} cameras of "
        f"{document['camera_size']} px (rebuilding: {document['rebuilding_camera_size']}) · "
        f"{document['gl']} · {document['cpus']} CPUs",
        table(rows),
    ]
    control = document["control"]
    lines.append(
        f"without pictures, ms/step: robosuite {control['ms_robosuite']:.2f}, exact "
        f"{control['ms_exact']:.2f} ({r['control']['exact']:.1f}x), fast {control['ms_fast']:.2f} "
        f"({r['control']['fast']:.1f}x, wanted {WANTED['control, fast']}), mj_step alone "
        f"{control['ms_mj_step']:.2f}"
    )
    reset, change, memory = (
        document["ms_reset"],
        document["ms_task_change"],
        document["mb_per_slot"],
    )
    lines.append(
        f"reset, ms: lerobot {reset['lerobot']:.0f}, rebuilding {reset['rebuilding']:.0f}, ours "
        f"{reset['ours']:.0f} ({r['reset']['against_lerobot']:.0f}x), seen before "
        f"{reset['ours cached']:.0f} ({r['reset']['cached_against_lerobot']:.0f}x, wanted "
        f"{WANTED['reset']:.0f}), limit {reset['limit']:.0f} "
        f"({r['reset']['limit_against_lerobot']:.0f}x); light, fast control {reset['light']:.0f} "
        f"({r['reset']['light_against_lerobot']:.0f}x), seen before {reset['light cached']:.0f} "
        f"({r['reset']['light_cached_against_lerobot']:.0f}x)"
    )
    lines.append(
        f"task met for the first time, ms: lerobot {change['lerobot builds']:.0f}, ours "
        f"{change['ours builds']:.0f} ({r['task_change']['first_time_against_lerobot']:.1f}x); "
        f"task met before: lerobot, one environment kept per task, {change['lerobot']:.0f}, ours "
        f"{change['ours']:.0f} ({r['task_change']['against_lerobot']:.0f}x, wanted "
        f"{WANTED['task change']:.0f}), state seen before {change['ours cached']:.0f} "
        f"({r['task_change']['cached_against_lerobot']:.0f}x)"
    )
    lines.append(
        f"memory per further slot, MB: lerobot {memory['lerobot']:.0f}, ours {memory['ours']:.1f} "
        "(wanted at most 80)"
    )
    agreement = document["agreement"]
    lines.append(
        f"exact against lerobot, hand pressing down: pixels identical at {agreement['identical']} "
        f"of {agreement['decisions']} decisions, largest difference of joint states "
        f"{agreement['largest_qpos_difference']:.1e}; fast control against exact "
        f"{agreement['largest_qpos_difference_of_fast_control']:.1e}"
    )
    return "\n".join(lines)
