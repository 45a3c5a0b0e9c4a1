"""What a run needs of this machine: packages, OpenGL, cores. Checked before the first phase and
before torch is imported."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vla_rl import build
from vla_rl.config import RunConfig
from vla_rl.errors import ConfigError, require_packages
from vla_rl.monitoring.machine import available_cores
from vla_rl.monitoring.sinks import require_sinks
from vla_rl.options import methods

_WORKERS_PER_CORE, _MANY_WORKERS = 8, 64


def check_workers(config: RunConfig) -> None:
    """Raise `UserError` for more simulator processes than make sense here, or for a Python of
    theirs that does not run."""
    most = max(_MANY_WORKERS, _WORKERS_PER_CORE * available_cores())
    if config.slots.workers > most:
        raise ConfigError(
            f"slots.workers={config.slots.workers} starts that many simulator processes on "
            f"{available_cores()} cores: at most {most} are allowed here, and as many as there are "
            "cores are enough"
        )
    if config.slots.python:
        build.attribute("sim.interpreter:check_python")(config.slots.python)


def check_machine(config: RunConfig, parts: Iterable[Any]) -> None:
    """Raise `UserError` where OpenGL is missing, or a package that some phase will import.
    ``parts``: the configs of what the run uses besides its env."""
    require_sinks(config.wandb, config.tensorboard)
    if methods(config.env).check_machine is not None:
        build.attribute("sim.calls:check_machine")(config.env, config.slots.python)
    for part in parts:
        if (check := methods(part).check_machine) is not None:
            check()
    for dataset in config.datasets:
        if next(Path(dataset).rglob("*.hdf5"), None):
            require_packages("h5py", extra="libero", purpose=f"dataset={dataset}, which is HDF5,")
