"""How the processes of a session begin that compute with torch."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vla_rl import build
from vla_rl.errors import UserError


def run_process(main: Callable[[dict[str, Any]], None]) -> None:
    """Call ``main`` with the config file that the command line names. It ends with the session's
    launcher, or by SIGTERM, and not by a Ctrl-C that was meant for that; a `UserError` is its last
    line."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    build.attribute("real.scheduling:die_with_parent")()
    try:
        main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    except UserError as error:
        print(f"error: {error}", flush=True)
        sys.exit(2)
