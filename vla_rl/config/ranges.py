"""What settings are held against: each raises a `ConfigError` that names the key, its value and
what it may be."""

from __future__ import annotations

from collections.abc import Sequence

from vla_rl.errors import ConfigError


def require_choice(owner: str, name: str, value: str, choices: Sequence[str]) -> None:
    """Raise `ConfigError` that lists the choices unless ``value`` is one of them."""
    if value not in choices:
        raise ConfigError(
            f"{owner}.{name}={value!r} is not a choice; use one of: {', '.join(choices)}"
        )


def require_range(
    owner: str,
    name: str,
    value: float | int | None,
    low: float | int,
    high: float | int = float("inf"),
) -> None:
    """Raise `ConfigError` unless ``value`` is None or lies in [low, high]."""
    if value is not None and not low <= value <= high:
        raise ConfigError(
            f"{owner}.{name}={value!r} is out of range; use a value in [{low}, {high}]"
        )


def require_above_zero(owner: str, name: str, value: float | None) -> None:
    """Raise `ConfigError` unless ``value`` is None or above 0: nothing would be learned."""
    if value is not None and not value > 0:
        raise ConfigError(
            f"{owner}.{name}={value!r} lets nothing be learned; use a value above 0, "
            "or null to turn it off"
        )


def require_betas(owner: str, betas: Sequence[float]) -> None:
    """Raise `ConfigError` unless ``betas`` are two decay rates of AdamW."""
    if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
        raise ConfigError(
            f"{owner}.betas={list(betas)!r} needs two numbers, each at least 0 and below 1"
        )
