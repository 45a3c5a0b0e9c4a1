"""A policy that always wants the same: ``python -m real.bench.driver SOCKET HZ ACTION...``. The simplest client there is.

It sends ten rows ahead, again after every fifth, for whatever epoch is current; every second one turns round, where
``--sway`` is given.
"""

from __future__ import annotations

import sys
import time

from real.link import Client, LinkError
from real.messages import Chunk, State, Welcome

AHEAD, AGAIN = 10, 5


def main() -> None:
    sway = "--sway" in sys.argv
    path, hz, *action = [a for a in sys.argv[1:] if a != "--sway"]
    row, rate = tuple(map(float, action)), float(hz)
    client = Client(path, "policy")
    print("ready", flush=True)
    decision, sent_at, epoch, sign = 0, 0.0, -1, 1.0
    try:
        while True:
            message = client.receive(0.1)
            if isinstance(message, Welcome):
                epoch = -1
            if not isinstance(message, State) or message.mode != "AUTO":
                continue
            if message.epoch == epoch and time.monotonic() - sent_at < AGAIN / rate:
                continue
            epoch, sent_at = message.epoch, time.monotonic()
            sign = -sign if sway and decision % 2 == 1 else sign
            moved = tuple(sign * x for x in row[:-1]) + row[-1:]
            client.send(
                Chunk, 0.3, epoch=epoch, start=0, hz=rate, decision=decision, policy_version="driver",
                obs_stamp=time.monotonic(), prefix=0, delay=0, actions=(moved,) * AHEAD,
            )  # fmt: skip
            decision += 1
    except LinkError:
        return


if __name__ == "__main__":
    main()
