"""The packages import where only torch, numpy, transformers and timm are installed, and find
their own files."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vla_rl import build, paths
from vla_rl.config.algorithms import PPOConfig
from vla_rl.errors import ConfigError, MissingDependency
from vla_rl.moved import MOVED

SDKS = [
    *(
        "robosuite",
        "mujoco",
        "numba",
        "sapien",
        "libero",
        "lerobot",
        "ray",
        "pyrealsense2",
        "diffusers",
        "peft",
        "wandb",
    ),
    *("tensorboard", "rerun", "simplejpeg", "jaxtyping", "beartype", "hydra", "omegaconf", "rich"),
]
PACKAGES = ("vla_rl", "policies", "sim", "real", "reward_models", "benchmarks")

# Every finder answers for an SDK as if it were not installed.
_BLOCK = f"""
import importlib, sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)  # importlib.metadata asks finders as well

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in {SDKS} else self.finder.find_spec(name, path, target)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
"""


def run_without_sdks(code: str) -> subprocess.CompletedProcess:
    """Run ``code`` in a fresh interpreter that cannot import any of `SDKS`."""
    return subprocess.run(
        [sys.executable, "-c", _BLOCK + code], capture_output=True, text=True, timeout=240
    )


def modules_of(package: str) -> list[str]:
    root = Path(importlib.util.find_spec(package).origin).parent
    files = sorted(file for file in root.rglob("*.py") if file.name != "__main__.py")
    return [
        ".".join((package, *f.relative_to(root).with_suffix("").parts)).removesuffix(".__init__")
        for f in files
    ]


def test_blocker_blocks():
    run = run_without_sdks("import hydra")
    assert run.returncode != 0
    assert "No module named 'hydra'" in run.stderr


def test_data_types_need_torch_and_numpy_only():
    run = run_without_sdks(
        "import vla_rl, vla_rl.types, vla_rl.interfaces, vla_rl.paths, policies, sim, real, "
        "reward_models\nprint(*sorted({'transformers', 'timm', 'torch', 'numpy'} & "
        "set(sys.modules)))"
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["numpy", "torch"]


def test_help_and_mistakes_in_a_command_import_nothing_heavy(tmp_path):
    """So that they are answered at once: neither parsing and composing nor any component's
    options nor `preflight` do."""
    commands = [
        ["--help"],
        ["train", "--help"],
        ["eval", "--help"],
        ["train", "sede=1"],
        ["quickstart", "rl.iterations=-1"],
        ["train", "run=openvla_oft_libero_grpo", "policy.chunk_length=0"],
        ["train", "run=flow_quickstart", "reward=pairwise", "reward.done_weight=2"],
        ["train", "run=toy", "phases=[rl]", f"output_dir={tmp_path}"],
        ["train", "run=toy", "device=gpu"],
        ["train", "run=toy", "checkpoint=no/such/place"],
        ["eval", "no/such/place", "--suite", "toy"],
        ["distill", "no/such/place"],
        ["reward", "score", "no/such/place", "reward=process", "reward.updates=0"],
    ]
    code = f"""
import sys
from vla_rl import build
from vla_rl.cli import main

heavy = {{"torch", "torchvision", "transformers", "timm", "wandb", "lerobot", "mujoco", "robosuite", "pyarrow", "av"}}
for group, entries in build.REGISTRY.items():
    for name in entries:
        build.config_class(group, name)
for arguments in {commands!r}:
    try:
        status = main(arguments)
    except SystemExit as ended:
        status = ended.code
    print("RESULT", status, *sorted(heavy & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    found = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert found == [["0" if "--help" in arguments else "2"] for arguments in commands], done.stderr


def test_the_parser_needs_no_numpy():
    code = "import sys; from vla_rl import cli; cli._parser(); print('numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.stdout == "False\n", done.stderr


@pytest.mark.slow
def test_all_imports_without_its_sdk_or_names_the_extra():
    """Core, policies and reward models import whole; any component does, or says what is to be
    installed."""
    modules = modules_of("vla_rl") + modules_of("policies") + modules_of("reward_models")
    run = run_without_sdks(
        f"for name in {modules}: print(name, flush=True); importlib.import_module(name)\n"
        """
from vla_rl import build
from vla_rl.errors import MissingPackage
for group, entries in build.REGISTRY.items():
    for name in entries:
        for resolve in (build.config_class, build.implementation):
            try:
                resolve(group, name)
            except MissingPackage as error:
                assert "Install it with: pip install -e '" in str(error), error
            print(group, name)
"""
    )
    assert run.returncode == 0, f"{run.stdout.splitlines()[-1:]} does not import:\n{run.stderr}"
    assert "env toy" in run.stdout.splitlines()


def test_config_dir_of_a_checkout():
    place = paths.config_dir()
    assert (place / "config.yaml").is_file()
    assert os.path.samefile(place, Path(__file__).parent.parent / "configs")


def test_config_dir_prefers_the_folder_inside_the_package(tmp_path, monkeypatch):
    (tmp_path / "vla_rl" / "configs").mkdir(parents=True)
    (tmp_path / "vla_rl" / "configs" / "config.yaml").touch()
    monkeypatch.setattr(paths, "__file__", str(tmp_path / "vla_rl" / "paths.py"))
    assert paths.config_dir() == tmp_path.resolve() / "vla_rl" / "configs"


def test_config_dir_missing_names_both_places(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "__file__", str(tmp_path / "vla_rl" / "paths.py"))
    with pytest.raises(MissingDependency, match=r"neither in .*vla_rl/configs nor in .*Install"):
        paths.config_dir()


@pytest.mark.parametrize("name", ["sim.py", "policies.py", "reward_models/__init__.py", "real.py"])
def test_a_module_of_ones_own_that_hides_one_of_ours_is_named(tmp_path, name):
    """``PYTHONPATH=.`` puts a user's folder first."""
    own = tmp_path / name
    own.parent.mkdir(exist_ok=True)
    own.write_text("raise SystemExit('it is not even imported')\n")
    package = name.removesuffix(".py").partition("/")[0]
    code = f"""
from vla_rl import build
from vla_rl.errors import ConfigError
targets = {{"sim": "sim.toy:ToyConfig", "policies": "policies.settings:SmallConfig"}}
try:
    build.attribute(targets.get({package!r}, "{package}.anything:At.all"))
except ConfigError as error:
    print(error)
"""
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parent.parent)])
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path},
    )
    place = own.parent if own.name == "__init__.py" else own
    assert done.stdout.startswith(f"{place} hides the package '{package}' of vla-rl"), (
        done.stdout + done.stderr
    )
    assert f"such as my_{place.name}" in done.stdout


def test_a_module_by_its_older_place_is_found_and_an_import_of_it_names_the_new_one(
    tmp_path, monkeypatch
):
    """Strings that name a moved module go on working; what a user's own file imports there
    cannot, and says where it is."""
    for old, new in MOVED.items():
        assert importlib.util.find_spec(new) is not None
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(old)
    assert build.attribute("vla_rl.algorithms.settings:PPOConfig") is PPOConfig
    (tmp_path / "my_algorithm.py").write_text("from vla_rl.algorithms.settings import PPOConfig\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        ConfigError,
        match=r"my_algorithm:Mine' imports vla_rl.algorithms.settings, which is vla_rl.config",
    ):
        build.attribute("my_algorithm:Mine")


@pytest.mark.slow
def test_a_training_imports_no_library_of_models():
    """timm and transformers take seconds, and timm takes wandb along; only policies and rewards
    that use them pay."""
    code = """
import sys, tempfile
from vla_rl.config import compose
from vla_rl.run.pipeline import run_pipeline
with tempfile.TemporaryDirectory() as folder:
    run_pipeline(compose([
        "run=toy", "collect.episodes_per_task=2", "sft.validation_episodes=1", "sft.updates=2", "rl.iterations=1",
        "rl.episodes_per_iteration=4", "evaluate.episodes_per_task=2", "evaluate.video_episodes=1", f"output_dir={folder}",
    ]))
import policies.denoising.policy, policies.small, policies.actors.residual
print("RESULT", *sorted({"timm", "transformers", "wandb", "lerobot", "torchvision", "diffusers"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "RESULT"
