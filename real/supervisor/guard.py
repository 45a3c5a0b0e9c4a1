"""The guard: ``python -m real.supervisor.guard SESSION_SOCKET MODULE:FUNCTION ADDRESS``.

It does nothing but listen to the supervisor. Where that is silent for `SILENCE_S`, or its
connection ends without a farewell, the guard calls ``FUNCTION(ADDRESS)``, which stops the robot,
until that succeeds. A supervisor that speaks again (this machine was busy) is told, for a latched
fault, and guarded on; after `GONE_S`, or where the connection has ended, the guard ends with status
3.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable

from real.link import Client, LinkError
from real.messages import Event, Notice
from real.named import named
from real.scheduling import freeze_garbage
from vla_rl.errors import UserError

SILENCE_S = 0.12
GONE_S = 10.0  # of silence after which it is not waited for any more
TRIES = 50
_SILENT = "the supervisor was silent"


def watch(client: Client, stop: Callable[[], None]) -> int:
    """The exit status: 0 after a farewell, 3 after a stop, 4 where the arm could not be stopped."""
    heard, stopped = time.monotonic(), False
    while True:
        try:
            message = client.receive(
                0.02 if stopped else max(0.001, heard + SILENCE_S - time.monotonic())
            )
        except LinkError:
            return _ended(stop, stopped, "the supervisor's connection ended without a farewell")
        except UserError:
            heard = time.monotonic()  # a packet that is no message is a sign of life all the same
            continue
        silent = time.monotonic() - heard
        if message is not None:
            if isinstance(message, Notice) and message.name == "farewell":
                return 0
            if stopped and not _told(
                client, f"{_SILENT} for {silent:.2f} s, so the guard stopped the arm"
            ):
                return 3
            heard, stopped = time.monotonic(), False
        elif silent >= GONE_S:
            return 3
        elif silent >= SILENCE_S and not stopped:
            if (
                status := _ended(
                    stop,
                    stopped,
                    f"{_SILENT} for {SILENCE_S} s: it hangs, or this machine is too busy",
                )
            ) != 3:
                return status
            stopped = True


def _ended(stop: Callable[[], None], stopped: bool, why: str) -> int:
    """3 once the arm was stopped, 4 where it could not be."""
    for _ in range(TRIES):
        try:
            if not stopped:
                stop()
                print(f"it stopped the arm, since {why}", flush=True)
            return 3
        except (OSError, UserError):
            time.sleep(0.02)
    return 4


def _told(client: Client, why: str) -> bool:
    """A fault, which a person acknowledges."""
    try:
        client.send(Event, name="fault", value=why, at=time.monotonic(), lease="")
    except LinkError:
        return False
    return True


def main() -> None:
    path, function, address = sys.argv[1:4]
    # a session that ends waits for what is left to stop
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    stop = named(function)
    client = Client(path, "guard")
    freeze_garbage()
    print("ready", flush=True)
    sys.exit(watch(client, lambda: stop(address)))


if __name__ == "__main__":
    main()
