"""A policy that always wants the same: ``python -m benchmarks.robot.driver SOCKET HZ ACTION...``.

The simplest client there is. It sends ten rows ahead, again after every fifth, for whatever epoch
is current; every second one turns round, where ``--sway`` is given. With ``--hand`` it is a
person's device instead, which takes control by force once a policy moves the arm, and wants the
same (ACTION as shares of full deflection); with ``--console`` a console that only lives.
"""

from __future__ import annotations

import sys
import time

from real.link import Client, LinkError
from real.messages import Chunk, Input, Lease, State, Welcome

AHEAD, AGAIN = 10, 5
_OPTIONS = ("--sway", "--hand", "--console")


def main() -> None:
    sway, hand, console = (option in sys.argv for option in _OPTIONS)
    path, hz, *action = [a for a in sys.argv[1:] if a not in _OPTIONS]
    row, rate = tuple(map(float, action)), float(hz)
    if hand or console:
        client = Client(path, "teleop" if hand else "console")
        print("ready", flush=True)
        _move(client, row[:3] if hand else ())
        return
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
                Chunk,
                0.3,
                epoch=epoch,
                start=0,
                hz=rate,
                decision=decision,
                policy_version="driver",
                obs_stamp=time.monotonic(),
                prefix=0,
                delay=0,
                actions=(moved,) * AHEAD,
            )
            decision += 1
    except LinkError:
        return


def _move(client: Client, axes: tuple[float, ...]) -> None:
    """Hold the dead-man and deflect by ``axes`` [3] thirty times a second; without them only
    listen."""
    sent, asked = 0.0, False
    try:
        while True:
            message = client.receive(0.01)
            if axes and not asked and isinstance(message, State) and message.mode == "AUTO":
                client.send(Lease, ask="request", token="", force=True)
                asked = True
            if not axes or not client.token or time.monotonic() - sent < 1.0 / 30.0:
                continue
            sent = time.monotonic()
            client.send(
                Input,
                0.15,
                lease=client.token,
                device_stamp=sent,
                dead_man=True,
                axes=(*axes, 0.0, 0.0, 0.0),
                gripper=-1.0,
                keys=(),
                target=(),
            )
    except LinkError:
        return


if __name__ == "__main__":
    main()
