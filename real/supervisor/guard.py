"""The guard: ``python -m real.supervisor.guard SESSION_SOCKET MODULE:FUNCTION ADDRESS``.

It does nothing but listen to the supervisor. Where that is silent for `SILENCE_S`, or its connection ends without a
farewell, the guard calls ``FUNCTION(ADDRESS)``, which stops the robot, until that succeeds; then it ends with status 3.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable

from real.link import Client, LinkError
from real.messages import Notice
from real.named import named
from real.scheduling import freeze_garbage
from vla_rl.errors import UserError

SILENCE_S = 0.12
TRIES = 50


def watch(client: Client, stop: Callable[[], None]) -> int:
    """The exit status: 0 after a farewell, 3 after a stop."""
    heard, why = time.monotonic(), "the supervisor's connection ended without a farewell"
    while True:
        try:
            message = client.receive(max(0.001, heard + SILENCE_S - time.monotonic()))
        except LinkError:
            break
        except UserError:
            continue  # a packet that is no message is a sign of life all the same
        if message is None:
            if time.monotonic() - heard >= SILENCE_S:
                why = f"the supervisor was silent for {SILENCE_S} s: it hangs, or this machine is too busy for a session"
                break
            continue
        if isinstance(message, Notice) and message.name == "farewell":
            return 0
        heard = time.monotonic()
    for _ in range(TRIES):
        try:
            stop()
            print(f"it stopped the arm, since {why}", flush=True)
            return 3
        except (OSError, UserError):
            time.sleep(0.02)
    return 4


def main() -> None:
    path, function, address = sys.argv[1:4]
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a session that ends waits for what is left to stop
    stop = named(function)
    client = Client(path, "guard")
    freeze_garbage()
    print("ready", flush=True)
    sys.exit(watch(client, lambda: stop(address)))


if __name__ == "__main__":
    main()
