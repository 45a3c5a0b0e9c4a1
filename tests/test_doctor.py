"""The doctor: findings name what is wrong and how to fix it, and nothing it tries can hang,
crash or ask."""

from __future__ import annotations

import builtins
import importlib.util
import math
import sys
from pathlib import Path

import pytest

from sim.libero import fidelity
from vla_rl import devices
from vla_rl.data.direct import cacheable_bytes
from vla_rl.doctor import machine as module
from vla_rl.doctor.machine import FAIL, MISSING, OK, Check, check_gl, exit_status, render, run_child

LEROBOT = "<0.7,>=0.6.1" if sys.version_info >= (3, 12) else "<0.5,>=0.4.4"


@pytest.fixture(scope="module")
def checks():
    return module.doctor()


def test_finds_this_machine(checks):
    by_name = {c.name: c for c in checks}
    assert by_name["python"].status == OK and by_name["torch"].status == OK
    assert {
        "gpu",
        "gl",
        "gl:egl",
        "gl:osmesa",
        "gl:glfw",
        "robosuite",
        "libero",
        "lerobot",
        "ray",
        "realsense",
        "disk",
    } <= set(by_name)
    assert all(c.fix for c in checks if c.status == FAIL)
    gl = [by_name[f"gl:{b}"].status for b in module.GL_BACKENDS]
    assert exit_status(checks) == int(
        OK not in gl or by_name["robosuite"].status != OK or by_name["gl"].status != OK
    )
    text = render(checks)
    assert all(c.name in text and c.detail in text for c in checks)


def test_exit_status_follows_the_core():
    good = [Check(name, OK, "", core=True) for name in module.CORE]
    assert exit_status([*good, Check("ray", MISSING, "", "pip install x")]) == 0
    assert "vla-rl quickstart" in render(good)
    for i in range(len(good)):
        bad = [*good[:i], Check(good[i].name, FAIL, "broken", "repair it"), *good[i + 1 :]]
        assert exit_status(bad) == 1
        assert f"cannot run yet: {good[i].name} is not in order" in render(
            bad
        ) and "→ repair it" in render(bad)
    assert exit_status(good[1:]) == 1


def test_nothing_optional_installed(monkeypatch):
    real = importlib.util.find_spec

    def find_spec(name, *args):
        return real(name, *args) if name in ("torch", "numpy") else None

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    monkeypatch.setattr(module, "_version", lambda distribution: None)
    checks = {c.name: c for c in module.doctor(timeout_s=20)}
    assert checks["robosuite"].status == FAIL and "[sim]'" in checks["robosuite"].fix
    assert checks["gl:egl"].status == MISSING and checks["gl"].status == FAIL
    for name, extra in (
        ("lerobot", "lerobot"),
        ("ray", "ray"),
        ("libero", "libero"),
        ("realsense", "real"),
    ):
        assert checks[name].status == MISSING and f"[{extra}]'" in checks[name].fix
    assert exit_status(list(checks.values())) == 1


@pytest.mark.parametrize(
    ("package", "version", "finding", "said", "fix"),
    [
        ("lerobot", "0.5.1", "lerobot", f"lerobot 0.5.1 is outside of {LEROBOT}", "[lerobot]'"),
        ("lerobot", "0.4.3", "libero", "lerobot 0.4.3 is outside of", "[lerobot]'"),
        ("ray", "2.9.0", "ray", "ray 2.9.0 is outside of >=2.60", "[ray]'"),
        ("torch", "2.5.1", "torch", "torch 2.5.1 is outside of >=2.6", "pip install 'torch>=2.6'"),
        (
            "numpy",
            "1.25.2",
            "packages",
            "numpy 1.25.2 is outside of >=1.26",
            "pip install 'numpy>=1.26'",
        ),
        ("mujoco", "3.1.6", "robosuite", "mujoco 3.1.6 is outside of >=3.2", "[sim]'"),
        ("pyarrow", None, "packages", "not installed: pyarrow", "pip install 'pyarrow>=16'"),
    ],
)
def test_a_version_that_vla_rl_is_not_made_for_gets_no_tick(
    monkeypatch, package, version, finding, said, fix
):
    if package not in module._wanted():
        pytest.skip("vla-rl is not installed as a package here")
    real = module._version
    monkeypatch.setattr(module, "_version", lambda name: version if name == package else real(name))
    if finding == "packages":
        check = module.check_packages()
    else:
        check = module.in_range(
            Check(finding, OK, "fine"), module._STANDS_ON.get(finding, (finding,))
        )
    assert check.status == FAIL and said in check.detail and check.fix.endswith(fix)


def test_versions_that_fit_change_nothing(monkeypatch):
    """A build for a GPU, a nightly one, and what is not installed are no fault."""
    good = Check("torch", OK, "fine")
    for version in ("2.10.0+cu128", "2.11.0.dev20260101+cu130", None):
        monkeypatch.setattr(module, "_version", lambda name, version=version: version)
        assert module.in_range(good, ("torch",)) is good
    monkeypatch.setattr(module, "_version", lambda name: "0.1")
    assert module.in_range(Check("gl", FAIL, "broken"), ("torch",)).detail == "broken"
    assert module.in_range(good, ("no-such-package",)) is good


def test_gl_choice(monkeypatch):
    backends = [Check("gl:egl", FAIL, "no"), Check("gl:osmesa", OK, "5 ms")]
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    assert check_gl(backends).status == OK and "osmesa" in check_gl(backends).detail
    monkeypatch.setenv("MUJOCO_GL", "egl")
    wrong = check_gl(backends)
    assert wrong.status == FAIL and wrong.fix == "export MUJOCO_GL=osmesa"
    none = check_gl(backends[:1])
    assert none.status == FAIL and "libegl1" in none.fix and "libosmesa6" in none.fix


def test_a_broken_gl_library_is_reported(monkeypatch):
    monkeypatch.setattr(module, "run_child", lambda *args: (None, "crashed with signal 11"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    check = module.check_gl_backend("egl")
    assert check.status == FAIL and "signal 11" in check.detail and "apt-get install" in check.fix
    monkeypatch.setattr(module, "run_child", lambda *args: ({"ms": 1.0, "spread": 0}, ""))
    assert "empty picture" in module.check_gl_backend("egl").detail


def test_a_gl_library_that_is_not_there_is_no_fault(monkeypatch):
    """Nothing is started for it."""
    monkeypatch.setattr(module, "run_child", lambda *args: pytest.fail("a child was started"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(module, "find_library", lambda name: None)
    check = module.check_gl_backend("osmesa")
    assert check.status == MISSING and check.detail == "libOSMesa is not installed"
    assert "libosmesa6" in check.fix and "egl" in check.fix


@pytest.mark.parametrize(
    "code, found",
    [
        ("print('noise'); print('{\"a\": 1}')", {"a": 1}),
        ("import os; os.kill(os.getpid(), 11)", "crashed with signal 11"),
        ("raise ImportError('no libEGL.so')", "ImportError: no libEGL.so"),
        ("import sys; sys.exit(3)", "ended with status 3"),
        ("import time; time.sleep(60)", "no answer within 1 s"),
        ("input('where? ')", "EOFError"),
    ],
)
def test_children_cannot_hurt(code, found):
    result, error = run_child(code, 1.0 if "sleep" in code else 30.0)
    assert result == found if isinstance(found, dict) else found in error


def test_libero_never_asks(monkeypatch, tmp_path):
    """LIBERO's first import asks on standard input; the check looks at its files only."""
    package = tmp_path / "libero"
    (package / "libero" / "bddl_files" / "suite").mkdir(parents=True)
    (package / "libero" / "bddl_files" / "suite" / "a.bddl").touch()
    for folder in (package, package / "libero"):
        (folder / "__init__.py").write_text("input('where to? ')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "libero", raising=False)
    monkeypatch.setattr(builtins, "input", lambda *args: pytest.fail("it asked"))
    versions = {"mujoco": "3.3.2", "robosuite": "1.4.0"}
    monkeypatch.setattr(fidelity, "version_of", lambda name, python="": versions.get(name, "0.1.4"))
    monkeypatch.setattr(fidelity.assets, "packaged", lambda: None)
    monkeypatch.setenv("LIBERO_CONFIG_PATH", str(tmp_path / "config"))
    monkeypatch.setenv("HOME", str(tmp_path))
    missing = module.check_env("libero")
    assert (
        missing.status == FAIL
        and "assets" in missing.detail
        and missing.fix == "vla-rl libero assets"
    )
    (tmp_path / "elsewhere" / "scenes").mkdir(parents=True)
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.yaml").write_text(f"assets: {tmp_path / 'elsewhere'}\n")
    found = module.check_env("libero")
    assert found.status == OK and "1 task files" in found.detail and "libero" not in sys.modules
    assert (
        "MuJoCo 3.3.2, own assets (" in found.detail
        and "not comparable with published ones" in found.detail
    )
    monkeypatch.setattr(
        fidelity, "version_of", lambda name, python="": "3.8.1" if name == "mujoco" else "1.4.0"
    )
    newer = module.check_env("libero")
    assert (
        newer.status == FAIL
        and "with MuJoCo 3.8.1" in newer.detail
        and "pip install 'mujoco>=3.2,<3.3.3'" in newer.fix
    )


def test_memory_and_disk(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "free_memory_bytes", lambda: 2 * 2**30)
    assert module.check_memory(6.0).status == FAIL and "slots" in module.check_memory(6.0).fix
    assert module.check_memory(1.0).status == OK
    assert module.check_disk(tmp_path, 0.0).status == OK
    assert module.check_disk(Path(tmp_path), 1e9).status == FAIL


def test_free_memory_is_read_in_one_place(monkeypatch, tmp_path):
    file = tmp_path / "meminfo"
    monkeypatch.setattr(devices, "_MEMINFO", file)
    assert devices.free_memory_bytes() == 0 and cacheable_bytes() == math.inf, "no Linux"
    for text, free in (
        ("MemTotal: 900 kB\nMemFree: 10 kB\nMemAvailable:     300 kB\n", 300 * 1024),
        ("MemTotal: 900 kB\n", 0),
        ("MemAvailable:\n", 0),
        ("MemAvailable: x kB\n", 0),
        ("", 0),
        ("nothing\n", 0),
    ):
        file.write_text(text)
        assert devices.free_memory_bytes() == free
        assert cacheable_bytes() == (free / 2 if free else math.inf)


@pytest.mark.parametrize(
    "job, outer, free",
    [
        (("max", 5, 0), ("900", 100, 0), 800),
        (("700", 600, 40), ("900", 700, 100), 140),
        (("500", 600, 0), ("900", 700, 0), 1),  # not "unknown"
        (("max", 5, 0), ("max", 5, 0), 300 * 1024),
        (("half", 5, 0), ("900", 800, 0), 100),
    ],
)
def test_a_containers_limit_is_a_limit_of_memory(monkeypatch, tmp_path, job, outer, free):
    """Of a job's own group or of one around it; caches that can be dropped are free."""
    (tmp_path / "meminfo").write_text("MemAvailable: 300 kB\n")
    (tmp_path / "own").write_text("4:memory:/elsewhere\n0::/slurm/job_1\n")
    monkeypatch.setattr(devices, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(devices, "_OWN_GROUP", tmp_path / "own")
    monkeypatch.setattr(devices, "_GROUPS", tmp_path / "groups")
    for folder, (limit, used, cached) in (("slurm/job_1", job), ("slurm", outer)):
        place = tmp_path / "groups" / folder
        place.mkdir(parents=True, exist_ok=True)
        (place / "memory.max").write_text(f"{limit}\n")
        (place / "memory.current").write_text(f"{used}\n")
        (place / "memory.stat").write_text(f"anon 7\ninactive_file {cached}\n")
    assert devices.free_memory_bytes() == free
