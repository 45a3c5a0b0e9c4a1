"""Whether figures measured here are those of the published benchmark: MuJoCo's version, the assets,
look and control.

LIBERO's scenes were made under MuJoCo 3.2 and 3.3.0 to 3.3.2, where states and pictures agree.
3.3.3 darkens floors (four fifths of libero_object's pixels change) and 3.4.0 changes contacts of
boxes (a bowl and ketchup settle centimetres away): published policies then reach other figures. See
docs/how_to/libero.md.
"""

from __future__ import annotations

import importlib.util
import shlex
from typing import TYPE_CHECKING, Any

from sim.interpreter import version_of
from sim.libero import assets, package, plus, pro
from sim.libero.protocols import matching
from vla_rl.errors import MissingDependency, MissingPackage, install_command

if TYPE_CHECKING:
    from sim.libero.settings import LiberoConfig

VERIFIED = ">=3.2,<3.3.3"
ROBOSUITE = "1.4.0"
_MUJOCO_FIX = f"pip install {shlex.quote(f'mujoco{VERIFIED}')}"


def versions(python: str = "") -> dict[str, str]:
    """Of what decides over physics and pictures, in the interpreter that simulates (empty: this
    one); "" where absent."""
    return {name: version_of(name, python) for name in ("mujoco", "robosuite")}


def package_problems(found: dict[str, str]) -> list[str]:
    """Why LIBERO under these versions is another benchmark than the published one, each with its
    remedy."""
    from packaging.specifiers import SpecifierSet

    problems = []
    if not (found["mujoco"] and SpecifierSet(VERIFIED).contains(found["mujoco"], prereleases=True)):
        problems.append(
            f"MuJoCo {found['mujoco'] or '(absent)'} is outside of {VERIFIED}, where LIBERO is the "
            f"published benchmark ({_MUJOCO_FIX}; no wheels of it exist for Python 3.14)"
        )
    if found["robosuite"] != ROBOSUITE:
        other = found["robosuite"] or "(absent)"
        problems.append(
            f"robosuite {other} is not {ROBOSUITE} (pip install robosuite=={ROBOSUITE})"
        )
    return problems


def asset_problems(copy: assets.Copy | None) -> list[str]:
    """Why pictures of these assets are not the published ones; None: there are no assets."""
    if copy is None:
        return [f"there are no assets ({assets.COMMAND})"]
    if copy.kind == "published":
        return []
    remedy = (
        f"{assets.COMMAND}, and leave env.assets empty"
        if copy.kind == "stand-in"
        else assets.COMMAND
    )
    return [f"{copy.kind} assets in {copy.place}: {copy.problem()} ({remedy})"]


def benchmark(config: LiberoConfig, split: str, python: str = "") -> dict[str, Any]:
    """For reports: ``versions``, ``assets`` (kind, hash), ``protocol`` (the named ones that it is,
    with what departs) and ``departures``: why figures of ``split`` may not be compared with
    published ones; none: they are official."""
    found, copy = versions(python), _assets(config)
    departures = [*package_problems(found), *asset_problems(copy)]
    if config.look != "exact":
        departures.append(f"the {config.look} look (env.look=exact)")
    if config.controller != "exact":
        departures.append(f"{config.controller} control (env.controller=exact)")
    if not config.is_official(split):
        departures.append("sampled initial states (env.init_states=official)")
    if config.files:
        departures.append("tasks of one's own (env.files)")
    elif config.suite in pro.SUITES:
        departures.append("LIBERO-PRO, of which no published evaluation was compared here")
    elif config.suite in plus.SUITES:
        departures.append("a part of LIBERO-plus, with words that lack the suffixes of its names")
    names = matching(config)
    kind = {"kind": copy.kind, "sha256": copy.digest} if copy else {"kind": "none", "sha256": ""}
    said = (
        f"MuJoCo {found['mujoco'] or '(absent)'}, {copy or 'no assets'}, protocol "
        f"{' = '.join(names) or 'of its own'}"
    )
    verdict = (
        f"not comparable with published figures: {'; '.join(departures)}"
        if departures
        else "official"
    )
    return {
        "versions": found,
        "verified_mujoco": VERIFIED,
        "assets": kind,
        "protocols": names,
        "departures": departures,
        "line": f"{said}; {verdict}",
    }


def _assets(config: LiberoConfig) -> assets.Copy | None:
    """What the config's assets are; None where there are none, which the env itself explains
    when it starts."""
    try:
        place = package.find_assets(config.assets) if config.assets or package.present() else None
    except (MissingDependency, MissingPackage):
        return None
    return assets.judged(place) if place else None


def check() -> tuple[str, str, str]:
    """For `vla-rl doctor`: status "ok", "fail" or "missing", detail and fix. LIBERO's first import
    would ask a question on standard input, so nothing of it is imported."""
    known = [version for name in ("hf-libero", "libero") if (version := version_of(name))]
    if not known or importlib.util.find_spec("libero") is None:
        return (
            "missing",
            "not installed (LIBERO benchmark suites)",
            install_command("libero", "hf-libero"),
        )
    try:
        root = package.root()
    except MissingPackage:
        return (
            "fail",
            f"{known[0]}, but the package is incomplete",
            "pip install --force-reinstall hf-libero",
        )
    place = package.present()
    if place is None or not any(place.iterdir()):
        return (
            "fail",
            f"{known[0]}, but its assets (meshes and textures) are missing",
            assets.COMMAND,
        )
    copy, found = assets.judged(place), versions()
    tasks = len(list((root / "bddl_files").glob("*/*.bddl")))
    detail = (
        f"{known[0]}, with MuJoCo {found['mujoco'] or '(absent)'}, {copy} and {tasks} task files"
    )
    if problems := package_problems(found):
        return (
            "fail",
            f"{detail}; figures are not comparable with published ones",
            "; ".join(problems),
        )
    if problems := asset_problems(copy):
        return "ok", f"{detail}; figures are not comparable with published ones: {problems[0]}", ""
    return "ok", f"{detail}: the published benchmark", ""
