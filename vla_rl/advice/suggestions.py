"""What to change where a start or a run is found wanting, in the words of the guard and of ``vla-rl
advise``.

Every ``key=value`` that `checks` and `advice` name is an override which the run at hand takes and
has not. Named first is what helped where it was measured (docs/explanation/learning.md).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vla_rl import build
from vla_rl.algorithms.validation import verdict
from vla_rl.assembly.folder import made_start
from vla_rl.checks.rewards import reads_rewards
from vla_rl.config import RunConfig
from vla_rl.learning.guard import NO_SUCCESS, STILL
from vla_rl.monitoring.metrics import METRICS_FILE, read_metrics
from vla_rl.options import AlgorithmOptions, PolicyOptions, view


def image_figures(config: RunConfig, folder: Path) -> dict[str, float]:
    """The last figures of SFT's validation (`algorithms.validation.input_use`): of this run, else
    of the run whose checkpoint it starts from; empty where there are none."""
    folders = [folder, *([Path(config.checkpoint).parent.parent] if config.checkpoint else [])]
    for path in folders:
        for record in reversed(read_metrics(path / METRICS_FILE)):
            found = {
                k.removeprefix("validation/"): v
                for k, v in record.items()
                if k.startswith("validation/")
            }
            if (
                record["phase"] == "sft"
                and found.get("loss") is not None
                and found.get("image_use") is not None
            ):
                return {k: float(v) for k, v in found.items() if v is not None}
    return {}


def better_start(config: RunConfig) -> str:
    """How to start from a policy that succeeds more often."""
    if config.checkpoint or "sft" not in config.phases:
        return "start from a stronger checkpoint (more demonstrations or updates of its SFT)"
    updates = f"sft.updates={2 * config.sft.updates}"
    if config.dataset:
        return f"a dataset of more demonstrations, or more SFT updates ({updates})"
    return (
        "more demonstrations or SFT updates "
        f"(collect.episodes_per_task={2 * config.collect.episodes_per_task} {updates})"
    )


def sees_more(config: RunConfig) -> str:
    """What makes a policy look at its images, of what it has not yet; with a comma behind each."""
    norm = view(config.policy, PolicyOptions).feature_norm
    hidden = (
        ""
        if config.sft.augment.proprio >= 0.5
        else "sft.augment.proprio=0.5 (it cannot go by its arm then), "
    )
    return hidden + ("" if norm == "position" else "policy.feature_norm=position, ")


def larger_groups(config: RunConfig, least: int = 1) -> str:
    """Groups twice as large, and those drawn anew in which all end alike."""
    dynamic = "" if config.rl.dynamic_sampling else " and rl.dynamic_sampling=true"
    return f"rl.group_size={2 * max(config.rl.group_size, least)}{dynamic}"


def a_memory(config: RunConfig) -> list[str]:
    """To learn from its few successes again and again, where the algorithm can and does not."""
    memory = view(config.algorithm, AlgorithmOptions).memory
    if memory is None or memory.episodes:
        return []
    return [
        "a memory of successes, which makes most of the few there are "
        "(algorithm.memory.episodes=256)"
    ]


def explores_by(config: RunConfig) -> tuple[str, Any]:
    """The option that says how much is sampled, and its value: of the actor where that has noise of
    its own, else of the policy; ("", None) where there is none."""
    entry = build.entry("actor", config.actor_type)
    if isinstance(entry, build.ActorEntry) and entry.own_noise:
        heated = view(config.algorithm, AlgorithmOptions).temperature is not None
        part, of, name = (
            ("algorithm", config.algorithm, "temperature")
            if heated
            else ("actor", config.actor, "noise")
        )
    else:
        part, of, name = "policy", config.policy, view(config.policy, PolicyOptions).explores_by
    value = getattr(of, name, None)
    return (f"{part}.{name}", value) if isinstance(value, int | float) and value > 0 else ("", None)


def more_exploration(config: RunConfig) -> str:
    """Samples that differ more."""
    key, value = explores_by(config)
    if not key or (key == "policy.noise_level" and value == 1.0):  # its highest
        return "more noise in the policy's sampling"
    more = min(1.3 * value, 1.0) if key == "policy.noise_level" else 1.3 * value
    return f"more exploration ({key}={more:.2g})"


def less_exploration(config: RunConfig) -> str:
    """Samples that differ less."""
    key, value = explores_by(config)
    return f"{key}={0.7 * value:.2g}" if key else "less noise in the policy's sampling"


def progress_reward(config: RunConfig, folder: Path) -> str:
    """How a new run from the same start goes on with progress where nothing succeeds."""
    start = config.checkpoint or made_start(config, folder) or folder / "checkpoints" / "published"
    data = config.one_dataset or (
        folder / "dataset" if (folder / "dataset").is_dir() else "DEMONSTRATIONS"
    )
    return (
        f"a learned progress reward (in a new run: name=NEW checkpoint={start} dataset={data} "
        "rl.fallback=progress)"
    )


def first_successes(config: RunConfig, folder: Path) -> list[str]:
    """What helps where almost nothing succeeds."""
    falls_back = (
        config.rl.fallback == "none" and config.reward_type == "success" and reads_rewards(config)
    )
    return [
        *a_memory(config),
        better_start(config),
        *([progress_reward(config, folder)] if falls_back else []),
    ]


def advice(config: RunConfig, folder: Path) -> dict[str, str]:
    """What helps, by the kind of finding."""
    figures = image_figures(config, folder)
    blind = verdict(figures) if figures else ""
    sight = f" Also, {blind}" if blind else ""
    if config.rl.fallback == "none":
        no_success = f"What helps: {'; '.join(first_successes(config, folder))}.{sight}"
    else:
        no_success = (
            "The run goes on with a learned progress reward "
            f"(rl.fallback={config.rl.fallback}).{sight}"
        )
    rate = view(config.algorithm, AlgorithmOptions).learning_rate
    options = (
        [f"another algorithm.learning_rate (now {rate:g}; lower where updates are skipped)"]
        if rate
        else []
    )
    if config.rl.group_size > 1:
        options = [f"larger groups ({larger_groups(config)})", *options]
    options = [
        *options,
        more_exploration(config),
        "a start between 5 and 65 % success (vla-rl advise RUN)",
    ]
    return {NO_SUCCESS: no_success, STILL: f"What helps: {'; '.join(options)}.{sight}"}
