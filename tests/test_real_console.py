"""The console's server: who is let in, what a page may say, who has control, what is sent to
whom."""

from __future__ import annotations

import asyncio
import io
import json
import math
import subprocess
import sys
import time
import types

import aiohttp
import numpy as np
import pytest
from console_stub import Session, until
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from real.console import display, wire
from real.console.clocks import PageClock
from real.console.remedies import remedy
from real.console.security import FLOOD, MAX_TEXT_BYTES, Rate
from real.console.settings import ConsoleConfig, Facts
from real.console.video import HEAD, pack
from real.console.viewers import LOST_S, WINDOW, Outbox
from real.messages import MODE_EVENTS, Event, Frame, Notice, State, Writer
from real.modes import By, Mode
from vla_rl.errors import ConfigError


class Now:
    def __init__(self) -> None:
        self.t = 0.0

    def __call__(self) -> float:
        return self.t


# -------------------------------------------------------------------------------- a page, in Python
class Page:
    """What the page's scripts do, as far as the server sees it. The page's clock is 1000 s
    ahead."""

    AHEAD = 1000.0

    def __init__(self, session: Session):
        self.session, self.n, self.said, self.pictures, self.state = session, 0, [], [], None
        self.nonce = ""
        self.code: int | None = None

    async def open(self, url: str = "", **headers: str) -> Page:
        jar = aiohttp.CookieJar(unsafe=True)
        self.client = aiohttp.ClientSession(cookie_jar=jar)
        await (await self.client.get(url or self.session.console.url)).read()
        self.socket = await self.client.ws_connect(
            self.session.address + "/ws", headers={"Origin": self.session.address, **headers}
        )
        self.reading = asyncio.create_task(self.read())
        await self.until(lambda: self.nonce and self.state)
        await self.beat()
        await self.until(lambda: self.state["you"]["offset"] is not None)
        return self

    async def read(self) -> None:
        async for message in self.socket:
            if message.type is aiohttp.WSMsgType.BINARY:
                self.pictures.append(HEAD.unpack(message.data[: HEAD.size]))
                continue
            found = json.loads(message.data)
            if found["k"] == "hello":
                self.nonce, self.hello = found["nonce"], found
            elif found["k"] == "state":
                self.state, self.seen = found, self.now()
            else:
                self.said.append(found)
        self.code = self.socket.close_code

    def now(self) -> float:
        return time.monotonic() + self.AHEAD

    def text(self, kind: str, **fields) -> str:
        self.n += 1
        return json.dumps({"k": kind, "c": self.nonce, "n": self.n, "t": self.now(), **fields})

    async def send(self, kind: str, **fields) -> None:
        await self.socket.send_str(self.text(kind, **fields))

    async def beat(self) -> None:
        await self.send("beat", echo=self.state["you"]["stamp"], seen=self.seen)

    async def input(self, dead_man: bool = True, axes=(0.5, 0, 0, 0, 0, 0), **changes) -> None:
        await self.send(
            "input", **{"d": dead_man, "a": list(axes), "g": 0, "keys": ["keyboard"]} | changes
        )

    async def event(self, name: str, value: str = "", **changes) -> None:
        await self.send("event", **{"name": name, "value": value, "at": self.now()} | changes)

    async def control(self, force: bool = False, who: str = "") -> dict:
        count = len(self.said)
        await self.send("control", ask="request", force=force, who=who)
        await self.until(lambda: any(m["k"] == "control" for m in self.said[count:]))
        return next(m for m in self.said[count:] if m["k"] == "control")

    async def until(self, holds, seconds: float = 20.0):
        end = time.monotonic() + seconds
        while not (found := holds()):
            assert time.monotonic() < end, (
                f"it did not become true; the page heard {self.said[-3:]}"
            )
            await asyncio.sleep(0.01)
        return found

    def refusals(self) -> list[str]:
        return [m["reason"] for m in self.said if m["k"] == "refused"]

    async def close(self) -> None:
        await self.socket.close()
        await self.client.close()


@pytest.fixture
def session():
    with Session(silence_s=5.0, link_silence_s=5.0, input_expiry_s=0.5) as found:
        yield found


def scenario(work):
    return asyncio.run(work())


# ----------------------------------------------------------------------------------------- security
def test_who_is_let_in(session):
    """No token, a wrong one, no cookie, another origin, none at all, a re-bound name, another
    port of this host."""

    async def answer(method: str, path: str, cookie: bool, **headers: str) -> int:
        cookies = (
            {session.console.gate.cookie_name: session.console.gate.cookies["full"]}
            if cookie
            else {}
        )
        async with (
            aiohttp.ClientSession(cookies=cookies) as client,
            client.request(
                method, session.address + path, headers=headers, allow_redirects=False
            ) as found,
        ):
            return found.status

    upgrade = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
    }
    here, port = session.address, session.console.gate.port
    token = f"/?token={session.console.gate.tokens['full']}"

    async def work():
        assert await answer("GET", "/", False) == 401
        assert await answer("GET", "/page/app.js", False) == 401
        assert await answer("GET", "/?token=wrong", False) == 401
        assert await answer("POST", "/estop", False, Origin=here) == 401
        assert await answer("GET", "/ws", False, Origin=here, **upgrade) == 401
        assert await answer("GET", token, False) == 303
        assert await answer("GET", "/", True) == 200
        assert await answer("GET", token, False, Host=f"evil.test:{port}") == 421
        assert await answer("GET", "/", True, Host=f"evil.test:{port}") == 421
        assert await answer("GET", "/", True, Host=f"localhost:{port + 1}") == 421
        for origin in (
            {},
            {"Origin": "http://evil.test"},
            {"Origin": f"http://localhost:{port + 1}"},
            {"Origin": "null"},
        ):
            assert await answer("GET", "/ws", True, **origin, **upgrade) == 403
            assert await answer("POST", "/estop", True, **origin) == 403
        # the cookie is of localhost; a page that was opened as 127.0.0.1 is another origin
        assert await answer("GET", "/ws", True, Origin=f"http://127.0.0.1:{port}", **upgrade) == 403
        for path in (
            "/page/../settings.py",
            "/page/%2e%2e/settings.py",
            "/page/settings.py",
            "/nothing",
        ):
            assert await answer("GET", path, True) == 404
        assert not session.stub.events("estop")
        assert await answer("POST", "/estop", True, Origin=here) == 204
        assert [await answer("GET", "/?token=wrong", False) for _ in range(15)][-1] == 429

    scenario(work)
    until(lambda: session.stub.modes.mode is Mode.FAULT)


def test_cookie_and_headers(session):
    async def work():
        async with aiohttp.ClientSession() as client:
            first = await client.get(session.console.url, allow_redirects=False)
            cookie = first.cookies[session.console.gate.cookie_name]
            assert (first.headers["Location"], cookie["httponly"], cookie["samesite"]) == (
                "/",
                True,
                "Strict",
            )
            assert session.console.gate.tokens["full"] not in cookie.value
            for answer in (
                first,
                await client.get(session.address + "/"),
                await client.get(session.address + "/nothing"),
            ):
                policy = answer.headers["Content-Security-Policy"]
                assert (
                    "default-src 'none'" in policy
                    and "frame-ancestors 'none'" in policy
                    and "unsafe" not in policy
                )
                assert f"connect-src 'self' ws://localhost:{session.console.gate.port};" in policy
                assert "Access-Control-Allow-Origin" not in answer.headers
                assert answer.headers["Cross-Origin-Opener-Policy"] == "same-origin"

    scenario(work)


def test_beyond_this_machine_only_with_tls(tmp_path):
    with pytest.raises(ConfigError, match=r"console\.host is 0\.0\.0\.0.*no TLS"):
        ConsoleConfig(host="0.0.0.0")
    with pytest.raises(ConfigError, match="go together"):
        ConsoleConfig(tls_key="key.pem")
    with pytest.raises(ConfigError, match=r"console\.quality=0 .* 10 to 100"):
        ConsoleConfig(quality=0)
    (tmp_path / "no.pem").write_text("no certificate")
    with (
        pytest.raises(ConfigError, match="not usable"),
        Session(tls_certificate=str(tmp_path / "no.pem"), tls_key=str(tmp_path / "no.pem")),
    ):
        pass


def test_an_address_that_is_taken_is_one_clear_error(session):
    with (
        pytest.raises(ConfigError, match=r"cannot listen on .*Set console\.port"),
        Session(port=session.console.gate.port),
    ):
        pass


def test_replayed_malformed_and_oversized_messages(session):
    async def work():
        page = await Page(session).open()
        assert (await page.control())["mine"]
        await page.event("arm")
        await page.until(lambda: session.stub.modes.mode is Mode.READY)
        await page.event("takeover")
        await page.until(lambda: session.stub.modes.mode is Mode.HUMAN)
        good = page.text("input", d=True, a=[1, 0, 0, 0, 0, 0], g=0, keys=[])
        await page.socket.send_str(good)
        await page.until(lambda: session.stub.inputs())
        count = len(session.stub.inputs())
        for wrong, said in [
            (good, "twice"),
            (good.replace(page.nonce, "another"), "another connection"),
            ("no json", "no JSON"),
            ("[1, 2]", "no known kind"),
            ('{"k": "__reduce__"}', "no known kind"),
            ('{"k": "input"}', "other fields"),
            (page.text("input", d=True, a=[0] * 6, g=0, keys=[], more=1), "other fields"),
            (page.text("input", d=True, a=[0] * 5, g=0, keys=[]), "5 axes"),
            (page.text("input", d=True, a=[0] * 5 + [float("nan")], g=0, keys=[]), "allowed"),
            (page.text("input", d=True, a=[0] * 5 + [7], g=0, keys=[]), "allowed"),
            (page.text("input", d=1, a=[0] * 6, g=0, keys=[]), "neither"),
            (page.text("input", d=True, a=[0] * 6, g=0, keys=["x"] * 99), "no list"),
            (page.text("event", name="fault", value="", at=1), "none of"),
            (page.text("event", name="__class__", value="", at=1), "none of"),
            (page.text("event", name="note", value="a\x00b", at=1), "printable"),
        ]:
            await page.socket.send_str(wrong)
            await page.until(lambda said=said: said in (page.refusals() or [""])[-1])
        await page.socket.send_bytes(b"\x80\x04]\x94.")
        await page.until(lambda: "pages send text" in page.refusals()[-1])
        assert len(session.stub.inputs()) == count
        # from before: another page's recording, or a message that lay somewhere too long
        await page.socket.send_str(
            page.text("input", d=True, a=[1] * 6, g=0, keys=[], t=page.now() - 5)
        )
        await page.until(lambda: session.console.hub.pages.counts["stale"] == 1)
        assert len(session.stub.inputs()) == count
        await page.socket.send_str("x" * (MAX_TEXT_BYTES + 1))
        await page.until(lambda: page.code == aiohttp.WSCloseCode.MESSAGE_TOO_BIG)
        await page.client.close()

    scenario(work)
    until(lambda: session.stub.modes.mode is Mode.PAUSED)
    assert session.stub.events()[-1].value == "the operator's page was closed"


def test_a_flood_is_dropped_then_closed_and_an_estop_still_gets_through(session):
    async def work():
        page, other = await Page(session).open(), await Page(session).open()
        assert (await page.control())["mine"]
        for _ in range(200):
            await page.input()
        assert len(session.stub.inputs()) < 150
        for _ in range(30):
            await page.event("note", "again")
        await page.event("estop", "page")
        await page.until(lambda: session.stub.modes.mode is Mode.FAULT)
        assert len(session.stub.events("note")) < 25
        for _ in range(2 * FLOOD[0]):
            if page.code is None:
                await page.input()
        await page.until(lambda: page.code == aiohttp.WSCloseCode.POLICY_VIOLATION)
        await other.beat()
        assert other.code is None
        await page.client.close()
        await other.close()

    scenario(work)


def test_there_are_only_so_many_pages():
    with Session(max_viewers=1) as session:

        async def work():
            page, more = await Page(session).open(), Page(session)
            with pytest.raises(aiohttp.WSServerHandshakeError, match="503"):
                await more.open()
            await more.client.close()
            await page.close()

        scenario(work)


# ------------------------------------------------------------------------------------------ control
def test_one_page_has_control_and_all_may_stop(session):
    async def work():
        first, second = await Page(session).open(), await Page(session).open()
        assert (await first.control(who="Ada"))["mine"]
        refused = await second.control()
        assert not refused["mine"] and refused["reason"] == "Ada has control"
        await first.event("arm")
        await first.event("start")
        await first.until(lambda: session.stub.modes.mode is Mode.AUTO)
        for name in ("takeover", "end", "redo", "hand_back", "label"):
            await second.event(name, "success" if name == "label" else "")
        await second.until(lambda: len(second.refusals()) == 5)
        assert all("do not have control" in reason for reason in second.refusals())
        await second.input()
        await second.event("pause")
        await second.until(lambda: session.stub.modes.mode is Mode.PAUSED)
        assert not session.stub.inputs(), "who only watches moves nothing"
        await first.until(
            lambda: (
                first.state["s"]["control"]
                == {"page": "page 1", "who": "Ada", "lost": False, "viewers": 2}
            )
        )
        assert first.state["you"]["mine"] and not second.state["you"]["mine"]
        await second.event("estop", "page")
        await second.until(lambda: session.stub.modes.mode is Mode.FAULT)
        await second.event("estop_clear")
        await second.until(lambda: len(second.refusals()) == 6)
        for name in ("estop_clear", "ack", "arm"):
            await first.event(name)
        await first.until(lambda: session.stub.modes.mode is Mode.READY and session.stub.modes.slow)
        await first.close()
        await second.close()

    scenario(work)


def test_a_link_that_watches_does_nothing_else(session):
    async def work():
        assert session.console.url != session.console.watch_url
        watcher = await Page(session).open(session.console.watch_url)
        await watcher.until(lambda: watcher.pictures and watcher.hello["watches"])
        heard = len(session.stub.heard)
        for name in ("pause", "stop", "estop", "note", "label", "task", "arm"):
            await watcher.event(name, "success")
        await watcher.send("control", ask="request", force=True, who="Eve")
        await watcher.input()
        await watcher.until(lambda: len(watcher.refusals()) == 9)
        assert set(watcher.refusals()) == {"this link is for watching alone"}
        origin = {"Origin": session.address}
        async with watcher.client.post(session.address + "/estop", headers=origin) as answer:
            assert answer.status == 403
        said = [m for m in list(session.stub.heard)[heard:] if type(m).__name__ != "Beat"]
        assert said == [] and session.stub.modes.mode is Mode.IDLE
        page = await Page(session).open()
        assert not page.hello["watches"] and (await page.control())["mine"]
        await page.close()
        await watcher.close()

    scenario(work)


def test_an_operator_chooses_among_the_sessions_tasks(session):
    async def work():
        session.console.hub.requests.facts = Facts(
            ("lift: lift the cube", "stack: stack the cubes"), "outputs/a/checkpoints/rl"
        )
        page = await Page(session).open()
        assert page.hello["tasks"] == ["lift: lift the cube", "stack: stack the cubes"]
        assert page.hello["checkpoint"] == "outputs/a/checkpoints/rl"
        await page.control()
        await page.event("task", "format the disk")
        await page.until(lambda: page.refusals() == ["it is none of the session's tasks"])
        await page.event("task", "stack: stack the cubes")
        await page.until(lambda: page.state["s"]["task"] == "stack: stack the cubes")
        assert [e.value for e in session.stub.events("task")] == ["stack: stack the cubes"]
        await page.close()

    scenario(work)


def test_why_it_paused_and_what_happened_survive_a_refusal_and_a_reload(session):
    async def work():
        page = await Page(session).open()
        await page.control()
        for name in ("arm", "start"):
            await page.event(name)
        await page.until(lambda: session.stub.modes.mode is Mode.AUTO)
        reason = "clips all the time: workspace"
        session.call(lambda: session.stub.modes.ask("pause", By.SUPERVISOR, reason))
        where = {"epoch": 1, "tick": 1, "episode": 1}
        session.call(
            lambda: session.stub.send(
                Notice, name="pause", value=reason, by="supervisor", mode="PAUSED", **where
            )
        )
        why = f"pause: {reason} (supervisor)"
        await page.until(lambda: page.state["s"]["why"] == why)
        await page.event("arm")  # refused
        await page.until(lambda: page.refusals())
        again = await Page(session).open()
        assert again.state["s"]["why"] == page.state["s"]["why"] == why
        assert [n["value"] for n in again.hello["story"] if n["name"] == "pause"] == [reason]
        await page.event("hand_back")
        await again.until(lambda: again.state["s"]["why"] == "")
        await page.close()
        await again.close()

    scenario(work)


def test_control_by_force_pauses_first_and_the_former_holder_is_told(session):
    async def work():
        first, second = await Page(session).open(), await Page(session).open()
        await first.control()
        await first.event("arm")
        await first.event("start")
        await first.until(lambda: session.stub.modes.mode is Mode.AUTO)
        assert (await second.control(force=True, who="Bo"))["mine"]
        assert session.stub.modes.mode is Mode.PAUSED
        await first.until(lambda: any(m.get("reason") == "Bo took control" for m in first.said))
        session.call(session.stub.other_takes_control)
        await second.until(
            lambda: any(m.get("reason") == "teleop.mouse took control" for m in second.said)
        )
        assert not (await second.control())["mine"]
        await first.close()
        await second.close()

    scenario(work)


def test_a_silent_operator_loses_control_and_the_session_pauses():
    with Session(silence_s=0.3) as session:

        async def work():
            page = await Page(session).open()
            await page.control()
            await page.event("arm")
            await page.event("start")
            await page.until(lambda: session.stub.modes.mode is Mode.PAUSED)
            assert session.stub.events("pause")[-1].value == "the operator's page was silent"
            await page.until(lambda: not page.state["you"]["mine"])
            assert session.stub.holder == ""
            await page.close()

        scenario(work)


def test_what_reaches_the_supervisor_is_on_its_clock(session):
    async def work():
        page = await Page(session).open()
        await page.control()
        await page.event("arm")
        await page.event("takeover")
        await page.until(lambda: session.stub.modes.mode is Mode.HUMAN)
        pressed = page.now() - 0.25
        await page.event("label", "success", at=pressed)
        taken = page.now()
        await page.input(axes=(1, -0.5, 0, 0, 0, 0.25), g=-1)
        sent = await page.until(lambda: session.stub.inputs())
        assert (
            sent[-1].axes == (1, -0.5, 0, 0, 0, 0.25)
            and sent[-1].gripper == -1
            and sent[-1].dead_man
        )
        assert sent[-1].lease == session.stub.token
        assert sent[-1].device_stamp == pytest.approx(taken, abs=0.2)
        assert sent[-1].expiry == pytest.approx(taken - page.AHEAD + 0.5, abs=0.05)
        label = (await page.until(lambda: session.stub.events("label")))[-1]
        assert (label.value, label.at) == ("success", pytest.approx(pressed - page.AHEAD, abs=0.05))
        await page.until(lambda: page.state["s"]["label"] == "success")
        await page.event("label", "success", at=page.now() - 60)
        await page.event("start", t=page.now() - 2)
        await page.until(lambda: len(page.refusals()) == 2)
        assert page.refusals() == ["that moment is too long ago", "it came too late"]
        await page.close()

    scenario(work)


def test_a_lost_supervisor_is_shown_and_ends_control(session):
    async def work():
        page = await Page(session).open()
        await page.control()
        session.call(lambda: setattr(session.stub, "mute", True))
        await page.until(lambda: page.state["s"]["robot"]["silent"])
        session.call(session.stub.link.close)
        await page.until(
            lambda: page.state["s"]["control"]["lost"] and not page.state["you"]["mine"]
        )
        await page.event("estop", "page")
        await page.until(lambda: any("arm's own button" in reason for reason in page.refusals()))
        await page.close()

    scenario(work)


# -------------------------------------------------------------------------------------------- video
def test_a_page_that_acknowledges_nothing_gets_four_pictures(session):
    async def work():
        page = await Page(session).open()
        await page.until(lambda: len(page.pictures) >= WINDOW)
        sent = session.console.hub.pages.counts["pictures"]
        await page.until(lambda: session.console.hub.pages.counts["pictures"] >= sent + 8)
        viewer = session.console.hub.pages.viewers[0]
        assert viewer.out.on_the_way <= WINDOW and viewer.out.waiting <= 2
        assert viewer.out.dropped > 0
        await page.close()

    scenario(work)


def test_of_each_camera_only_the_newest_picture_waits():
    clock = Now()
    out = Outbox(clock)
    for number in range(6):
        out.picture(0, number, b"front %d" % number)
        out.picture(1, number, b"wrist %d" % number)
    out.state("old")
    out.state("new")
    out.urgent("answer")
    assert [out.take() for _ in range(5)] == ["answer", "new", b"front 5", b"wrist 5", None]
    assert out.dropped == 10
    for number in (6, 7, 8):
        out.picture(0, number, b"x")
        assert (out.take() is None) == (number == 8), "four are on the way"
    out.seen(0, 5)
    assert out.take() == b"x"
    out.picture(1, 9, b"y")
    assert out.take() is None
    clock.t += LOST_S + 0.01
    assert out.take() == b"y", "what is not acknowledged for a second was lost"


def test_a_picture_is_a_head_and_a_jpeg():
    picture = np.zeros((48, 64, 3), np.uint8)
    picture[:, :32] = (200, 40, 40)
    data = pack(1, 2**32 + 5, 12.25, picture, 90)
    assert HEAD.size == 24 and HEAD.unpack(data[:24]) == (b"V", 1, 1, 5, 12.25, 48, 64)
    drawn = np.asarray(Image.open(io.BytesIO(data[24:])), dtype=int)
    assert drawn.shape == (48, 64, 3)
    assert np.abs(drawn[24, 8] - (200, 40, 40)).max() < 8 and drawn[24, 56].max() < 8
    assert Image.open(io.BytesIO(pack(0, 0, 0.0, picture[:, :, 0], 90)[24:])).mode == "L"


# --------------------------------------------------------------------------------- what is computed
def test_the_fastest_answer_tells_the_offset_of_a_clock():
    clock = PageClock()
    assert clock.here(5.0, 9.0) is None
    # trip 0.5: anything between 99.9 and 100.4
    clock.answer(sent=10.0, seen_at=110.4, page=110.4, received=10.5)
    assert clock.offset == pytest.approx(100.15)
    # held for 0.1, trip 0.01
    clock.answer(sent=11.0, seen_at=111.005, page=111.105, received=11.11)
    assert clock.offset == pytest.approx(100.0) and clock.round_trip == pytest.approx(0.01)
    clock.answer(sent=12.0, seen_at=112.9, page=112.9, received=13.0)
    clock.answer(sent=12.0, seen_at=112.9, page=111.0, received=13.0)  # held for less than nothing
    assert clock.offset == pytest.approx(100.0)
    assert clock.here(112.5, 13.0) == pytest.approx(12.5)
    assert clock.here(120.0, 13.0) == 13.0, "never in the future"
    # the window forgets the old ones
    clock.answer(sent=40.0, seen_at=141.01, page=141.01, received=40.02)
    assert clock.offset == pytest.approx(101.0)


def test_a_rate_fills_up_to_its_burst():
    clock = Now()
    rate = Rate(10, 3, clock)
    assert [rate.allow() for _ in range(5)] == [True, True, True, False, False]
    clock.t += 0.2
    assert [rate.allow() for _ in range(3)] == [True, True, False]
    clock.t += 100
    assert sum(rate.allow() for _ in range(9)) == 3


@given(
    st.text(max_size=300)
    | st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=9),
        lambda x: (
            st.lists(x)
            | st.dictionaries(
                st.sampled_from(["k", "c", "n", "t", "d", "a", "g", "keys", "name"]), x
            )
        ),
        max_leaves=20,
    ).map(json.dumps)
)
def test_noise_is_one_clear_error(text):
    with pytest.raises(wire.PageError):
        wire.parse(text, "nonce")


def _state(**changes) -> State:
    vectors = (
        "proprio",
        "pose",
        "joints",
        "wrench",
        "policy",
        "human",
        "sent",
        "reference",
        "clipped",
        "faults",
    )
    numbers = (
        "tick",
        "epoch",
        "episode",
        "step",
        "gripper",
        "measured",
        "queue",
        "gate",
        "lateness",
        "overruns",
    )
    fields = dict.fromkeys(vectors, ()) | dict.fromkeys(numbers, 0)
    fields |= {"mode": "AUTO", "holder": "", "policy_version": "", "decision": -1, "index": -1}
    fields |= dict.fromkeys(("step_done", "is_human", "holding", "slow", "estop"), False)
    return Writer("supervisor", lambda: 0.0).make(State, **fields | changes)


def test_the_share_of_human_steps():
    share = display.Share()
    for step, human in enumerate([False, True, True, False, True]):
        share.add(_state(episode=1, step=step, step_done=True, is_human=human))
        # a tick within the step
        share.add(_state(episode=1, step=step, step_done=False, is_human=human))
    assert share.shown() == {"episode": 3 / 5, "session": 3 / 5, "takeovers": 2}
    for step in range(5):
        share.add(_state(episode=2, step=step, step_done=True))
    assert share.shown() == {"episode": 0.0, "session": 3 / 10, "takeovers": 0}


def test_frozen_and_lost_pictures_are_counted():
    camera = display.Camera("front")
    make = Writer("camera.front", lambda: 0.0).make
    for number, capture in [(10, 1.0), (11, 1.1), (14, 1.2), (14, 1.3), (13, 1.4)]:
        camera.add(
            make(
                Frame,
                camera="front",
                ring="",
                slot=0,
                number=0,
                device_no=number,
                capture=capture,
                device_stamp=0.0,
                height=1,
                width=1,
                channels=3,
            )
        )
    assert camera.shown(1.5) == {"name": "front", "age": 0.3, "fps": 10.0, "lost": 2, "frozen": 2}


def test_numbers_without_end_and_faults_are_shown():
    shown = display.Display(ConsoleConfig(folder="/no/such/folder"), lambda: 5.0)
    shown.hear_state(
        _state(pose=(math.inf, 1.0, 2.0, 1.0, 0.0, 0.0, 0.0), faults=("robot lost",), mode="FAULT")
    )
    found = json.loads(shown.text({}))
    assert found["robot"]["pose"][:2] == [None, 1.0]
    assert found["robot"]["faults"][0]["remedy"] == remedy("robot lost") and "cable" in remedy(
        "robot lost"
    )
    assert found["robot"]["may"] == ["ack"]
    assert found["disk"] == {"gb": None, "low": True}


def test_a_call_for_help_stands_until_the_arm_practises_again():
    now = [5.0]
    shown = display.Display(ConsoleConfig(), lambda: now[0])
    calls = lambda: json.loads(shown.text({}))["help"]  # noqa: E731
    shown.hear_note("the cable is loose")
    assert calls() == ""
    shown.hear_note("help is wanted: 3 resets in a row have failed: put things back")
    now[0] += 40.0  # a reminder is late
    shown.hear_state(_state(mode="HUMAN"))
    wanted = (
        "Help is wanted: 3 resets in a row have failed: put things back. Take control, help, and "
        "give control up."
    )
    assert calls() == wanted
    shown.hear_state(_state(mode="AUTO"))
    assert calls() == ""
    shown.hear_note("help is wanted: left the safe set")
    assert calls().startswith("Help is wanted: left the safe set. ")
    now[0] += 46.0  # whoever called is gone
    assert calls() == ""


def test_episodes_are_counted_and_a_label_goes_to_the_one_that_it_means():
    shown = display.Display(ConsoleConfig(), lambda: 5.0)

    def notice(name: str, stamp: float, episode: int, value: str = "") -> None:
        make = Writer("supervisor", lambda: stamp).make
        mode = "AUTO" if name == "begin" else "READY"
        shown.hear_notice(
            make(
                Notice,
                name=name,
                value=value,
                by="ada",
                mode=mode,
                epoch=1,
                tick=1,
                episode=episode,
            )
        )

    def label(value: str, at: float) -> None:
        shown.hear_event(
            Writer("console", lambda: at).make(Event, name="label", value=value, at=at, lease="")
        )

    notice("begin", 10.0, 1, "lift: lift the cube")
    label("success", 12.0)
    assert shown.counts() == {"successes": 0, "failures": 0, "unlabelled": 0, "discarded": 0}
    notice("end_episode", 12.1, 1)
    notice("begin", 15.0, 2, "stack: stack the cubes")
    label("failure", 11.5)  # the mark of the first, moved and called the other way
    assert json.loads(shown.text({}))["label"] == "", "of the second, nothing was said"
    notice("discard", 20.0, 2)
    notice("begin", 21.0, 3, "lift: lift the cube")
    notice("end_episode", 23.0, 3)
    assert shown.counts() == {"successes": 0, "failures": 1, "unlabelled": 1, "discarded": 1}
    label("success", 22.0)
    assert shown.counts() == {"successes": 1, "failures": 1, "unlabelled": 0, "discarded": 1}
    assert json.loads(shown.text({}))["task"] == "lift: lift the cube"
    late = display.Display(ConsoleConfig(), lambda: 5.0)  # a console that is started in an episode
    late.hear_state(_state(mode="AUTO", episode=7))
    late.hear_event(
        Writer("console", lambda: 3.0).make(Event, name="label", value="success", at=3.0, lease="")
    )
    late.hear_state(_state(mode="READY", episode=7))
    assert late.counts()["successes"] == 1


def test_every_event_of_the_table_can_be_asked_for_by_a_page():
    assert {*wire.FOR_ALL, *wire.FOR_HOLDER} == {*MODE_EVENTS, "label", "task", "note"} - {"fault"}


def test_the_process_of_the_console_imports_no_torch():
    code = (
        "import sys, real.console.server; print(sorted({'torch', 'lerobot', 'mujoco'} & "
        "set(sys.modules)))"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip()
        == "[]"
    )


def test_the_process_ends_with_its_supervisor():
    import signal
    import socket
    import threading

    from real.console.server import run

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    said: list[str] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    threading.Timer(0.5, ours.close).start()
    run(ConsoleConfig(port=0), theirs, lambda frame: None, said.append)
    for number, handler in before.items():
        signal.signal(number, handler)
    assert said and "token=" in said[0]


# ----------------------------------------------------------------------- before the real supervisor
def test_with_the_real_supervisor_and_its_simulated_arm(tmp_path):
    """The page takes control, drives the arm by hand, stops it, and brings it back; pictures
    come out of the ring."""
    from test_real_body import LIMITS

    from real.body import Body, BodyConfig

    config = BodyConfig(
        limits=str(LIMITS / "fake_point.yaml"), camera_hz=20.0, guard=False, record=False
    )
    with Body(tmp_path, config) as body:
        console_config = tmp_path / "console.json"
        options = {"port": 0, "silence_s": 5.0, "input_expiry_s": 0.5, "event_age_s": 5.0}
        console_config.write_text(json.dumps({"socket": body.socket, "console": options}))
        command = [sys.executable, "-m", "real.console.process", str(console_config)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout.readline() == "ready\n"
            url = process.stdout.readline().strip()
            console = types.SimpleNamespace(url=url)
            try:
                asyncio.run(
                    _drive(types.SimpleNamespace(console=console, address=url.partition("/?")[0]))
                )
            finally:
                process.terminate()
        assert process.returncode == 0


async def _drive(session) -> None:
    page = await Page(session).open()

    def robot():
        return page.state["s"]["robot"]

    await page.until(robot)
    await page.until(lambda: page.pictures)
    assert page.pictures[0][0] == b"V"
    assert (await page.control(who="Ada"))["mine"]
    await page.event("arm")
    await page.until(lambda: robot()["mode"] == "READY")
    start = robot()["pose"][0]
    await page.event("takeover")
    await page.until(lambda: robot()["mode"] == "HUMAN")
    end = time.monotonic() + 20
    while abs(robot()["pose"][0] - start) < 0.01:
        assert time.monotonic() < end, robot()
        await page.beat()
        await page.input(axes=(1, 0, 0, 0, 0, 0))
        await asyncio.sleep(0.03)
        if robot()["mode"] == "PAUSED":  # a machine that is busy for 150 ms: the supervisor let go
            await page.input(dead_man=False)
    await page.event("label", "failure")
    await page.until(lambda: page.state["s"]["label"] == "failure")
    await page.event("estop")
    await page.until(lambda: robot()["mode"] == "FAULT" and robot()["estop"])
    assert robot()["faults"][0]["name"] == "e-stop (console)"
    for name, mode in (("estop_clear", "FAULT"), ("ack", "IDLE"), ("arm", "READY")):
        await page.event(name)
        await page.until(
            lambda name=name, mode=mode: robot()["mode"] == mode and not robot()["estop"]
        )
    assert robot()["slow"]
    await page.close()


def test_pictures_of_a_ring_that_is_gone_are_none():
    from real.console.process import Rings
    from real.ring import RingWriter

    rings, writer = Rings(), RingWriter("front", (4, 6, 3))
    picture = np.arange(72, dtype=np.uint8).reshape(4, 6, 3)
    make = Writer("camera.front", lambda: 0.0).make

    def frame(slot: int, number: int, ring: str = writer.address) -> Frame:
        return make(
            Frame,
            camera="front",
            ring=ring,
            slot=slot,
            number=number,
            device_no=number,
            capture=0.0,
            device_stamp=0.0,
            height=4,
            width=6,
            channels=3,
        )

    slot = writer.write(picture, 7)
    np.testing.assert_array_equal(rings(frame(slot, 7)), picture)
    assert rings(frame(slot, 6)) is None and rings(frame(slot, 7, "/proc/0/fd/0")) is None
    writer.close()
    rings._forget(writer.address)
    assert rings(frame(slot, 7)) is None
