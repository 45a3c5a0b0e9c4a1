"""The one place that resolves names from the config into plug-ins, at run time.

An entry maps (group, name) to where the implementation and its config dataclass live. A user's own
class is given as ``type: package.module:Class``; its config dataclass is found as the class
attribute ``Config``.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import operator
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vla_rl.errors import ConfigError
from vla_rl.moved import MOVED
from vla_rl.options import (
    CLASSES,
    OPTIONS,
    AlgorithmFigures,
    ComponentClass,
    ShapingOptions,
    misspelt,
    view,
)


@dataclass
class NoConfig:
    """A component without options."""


@dataclass(frozen=True)
class Entry:
    """``target`` and ``config`` are "module:attribute" strings, imported when used."""

    target: str
    config: str = "vla_rl.build:NoConfig"


@dataclass(frozen=True)
class PolicyEntry(Entry):
    """A policy, and what it ``can`` do of what algorithms and actors need, known without importing
    it; `tests/test_build.py` holds it to the class's own `vla_rl.interfaces.Policy.can`."""

    can: tuple[str, ...] = ()


@dataclass(frozen=True)
class ActorEntry(PolicyEntry):
    """A small actor on top of a frozen policy, of which it ``needs`` a capability; with
    ``own_noise`` what explores is its noise, not the policy's."""

    needs: str = "features"
    own_noise: bool = False


@dataclass(frozen=True)
class AlgorithmEntry(Entry):
    """An algorithm, and the capability of a policy that it works on: a word of
    `vla_rl.interfaces.Policy.can`, or `ActorPolicy.can`."""

    needs: str = ""


@dataclass(frozen=True)
class EnvEntry(Entry):
    """An env and what comes with it: a new benchmark is one row.

    ``collect`` runs one scripted demonstration, ``demonstrations`` reads those that others
    published, ``check`` tells `vla-rl doctor` (status, detail, fix) without importing the
    simulator, ``protocols`` gives overrides for one of its published evaluations (``--protocol``).
    ``suites`` are names that ``--suite`` knows besides the env's own; ``suite_overrides`` then set
    its config. ``records``, a function of the run's config, opens one that is a recording, in which
    no episode can be run.
    """

    collect: str = ""
    demonstrations: str = ""
    check: str = ""
    protocols: str = ""
    suites: tuple[str, ...] = ()
    suite_overrides: tuple[str, ...] = ()
    records: str = ""


# names that others may have as well
_OUR_PACKAGES = ("sim", "real", "policies", "reward_models", "benchmarks")

_BASES, _CHANGES = ("spatial", "object", "goal", "10"), ("lan", "object", "swap", "task")
_VARIED = ("camera", "robot", "language", "layout")  # of LIBERO-plus
REGISTRY: dict[str, dict[str, Entry]] = {
    "policy": {
        "nano_vla": PolicyEntry(
            "policies.nano_vla:NanoVLA",
            "policies.settings:NanoVLAConfig",
            ("likelihood", "imitation", "features", "cached_features"),
        ),
        "openvla": PolicyEntry(
            "policies.openvla:OpenVLA",
            "policies.openvla.config:OpenVLAConfig",
            ("likelihood", "imitation", "features"),
        ),
        "openvla_l1": PolicyEntry(
            "policies.openvla:OpenVLAL1",
            "policies.openvla.config:OpenVLAConfig",
            ("imitation", "features"),
        ),
        "denoising_vla": PolicyEntry(
            "policies.denoising.policy:DenoisingVLA",
            "policies.denoising.settings:DenoisingVLAConfig",
            ("likelihood", "imitation", "features", "cached_features", "noise"),
        ),
        "consistency_vla": PolicyEntry(
            "policies.denoising.consistency:ConsistencyVLA",
            "policies.denoising.settings:ConsistencyConfig",
            ("features", "noise"),
        ),
        # (the likelihood of those that denoise; ACT has none, which it says itself)
        "lerobot": PolicyEntry(
            "policies.lerobot.policy:LeRobotPolicy",
            "policies.settings:LeRobotConfig",
            ("likelihood", "imitation", "features", "noise"),
        ),
        "remote": PolicyEntry(
            "vla_rl.serving.policy:WirePolicy", "vla_rl.config.serving:RemoteConfig"
        ),
        "small": PolicyEntry(
            "policies.small:SmallPolicy",
            "policies.settings:SmallConfig",
            ("actor", "weighted_imitation", "imitation"),
        ),
    },
    # policies around another, which a run makes of ``policy`` where its data ask for that
    "around": {"relative": Entry("policies.relative:RelativePolicy")},
    "actor": {
        "none": Entry("vla_rl.build:no_component"),
        "residual": ActorEntry(
            "policies.actors.residual:ResidualPolicy",
            "policies.actors.settings:ResidualConfig",
            ("actor", "weighted_imitation"),
            own_noise=True,
        ),
        "direct": ActorEntry(
            "policies.actors.direct:DirectActor",
            "policies.actors.settings:DirectConfig",
            ("actor", "weighted_imitation"),
            own_noise=True,
        ),
        "own": ActorEntry(
            "policies.actors.own:OwnPolicy",
            "policies.actors.settings:OwnConfig",
            ("weighted_imitation",),
            needs="cached_features",
        ),
        "improved": ActorEntry(
            "policies.actors.improved:ImprovedPolicy",
            "policies.actors.settings:ImprovedConfig",
            ("ranked_candidates",),
            needs="cached_features",
        ),
        "steered": ActorEntry(
            "policies.actors.steered:SteeredPolicy",
            "policies.actors.settings:SteeredConfig",
            ("actor",),
            needs="noise",
            own_noise=True,
        ),
    },
    "env": {
        "tabletop": EnvEntry(
            "sim.tabletop.simulator:TabletopSimulator",
            "sim.tabletop.simulator:TabletopConfig",
            collect="sim.tabletop.collect:collect_episode",
        ),
        "libero": EnvEntry(
            "sim.libero.perturb:PerturbedLibero",
            "sim.libero.settings:LiberoConfig",
            collect="sim.libero.collect:collect_episode",
            demonstrations="sim.libero_demos:LiberoDemonstrations",
            check="sim.libero.fidelity:check",
            protocols="sim.libero.protocols:overrides",
            suites=(
                *("libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90"),
                *(f"libero_pro_{base}_{kind}" for base in _BASES for kind in _CHANGES),
                *(f"libero_plus_{base}_{kind}" for base in _BASES for kind in _VARIED),
            ),
            # a benchmark's time limit is part of its protocol, whatever training used
            suite_overrides=("env.suite={suite}", "env.tasks=[]", "env.horizon=0"),
        ),
        "dualarm": EnvEntry(
            "sim.dualarm.simulator:DualArmSimulator",
            "sim.dualarm.settings:DualArmConfig",
            collect="sim.dualarm.collect:collect_episode",
            check="sim.vulkan:check",
        ),
        "so101": EnvEntry(
            "sim.so101.simulator:SO101Simulator",
            "sim.so101.simulator:SO101Config",
            collect="sim.so101.collect:collect_episode",
            check="sim.so101.model:check",
        ),
        "robotwin": EnvEntry(
            "sim.robotwin.simulator:RoboTwinSimulator",
            "sim.robotwin.settings:RoboTwinConfig",
            collect="sim.robotwin.collect:collect_episode",
        ),
        "dataset": EnvEntry(
            "vla_rl.assembly.recorded_env:RecordedEnv",
            "vla_rl.config.recording:RecordingConfig",
            records="vla_rl.assembly.recorded_env:open_recorded",
        ),
        "gym": EnvEntry(
            "sim.gym:GymSimulator", "sim.gym:GymConfig", collect="sim.stepped:collect_episode"
        ),
        "lerobot": EnvEntry(
            "sim.lerobot:LeRobotSimulator",
            "sim.lerobot:LeRobotEnvConfig",
            collect="sim.stepped:collect_episode",
        ),
        "toy": EnvEntry(
            "sim.toy:ToyReach", "sim.toy:ToyConfig", collect="sim.toy:ToyReach.collect_episode"
        ),
    },
    "reward": {
        "success": Entry(
            "reward_models.success:TaskSuccess", "reward_models.settings:TaskSuccessConfig"
        ),
        "env": Entry("reward_models.success:EnvReward", "reward_models.settings:EnvRewardConfig"),
        "combined": Entry(
            "vla_rl.rewards.combined:CombinedReward", "vla_rl.config.episodes:CombinedConfig"
        ),
        "srpo": Entry("reward_models.srpo:SRPO", "reward_models.settings:SRPOConfig"),
        "pairwise": Entry(
            "reward_models.pairwise:PairwiseCritic", "reward_models.settings:PairwiseConfig"
        ),
        "process": Entry(
            "reward_models.process:ProcessReward", "reward_models.settings:ProcessConfig"
        ),
        "classifier": Entry(
            "reward_models.classifier:SuccessClassifier", "reward_models.settings:ClassifierConfig"
        ),
        "value_progress": Entry(
            "reward_models.value_progress:ValueProgress",
            "reward_models.settings:ValueProgressConfig",
        ),
        "preference": Entry(
            "reward_models.preference:PreferenceReward", "reward_models.settings:PreferenceConfig"
        ),
        "vlac": Entry("reward_models.vlac:VLAC", "reward_models.settings:VLACConfig"),
    },
    "algorithm": {
        "ppo": AlgorithmEntry(
            "vla_rl.algorithms.ppo:PPO", "vla_rl.config.algorithms:PPOConfig", "likelihood"
        ),
        "filtered_bc": AlgorithmEntry(
            "vla_rl.algorithms.filtered_bc:FilteredBC",
            "vla_rl.config.imitation:FilteredBCConfig",
            "imitation",
        ),
        "td3": AlgorithmEntry(
            "vla_rl.algorithms.actor_critic:TD3",
            "vla_rl.config.replay_algorithms:TD3Config",
            "actor",
        ),
        "sac": AlgorithmEntry(
            "vla_rl.algorithms.actor_critic:SAC",
            "vla_rl.config.replay_algorithms:SACConfig",
            "actor",
        ),
        "parl": AlgorithmEntry(
            "vla_rl.algorithms.parl:PARL",
            "vla_rl.config.replay_algorithms:PARLConfig",
            "ranked_candidates",
        ),
        "dsrl": AlgorithmEntry(
            "vla_rl.algorithms.dsrl:DSRL", "vla_rl.config.replay_algorithms:DSRLConfig", "actor"
        ),
        "iql": AlgorithmEntry(
            "vla_rl.algorithms.iql:IQL",
            "vla_rl.config.replay_algorithms:IQLConfig",
            "weighted_imitation",
        ),
        "dagger": AlgorithmEntry(
            "vla_rl.algorithms.dagger:Dagger",
            "vla_rl.config.replay_algorithms:DaggerConfig",
            "weighted_imitation",
        ),
        "recap": AlgorithmEntry(
            "vla_rl.algorithms.recap:RECAP",
            "vla_rl.config.replay_algorithms:RECAPConfig",
            "imitation",
        ),
        "iql_sac": AlgorithmEntry(
            "vla_rl.algorithms.iql:IQLThenSAC",
            "vla_rl.config.replay_algorithms:IQLThenSACConfig",
            "actor",
        ),
    },
    "collector": {"engine": Entry("vla_rl.build:the_engine")},
    "cluster": {
        "local": Entry("vla_rl.build:no_component", "vla_rl.config.cluster:LocalConfig"),
        "ray": Entry("vla_rl.cluster.collector:ray_collector", "vla_rl.config.cluster:RayConfig"),
    },
    "critic": {
        "none": Entry("vla_rl.build:no_component"),
        "privileged": Entry(
            "vla_rl.algorithms.critic:PrivilegedCritic", "vla_rl.config.algorithms:CriticConfig"
        ),
    },
}


def no_component(*_: Any) -> None:
    """No critic: the algorithm uses the policy's own value head, or none. No actor: it trains
    the policy itself."""


def the_engine(_: NoConfig, engine: Any) -> Any:
    """The rollout engine itself as the collector."""
    return engine


def names(group: str) -> list[str]:
    return sorted(REGISTRY[group])


def attribute(path: str) -> Any:
    """Import "module:attribute" ("module:Class.method" too)."""
    module, _, name = path.partition(":")
    module = MOVED.get(module, module)
    if (package := module.partition(".")[0]) in _OUR_PACKAGES:
        _require_ours(package)
    try:
        return operator.attrgetter(name)(importlib.import_module(module))
    except ModuleNotFoundError as error:
        if error.name and module.startswith(error.name):
            raise ConfigError(
                f"'{path}' cannot be imported: there is no module {error.name!r}"
            ) from error
        if error.name in MOVED:
            raise ConfigError(
                f"'{path}' imports {error.name}, which is {MOVED[error.name]} now: change it there"
            ) from error
        raise
    except AttributeError as error:
        raise ConfigError(
            f"'{path}' cannot be imported: {module} has no attribute {name!r}"
        ) from error


@functools.cache
def _require_ours(package: str) -> None:
    """Raise `ConfigError` where a user's module of that name comes first (with ``PYTHONPATH=.``,
    say)."""
    found = importlib.util.find_spec(package)
    ours = Path(__file__).resolve().parent.parent / package / "__init__.py"
    if found is not None and found.origin and Path(found.origin).resolve() != ours:
        theirs = Path(found.origin)
        place = theirs.parent if theirs.name == "__init__.py" else theirs
        raise ConfigError(
            f"{place} hides the package {package!r} of vla-rl ({ours.parent}), which has the same "
            f"name and comes later in sys.path: give yours another name, such as my_{place.name}"
        )


def entry(group: str, name: str) -> Entry:
    # a user's own class; an env's demonstrations come from its method `collect_episode`
    if ":" in name:
        own = f"{name}.Config"
        return (
            EnvEntry(name, own, collect=f"{name}.collect_episode")
            if group == "env"
            else Entry(name, own)
        )
    try:
        return REGISTRY[group][name]
    except KeyError:
        which = " (which env of lerobot's or Gymnasium's is env.id)" if group == "env" else ""
        raise ConfigError(
            f"{group}.type is {name!r}, which does not exist. Choose one of {names(group)}{which}, "
            f"or give your own class as {group}.type=package.module:Class"
        ) from None


def config_class(group: str, name: str) -> type:
    """The dataclass that checks this component's keys."""
    found = entry(group, name)
    if found.config.endswith(".Config"):
        own = view(attribute(found.target), ComponentClass).Config
        if own is None:
            raise ConfigError(
                f"{found.target} needs a class attribute 'Config': the dataclass of its options"
            )
        _refuse_misspelt(group, found.target, own)
        return own
    return attribute(found.config)


def refuse_misspelt(own: type, kind: type, where: str) -> None:
    """Raise `ConfigError` where a user's class misspells what is asked of it (`misspelt`)."""
    if (found := misspelt(own, kind)) is not None:
        raise ConfigError(
            f"{where} has {found[0]!r}, and what is read of it is called {found[1]!r}: rename it. "
            f"If you mean something else by it, declare {found[1]!r} beside it"
        )


def _refuse_misspelt(group: str, target: str, config: type) -> None:
    """Of a user's own class: options and attributes that are near to what the core asks for."""
    if group in OPTIONS:
        refuse_misspelt(config, OPTIONS[group], f"{target}.Config")
    if group in CLASSES:
        refuse_misspelt(attribute(target), CLASSES[group], target)
    if group == "algorithm":
        refuse_misspelt(config, AlgorithmFigures, f"{target}.Config")
    if group == "reward" and isinstance(
        shaping := typing.get_type_hints(config).get("shaping"), type
    ):
        refuse_misspelt(shaping, ShapingOptions, f"{target}.Config.shaping")


def implementation(group: str, name: str) -> Any:
    """The class (or factory) itself."""
    return attribute(entry(group, name).target)


def policy_class(kind: str) -> Any:
    """The class of a checkpoint's policy, which may have another beneath it."""
    groups = [group for group in ("actor", "around") if kind in REGISTRY[group]]
    return implementation(groups[0] if groups else "policy", kind)


def require_fit(algorithm: str, policy: str, actor: str = "none") -> None:
    """Raise `ConfigError` where the algorithm needs of a policy what this one cannot do, or the
    actor on top of it does.

    Users' own classes say so themselves when they are made.
    """
    wants, has, top = entry("algorithm", algorithm), entry("policy", policy), entry("actor", actor)
    if isinstance(top, ActorEntry) and isinstance(has, PolicyEntry) and top.needs not in has.can:
        raise ConfigError(
            f"actor.type={actor} needs a policy with a {top.needs} capability, and "
            f"policy.type={policy} has none: use "
            f"policy.type={' or '.join(policies_that_can(top.needs))}"
        )
    has = has if actor == "none" else top
    if (
        not isinstance(wants, AlgorithmEntry)
        or not isinstance(has, PolicyEntry)
        or wants.needs in has.can
    ):
        return
    actors = {name: row for name, row in REGISTRY["actor"].items() if isinstance(row, ActorEntry)}
    suited = [name for name, row in actors.items() if wants.needs in row.can]
    if actor != "none":
        fits = [
            n
            for n, row in REGISTRY["algorithm"].items()
            if isinstance(row, AlgorithmEntry) and row.needs in has.can
        ]
        remedy = f"actor={' or '.join(suited)}" if suited else "actor=none"
        raise ConfigError(
            f"algorithm.type={algorithm} needs a {wants.needs} capability, and actor.type={actor} "
            f"has none: set {remedy}, or algorithm={' or '.join(fits)}"
        )
    if suited:
        fit = [name for name in suited if actors[name].needs in has.can]
        choice = (
            f"set actor={' or '.join(fit)}, which goes on top of it"
            if fit
            else "use policy=nano, which takes one"
        )
        raise ConfigError(
            f"algorithm.type={algorithm} needs an actor, and policy.type={policy} is none: {choice}"
            f"{', or use policy=small' if wants.needs in ('actor', 'weighted_imitation') else ''}"
        )
    other = [
        name
        for name, row in REGISTRY["algorithm"].items()
        if isinstance(row, AlgorithmEntry) and row.needs in has.can
    ]
    also = f", or algorithm.type={' or '.join(other)}" if other else ""
    raise ConfigError(
        f"algorithm.type={algorithm} needs a policy with a {wants.needs} capability, and "
        f"policy.type={policy} has none: use "
        f"policy.type={' or '.join(policies_that_can(wants.needs))}{also}"
    )


def policies_that_can(capability: str) -> list[str]:
    """Names of this project's."""
    return sorted(
        n
        for n, row in REGISTRY["policy"].items()
        if isinstance(row, PolicyEntry) and capability in row.can
    )


def env_entry(name: str) -> EnvEntry:
    """All that comes with the env ``name``."""
    found = entry("env", name)
    assert isinstance(found, EnvEntry)
    return found


def suites() -> dict[str, str]:
    """What ``--suite`` knows, in alphabetical order, and the env type behind each."""
    return dict(
        sorted((suite, env) for env in REGISTRY["env"] for suite in (env, *env_entry(env).suites))
    )


def suite(name: str) -> tuple[str, list[str]]:
    """The env type behind a ``--suite``, and the overrides that choose it. Raises `ConfigError`
    for an unknown one."""
    known = suites()
    if name not in known:
        raise ConfigError(f"--suite {name} does not exist. Choose one of {', '.join(known)}")
    return known[name], [
        text.format(suite=name)
        for text in env_entry(known[name]).suite_overrides
        if name != known[name]
    ]
