"""Set up before any test module imports the code under test: environment, GL backend, run-time
shape checks."""

from __future__ import annotations

import functools
import gc
import hashlib
import importlib
import importlib.util
import os
import random
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# of the processes that tests start, too: what they compute is tiny
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["WANDB_MODE"] = "offline"
os.environ["WANDB_SILENT"] = "true"

import hypothesis
import jaxtyping
import numpy as np
import pytest
import torch
from costs import Costs

# Every call into these modules has its shape annotations checked; it must precede the first import
# of vla_rl.types.
jaxtyping.install_import_hook(
    ["vla_rl.types", "vla_rl.algorithms"], "beartype.beartype"
).__enter__()

torch.set_num_threads(1)
hypothesis.settings.register_profile("vla_rl", deadline=None)  # a busy machine is no failure
hypothesis.settings.load_profile("vla_rl")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Costs())


# Modules whose tests share something that takes seconds to make: they go to one worker.
SHARING = {
    "test_dualarm",
    "test_house",
    "test_libero_demonstrator",
    "test_libero_perturb",
    "test_libero_pro",
    "test_libero_sim",
    "test_quickstart_sim",
    "test_ranks",
    "test_real_console_page",
    "test_reward_models",
    "test_robot_live",
    "test_robot_replay",
    "test_robotwin",
    "test_tabletop",
}
# Modules whose sessions run on the wall clock.
REAL_TIME = {
    "test_own_arm",
    "test_real_body",
    "test_real_cameras",
    "test_real_console",
    "test_real_console_page",
    "test_real_stops",
    "test_robot_learn",
    "test_robot_live",
    "test_robot_operator",
    "test_robot_replay",
    "test_robot_session",
    "test_so101_session",
}
# What needs lerobot, timm or transformers, whose imports take up to ten CPU seconds each, goes to
# one worker.
LIBRARIES = {
    "test_lerobot_policies",
    "test_openvla",
    "test_openvla_checkpoints",
    "test_openvla_runs",
    "test_real_lerobot",
    "test_real_so101",
    "test_so101",
}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A module of which `-m` chooses nothing is not even imported: it takes each worker a tenth of a
    second, or more."""
    marks = config.option.markexpr
    # (only what "and" joins is read here)
    if re.search(r"\bor\b|\(", marks) or not collection_path.match("test_*.py"):
        return None
    text, in_time = collection_path.read_text(encoding="utf-8"), collection_path.stem in REAL_TIME
    if "not real_time" in marks:
        unwanted = in_time
    else:
        unwanted = "real_time" in marks and not in_time and "mark.real_time" not in text
    if re.search(r"(?<!not )\bslow\b", marks):
        unwanted = unwanted or not ("slow" in text or "ray_here" in text)
    return True if unwanted else None


@pytest.hookimpl(wrapper=True)  # marks before `-m` chooses, names after xdist's own hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Which tests share a worker, and which are in real time. A session of Ray is slow, and there
    is one."""
    mark(items)
    yield
    name_groups(items)


def name_groups(items: list[pytest.Item]) -> None:
    """xdist 3.8 names a test's group, by which it is sent to a worker, where pytest 9.2 does not
    read a test's name any more (pytest-xdist #1386): without this nothing is grouped."""
    for item in items:
        if (named := vars(item).get("_nodeid")) is not None:
            item._id = type(item._id).parse(named)


def mark(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.stem in SHARING:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
        if item.path.stem in REAL_TIME:
            item.add_marker(pytest.mark.real_time)
        if item.get_closest_marker("real_time") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(900))  # a busy machine may begin it anew
        if item.path.stem in LIBRARIES or "paper_arm" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("libraries"))
        if "ray_here" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.xdist_group("ray"))


@functools.cache
def _real_sim_problem() -> str | None:
    """Why the real simulation cannot run here, or None. Fixes the GL backend for this process on
    the way."""
    from sim.gl import ensure_backend
    from vla_rl.errors import MissingDependency

    for package in ("mujoco", "robosuite"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed"
    try:
        ensure_backend()
    except MissingDependency as error:
        return str(error)
    return None


_real_sim_problem()  # before a test module imports mujoco, which reads MUJOCO_GL once


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if item.get_closest_marker("real_sim") and (problem := _real_sim_problem()):
        pytest.skip(f"needs the real simulation: {problem}")


@pytest.fixture(autouse=True)
def seed() -> int:
    """The same random state at the start of every test, whatever ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    return 0


@pytest.fixture(scope="session")
def script() -> Callable[[str], ModuleType]:
    """``script(name)`` is scripts/NAME.py as a module, read anew each time."""

    def read(name: str) -> ModuleType:
        path = Path(__file__).resolve().parent.parent / "scripts" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return read


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``finished_run(*overrides)`` is the folder of a run of that config, which the first worker
    that asks makes for all.

    Each worker has a copy of its own, which all of its tests share: who writes into it copies it
    once more.
    """
    from filelock import FileLock

    from vla_rl.config import compose
    from vla_rl.run.pipeline import run_pipeline

    mine = tmp_path_factory.mktemp("runs")
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    copies: dict[str, Path] = {}

    def folder_of(*overrides: str) -> Path:
        key = hashlib.sha256("\n".join(overrides).encode()).hexdigest()[:16]
        if key not in copies:
            place = shared / "finished_runs" / key
            place.mkdir(parents=True, exist_ok=True)
            with FileLock(place / "lock"):
                if not (place / "made").exists():
                    run = run_pipeline(compose([*overrides, f"output_dir={place}"]))
                    (place / "made").write_text(str(run.relative_to(place)))
                name = (place / "made").read_text()
                copies[key] = Path(shutil.copytree(place / name, mine / key / name))
        return copies[key]

    return folder_of


@pytest.fixture
def paper_arm(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """tests/paper_arm.py, whose robot lerobot makes whatever it is asked for; lerobot's import
    takes seconds."""
    pytest.importorskip("lerobot")
    module = importlib.import_module("paper_arm")
    monkeypatch.setattr("lerobot.robots.utils.make_device_from_device_class", module.PaperArm)
    return module


@pytest.fixture(scope="session")
def ray_here():
    """The one Ray of a test session, started by the first test that asks for it; runs with
    ``cluster=ray`` join it."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("needs ray")
    # by itself Ray gives up on its own processes after half a minute; a busy machine needs more
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "240")
    os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "240")
    from vla_rl.cluster.session import ray_session
    from vla_rl.config.cluster import RayConfig

    with ray_session(RayConfig(object_store_mib=100)) as ray:
        yield ray
        with warnings.catch_warnings():
            # Ray forgets the processes that it has ended
            warnings.simplefilter("ignore", ResourceWarning)
            ray.shutdown()
            gc.collect()
