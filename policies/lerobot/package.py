"""The lerobot package: is it there, and may it be quiet."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator
from importlib import metadata

from packaging.version import Version

from vla_rl.errors import MissingPackage


def require_lerobot() -> None:
    try:
        import lerobot.policies.factory  # noqa: F401 (registers the families)
    except ImportError as error:
        raise MissingPackage(
            str(error.name or "lerobot"), "lerobot", "A policy of lerobot"
        ) from error


def version() -> str:
    """Of the installed lerobot."""
    return metadata.version("lerobot")


def since(number: str) -> bool:
    """Whether the installed lerobot is that version or a newer one."""
    return Version(version()) >= Version(number)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """lerobot prints and warns about devices while it builds; what matters comes as an error
    here."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(level)
