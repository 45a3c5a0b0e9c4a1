"""Where files that ship with the code lie."""

from __future__ import annotations

from pathlib import Path

from vla_rl.errors import MissingDependency


def config_dir() -> Path:
    """The folder with ``config.yaml`` and the config groups, in a source checkout as in an
    installed wheel.

    Raises `MissingDependency` where the YAML files are in neither place.
    """
    package = Path(__file__).resolve().parent
    # a wheel; a checkout or an editable install
    places = (package / "configs", package.parent / "configs")
    for place in places:
        if (place / "config.yaml").is_file():
            return place
    raise MissingDependency(
        f"The configuration files of vla-rl are missing: config.yaml is neither in {places[0]} nor "
        f"in {places[1]}. Install vla-rl again, or work from a complete checkout."
    )


def is_address(place: object) -> bool:
    """Whether a policy is named by where it is served."""
    return str(place).startswith(("ws://", "wss://"))
