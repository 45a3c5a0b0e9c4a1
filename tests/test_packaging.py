"""What a stranger installs: the extras that messages name, and the wheel in an environment of
its own."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from vla_rl import errors
from vla_rl.checks import preflight
from vla_rl.config import compose
from vla_rl.errors import MissingPackage, install_command, require_packages

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("vla_rl", "sim", "real", "policies", "reward_models", "benchmarks")
FILES = sorted(p for package in PACKAGES for p in (ROOT / package).rglob("*.py"))


def extras() -> dict[str, str]:
    """{extra: its line in pyproject.toml}, read without tomllib, which Python 3.10 lacks."""
    table = (
        (ROOT / "pyproject.toml")
        .read_text()
        .partition("[project.optional-dependencies]")[2]
        .partition("\n[")[0]
    )
    return {m[1]: m[2] for m in re.finditer(r"^(\w+) = \[(.*?)\]$", table, re.M | re.S)}


def test_every_extra_that_a_message_names_exists_and_has_packages():
    known, named = extras(), set()
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                place = {"MissingPackage": 1, "install_command": 0, "check_package": 1}.get(
                    node.func.id
                )
                given = [k.value for k in node.keywords if k.arg == "extra"]
                if node.func.id == "require_packages" or place is not None:
                    given += node.args[place : place + 1] if place is not None else []
                    named |= {value.value for value in given if isinstance(value, ast.Constant)}
    assert named >= {"sim", "ray", "tensorboard", "peft", "dualarm", "openvla", "lerobot", "libero"}
    assert not {name for name in named if not known.get(name)}


def test_a_checkout_is_installed_again_with_the_extra():
    assert install_command("ray", "ray") == f"pip install -e '{ROOT}[ray]'"
    assert str(MissingPackage("ray", "ray", "cluster=ray")).endswith(
        f"Install it with: pip install -e '{ROOT}[ray]'"
    )


def test_from_a_wheel_the_packages_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(
        errors, "__file__", str(tmp_path / "site-packages" / "vla_rl" / "errors.py")
    )
    requires = [
        "torch>=2.6",
        "ray>=2.60; extra == 'ray'",
        "odd>1; sys_platform == 'never' and extra == 'ray'",
    ]
    monkeypatch.setattr(metadata, "requires", lambda name: requires)
    assert install_command("ray", "ray") == "pip install 'ray>=2.60'"
    # an extra of a user's own distribution
    assert install_command("moon", "rocket") == "pip install rocket"


def missing(monkeypatch, *packages: str) -> None:
    real = errors.importlib.util.find_spec
    monkeypatch.setattr(
        errors.importlib.util,
        "find_spec",
        lambda name, *a: None if name in packages else real(name, *a),
    )


@pytest.mark.parametrize(
    ("package", "overrides", "says"),
    [
        (
            "diffusers",
            ["policy=nano_diffusion"],
            "policy.sampler=ddim needs the package 'diffusers'",
        ),
        (
            "peft",
            ["policy=openvla_oft", "policy.lora_rank=8"],
            "policy.lora_rank=8) needs the package 'peft'",
        ),
        (
            "simplejpeg",
            ["policy=openvla_oft", "policy.lora_rank=0"],
            "needs the package 'simplejpeg'",
        ),
        ("lerobot", ["policy=lerobot"], "needs the package 'lerobot'"),
        ("num2words", ["policy=lerobot", "policy.family=smolvla"], "needs the package 'num2words'"),
        ("tensorboard", ["tensorboard=true"], "tensorboard=true needs the package 'tensorboard'"),
        ("ray", ["cluster=ray"], "cluster=ray needs the package 'ray'"),
    ],
)
def test_what_a_later_phase_imports_is_missed_before_the_first(
    tmp_path, monkeypatch, package, overrides, says
):
    missing(monkeypatch, package)
    with pytest.raises(MissingPackage, match=re.escape(says)):
        preflight.check(
            compose(
                [
                    "run=toy",
                    "critic=none",
                    "algorithm=filtered_bc",
                    *overrides,
                    f"output_dir={tmp_path}",
                ]
            )
        )
    assert not list(tmp_path.iterdir())


def test_packages_of_phases_that_do_not_run_are_not_asked_for(tmp_path, monkeypatch):
    missing(monkeypatch, "diffusers")
    preflight.check(
        compose(["run=toy", "policy=nano_diffusion", "phases=[collect]", f"output_dir={tmp_path}"])
    )


def test_hdf5_demonstrations_need_h5py(tmp_path, monkeypatch):
    missing(monkeypatch, "h5py")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "one.hdf5").touch()
    with pytest.raises(MissingPackage, match="which is HDF5, needs the package 'h5py'"):
        preflight.check(
            compose(
                [
                    "run=toy",
                    "phases=[sft]",
                    f"dataset={tmp_path}/data",
                    f"output_dir={tmp_path}/out",
                ]
            )
        )


def test_require_packages_survives_a_broken_parent():
    with pytest.raises(MissingPackage, match=r"'nowhere\.at\.all'"):
        require_packages("nowhere.at.all", extra="ray", purpose="a test")


# ---------------------------------------------------------------------------------------- the wheel
def run(*command: str | Path, cwd: Path, **options) -> subprocess.CompletedProcess:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1200,
        **options,
    )


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> Path:
    """The folder of an environment that holds the wheel and its core dependencies, and nothing
    else."""
    folder, python = tmp_path_factory.mktemp("bare"), Path(sys.executable)
    source = folder / "source"  # the build writes beside what it builds
    ignored = ("*.egg-info", "__pycache__", "build", "outputs", ".*")
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*ignored), symlinks=True)
    made = run(
        python,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        folder,
        source,
        cwd=folder,
    )
    assert made.returncode == 0, made.stderr
    uv = [python, "-m", "uv"]
    assert (
        run(*uv, "venv", "--quiet", "--python", python, folder / "venv", cwd=folder).returncode == 0
    )
    install = [
        *uv,
        "pip",
        "install",
        "--quiet",
        "--python",
        folder / "venv",
        "-c",
        ROOT / "constraints.txt",
    ]
    wheel = next(folder.glob("*.whl"))
    # uv's cache has all of it where `make setup` made this
    done = run(*install, "--offline", wheel, cwd=folder)
    if done.returncode:
        done = run(*install, wheel, cwd=folder)
    if done.returncode and re.search(
        r"[Ff]ailed to fetch|error sending request|dns error", done.stderr
    ):
        pytest.skip(
            "the wheel's dependencies are neither in uv's cache nor to be fetched: "
            f"{done.stderr[:200]}"
        )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_bare_wheel_trains_away_from_the_checkout(bare, tmp_path):
    command = bare / "venv" / "bin" / "vla-rl"
    small = ["collect.episodes_per_task=20", "sft.updates=10", "rl.iterations=2"]
    small += ["rl.episodes_per_iteration=16", "evaluate.episodes_per_task=10", "threads=1"]
    done = run(command, "train", "run=toy", *small, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "outputs" / "toy"
    assert (folder / "report.html").is_file() and (folder / "checkpoints" / "rl").is_dir()
    assert list((folder / "videos").glob("*.mp4"))
    where = run(
        bare / "venv" / "bin" / "python",
        "-c",
        "import vla_rl; print(vla_rl.__file__)",
        cwd=tmp_path,
    )
    assert str(bare / "venv") in where.stdout


@pytest.mark.slow
def test_the_bare_wheel_names_what_is_missing_before_anything_runs(bare, tmp_path):
    command = bare / "venv" / "bin" / "vla-rl"
    for overrides, packages in (
        (["run=quickstart"], "robosuite"),
        (["run=toy", "policy=nano_diffusion"], "diffusers"),
    ):
        done = run(command, "train", *overrides, cwd=tmp_path)
        assert done.returncode == 2 and not list(tmp_path.iterdir()), done.stderr
        told = re.search(r"Install it with: (pip install .*)", done.stderr)
        assert told and packages in told[1] and "vla-rl" not in told[1]
