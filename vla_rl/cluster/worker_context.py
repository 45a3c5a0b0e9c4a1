"""What an actor of Ray needs of the driver: the run's config, its folder, its modules; and what
it says of itself."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from vla_rl import config as configs
from vla_rl.assembly.context import Run
from vla_rl.assembly.learner_main import Described
from vla_rl.cluster.session import cause_of
from vla_rl.config import RunConfig
from vla_rl.errors import UserError
from vla_rl.interfaces import Env
from vla_rl.monitoring.progress import Progress
from vla_rl.types import EmbodimentSpec, TaskSpec

_PACKAGES = ("vla_rl", "sim", "policies", "reward_models", "real")


@dataclass(frozen=True)
class WorkerContext:
    """``config`` as `vla_rl.config.to_tree`; paths in it are relative to ``folder``, which every
    node must see. ``paths`` are where the driver finds modules, such as the run's own env.
    ``threads`` are torch's."""

    config: dict[str, Any]
    folder: str
    paths: tuple[str, ...]
    threads: int

    @classmethod
    def of(cls, config: RunConfig, sharers: int, threads: int = 0) -> WorkerContext:
        """The driver's own, for each of ``sharers`` processes; ``threads`` 0: its part of the
        driver's."""
        tree = configs.to_tree(config)
        tree["cluster"] = {"type": "local"}
        share = threads or max(1, torch.get_num_threads() // sharers)
        return cls(tree, os.getcwd(), tuple(path for path in sys.path if path), share)

    def enter(
        self,
        embodiment: Mapping[str, Any] | None = None,
        tasks: tuple[TaskSpec, ...] = (),
        privileged_dim: int = 0,
    ) -> Run:
        """Be there; the run as one process alone would have it, with nothing opened. ``embodiment``
        (`EmbodimentSpec.to_dict`) and ``tasks`` stand in for the env of a process that opens
        none."""
        os.chdir(self.folder)
        sys.path += [path for path in self.paths if path not in sys.path]
        torch.set_num_threads(self.threads)
        run = Run(configs.from_tree(self.config), cast(Any, None), Progress(), {})
        if embodiment is not None:
            run.env = cast(
                Env, Described(EmbodimentSpec.from_dict(embodiment), tasks, privileged_dim)
            )
        return run


def heard(ray: Any, call: Any, timeout: float | None = None) -> Any:
    """What a call of an actor returns. Raises `UserError`s as `session.cause_of`, all else as Ray
    does."""
    try:
        return ray.get(call, timeout=timeout)
    except ray.exceptions.RayError as error:
        cause_of(ray, error)
        raise error from None


def hello() -> dict[str, Any]:
    """Where this process runs and with what."""
    import ray

    node = ray.get_runtime_context().get_node_id() if ray.is_initialized() else ""
    return {"pid": os.getpid(), "host": platform.node(), "node": node, "versions": versions()}


def require_same_code(hello: Mapping[str, Any]) -> None:
    """Raise `UserError` where the process that says ``hello`` is made of other code than this
    one."""
    own = versions()
    for name in own:
        if hello["versions"].get(name) != own[name]:
            raise UserError(
                f"the node {hello['host']} has another {name} than this machine: "
                f"{hello['versions'].get(name)} there, {own[name]} here. Install the same versions "
                "on all nodes, and start Ray there again"
            )


@functools.cache
def versions() -> dict[str, str]:
    """What must be alike on all nodes: packages, and the code of this project itself."""
    found = {"python": ".".join(platform.python_version_tuple()[:2])}
    found |= {
        name: importlib.metadata.version(name) for name in ("ray", "torch", "numpy", "safetensors")
    }
    return found | {"vla-rl": _fingerprint()}


def _fingerprint() -> str:
    """A hash of this project's code as it is imported here."""
    digest = hashlib.sha256()
    for package in _PACKAGES:
        spec = importlib.util.find_spec(package)
        for root in (spec.submodule_search_locations or ()) if spec is not None else ():
            for path in sorted(Path(root).rglob("*.py")):
                digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()[:12]
