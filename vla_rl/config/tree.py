"""All options of one run: `RunConfig`, and the plain tree of it that is written and read."""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from vla_rl import build
from vla_rl.bounds import Bounded, bound, several
from vla_rl.config.algorithms import CurriculumConfig
from vla_rl.config.cluster import MODES, WHAT_A_CLUSTER_LEARNS_FROM, RayConfig
from vla_rl.config.episodes import EvaluateConfig, RewardCheckConfig, RolloutConfig
from vla_rl.config.imitation import ImitationConfig
from vla_rl.config.offline import OfflineConfig
from vla_rl.config.overrides import EXAMPLE, dotlist, require_key_value
from vla_rl.config.own_files import COMPONENTS
from vla_rl.config.phases import PHASES, USUAL_PHASES
from vla_rl.config.recording import as_datasets
from vla_rl.config.run import CollectConfig, ReplayConfig, RLConfig, SlotsConfig, WandbConfig
from vla_rl.config.schema import checked
from vla_rl.errors import ConfigError
from vla_rl.files import write_whole
from vla_rl.hub import DATASET, located
from vla_rl.options import AlgorithmOptions, PolicyOptions, view

# What may differ when a run is resumed, and between the runs of a study: it says how and where to
# compute, not what.
MACHINE_KEYS = (
    "output_dir:",
    "threads:",
    "device:",
    "wandb:",
    "wandb.",
    "tensorboard:",
    "phases:",
    "collect.workers:",
    "slots.",
    "replay.ram_bytes:",
    "rollout.max_retries:",
    "reward_check.on_bad:",
    "rl.guard:",
    "sft.checkpoint_every:",
    "sft.ram_bytes:",
    "rl.checkpoint_every:",
    "rl.keep_checkpoints:",
    "rl.keep_best:",
    "rl.concurrent.threads:",
    "rl.concurrent.nice:",
    "rl.concurrent.restarts:",
    "rl.concurrent.hang_seconds:",
    "cluster.type:",
    *(
        f"cluster.{f.name}:"
        for f in dataclasses.fields(RayConfig)
        if f.name not in WHAT_A_CLUSTER_LEARNS_FROM
    ),
)


@dataclass
class RunConfig(Bounded):
    """One run. Component groups are already their own dataclasses here; ``*_type`` keeps the
    name they came from."""

    # the run's folder inside output_dir; may be a path such as study/seed_1
    name: str = "run"
    # of everything that is drawn at random
    seed: int = bound(0, ge=0, lt=2**63)
    # the folder that runs are kept in
    output_dir: str = "outputs"
    # torch threads of the main process; 0: all cores, or OMP_NUM_THREADS
    threads: int = bound(0, ge=0, hint="0: all cores")
    # of the policy and what learns: "auto" (the first GPU, else the CPU), "cpu", "cuda", "cuda:1"
    device: str = "auto"
    tasks: list[str] = several([], once=True)  # empty: all tasks of the env
    # tasks that nothing is trained on; evaluations count them apart
    held_out_tasks: list[str] = several([], once=True)
    # what is run, in this order: see `vla_rl.config.phases`
    phases: list[str] = field(default_factory=lambda: list(USUAL_PHASES))
    checkpoint: str = ""  # start from this policy instead of phases collect and sft
    # of that policy's own config: its policy.* overrides
    policy_changes: dict[str, Any] = field(default_factory=dict)
    # train on this dataset instead of collecting one. env=dataset also takes several of one robot:
    # [A, B], all their rows alike, or {A: 3, B: 1}, how often each is drawn from
    dataset: Any = ""
    # wandb=false is short for wandb.mode=off
    wandb: WandbConfig = field(default_factory=WandbConfig)
    tensorboard: bool = False  # event files in the run folder
    collect: CollectConfig = field(default_factory=CollectConfig)
    sft: ImitationConfig = field(default_factory=ImitationConfig)
    slots: SlotsConfig = field(default_factory=SlotsConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    offline: OfflineConfig = field(default_factory=OfflineConfig)
    rl: RLConfig = field(default_factory=RLConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    reward_check: RewardCheckConfig = field(default_factory=RewardCheckConfig)
    policy_type: str = "nano_vla"
    policy: Any = None
    env_type: str = "tabletop"
    env: Any = None
    reward_type: str = "success"
    reward: Any = None
    algorithm_type: str = "ppo"
    algorithm: Any = None
    critic_type: str = "none"
    critic: Any = None
    actor_type: str = "none"
    actor: Any = None  # what RL trains on top of the policy, which then stays frozen
    collector_type: str = "engine"
    collector: Any = None  # where RL's episodes come from
    cluster_type: str = "local"
    cluster: Any = None  # on which machines they do

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_phases()
        for key in ("output_dir", "checkpoint"):  # (no shell does it behind the key's =)
            setattr(self, key, os.path.expanduser(getattr(self, key)))
        self.sft.start = os.path.expanduser(self.sft.start)
        self.dataset = as_datasets(self.dataset, os.path.expanduser)
        if not self.output_dir.strip():
            raise ConfigError(
                "output_dir is empty: name the folder that runs are kept in, such as "
                "output_dir=outputs"
            )
        parts = Path(self.name).parts
        named = (
            self.name.strip()
            and self.name.isprintable()
            and parts
            and not Path(self.name).is_absolute()
        )
        if not named or {"..", "."} & set(parts):
            raise ConfigError(
                f"name={self.name!r} is no name for a run: it becomes a folder inside output_dir, "
                "so give a word, or a path without '..' such as study/seed_1"
            )
        both = sorted(set(self.tasks) & set(self.held_out_tasks))
        if both:
            raise ConfigError(
                f"tasks {both} are both in tasks and in held_out_tasks; a task is "
                "trained on or held out"
            )

    def _check_phases(self) -> None:
        unknown = [p for p in self.phases if p not in PHASES]
        if unknown:
            close = difflib.get_close_matches(unknown[0], PHASES, n=1)
            hint = f" Did you mean {close[0]}?" if close else ""
            raise ConfigError(
                f"phases has {unknown}, which do not exist.{hint} Choose from {list(PHASES)}"
            )
        if not self.phases:
            raise ConfigError(f"phases=[] runs nothing. Choose from {list(PHASES)}")
        order = [name for name in PHASES if name in self.phases]
        if order != list(self.phases):
            raise ConfigError(
                f"phases={list(self.phases)} must name each phase once, in order: "
                f"phases=[{','.join(order)}]"
            )

    @property
    def run_dir(self) -> Path:
        return Path(self.output_dir) / self.name

    @property
    def given(self) -> str:
        """The checkpoint that brings the run's policy, as it is or for SFT to go on from; "": SFT
        makes one of ``policy``."""
        return self.checkpoint or (self.sft.start if "sft" in self.phases else "")

    @property
    def datasets(self) -> list[str]:
        """All that ``dataset`` names."""
        return (
            [self.dataset] * bool(self.dataset)
            if isinstance(self.dataset, str)
            else [*self.dataset]
        )

    @property
    def one_dataset(self) -> str:
        """``dataset``, where no more than one may be named; else ConfigError."""
        if len(self.datasets) > 1:
            raise ConfigError(
                f"dataset={self.dataset} names several, which env=dataset alone puts together: use "
                "run=sft (or env=dataset), or make one of them with 'vla-rl data convert'"
            )
        return "".join(self.datasets)


def with_policy_changes(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """The ``policy.*`` among the overrides noted as changes of the policy that a checkpoint holds.

    A checkpoint brings its own policy config; without this, such overrides would be read and then
    mean nothing.
    """
    values = to_tree(config)["policy"]
    for text in overrides:
        group, _, key = text.lstrip("+").partition("=")[0].partition(".")
        name = key.partition(".")[0]
        if group == "policy" and name not in ("", "type"):
            config.policy_changes[name] = values[name]
    return config


def written_out(overrides: Sequence[str]) -> list[str]:
    """``wandb=false`` and its like written out, so that they stand beside other keys of wandb."""
    return [re.sub(r"^(\+*)wandb=(?!\{)", r"\1wandb.mode=", text) for text in overrides]


def from_tree(tree: dict[str, Any]) -> RunConfig:
    """Check a composed tree (as `to_tree` writes it) against the schemas."""
    usual = {"actor": "none", "collector": "engine", "cluster": "local"}  # older runs have none
    tree = {**{group: {"type": kind} for group, kind in usual.items()}, **tree}
    if isinstance(tree.get("wandb"), bool | str):  # as a YAML file may say it, and older runs do
        tree["wandb"] = {"mode": tree["wandb"]}
    groups: dict[str, Any] = {}
    for group in COMPONENTS:
        if f"{group}_type" in tree:
            raise ConfigError(f"unknown config key '{group}_type'. Did you mean '{group}.type'?")
        values = tree.pop(group, None) or {}
        if not isinstance(values, dict):
            raise ConfigError(
                f"{group} is {values!r}, it must be a mapping with a key 'type', one "
                f"of {build.names(group)}"
            )
        values = dict(values)
        kind = values.pop("type", None)
        if not isinstance(kind, str):
            problem = "is missing" if kind is None else f"is {kind!r}, which is not a name"
            raise ConfigError(f"{group}.type {problem}. Choose one of {build.names(group)}")
        groups[f"{group}_type"] = kind
        groups[group] = checked(build.config_class(group, kind), values, group)
    config = checked(RunConfig, tree, "")
    for key, value in groups.items():
        setattr(config, key, value)
    config.checkpoint = located(config.checkpoint)
    config.dataset = as_datasets(config.dataset, lambda name: located(name, DATASET))
    config.collect.policy = located(config.collect.policy)
    config.sft.start = located(config.sft.start)
    if view(config.policy, PolicyOptions).checkpoint:
        config.policy.checkpoint = located(config.policy.checkpoint)
    return config


def to_tree(config: RunConfig) -> dict[str, Any]:
    """The plain tree that `from_tree` reads: exact record of a run."""
    tree = dataclasses.asdict(config)
    for group in COMPONENTS:
        tree[group] = {"type": tree.pop(f"{group}_type"), **(tree[group] or {})}
    return tree


def as_learned(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A run's tree with ``algorithm.behavior_weight`` as it is learned with: where that is none,
    and rollouts run ahead of a learner that asks the policy anew, ``cluster.correction``."""
    algorithm, cluster = tree.get("algorithm"), tree.get("cluster")
    if not isinstance(algorithm, Mapping) or not isinstance(cluster, Mapping):
        return dict(tree)
    ahead = cluster.get("max_staleness")
    if ahead is None:
        ahead = MODES.get(cluster.get("mode", "sync"), 0)
    left = algorithm.get("behavior_weight") == "none" and algorithm.get("recompute_old_log_prob")
    if not (ahead and left):
        return dict(tree)
    weight = cluster.get("correction", "none")
    return {**tree, "algorithm": {**algorithm, "behavior_weight": weight}}


def learned_algorithm(config: RunConfig) -> Any:
    """The options of the run's algorithm, as `as_learned`."""
    own = as_learned(to_tree(config))["algorithm"].get("behavior_weight")
    if own in (None, view(config.algorithm, AlgorithmOptions).behavior_weight):
        return config.algorithm
    return dataclasses.replace(config.algorithm, behavior_weight=own)


def override(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """A finished config with some values changed (``rl.iterations=10``); errors as in `compose`."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    require_key_value(overrides)
    try:
        changed = OmegaConf.merge(to_tree(config), dotlist(written_out(overrides)))
        return with_policy_changes(from_tree(OmegaConf.to_container(changed)), overrides)  # type: ignore[arg-type]
    except OmegaConfBaseException as error:
        raise ConfigError(
            f"{' '.join(overrides)}: {str(error).splitlines()[0]}. {EXAMPLE}"
        ) from error


def to_yaml(config: RunConfig) -> str:
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(to_tree(config)))


def save(config: RunConfig, path: Path) -> None:
    write_whole(path, to_yaml(config))


def load(path: Path) -> RunConfig:
    """Raises `ConfigError` where the file is missing, no YAML mapping, or does not fit the
    schemas."""
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        tree = OmegaConf.to_container(OmegaConf.load(path))
    except (OSError, ValueError, RecursionError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(
            f"{path} cannot be read as a config: {' '.join(str(error).split())}"
        ) from error
    if not isinstance(tree, dict):
        raise ConfigError(
            f"{path} is not a config: it holds a {type(tree).__name__}, not a mapping"
        )
    if isinstance(tree.get("sft"), dict):
        # of runs from before it was dropped: nothing used what it averaged
        tree["sft"].pop("ema_decay", None)
    try:
        return from_tree(cast(dict[str, Any], tree))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
