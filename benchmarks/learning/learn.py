"""`vla-rl bench learn`: how soon runs reached a success rate; methods from one start; or two
settings side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.learning import against as two_settings
from benchmarks.learning import methods as of_methods
from benchmarks.learning import runs
from vla_rl.errors import ConfigError


def measure(
    overrides: Sequence[str],
    start: Path | None,
    methods: str | None,
    against: str | None,
    **options: Any,
) -> dict[str, Any]:
    """Of `benchmarks.learning.runs`, `methods` or `against`, which take the ``options`` that
    concern them."""

    def of(*names: str) -> dict[str, Any]:
        return {name: options[name] for name in names}

    if bool(start) != bool(methods) or (start and against):
        raise ConfigError(
            "--start CKPT goes with --methods A,B (and --seeds, --out), and without --against"
        )
    if start and methods:
        names, out = (
            [name for name in methods.split(",") if name],
            options["out"] or Path("outputs/bench_learn"),
        )
        return of_methods.measure(
            start, names, overrides, out=out, **of("seeds", "level", "figure")
        )
    if against:
        return two_settings.measure(
            overrides, two_settings.split_overrides(against), **of("iterations", "rounds")
        )
    return runs.measure([Path(word) for word in overrides], **of("level", "figure"))


def text(document: Mapping[str, Any]) -> str:
    return two_settings.text(document) if "sides" in document else runs.text(document)
