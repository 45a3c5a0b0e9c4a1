"""Configuration: Hydra composes YAML, one dataclass per component checks it, plain dataclasses come out.

Every component group (``policy``, ``env``, ``reward``, ``algorithm``, ``critic``, ``actor``, ``collector``, ``cluster``)
has a ``type`` that names an entry of `vla_rl.build`; the other keys must fit that entry's config dataclass. The rest of the
tree must fit `RunConfig`.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import os
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from vla_rl import build
from vla_rl.algorithms.imitation_settings import ImitationConfig
from vla_rl.algorithms.offline_settings import OfflineConfig
from vla_rl.algorithms.settings import CurriculumConfig
from vla_rl.asked import CorrectsStaleness
from vla_rl.cluster.settings import WHAT_A_CLUSTER_LEARNS_FROM, RayConfig
from vla_rl.composition import composed
from vla_rl.errors import ConfigError
from vla_rl.files import write_whole
from vla_rl.overrides import EXAMPLE, require_key_value, spoken
from vla_rl.own_configs import COMPONENTS, own_configs
from vla_rl.paths import config_dir
from vla_rl.reporting.sinks import WandbConfig
from vla_rl.run.phases import PHASES, USUAL_PHASES
from vla_rl.run.settings import CollectConfig, ReplayConfig, RLConfig, SlotsConfig
from vla_rl.settings import EvaluateConfig, RewardCheckConfig, RolloutConfig

# What may differ when a run is resumed, and between the runs of a study: it says how and where to compute, not what.
MACHINE_KEYS = (
    "output_dir:", "threads:", "device:", "wandb:", "wandb.", "tensorboard:", "phases:", "collect.workers:", "slots.",
    "replay.ram_bytes:", "rollout.max_retries:", "reward_check.on_bad:", "rl.guard:", "sft.checkpoint_every:",
    "rl.checkpoint_every:", "rl.keep_checkpoints:", "rl.keep_best:", "rl.concurrent.threads:", "rl.concurrent.nice:",
    "rl.concurrent.restarts:", "rl.concurrent.hang_seconds:", "cluster.type:",
    *(f"cluster.{f.name}:" for f in dataclasses.fields(RayConfig) if f.name not in WHAT_A_CLUSTER_LEARNS_FROM),
)  # fmt: skip
# Schemas that stand in several places: (where this one is, what its messages say, what they should say; *: that place).
_MOVED = (
    ("reward.parts.", "reward", "*"),
    ("rl.fallback_reward", "reward", "*"),
    ("offline.critics", "algorithm.critics", "*"),
    ("algorithm", "sft.augment", "algorithm.augment"),
)


@dataclass
class RunConfig:
    """One run. Component groups are already their own dataclasses here; ``*_type`` keeps the name they came from."""

    # the run's folder inside output_dir; may be a path such as study/seed_1
    name: str = "run"
    # of everything that is drawn at random
    seed: int = 0
    # the folder that runs are kept in
    output_dir: str = "outputs"
    threads: int = 0  # torch threads of the main process; 0: all cores, or OMP_NUM_THREADS
    # of the policy and what learns: "auto" (the first GPU, else the CPU), "cpu", "cuda", "cuda:1"
    device: str = "auto"
    tasks: list[str] = field(default_factory=list)  # empty: all tasks of the env
    # tasks that nothing is trained on; evaluations count them apart
    held_out_tasks: list[str] = field(default_factory=list)
    # what is run, in this order: see `vla_rl.run.phases`
    phases: list[str] = field(default_factory=lambda: list(USUAL_PHASES))
    checkpoint: str = ""  # start from this policy instead of phases collect and sft
    policy_changes: dict[str, Any] = field(default_factory=dict)  # of that policy's own config: its policy.* overrides
    dataset: str = ""  # train on this dataset instead of collecting one
    wandb: WandbConfig = field(default_factory=WandbConfig)  # wandb=false is short for wandb.mode=off
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
        self._check_phases()
        for key in ("output_dir", "dataset", "checkpoint"):  # (no shell does it behind the key's =)
            setattr(self, key, os.path.expanduser(getattr(self, key)))
        if not self.output_dir.strip():
            raise ConfigError("output_dir is empty: name the folder that runs are kept in, such as output_dir=outputs")
        parts = Path(self.name).parts
        named = self.name.strip() and self.name.isprintable() and parts and not Path(self.name).is_absolute()
        if not named or {"..", "."} & set(parts):
            raise ConfigError(
                f"name={self.name!r} is no name for a run: it becomes a folder inside output_dir, so give a word, or a path "
                f"without '..' such as study/seed_1"
            )
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed={self.seed} must be 0 or more, and below 2**63")
        if self.threads < 0:
            raise ConfigError(f"threads={self.threads} must be 0 (all cores) or more")
        both = sorted(set(self.tasks) & set(self.held_out_tasks))
        if both:
            raise ConfigError(f"tasks {both} are both in tasks and in held_out_tasks; a task is trained on or held out")

    def _check_phases(self) -> None:
        unknown = [p for p in self.phases if p not in PHASES]
        if unknown:
            close = difflib.get_close_matches(unknown[0], PHASES, n=1)
            hint = f" Did you mean {close[0]}?" if close else ""
            raise ConfigError(f"phases has {unknown}, which do not exist.{hint} Choose from {list(PHASES)}")
        if not self.phases:
            raise ConfigError(f"phases=[] runs nothing. Choose from {list(PHASES)}")
        order = [name for name in PHASES if name in self.phases]
        if order != list(self.phases):
            raise ConfigError(f"phases={list(self.phases)} must name each phase once, in order: phases=[{','.join(order)}]")
        for key in ("tasks", "held_out_tasks"):
            names = getattr(self, key)
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise ConfigError(f"{key} has {twice[0]!r} more than once; name each task once")

    @property
    def run_dir(self) -> Path:
        return Path(self.output_dir) / self.name


def compose(overrides: Sequence[str] = (), directory: Path | None = None, folders: Sequence[Path] = ()) -> RunConfig:
    """Compose ``configs/config.yaml`` with Hydra overrides (``run=quickstart seed=1 algorithm.learning_rate=3e-4``).

    ``run=./mine.yaml`` names a file of one's own; ``folders`` hold groups besides those here, as ``--config-dir`` names them
    (`vla_rl.own_configs`). Raises `ConfigError` naming the key, the value and what would fit.
    """
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    directory = (directory or config_dir()).resolve()
    own, words = own_configs(overrides, directory, folders)
    groups = {d.name for d in directory.iterdir() if d.is_dir()} | {"hydra.searchpath"}
    try:
        with own.known():
            tree = composed(_forced(words, groups), (directory, *own.folders), groups, keep=not own.stored)
        config = from_tree(cast(dict[str, Any], tree))
    except (HydraException, OmegaConfBaseException, YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(own.located(_explain(error, (directory, *own.folders)))) from error
    except ConfigError as error:
        raise ConfigError(own.located(str(error))) from error
    return with_policy_changes(config, overrides) if config.checkpoint else config


def with_run(overrides: Sequence[str], otherwise: Sequence[str]) -> list[str]:
    """``overrides``, after ``otherwise`` where they choose no ``run`` themselves."""
    named = any(o.partition("=")[0].lstrip("~+") == "run" for o in overrides)
    return [*(() if named else otherwise), *overrides]


def with_policy_changes(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """The ``policy.*`` among the overrides noted as changes of the policy that a checkpoint holds.

    A checkpoint brings its own policy config; without this, such overrides would be read and then mean nothing.
    """
    values = to_tree(config)["policy"]
    for text in overrides:
        group, _, key = text.lstrip("+").partition("=")[0].partition(".")
        name = key.partition(".")[0]
        if group == "policy" and name not in ("", "type"):
            config.policy_changes[name] = values[name]
    return config


def _forced(overrides: Sequence[str], groups: Collection[str]) -> list[str]:
    """Let value overrides set keys that no YAML lists: the schemas know the keys and refuse the others with a hint."""
    require_key_value(overrides)
    texts = [f.name for f in dataclasses.fields(RunConfig) if f.type == "str"]
    words = [spoken(word, texts) for word in _long(overrides)]
    return [o if o[:1] in "+~" or o.partition("=")[0] in groups else f"++{o}" for o in words]


def _long(overrides: Sequence[str]) -> list[str]:
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
            raise ConfigError(f"{group} is {values!r}, it must be a mapping with a key 'type', one of {build.names(group)}")
        values = dict(values)
        kind = values.pop("type", None)
        if not isinstance(kind, str):
            problem = "is missing" if kind is None else f"is {kind!r}, which is not a name"
            raise ConfigError(f"{group}.type {problem}. Choose one of {build.names(group)}")
        groups[f"{group}_type"] = kind
        groups[group] = checked(build.config_class(group, kind), values, group)
    config = checked(RunConfig, tree, "")
    cluster, algorithm = groups["cluster"], groups["algorithm"]
    if cluster.ahead and isinstance(algorithm, CorrectsStaleness) and algorithm.recompute_old_log_prob:
        algorithm.behavior_weight = cluster.correction if algorithm.behavior_weight == "none" else algorithm.behavior_weight
    for key, value in groups.items():
        setattr(config, key, value)
    return config


def to_tree(config: RunConfig) -> dict[str, Any]:
    """The plain tree that `from_tree` reads: exact record of a run."""
    tree = dataclasses.asdict(config)
    for group in COMPONENTS:
        tree[group] = {"type": tree.pop(f"{group}_type"), **(tree[group] or {})}
    return tree


def override(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """A finished config with some values changed (``rl.iterations=10``); errors as in `compose`."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    require_key_value(overrides)
    try:
        changed = OmegaConf.merge(to_tree(config), OmegaConf.from_dotlist(_long(overrides)))
        return with_policy_changes(from_tree(OmegaConf.to_container(changed)), overrides)  # type: ignore[arg-type]
    except OmegaConfBaseException as error:
        raise ConfigError(f"{' '.join(overrides)}: {str(error).splitlines()[0]}. {EXAMPLE}") from error


def to_yaml(config: RunConfig) -> str:
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(to_tree(config)))


def save(config: RunConfig, path: Path) -> None:
    write_whole(path, to_yaml(config))


def load(path: Path) -> RunConfig:
    """Raises `ConfigError` where the file is missing, no YAML mapping, or does not fit the schemas."""
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        tree = OmegaConf.to_container(OmegaConf.load(path))
    except (OSError, ValueError, RecursionError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path} cannot be read as a config: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} is not a config: it holds a {type(tree).__name__}, not a mapping")
    if isinstance(tree.get("sft"), dict):
        tree["sft"].pop("ema_decay", None)  # of runs from before it was dropped: nothing used what it averaged
    try:
        return from_tree(cast(dict[str, Any], tree))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def checked(schema: type, values: dict[str, Any], where: str) -> Any:
    """An instance of the dataclass ``schema``; raises `ConfigError` for unknown keys and wrong types under ``where``."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    _refuse_unknown(schema, values, where)
    try:
        found = OmegaConf.to_object(OmegaConf.merge(_structured(schema), values))
    except ConfigError as error:
        raise ConfigError(_with_its_key(str(error), schema, values, where)) from None
    except OmegaConfBaseException as error:
        key = ".".join(p for p in (where, str(error.full_key or "")) if p)
        reason = str(error).splitlines()[0].rstrip(".")
        remedy = "Mend the value in your override or YAML."
        if isinstance(_at(values, str(error.full_key or "")), str) and "ListConfig" in reason:
            reason, remedy = "this is a list", f"Write it in brackets: {key}=[{_at(values, str(error.full_key))}]"
        raise ConfigError(f"{key} = {_at(values, str(error.full_key or ''))!r}: {reason}. {remedy}") from error
    for path, number in _numbers(found, where):
        if not math.isfinite(number):
            raise ConfigError(f"{path}={number} is not finite: give a number")
        if path.rpartition(".")[2] == "seed" and not 0 <= number < 2**63:
            raise ConfigError(f"{path}={number} must be 0 or more, and below 2**63")
    return found


def _with_its_key(text: str, schema: type, values: dict[str, Any], where: str) -> str:
    """The message of a schema's own check, with the key as the user typed it: some name several keys, or a usual place."""
    of_memory = [("algorithm", "sft.augment", "algorithm.memory.augment")] if "memory" in values else []
    for place, usual, here in (*of_memory, *_MOVED):
        if where.startswith(place):
            text = re.sub(rf"(?<![\w.]){re.escape(usual)}(?=[. ])", where if here == "*" else here, text)
    names = "|".join(re.escape(f"{where}.{name}" if where else str(name)) for name in values)
    if re.match(rf"({names})[\w.]*(=| is )", text):
        return text
    if any(f.default is f.default_factory is dataclasses.MISSING for f in dataclasses.fields(schema)):
        return text  # a user's own, without defaults to compare with
    path: list[str] = []
    rest: Any = values
    default: Any = dataclasses.asdict(schema())
    while isinstance(rest, dict) and isinstance(default, dict):  # which key alone, left at its default, makes it right?
        changed = [key for key in rest if rest[key] != default.get(key)]
        found = [key for key in changed if _fits(schema, _without(values, [*path, key]))]
        if len(found) != 1:
            return text
        path, rest, default = [*path, found[0]], rest[found[0]], default.get(found[0])
    return f"{'.'.join([where, *path] if where else path)}={rest}: {text}"


def _without(values: dict[str, Any], path: Sequence[str]) -> dict[str, Any]:
    if len(path) == 1:
        return {key: value for key, value in values.items() if key != path[0]}
    return {key: _without(value, path[1:]) if key == path[0] else value for key, value in values.items()}


def _fits(schema: type, values: dict[str, Any]) -> bool:
    from omegaconf import OmegaConf

    try:
        OmegaConf.to_object(OmegaConf.merge(_structured(schema), values))
    except ConfigError:
        return False
    return True


def _numbers(value: Any, path: str) -> Iterator[tuple[str, float]]:
    """(key, value) of every number in a config."""
    if dataclasses.is_dataclass(value):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _numbers(inner, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list | tuple):
        for i, inner in enumerate(value):
            yield from _numbers(inner, f"{path}[{i}]")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, value


@functools.cache
def _structured(schema: type) -> Any:
    """OmegaConf's form of a dataclass, which takes long to make; `OmegaConf.merge` works on a copy."""
    from omegaconf import OmegaConf

    return OmegaConf.structured(schema)


def _at(values: Any, path: str) -> Any:
    """The value under a dotted path, as far as it leads."""
    for name in path.replace("[", ".").replace("]", "").split("."):
        if isinstance(values, dict) and name in values:
            values = values[name]
        elif isinstance(values, list) and name.isdigit() and int(name) < len(values):
            values = values[int(name)]
    return values


def _refuse_unknown(schema: type, values: dict[str, Any], where: str) -> None:
    known = {f.name: f for f in dataclasses.fields(schema)}
    shown = [name for name in known if schema is not RunConfig or not name.endswith("_type")]
    for key, value in values.items():
        path = f"{where}.{key}" if where else str(key)
        if key not in known:
            close = difflib.get_close_matches(str(key), shown, n=1)
            prefix = f"{where}." if where else ""
            listing = f" Known keys here: {', '.join(sorted(shown))}." if shown else " There are no keys here."
            hint = f" Did you mean '{prefix}{close[0]}'?" if close else listing
            raise ConfigError(f"unknown config key '{path}' (value {value!r}).{hint}")
        factory = known[key].default_factory
        if isinstance(factory, type) and dataclasses.is_dataclass(factory):
            if not isinstance(value, dict):
                keys = ", ".join(f.name for f in dataclasses.fields(factory))
                raise ConfigError(f"{path} is {value!r}, it must be a mapping. Set one of its keys instead: {keys}")
            _refuse_unknown(factory, value, path)


def _explain(error: Exception, folders: Sequence[Path]) -> str:
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    text = str(error).strip()
    first = text.splitlines()[0] if text else type(error).__name__
    if isinstance(error, RecursionError):
        return "the defaults of the config files lead in a circle: let none of them name one that names it"
    if not isinstance(error, HydraException | OmegaConfBaseException):
        return f"a file in {' or '.join(map(str, folders[1:]))} cannot be read: {' '.join(text.split())}"
    groups = {d.name: sorted(p.stem for f in folders for p in (f / d.name).glob("*.yaml"))
              for d in sorted(folders[0].iterdir()) if d.is_dir()}  # fmt: skip
    missing = re.search(r"[Cc]ould not (?:find|load) '(\w+)/([^']+)'", first)
    if missing and missing[1] in groups:
        group, name = missing.groups()
        close = difflib.get_close_matches(name, groups[group], n=1)
        hint = f" Did you mean {group}={close[0]}?" if close else ""
        return f"{group}={name} does not exist.{hint} Available: {', '.join(groups[group])}"
    if "Could not find" in text or "In 'config'" in text:
        listing = "; ".join(f"{g}: {', '.join(v)}" for g, v in groups.items() if v)
        return f"{first}. Available: {listing}"
    return f"{first}. {EXAMPLE}"
