"""What is known of a run on a cluster before anything starts."""

from __future__ import annotations

import dataclasses

from vla_rl import build
from vla_rl.cluster.placement import Amount, arranged, require_times, resolved
from vla_rl.cluster.session import nodes_of, ray_session, require_ray
from vla_rl.config import RunConfig
from vla_rl.errors import ConfigError
from vla_rl.monitoring.machine import available_cores


def check_cluster(config: RunConfig) -> None:
    """Raise `UserError` where this run cannot have its rollouts in actors of Ray."""
    require_ray()
    entry = build.entry("algorithm", config.algorithm_type)
    if isinstance(entry, build.AlgorithmEntry) and entry.needs == "ranked_candidates":
        raise ConfigError(
            f"cluster=ray: algorithm.type={config.algorithm_type} chooses actions by its critics, "
            "which stay with the learner, and rollouts are in other processes. Use cluster=local, "
            "or another algorithm"
        )
    learners, auto = config.cluster.learners, config.cluster.placement == "auto"
    if (
        (learners or auto)
        and isinstance(entry, build.AlgorithmEntry)
        and entry.needs not in ("likelihood", "imitation")
    ):
        raise ConfigError(
            f"{'cluster.placement=auto' if auto else f'cluster.learners={learners}'}: "
            f"algorithm.type={config.algorithm_type} learns from a replay, which one process has. "
            "Use cluster.learners=0 and cluster.placement=free"
        )
    if config.cluster.ahead:
        _check_ahead(config)
    if auto:
        require_times(config)


def check_sft(config: RunConfig) -> None:
    """Raise `UserError` where this run's SFT cannot be made by the learner ranks of a cluster."""
    require_ray()
    c = config.cluster
    if config.sft.offload_optimizer and c.learners > 1 and c.learner_mode == "sharded":
        raise ConfigError(
            f"sft.offload_optimizer=true with cluster.learners={c.learners}: the optimiser's state "
            "is spread over the ranks already (cluster.learner_mode=sharded). Leave it out, or use "
            "cluster.learner_mode=replicated"
        )


def _check_ahead(config: RunConfig) -> None:
    mode = f"cluster.mode={config.cluster.mode}"
    if config.rl.dynamic_sampling:
        raise ConfigError(
            f"{mode} plans an iteration before it knows the one before, and "
            "rl.dynamic_sampling=true rolls out until enough groups are left: use "
            "cluster.mode=sync, or leave dynamic sampling out"
        )
    if config.rl.rhythm != "alternate":
        raise ConfigError(
            f"{mode} already lets rollouts and learning overlap: use rl.rhythm=alternate with it"
        )
    if config.collector_type != "engine":
        raise ConfigError(
            f"{mode} gives new weights to episodes under way, which "
            f"collector.type={config.collector_type} knows nothing of: use collector=engine, or "
            "cluster.mode=sync"
        )


def check_room(config: RunConfig) -> None:
    """Raise `UserError` where the cluster is too small for the run. One that it will join is
    joined for a moment, to see."""
    c = config.cluster
    if c.address == "local":
        nodes = [Amount(available_cores(), _gpus_here(config))]
    else:
        with ray_session(c) as ray:
            nodes = nodes_of(ray)
    arranged(dataclasses.replace(config, cluster=resolved(config, nodes)[0]), nodes)


def _gpus_here(config: RunConfig) -> int:
    c = config.cluster
    asks = (
        c.placement != "free"
        or c.learners > 1
        or c.rollout_gpus
        or c.inference_gpus
        or c.reward_gpus
        or c.learner_gpus
    )
    if config.device == "cpu" or not asks:
        return 0
    import torch

    return torch.cuda.device_count()
