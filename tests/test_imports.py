"""The packages import where only torch, numpy, transformers and timm are installed, and find their own files."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vla_rl import paths
from vla_rl.errors import MissingDependency

SDKS = [
    *("robosuite", "mujoco", "numba", "libero", "lerobot", "ray", "pyrealsense2", "diffusers", "peft", "wandb"),
    *("simplejpeg", "jaxtyping", "beartype", "hydra", "omegaconf", "rich"),
]
PACKAGES = ("vla_rl", "policies", "sim", "real", "reward_models")

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
    return subprocess.run([sys.executable, "-c", _BLOCK + code], capture_output=True, text=True, timeout=240)


def modules_of(package: str) -> list[str]:
    root = Path(importlib.util.find_spec(package).origin).parent
    files = sorted(file for file in root.rglob("*.py") if file.name != "__main__.py")
    return [".".join((package, *f.relative_to(root).with_suffix("").parts)).removesuffix(".__init__") for f in files]


def test_blocker_blocks():
    run = run_without_sdks("import hydra")
    assert run.returncode != 0
    assert "No module named 'hydra'" in run.stderr


def test_data_types_need_torch_and_numpy_only():
    run = run_without_sdks(
        "import vla_rl, vla_rl.types, vla_rl.interfaces, vla_rl.paths, policies, sim, real, reward_models\n"
        "print(*sorted({'transformers', 'timm', 'torch', 'numpy'} & set(sys.modules)))"
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["numpy", "torch"]


def test_core_and_policies_import_without_any_sdk():
    modules = modules_of("vla_rl") + modules_of("policies") + modules_of("reward_models")
    run = run_without_sdks(f"for name in {modules}: print(name, flush=True); importlib.import_module(name)")
    assert run.returncode == 0, f"{run.stdout.split()[-1:]} does not import:\n{run.stderr}"


def test_every_component_imports_without_its_sdk_or_names_the_extra():
    run = run_without_sdks(
        """
from vla_rl import build
from vla_rl.errors import MissingPackage
for group, entries in build.REGISTRY.items():
    for name in entries:
        for resolve in (build.config_class, build.implementation):
            try:
                resolve(group, name)
            except MissingPackage as error:
                assert "pip install 'vla-rl[" in str(error), error
            print(group, name)
"""
    )
    assert run.returncode == 0, run.stderr
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
