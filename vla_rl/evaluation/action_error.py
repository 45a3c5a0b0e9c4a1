"""How far a policy's actions are from those of held-out demonstrations, by joint and step of the
chunk, beside guesses.

It is what can be known of a policy without a simulator. It is no success rate: an error is paid
where it is made, and what a policy does after it has left the demonstrated states is not seen here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vla_rl.algorithms.validation import evaluating
from vla_rl.data.demonstrations import DemonstrationDataset
from vla_rl.interfaces import Policy

ROWS = 2000  # decisions that errors are measured on, at most
GUESSES = {
    "hold": "go where the robot is",
    "repeat": "repeat the action before",
    "mean": "the mean action of the demonstrations",
}
_SLICE = 32
_LEAST = 1e-6  # a number that spreads less does not move


def action_errors(
    policy: Any,
    held_out: DemonstrationDataset,
    seen: Tensor,
    *,
    rows: int = ROWS,
    device: torch.device | str = "cpu",
    progress: Callable[[int], object] = lambda done: None,
) -> dict[str, Any]:
    """Mean absolute errors of the most likely actions, JSON-ready. ``seen`` float32 [n a]: the
    actions it was trained on.

    Every control step of every episode in ``held_out`` but its first is a decision; of more than
    ``rows`` those are taken that lie evenly, of several datasets as many of each. ``joints``:
    {name, unit, spread (standard deviation of ``seen``), policy, and each of `GUESSES`} in the
    action's own unit, over the whole chunk; "hold" is None where no number of the state has that
    name. ``steps``: the same by step of the chunk, in spreads, as the mean over joints that move;
    ``table`` [h][a] in units. ``episodes``: {rows, policy, guess} each, in spreads, with the guess
    that is best over all; ``datasets``, of several: {dataset, episodes, decisions, policy, guess}
    each. ``traces``: of the first episode, what was recorded and what the policy would do first.
    """
    index = _decisions(held_out, rows)
    chunk = held_out.chunk_length
    spread = seen.double().std(0, unbiased=False).numpy()
    moves = spread > _LEAST
    names = held_out.embodiment.action_names
    held = [
        held_out.embodiment.proprio_names.index(n) if n in held_out.embodiment.proprio_names else -1
        for n in names
    ]
    errors = {name: np.zeros((len(index), chunk, len(names))) for name in ("policy", *GUESSES)}
    weights = np.zeros((len(index), chunk, 1))
    with evaluating(policy):
        for start in range(0, len(index), _SLICE):
            part = slice(start, start + _SLICE)
            observation, actions, valid = held_out.at(index[part])
            told, shown = _act(policy, observation.to(device), chunk)
            proprio = observation.proprio.double().numpy()
            now = np.stack(
                [proprio[:, j] if j >= 0 else np.full(len(proprio), np.nan) for j in held], -1
            )
            before = held_out.actions[index[part] - 1].double().numpy()
            guessed = {
                "policy": told,
                "hold": now[:, None],
                "repeat": before[:, None],
                "mean": seen.double().mean(0).numpy(),
            }
            for name, guess in guessed.items():
                errors[name][part] = np.abs(guess - actions.double().numpy())
            weights[part] = (valid & shown)[..., None].numpy()
            progress(min(start + _SLICE, len(index)))
    return _figures(held_out, index, errors, weights, spread, moves) | {
        "traces": _traces(policy, held_out, device)
    }


def _decisions(dataset: DemonstrationDataset, rows: int) -> Tensor:
    """All control steps with one before them, or ``rows`` of them that lie evenly."""
    parts: dict[int, list[Tensor]] = {}
    for e in dataset.episodes:
        parts.setdefault(e.source, []).append(torch.arange(e.start + 1, e.start + e.length))
    each = rows // len(parts)
    found = [torch.cat(part) for part in parts.values()]
    if sum(map(len, found)) > rows:
        found = [
            part[torch.linspace(0, len(part) - 1, min(each, len(part))).round().long()]
            for part in found
        ]
    return torch.cat(found)


def _act(policy: Any, observation: Any, chunk: int) -> tuple[np.ndarray, Tensor]:
    """(actions [b h a], which of them the policy gave [b h]); one that remembers decides as an
    episode's first time."""
    seeds = list(range(len(observation)))
    memory: dict[str, Any] = {}
    if "memory" in Policy.of(policy).can:
        memory["memory"] = [policy.initial_memory() for _ in seeds]
    found = policy.act(observation, deterministic=True, seeds=seeds, **memory).chunk
    actions, valid = found.actions.double().cpu(), found.valid.cpu()
    missing = chunk - actions.shape[1]
    if missing > 0:
        actions = torch.cat([actions, actions[:, -1:].expand(-1, missing, -1)], 1)
        valid = torch.cat([valid, valid.new_zeros(len(valid), missing)], 1)
    return actions[:, :chunk].numpy(), valid[:, :chunk]


def _figures(
    dataset: DemonstrationDataset,
    index: Tensor,
    errors: dict[str, np.ndarray],
    weights: np.ndarray,
    spread: np.ndarray,
    moves: np.ndarray,
) -> dict[str, Any]:
    spec = dataset.embodiment
    total = weights.sum((0, 1))
    joint = {name: (e * weights).sum((0, 1)) / total for name, e in errors.items()}
    known = {
        name: [None if np.isnan(x) else float(x) for x in values] for name, values in joint.items()
    }
    step = {name: _mean(e, weights, spread, moves, (0, 2)) for name, e in errors.items()}
    table = (errors["policy"] * weights).sum(0) / np.maximum(weights.sum(0), 1.0)
    overall = {name: _mean(e, weights, spread, moves, (0, 1, 2)) for name, e in errors.items()}
    guesses = {name: float(overall[name]) for name in GUESSES if not np.isnan(overall[name])}
    best = min(guesses, key=lambda name: guesses[name])

    def both(mine: np.ndarray) -> dict[str, float]:
        return {
            word: float(_mean(errors[n][mine], weights[mine], spread, moves, (0, 1, 2)))
            for word, n in (("policy", "policy"), ("guess", best))
        }

    episodes, source = [], np.zeros(len(index), np.int64)
    for number, e in enumerate(dataset.episodes):
        mine = ((index >= e.start) & (index < e.start + e.length)).numpy()
        source[mine] = e.source
        if mine.any():
            task = e.task_id or e.instruction
            episodes.append(
                {"episode": number, "task": task, "rows": int(mine.sum()), **both(mine)}
            )
    datasets = [
        {
            "dataset": name,
            "episodes": sum(e.source == number for e in dataset.episodes),
            "decisions": int(mine.sum()),
            **both(mine),
        }
        for number, name in enumerate(dataset.sources)
        if (mine := source == number).any()
    ]
    return {
        "decisions": len(index),
        "control_steps": len(dataset),
        "chunk_length": dataset.chunk_length,
        "chunk_seconds": dataset.chunk_length / spec.control_hz,
        "joints": [
            {
                "name": n,
                "unit": spec.action_units[i],
                "spread": float(spread[i]),
                **{k: v[i] for k, v in known.items()},
            }
            for i, n in enumerate(spec.action_names)
        ],
        "steps": [
            {"step": h, **{k: None if np.isnan(v[h]) else float(v[h]) for k, v in step.items()}}
            for h in range(dataset.chunk_length)
        ],
        "table": table.tolist(),
        "overall": {"policy": float(overall["policy"]), **guesses},
        "best_guess": best,
        "episodes": episodes,
        **({"datasets": datasets} if datasets else {}),
    }


def _mean(
    errors: np.ndarray,
    weights: np.ndarray,
    spread: np.ndarray,
    moves: np.ndarray,
    axes: tuple[int, ...],
) -> np.ndarray:
    """Weighted mean [remaining axes] of errors [n h a] in spreads, over the joints that move;
    NaN where one is not known."""
    if not moves.any():
        moves = np.ones_like(moves)
    scaled = errors[..., moves] / np.maximum(spread[moves], _LEAST)
    full = np.broadcast_to(weights, scaled.shape)
    return np.asarray((scaled * full).sum(axes) / np.maximum(full.sum(axes), 1.0))


def _traces(
    policy: Any, dataset: DemonstrationDataset, device: torch.device | str, most: int = 300
) -> dict[str, Any]:
    """The first episode, control step by control step (at most so many of them, evenly):
    recorded and predicted [t a]."""
    e = dataset.episodes[0]
    steps = torch.linspace(0, e.length - 1, min(most, e.length)).round().long().unique()
    told = []
    with evaluating(policy):
        for part in (e.start + steps).split(_SLICE):
            told.append(_act(policy, dataset.at(part)[0].to(device), dataset.chunk_length)[0][:, 0])
    recorded = dataset.actions[e.start + steps].double()
    return {
        "seconds": (steps / dataset.embodiment.control_hz).tolist(),
        "recorded": recorded.tolist(),
        "predicted": np.concatenate(told).tolist(),
    }


def verdict(found: dict[str, Any]) -> str:
    """Whether it is better than a guess, in a sentence with numbers."""
    own, best = found["overall"]["policy"], found["best_guess"]
    guess = found["overall"][best]
    better = sum(e["policy"] < e["guess"] for e in found["episodes"])
    of = f"{better} of {len(found['episodes'])} held-out episodes"
    text = (
        f"its actions are off by {own:.2f} of their spread, and the best simple guess "
        f"({GUESSES[best]}) by {guess:.2f}; it is nearer in {of}"
    )
    if own >= guess:
        return (
            f"no nearer than a guess: {text}. A guess is hard to beat where a chunk is short "
            f"({found['chunk_seconds']:.2g} s), as the robot hardly moves in it; else try more "
            "sft.updates, more demonstrations, or a longer policy.chunk_length"
        )
    return f"{1 - own / guess:.0%} nearer than a guess: {text}"


def table(found: dict[str, Any]) -> str:
    """Errors by joint in units, and by step of the chunk in spreads, as text."""
    columns = (
        "policy",
        *(
            g
            for g in GUESSES
            if g in found["overall"] or any(j[g] is not None for j in found["joints"])
        ),
    )
    width = max(len(j["name"]) for j in found["joints"])
    lines = [f"{'':{width}}  " + "".join(f"{c:>10}" for c in columns) + "  unit"]
    for j in found["joints"]:
        lines.append(
            f"{j['name']:{width}}  " + "".join(_cell(j[c]) for c in columns) + f"  {j['unit']}"
        )
    lines.append(f"{'by step':{width}}  in spreads")
    shown: Sequence[dict[str, Any]] = found["steps"]
    for s in (
        shown
        if len(shown) <= 8
        else [shown[i] for i in np.linspace(0, len(shown) - 1, 8).round().astype(int)]
    ):
        lines.append(f"{s['step'] + 1:>{width}}  " + "".join(_cell(s[c]) for c in columns))
    for d in found.get("datasets", ()):
        lines.append(
            f"{d['dataset']}: off by {d['policy']:.2f} of the spread, {GUESSES[found['best_guess']]} "
            f"by {d['guess']:.2f} ({d['episodes']} episodes, {d['decisions']} decisions)"
        )
    return "\n".join(lines)


def _cell(value: float | None) -> str:
    return f"{'–':>10}" if value is None else f"{value:>10.4g}"
