"""What commands share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

Add = Callable[[str, Any, str], argparse.ArgumentParser]
"""(name, function, text) → the parser of a new command."""


def write_result(path: Path | None, document: Any) -> None:
    if path is not None:
        from vla_rl.reporting.metrics import write_json

        write_json(path, document)
        print(f"wrote {path}")
