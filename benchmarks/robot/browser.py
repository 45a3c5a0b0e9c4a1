"""From a key in the console's page to the first human command, in a real browser: ``python -m
benchmarks.robot.browser``.

Needs Chromium on the path and the package playwright, which drives it. Counted from before the key
is handed to the browser, so that what playwright needs for that is in the figure.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measuring import milliseconds
from benchmarks.robot.report import with_cameras
from benchmarks.robot.trials import swaying
from real.body import Body, BodyConfig
from real.link import Client
from real.messages import State
from vla_rl.errors import UserError

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def takeover(limits: Path, trials: int, cameras: int = 2) -> dict[str, Any]:
    """``trials`` times the page's dead-man and a direction are pressed while a policy moves the
    point robot, with ``cameras`` of 640 × 480 recorded and shown."""
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError as error:
        raise UserError(
            "measuring the page needs the package playwright: pip install playwright"
        ) from error
    if (chromium := shutil.which("chromium")) is None:
        raise UserError("there is no chromium on the path: apt-get install -y chromium")
    required = {"required": ["guard", "console", "recorder"]}
    config = BodyConfig(
        limits=str(limits.resolve()), world="fake", camera_hz=20.0, supervisor=required
    )
    waits: list[float] = []
    with (
        tempfile.TemporaryDirectory(prefix="page") as place,
        Body(place, with_cameras(config, cameras)) as body,
    ):
        asked = body.write_config("console", {"socket": body.socket, "console": {"port": 0}})
        url = body.process("console", "real.console.process", [asked]).split()[1]
        with swaying(body, "fake", "viewer") as operator, sync_playwright() as playwright:
            watcher = operator.client
            browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
            page = browser.new_page()
            page.goto(url)
            page.locator("#modename").filter(has_text="IDLE").first.wait_for()
            page.keyboard.press("c")
            page.locator("#who").filter(has_text="you").first.wait_for()
            for key, button, mode in (("l", "arm", "READY"), ("p", "start", "AUTO")):
                page.locator(f"[data-do={button}]:enabled").wait_for()
                page.keyboard.press(key)
                page.locator("#modename").filter(has_text=mode).first.wait_for()
            rng = np.random.default_rng(0)
            for _ in range(trials):
                page.locator("#drive:not(.locked)").wait_for()
                _until(watcher, lambda s: s.mode == "AUTO", 0.5 + float(rng.uniform(0, 0.02)))
                waits.append(_pressed(page, watcher))
                _until(watcher, lambda s: not s.is_human, 0.3)
                page.locator("[data-do=hand_back]:enabled").wait_for()
                page.keyboard.press("h")
            browser.close()
    return {
        "trials": trials,
        "key_to_command_ms": milliseconds(waits, (50, 95, 100)),
        "load": os.getloadavg()[0],
    }


def _pressed(page: Any, watcher: Client) -> float:
    """Seconds from the keys to the stamp of the first state with a human command."""
    began = time.monotonic()
    page.keyboard.down("Shift")
    page.keyboard.down("w")
    first = _until(watcher, lambda s: s.is_human and s.reference, 0.0)
    page.keyboard.up("w")
    page.keyboard.up("Shift")
    return first.stamp - began


def _until(watcher: Client, holds: Any, least: float) -> State:
    """The first state for which ``holds``, after ``least`` seconds. Raises `UserError` after 10
    s."""
    begin = time.monotonic()
    while time.monotonic() - begin < 10.0:
        state = watcher.receive(0.05)
        if isinstance(state, State) and holds(state) and time.monotonic() - begin >= least:
            return state
    raise UserError("the page's key did not reach the arm within 10 s: is the machine too busy?")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limits", type=Path, default=Path("configs/limits/fake_point.yaml"))
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    try:
        figures = json.dumps(takeover(arguments.limits, arguments.trials), indent=1)
    except UserError as error:
        sys.exit(f"error: {error}")
    print(figures)
    if arguments.json:
        arguments.json.write_text(figures + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
