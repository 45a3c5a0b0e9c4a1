"""The console's process: ``python -m real.console.process CONFIG.json`` with {"socket", "console":
options of `ConsoleConfig`, "facts": `Facts`}. Says "ready", the address to open and that for who
watches; ends with its supervisor, on SIGTERM and on Ctrl-C."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import Any

from real.console.server import run
from real.console.settings import ConsoleConfig, Facts
from real.link import LinkError
from real.ring import Rings
from vla_rl.errors import ConfigError, UserError


def connected(path: str | Path) -> socket.socket:
    """To the supervisor that listens at ``path``. Raises `LinkError`."""
    found = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        found.connect(str(path))
    except OSError as error:
        found.close()
        raise LinkError(
            f"no session answers at {path} ({error.strerror}): is `vla-rl robot run` running?"
        ) from None
    return found


def main(arguments: list[str]) -> int:
    config: dict[str, Any] = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    try:
        options: dict[str, Any] = dict(config.get("console", {}))
        options |= {k: tuple(v) for k, v in options.items() if isinstance(v, list)}
        try:
            settings = ConsoleConfig(**options)
        except TypeError as error:
            raise ConfigError(f"console: {error}") from None
        found = config.get("facts", {})
        facts = Facts(tuple(found.get("tasks", ())), found.get("checkpoint", ""))
        run(
            settings,
            connected(config["socket"]),
            Rings(),
            lambda urls: print(f"ready\n{urls}", flush=True),
            facts,
        )
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
