"""The card of a checkpoint on a hub: what it is, and what was measured, with intervals."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import vla_rl
from vla_rl.errors import UserError
from vla_rl.files import read_json
from vla_rl.specs import EmbodimentSpec

_REMEDY = "give the file that 'vla-rl eval CHECKPOINT --json FILE' wrote"


@dataclass(frozen=True)
class Measured:
    """An evaluation: its document, and what it is called."""

    title: str
    document: Mapping[str, Any]


def measured(path: Path) -> list[Measured]:
    """The evaluations in a file of ``vla-rl eval --json``, or of a run's folder. Raises `UserError`
    for another file."""
    document = read_json(path, _REMEDY)
    if isinstance(document.get("results"), list):
        raise UserError(
            f"{path} compares two checkpoints, and a card tells of one: {_REMEDY} (without "
            "--compare)"
        )
    try:
        total = document["total"]
        numbers = [float(total[key]) for key in ("episodes", "successes", "rate", "low", "high")]
        good = all(0 <= x <= 1 for x in numbers[2:]) and isinstance(document["split"], str)
        tasks = all(float(t["rate"]) >= 0 for t in document["tasks"].values())
    except (KeyError, TypeError, ValueError, AttributeError):
        good = tasks = False
    if not (good and tasks):
        raise UserError(f"{path} is no evaluation: {_REMEDY}")
    return [Measured(path.stem, document)]


def card(
    config: Mapping[str, Any],
    robot: EmbodimentSpec,
    name: str,
    results: Sequence[Measured],
    licence: str,
) -> str:
    """Markdown with the hub's YAML in front; ``config`` is the checkpoint's."""
    kind = config["policy_type"]
    front = [
        "---", f"license: {licence}", "library_name: vla-rl", "pipeline_tag: robotics",
        "tags:", *(f"- {tag}" for tag in ("robotics", "vision-language-action", "vla-rl", kind)), "---",
    ]  # fmt: skip
    lines = [
        f"# {name.partition('/')[2]}",
        "",
        f"A `{kind}` policy for `{robot.name}` ({', '.join(robot.action_names)} at {robot.control_hz:g} Hz; cameras "
        f"{', '.join(f'{c.name} {c.height}x{c.width}' for c in robot.cameras)}), trained with vla-rl "
        f"{config.get('vla_rl_version', '')}.".replace(" .", "."),
        "",
        "```sh",
        f"vla-rl hub fetch {name}",
        f"vla-rl eval {name}",
        f"vla-rl serve {name}    # for programs that speak openpi's protocol",
        "```",
        "",
        "## Results",
    ]
    lines += _table(results) if results else ["", "Nothing was measured."]
    lines += ["", f"Licence: {licence}. Written by vla-rl {vla_rl.__version__}.", ""]
    return "\n".join([*front, *lines])


def _table(results: Sequence[Measured]) -> list[str]:
    lines = ["", "Success with its 95 % Wilson interval.", ""]
    lines += ["| evaluation | task | success | episodes | protocol |", "|---|---|---|---|---|"]
    for found in results:
        document = found.document
        rows = {
            "all": document["total"],
            **(document["tasks"] if len(document["tasks"]) > 1 else {}),
        }
        for task, figures in rows.items():
            interval = (
                f"{100 * figures['rate']:.1f} % ({100 * figures['low']:.1f} to "
                f"{100 * figures['high']:.1f})"
            )
            told = _protocol(document) if task == "all" else ""
            lines.append(
                f"| {_cell(found.title)} | {_cell(task)} | {interval} | {figures['successes']} of "
                f"{figures['episodes']} | {_cell(told)} |"
            )
    return lines


def _protocol(document: Mapping[str, Any]) -> str:
    """Env, split, seed, and how actions were chosen."""
    env = document.get("env")
    said = [
        str(env.get("type", "")) if isinstance(env, Mapping) else "",
        f"{document['split']} initial states",
        f"seed {document.get('seed')}",
        "most likely actions" if document.get("deterministic") else "sampled actions",
        *(str(document[key]) for key in ("initial_states", "conditions") if document.get(key)),
    ]
    benchmark = document.get("benchmark")
    said.append(str(benchmark.get("line", "")) if isinstance(benchmark, Mapping) else "")
    return "; ".join(text for text in said if text)


def _cell(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1].replace("|", "\\|")
