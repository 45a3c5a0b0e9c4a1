"""The page in a real browser (Debian's chromium, driven by playwright), before a small
supervisor with the real messages."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
from pathlib import Path

import pytest
from console_stub import Session, until

from real.messages import Event, Writer
from real.modes import Mode

CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CHROMIUM is None, reason="needs the browser chromium (apt install chromium)"
    ),
    pytest.mark.skipif(
        importlib.util.find_spec("playwright") is None, reason="needs the package playwright"
    ),
    # of playwright and its event loop, which ends after the test
    pytest.mark.filterwarnings("default"),
]
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
# Limits that a test machine with one busy core can keep; what is asserted here is never how long
# something takes.
PATIENT = {"silence_s": 5.0, "link_silence_s": 5.0, "stale_image_s": 5.0, "input_expiry_s": 0.5}
PATIENT |= {"event_age_s": 5.0, "state_hz": 5.0}
FRAME_EVERY = 20  # ticks of the stub, 0.4 s: a browser without a GPU draws on the same core
NEEDED = {"l": "arm", "p": "start", "t": "takeover"}
SHOTS = os.environ.get("CONSOLE_SHOTS", "")  # a folder for pictures of the page

FAKE_PAD = """
window.pad = {id: "fake", index: 0, connected: true, mapping: "standard", timestamp: 0, axes: [0, 0, 0, 0],
              buttons: Array.from({length: 17}, () => ({pressed: false, touched: false, value: 0}))};
window.padThere = false;
navigator.getGamepads = () => window.padThere ? [window.pad] : [null];
"""


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(
            executable_path=CHROMIUM, headless=True, args=[*FLAGS, "--no-first-run"]
        )
        yield found
        found.close()


@pytest.fixture
def session(browser):
    with running() as found:
        yield found
        for context in browser.contexts:  # of a test that failed: its pages would go on drawing
            context.close()


@contextlib.contextmanager
def running():
    with Session(**PATIENT) as found:
        found.stub.frame_every = FRAME_EVERY
        yield found


def opened(browser, session: Session, **context):
    page = browser.new_context(**{"viewport": {"width": 640, "height": 480}, **context}).new_page()
    page.set_default_timeout(60000)
    page.mistakes = []
    page.on("pageerror", lambda error: page.mistakes.append(str(error)))
    page.on("console", lambda said: said.type == "error" and page.mistakes.append(said.text))
    page.goto(session.console.url)
    shows(page, "#modename", "IDLE")
    hidden(page, "#lost")
    return page


def shows(page, selector: str, text: str) -> None:
    page.locator(selector).filter(has_text=text).first.wait_for(state="attached")


def hidden(page, selector: str) -> None:
    page.locator(selector).wait_for(state="hidden")


def picture(page, name: str) -> None:
    if SHOTS:
        page.screenshot(path=str(Path(SHOTS) / f"{name}.png"))


def in_control(page, session: Session, *keys: str) -> None:
    page.keyboard.press("c")
    shows(page, "#who", "you")
    for key in ("l", *keys):
        mode = session.stub.modes.mode
        page.locator(f"[data-do={NEEDED[key]}]:enabled").wait_for()
        page.keyboard.press(key)
        until(lambda mode=mode: session.stub.modes.mode is not mode)
        shows(page, "#modename", session.stub.modes.mode.value)


def drivable(page) -> None:
    page.locator("#drive:not(.locked)").wait_for()


def test_take_over_drive_let_go_hand_back_and_label(browser, session):
    page, stub = opened(browser, session, viewport={"width": 1280, "height": 860}), session.stub
    assert "token" not in page.url
    in_control(page, session, "p")
    until(lambda: stub.step > 60)
    drivable(page)
    picture(page, "auto")
    page.keyboard.down("Shift")
    until(lambda: stub.modes.mode is Mode.HUMAN)
    page.keyboard.down("w")
    page.keyboard.down("a")
    until(lambda: stub.position[0] > 0.02 and stub.position[1] > 0.02)
    assert stub.position[2] == 0
    shows(page, "#driving", "You drive")
    picture(page, "human")
    page.keyboard.up("a")
    page.keyboard.up("Shift")  # w is still down: without the dead-man it means nothing
    until(lambda: not stub.inputs()[-1].dead_man)
    assert stub.modes.mode is Mode.HUMAN, "nothing was handed back"
    page.keyboard.up("w")
    page.keyboard.press("h")
    until(lambda: stub.modes.mode is Mode.AUTO)
    page.keyboard.press("Space")
    until(lambda: stub.modes.mode is Mode.PAUSED)
    shows(page, "#modename", "PAUSED")
    page.keyboard.press("Enter")
    until(lambda: stub.modes.mode is Mode.READY)
    label = stub.events("label")[-1]
    assert label.value == "success" and label.at <= label.stamp
    shows(page, "#label", "success")
    page.locator("#marks button").nth(3).wait_for()
    picture(page, "label")
    page.keyboard.press("BracketLeft")
    moved = until(lambda: stub.events("label")[1:])[0]
    assert moved.value == "success" and label.at - 3.1 < moved.at < label.at
    assert [e.name for e in stub.events()][:4] == ["arm", "start", "takeover", "hand_back"]
    assert not page.mistakes
    page.context.close()


def test_redo_wants_two_presses_and_space_pauses_whatever_has_the_focus(browser, session):
    page, stub = opened(browser, session), session.stub
    in_control(page, session, "p")
    page.locator("[data-do=end]").focus()
    page.keyboard.press("Space")
    until(lambda: stub.modes.mode is Mode.PAUSED)
    assert not stub.events("end")
    page.locator("body").focus()
    page.keyboard.press("r")
    shows(page, "[data-do=redo]", "Press again")
    assert not stub.events("redo")
    page.keyboard.press("r")
    until(lambda: stub.events("redo"))
    page.context.close()


def test_an_estop_and_its_release(browser, session):
    page, watcher, stub = opened(browser, session), opened(browser, session), session.stub
    in_control(page, session, "p")
    shows(watcher, "#who", "page 1")
    watcher.locator("#estop").click()
    until(lambda: stub.modes.mode is Mode.FAULT)
    shows(page, "#modename", "FAULT")
    shows(page, ".fault", "release the e-stop, acknowledge, arm")
    picture(page, "estop")
    page.bring_to_front()
    page.keyboard.press("k")
    shows(page, "#said", "not now")
    assert not stub.events("ack")
    page.locator("[data-do=estop_clear]").click()
    page.locator("[data-do=ack]:enabled").click()
    page.locator("[data-do=arm]:enabled").click()
    until(lambda: stub.modes.mode is Mode.READY)
    shows(page, ".fault", "The arm is slow")
    page.keyboard.press("m")
    until(lambda: not stub.modes.slow)
    # by key, in the middle of anything, and where keys are turned off too
    page.locator("#keys summary").click()
    page.locator("#keyson").uncheck()
    page.keyboard.press("p")
    page.keyboard.press("Backquote")
    until(lambda: stub.modes.mode is Mode.FAULT)
    assert not stub.events("start")[1:]
    page.context.close()
    watcher.context.close()


def test_a_second_operator_watches_and_may_take_control_by_force(browser, session):
    first, second, stub = opened(browser, session), opened(browser, session), session.stub
    in_control(first, session, "p")
    second.bring_to_front()
    second.keyboard.press("c")
    shows(second, "#said", "page 1 has control")
    second.keyboard.press("h")
    shows(second, "#said", "you do not have control")
    second.keyboard.down("Shift")
    second.keyboard.down("w")
    assert not [i for i in stub.inputs() if i.dead_man]
    shows(second, "#modename", "AUTO")
    second.locator("canvas").first.wait_for()
    second.keyboard.up("w")
    second.keyboard.up("Shift")
    second.keyboard.press("c")  # a refusal that is some seconds old is asked for anew
    if not stub.events("pause"):
        second.keyboard.press("c")
    until(lambda: stub.events("pause"))
    shows(second, "#who", "you")
    shows(first, "#said", "took control")
    first.context.close()
    second.context.close()


def test_drive_by_gamepad_and_pull_its_plug(browser, session):
    context = browser.new_context(viewport={"width": 640, "height": 480})
    context.add_init_script(FAKE_PAD)
    page, stub = context.new_page(), session.stub
    page.goto(session.console.url)
    shows(page, "#modename", "IDLE")
    in_control(page, session, "p")
    drivable(page)
    press = "([i, on]) => { pad.buttons[i].pressed = on; padThere = true; }"
    page.evaluate("() => { padThere = true; pad.axes = [0, -1, 0, 0]; }")
    page.wait_for_timeout(300)
    assert stub.modes.mode is Mode.AUTO, "a stick alone does nothing"
    page.evaluate(press, [5, True])
    until(lambda: stub.modes.mode is Mode.HUMAN and stub.position[0] > 0.01)
    assert stub.inputs()[-1].axes[0] == 1 and "gamepad" in stub.inputs()[-1].keys
    page.evaluate("() => { pad.axes = [0.1, 0, 0, 0]; pad.buttons[6].pressed = true; }")
    # in the dead-zone
    until(lambda: stub.inputs()[-1].axes == (0,) * 6 and stub.inputs()[-1].gripper == 1)
    page.evaluate("() => { padThere = false; dispatchEvent(new Event('gamepaddisconnected')); }")
    until(lambda: not stub.inputs()[-1].dead_man)
    # back, with its button held
    page.evaluate("() => { padThere = true; pad.axes = [0, -1, 0, 0]; }")
    page.wait_for_timeout(300)
    assert not stub.inputs()[-1].dead_man, "the dead-man has to be pressed anew"
    page.evaluate(press, [5, False])
    page.wait_for_timeout(200)
    page.evaluate(press, [5, True])
    until(lambda: stub.inputs()[-1].dead_man)
    page.evaluate(press, [9, True])
    until(lambda: stub.modes.mode is Mode.PAUSED)
    context.close()


def test_drive_by_finger_on_a_phone(browser, session):
    phone = {
        "viewport": {"width": 390, "height": 844},
        "has_touch": True,
        "is_mobile": True,
        "device_scale_factor": 1,
    }
    page, stub = opened(browser, session, **phone), session.stub
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.locator("#control").tap()
    shows(page, "#who", "you")
    page.locator("[data-do=arm]:enabled").tap()
    page.locator("[data-do=start]:enabled").tap()
    until(lambda: stub.modes.mode is Mode.AUTO)
    drivable(page)
    picture(page, "phone")
    pad = page.locator("#pad-move")
    pad.scroll_into_view_if_needed()
    picture(page, "phone-drive")
    box = pad.bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    touch = page.context.new_cdp_session(page)
    touch.send(
        "Input.dispatchTouchEvent", {"type": "touchStart", "touchPoints": [{"x": x, "y": y}]}
    )
    until(lambda: stub.modes.mode is Mode.HUMAN)
    touch.send(
        "Input.dispatchTouchEvent", {"type": "touchMove", "touchPoints": [{"x": x, "y": y - 40}]}
    )
    until(lambda: stub.position[0] > 0.005)
    touch.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
    until(lambda: not stub.inputs()[-1].dead_man)
    estop = page.locator("#estop").bounding_box()
    assert estop["y"] >= 0 and estop["y"] + estop["height"] <= 844 and estop["width"] > 300, (
        "always on the screen"
    )
    seen = "[...document.querySelectorAll('button')].filter(b => b.offsetParent)"
    assert page.evaluate(f"Math.min(...{seen}.map(b => b.getBoundingClientRect().height))") >= 24
    page.locator("#estop").tap()
    until(lambda: stub.modes.mode is Mode.FAULT)
    assert not page.mistakes
    page.context.close()


def test_a_key_that_is_held_as_the_focus_leaves_is_let_go(browser, session):
    page, stub = opened(browser, session), session.stub
    in_control(page, session, "t")
    drivable(page)
    page.keyboard.down("Shift")
    page.keyboard.down("w")
    until(lambda: stub.inputs() and stub.inputs()[-1].dead_man)
    page.evaluate("dispatchEvent(new Event('blur'))")
    until(lambda: not stub.inputs()[-1].dead_man and stub.inputs()[-1].axes == (0,) * 6)
    page.context.close()
    until(lambda: stub.modes.mode is Mode.PAUSED)  # closing the page pauses


def test_a_lost_network_is_shown_and_locks_the_controls(browser, session):
    page, stub = opened(browser, session), session.stub
    in_control(page, session, "p")
    page.context.set_offline(True)
    shows(page, "#lost", "LINK LOST")
    until(lambda: stub.modes.mode is Mode.PAUSED)
    assert stub.events("pause")[-1].value in (
        "the operator's page was silent",
        "the operator's page was closed",
    )
    assert page.locator("[data-do]:enabled").count() == 0
    assert page.locator("#estop").is_enabled()
    picture(page, "lost")
    page.context.set_offline(False)
    hidden(page, "#lost")
    shows(page, "#who", "nobody")
    page.context.close()


def test_a_frozen_page_loses_control_and_says_so_afterwards(browser, session):
    page, stub = opened(browser, session), session.stub
    in_control(page, session, "p")
    stopped = renderers()
    try:
        for process in stopped:
            os.kill(process, signal.SIGSTOP)
        until(lambda: stub.modes.mode is Mode.PAUSED)
    finally:
        for process in stopped:
            os.kill(process, signal.SIGCONT)
    assert stub.events("pause")[-1].value == "the operator's page was silent" and stub.holder == ""
    shows(page, "#said", "control again")
    shows(page, "#who", "nobody")
    page.context.close()


def test_old_pictures_lock_driving(browser, session):
    page, stub = opened(browser, session), session.stub
    in_control(page, session, "t")
    drivable(page)
    session.call(lambda: setattr(stub, "dark", True))
    page.locator("#drive.locked").wait_for()
    shows(page, "#why", "old picture: front, wrist")
    shows(page, ".video.stale", "OLD")
    page.keyboard.down("Shift")
    page.wait_for_timeout(300)
    assert not stub.inputs()[-1].dead_man
    page.context.close()


def test_a_call_for_help_stands_on_every_page_that_opens(browser, session):
    """Also on one that opens after it, until the arm practises again."""
    stub = session.stub
    note = Writer("launcher", stub.writer.clock).make(
        Event,
        name="note",
        lease="",
        at=0.0,
        value="help is wanted: 3 resets in a row have failed: put things back",
    )
    session.call(lambda: stub.send_on(note))
    page = opened(browser, session, viewport={"width": 1280, "height": 860})
    shows(
        page,
        "#help",
        "Help is wanted: 3 resets in a row have failed: put things back. Take control",
    )
    picture(page, "help")
    in_control(page, session, "p")
    hidden(page, "#help")
    assert not page.mistakes
    page.context.close()


def test_a_supervisor_that_is_gone_is_shown(browser, session):
    page = opened(browser, session)
    session.call(session.stub.link.close)
    shows(page, "#lost", "SUPERVISOR GONE")
    page.context.close()


def renderers() -> list[int]:
    """The processes of this test's browser that run pages."""
    parents, lines = {}, {}
    for place in Path("/proc").iterdir():
        if place.name.isdigit():
            try:
                parents[int(place.name)] = int(
                    (place / "stat").read_text().rpartition(")")[2].split()[1]
                )
                lines[int(place.name)] = (place / "cmdline").read_bytes()
            except OSError:
                continue

    def mine(process: int) -> bool:
        while process in parents:
            process = parents[process]
            if process == os.getpid():
                return True
        return False

    return [
        process for process, line in lines.items() if b"--type=renderer" in line and mine(process)
    ]
