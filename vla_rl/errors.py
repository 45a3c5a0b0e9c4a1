"""Errors a user can act on. The CLI prints them as one message, without a traceback."""

from __future__ import annotations

import importlib.util
import shlex
from pathlib import Path

# marks of direction, of which one can make a name read as another
_TURNS = "\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"


class UserError(Exception):
    """Bad input or a missing piece of the machine. The message names the value, the place and
    the remedy."""


class ConfigError(UserError):
    """An unknown key, a wrong type or a value outside its range in the configuration."""


class EmbodimentMismatch(UserError):
    """Env, policy, checkpoint or dataset disagree about the robot, its cameras or its actions."""


class MissingPackage(UserError):
    """An optional package is not installed."""

    def __init__(self, package: str, extra: str, purpose: str):
        super().__init__(
            f"{purpose} needs the package '{package}', which is not installed. "
            f"Install it with: {install_command(extra, package)}"
        )
        self.package, self.extra, self.purpose = package, extra, purpose

    def __reduce__(self) -> tuple[type, tuple[str, str, str]]:
        """So that a worker process can send it."""
        return type(self), (self.package, self.extra, self.purpose)


class MissingDependency(UserError):
    """Something outside Python (a GL library, an asset set, a device) is missing."""


class PolicyLost(UserError):
    """A policy that somebody else serves cannot be reached, went away, or does not answer in
    time."""


class NoGradient(UserError):
    """A loss reached none of the parameters that it should train."""


class CheckpointError(UserError):
    """A checkpoint is missing, damaged, or made for something else."""


class DiskFull(UserError):
    """There is no room left where a file is to be written, or none for a file of that size."""


class TrainingDiverged(UserError):
    """Too many updates in a row had a loss that was not finite, or weights are not."""


# what contents of a wrong kind lead to
MANGLED = (OSError, LookupError, TypeError, ValueError, AttributeError)


def install_command(extra: str, package: str) -> str:
    """What installs the packages of an extra, ``package`` among them, for the way in which this
    vla-rl is installed.

    A checkout is installed again with the extra. PyPI has no vla-rl to name, and the file of a
    wheel may be gone: then the packages themselves are named.
    """
    checkout = Path(__file__).resolve().parent.parent
    if (checkout / "pyproject.toml").is_file():
        return f"pip install -e {shlex.quote(f'{checkout}[{extra}]')}"
    return f"pip install {' '.join(map(shlex.quote, _requirements(extra) or [package]))}"


def _requirements(extra: str) -> list[str]:
    """What the installed distribution asks for with this extra, on this machine."""
    from importlib import metadata

    from packaging.requirements import Requirement

    try:
        every = [Requirement(text) for text in metadata.requires("vla-rl") or ()]
    except metadata.PackageNotFoundError:
        return []
    chosen = [
        r
        for r in every
        if r.marker and "extra" in str(r.marker) and r.marker.evaluate({"extra": extra})
    ]
    for requirement in chosen:
        requirement.marker = None
    return [str(requirement) for requirement in chosen]


def require_packages(*names: str, extra: str, purpose: str) -> None:
    """Raise `MissingPackage` for the first of the packages that is not installed; imports none."""
    for name in names:
        try:
            found = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            found = None
        if found is None:
            raise MissingPackage(name, extra, purpose)


def first_line(error: BaseException) -> str:
    """What an exception says, in one line; its class where it says nothing."""
    return (str(error) or type(error).__name__).splitlines()[0]


def visible(text: object) -> str:
    """What somebody else wrote, so that it can be printed: characters that steer a terminal, or
    turn the direction of what is read, as their codes."""
    return "".join(
        repr(c)[1:-1]
        if (ord(c) < 32 or 127 <= ord(c) < 160 or c in _TURNS) and c not in "\n\t"
        else c
        for c in str(text)
    )
