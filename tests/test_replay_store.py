"""The replay on disk: the same rows as in memory, whatever happens to the process, the disk or
the folder."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.learning.replay import Sizes, Tuples, measure, text, write_episodes
from vla_rl.data import direct, journal, tables
from vla_rl.data.direct import can_read_directly
from vla_rl.data.replay import Replay
from vla_rl.errors import DiskFull, EmbodimentMismatch, UserError
from vla_rl.types import (
    CameraSpec,
    EmbodimentSpec,
    EpisodeSpec,
    Observation,
    Trajectory,
    Transitions,
)

SIDE = 40  # pixels: large enough for a file of its own
SPEC = EmbodimentSpec(
    name="arm",
    action_names=("x", "grip"),
    action_units=("m", "1"),
    action_low=(-0.05, -1.0),
    action_high=(0.05, 1.0),
    frame="base",
    rotation="none",
    gripper="0 close, 1 open",
    control_hz=10.0,
    cameras=(CameraSpec("top", SIDE, SIDE), CameraSpec("hand", 8, 8)),
    proprio_names=("p", "q"),
)


def pixels(first: int, count: int, side: int) -> torch.Tensor:
    """Images that tell their frame, in every pixel."""
    shade = torch.arange(first, first + count) % 251
    return shade.to(torch.uint8).view(-1, 1, 1, 1).expand(count, side, side, 3).contiguous()


def seen(first: int, count: int) -> Observation:
    """Frames ``first`` …, known by their proprio and their pixels."""
    proprio = torch.tensor([[float(i), 0.5] for i in range(first, first + count)])
    images = {"top": pixels(first, count, SIDE), "hand": pixels(first, count, 8)}
    return Observation(images, proprio, (f"task {first // 40}",) * count)


def episode(i: int, **changes) -> Trajectory:
    """Number ``i``: three to five decisions of two control steps; frames 100·i …; every third
    one runs out of time."""
    t, first = 3 + i % 3, 100 * i
    human = torch.zeros(t, 2, dtype=torch.bool)
    human[1, 1] = i % 2 == 1
    valid = torch.ones(t, 2, dtype=torch.bool)
    valid[-1, 1] = False
    actions = torch.tensor([[[0.04, 1.0], [-0.04, -1.0]]]).repeat(t, 1, 1) * torch.linspace(
        0.1, 1.0, t
    ).view(t, 1, 1)
    whole = Trajectory(
        episode=EpisodeSpec("lift", i, rollout_id=f"r{i}"),
        observations=seen(first, t),
        final_observation=seen(first + t, 1),
        actions=actions,
        valid=valid,
        rewards=torch.zeros(t, 2),
        behavior_log_prob=torch.zeros(t),
        replay={},
        terminated=i % 3 != 2,
        truncated=i % 3 == 2,
        success=i % 3 == 0,
        policy_version=i // 2,
        is_human=human,
        proposed=None if i % 4 == 0 else actions * 0.5,
    )
    for name, value in changes.items():  # (past the shape checks, which only run in tests)
        object.__setattr__(whole, name, value)
    return whole


def put(replay: Replay, i: int, **changes) -> None:
    trajectory = episode(i, **changes)
    t = len(trajectory)
    extra = {
        "base": torch.arange(100.0 * i, 100 * i + t + 1).to(torch.bfloat16)[:, None],
        # whole blocks: uncopied
        "features": torch.arange(100 * i, 100 * i + t + 1).float()[:, None].repeat(1, 1152),
    }
    replay.add(
        trajectory,
        torch.linspace(0.0, 1.0, t) + i,
        "demonstrations" if i % 4 == 0 else "online",
        extra,
    )


def filled(count: int, folder: Path | None = None, **options) -> Replay:
    replay = Replay(folder, embodiment=SPEC, **options)
    for i in range(count):
        put(replay, i)
    return replay


def tensors(batch: Transitions) -> dict[str, torch.Tensor | tuple[str, ...]]:
    """Every column of a batch under a name of its own."""
    found: dict[str, torch.Tensor | tuple[str, ...]] = {}
    for f in dataclasses.fields(batch):
        value = getattr(batch, f.name)
        if isinstance(value, Observation):
            found |= {f"{f.name}/{k}": v for k, v in value.images.items()}
            found |= {
                f"{f.name}/proprio": value.proprio,
                f"{f.name}/instruction": value.instruction,
            }
        elif isinstance(value, dict):
            found |= {f"{f.name}/{k}": v for k, v in value.items()}
        else:
            found[f.name] = value
    return found


def same(a: Replay, b: Replay, draws: int = 2, seed: int = 0) -> bool:
    """Whether two replays yield the same rows for the same seed, in every column."""
    assert (a.episodes, len(a), a.count("online")) == (b.episodes, len(b), b.count("online"))
    generators = [torch.Generator().manual_seed(seed) for _ in range(2)]
    for _ in range(draws):
        options = {"n_step": 3, "gamma": 0.9, "shares": {"online": 0.5, "demonstrations": 0.5}}
        x, y = (tensors(r.draw(64, g, **options)) for r, g in zip((a, b), generators))
        assert x.keys() == y.keys()
        if not all(
            torch.equal(x[k], y[k]) if isinstance(x[k], torch.Tensor) else x[k] == y[k] for k in x
        ):
            return False
    return True


# ------------------------------------------------------------------------------------------ drawing
@pytest.mark.parametrize("ram_bytes", [0, 20_000, 2 << 30])
def test_what_is_drawn_does_not_depend_on_where_it_lies(tmp_path, ram_bytes):
    memory = filled(9)
    disk = filled(9, tmp_path / "r", ram_bytes=ram_bytes)
    assert same(memory, disk) and same(
        memory, Replay(tmp_path / "r", episodes=None, ram_bytes=ram_bytes)
    )
    ram = {name for name, table in disk._tables.items() if not table.on_disk_alone}
    small = {"decisions", "frames"}
    assert (
        ram
        == {
            0: set(),
            20_000: {"frames", "decisions"},
            2 << 30: small | {"image:top", "extra:features"},
        }[ram_bytes]
    )
    assert memory.bytes == disk.bytes


@pytest.mark.parametrize("ram_bytes", [0, 20_000])
def test_what_memory_cannot_hold_is_read_directly(tmp_path, ram_bytes):
    """Rows of 40 px images begin and end anywhere in the disk's blocks; some are drawn twice,
    some lie side by side."""
    memory, disk = filled(9), filled(9, tmp_path / "r", ram_bytes=ram_bytes, cache_bytes=1000)
    again = Replay(tmp_path / "r", episodes=None, ram_bytes=ram_bytes, cache_bytes=1000)
    assert disk.reads_directly == again.reads_directly == can_read_directly(tmp_path / "r")
    # memory can
    assert not Replay(tmp_path / "r", episodes=None, ram_bytes=ram_bytes).reads_directly
    for i in range(9, 12):
        assert same(memory, disk, draws=4, seed=i)
        put(memory, i)
        put(disk, i)
    assert same(Replay(tmp_path / "r", episodes=9, ram_bytes=ram_bytes), again)
    if again.reads_directly:
        os.truncate(tmp_path / "r" / "image%3Atop.rows", 50_000)
        with pytest.raises(OSError, match="cut short while it was open"):
            again.draw(64, torch.Generator().manual_seed(0))


def test_rows_carry_what_was_known_of_them_and_images_can_stay_behind():
    replay = filled(8)
    batch = replay.draw(400, torch.Generator().manual_seed(0))
    frame = batch.observations.proprio[:, 0].long()
    i, k = frame // 100, frame % 100
    last = k == 2 + i % 3
    assert torch.equal(batch.observations.images["top"][:, 3, 5, 1].long(), frame % 251)
    assert torch.equal(batch.next_observations.images["hand"][:, 7, 0, 2].long(), (frame + 1) % 251)
    assert torch.equal(batch.extra["base"][:, 0], frame.to(torch.bfloat16))
    assert torch.equal(batch.next_extra["features"][:, 1099].long(), frame + 1)
    assert torch.equal(batch.version, i // 2) and torch.equal(batch.proposed_known, i % 4 != 0)
    sent = torch.where(batch.proposed_known[:, None, None], 2.0 * batch.proposed, batch.proposed)
    assert torch.equal(sent, batch.actions)
    assert (
        torch.equal(batch.is_human[:, 1], (i % 2 == 1) & (k == 1))
        and not batch.is_human[:, 0].any()
    )
    assert torch.equal(batch.truncated, last & (i % 3 == 2))
    assert torch.equal(batch.discounts == 0.0, last & (i % 3 != 2))
    assert batch.observations.instruction == tuple(f"task {(100 * n) // 40}" for n in i.tolist())
    blind = replay.draw(400, torch.Generator().manual_seed(0), images=False)
    assert blind.observations.images == blind.next_observations.images == {}
    assert torch.equal(blind.observations.proprio, batch.observations.proprio) and torch.equal(
        blind.rewards, batch.rewards
    )
    assert torch.equal(blind.next_extra["features"], batch.next_extra["features"])


def test_corrections_are_a_source_of_their_own_beside_their_episodes(tmp_path):
    """Decision 1 of the odd episodes is human; episode 8 is a demonstration, whatever a person
    did in it."""
    replay = filled(8, tmp_path / "r")
    put(replay, 8, is_human=torch.ones(5, 2, dtype=torch.bool))
    for r in (replay, Replay(tmp_path / "r", episodes=None)):
        assert r.count("interventions") == 4 and r.count("online") + r.count(
            "demonstrations"
        ) == len(r)
        batch = r.draw(60, torch.Generator().manual_seed(0), shares={"interventions": 1.0})
        assert set(batch.observations.proprio[:, 0].tolist()) == {101.0, 301.0, 501.0, 701.0}
        assert batch.is_human[:, 1].all() and set(batch.source) == {"online"}
    unexecuted = torch.zeros(4, 2, dtype=torch.bool)
    unexecuted[-1, 1] = True  # of a step that was never run
    put(replay, 13, is_human=unexecuted)
    assert replay.count("interventions") == 4


def test_successes_are_drawn_apart_beside_their_source(tmp_path):
    """Episodes 2 and 4 succeeded; 4 is a demonstration, and drawn as one alone."""
    replay = Replay(tmp_path / "r", embodiment=SPEC)
    for i in range(1, 6):
        put(replay, i, success=i in (2, 4))
    two = replay.lengths(1)[0]
    for r in (replay, Replay(tmp_path / "r", episodes=None)):
        assert r.count("solved") == two and r.count("online") + r.count("demonstrations") == len(r)
        batch = r.draw(60, torch.Generator().manual_seed(0), shares={"solved": 1.0})
        assert set(batch.observations.proprio[:, 0].tolist()) == {200.0 + k for k in range(two)}
        assert set(batch.source) == {"online"}


def test_a_batch_that_is_held_is_never_written_over():
    """A batch's memory is used again only when nobody holds any of it: not even a slice or a
    view."""
    replay, generator = filled(6), torch.Generator().manual_seed(0)
    held, expected = [], []
    for k in range(6):
        batch = replay.draw(256, generator)
        part = (
            batch.next_observations.images["top"][10:20].permute(0, 3, 1, 2)
            if k % 2
            else batch.extra["features"]
        )
        held.append(part)
        expected.append(part.clone())
        del batch
    assert all(torch.equal(a, b) for a, b in zip(held, expected))


def test_memory_of_forgotten_batches_is_used_again(monkeypatch):
    """Batches of a MiB and more ("top", the features) ask for memory once; of the small ones
    each does."""
    replay, generator, asked = filled(6), torch.Generator().manual_seed(0), []
    monkeypatch.setattr(
        tables,
        "aligned",
        lambda rows, width: asked.append(rows * width) or direct.aligned(rows, width),
    )
    for _ in range(6):
        replay.draw(256, generator)
    large = [size for size in asked if size >= 1 << 20]
    assert len(large) == len(set(large)) == 2 and len(asked) > 6
    held = [replay.draw(256, generator) for _ in range(3)]
    assert len([size for size in asked if size >= 1 << 20]) > 2 and len(held) == 3


# ------------------------------------------------------------------------------------------ killing
FORKS = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import signal, torch
from test_replay_store import filled, put
from vla_rl.data import tables
from vla_rl.data.direct import can_read_directly
from vla_rl.data.replay import Replay

root, real = Path(sys.argv[2]), os.pwrite

def child(work):
    process = os.fork()
    if process == 0:
        work()
        os._exit(1)  # not reached: it was to be killed
    return process

def dies_at(write, share):
    def work():
        replay = Replay(folder, episodes=None)
        calls = iter(range(100))
        def half(file, data, offset):
            if next(calls) != write:
                return real(file, data, offset)
            real(file, data[: int(len(data) * share)], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        os.pwrite = half
        put(replay, 2)
    return work

for before in (0, 2):
    for write in range(5):
        for share in (0.0, 0.5, 1.0):
            folder = root / f"{before}-{write}-{share}"
            filled(before, folder)
            _, status = os.waitpid(child(dies_at(write, share)), 0)
            assert os.WTERMSIG(status) == signal.SIGKILL, (folder, status)

folder = root / "stream"
def stream():
    replay = Replay(folder)
    for i in range(100_000):
        put(replay, i)
        (root / "closed").write_text(str(i + 1))
process = child(stream)
while not (root / "closed").exists() or not (text := (root / "closed").read_text()) or int(text) < 20:
    pass
os.kill(process, signal.SIGKILL)
os.waitpid(process, 0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forked writers")
@pytest.mark.slow
def test_a_writer_that_was_killed_leaves_every_closed_episode(tmp_path):
    """SIGKILL before, in the middle of and after each write of an episode, and at some moment of
    a stream of them."""
    code = [sys.executable, "-c", FORKS, str(Path(__file__).parent), str(tmp_path)]
    run = subprocess.run(code, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr
    memory, two, three = filled(2), filled(2), filled(2)
    put(three, 2)
    first = Replay()
    put(first, 2)
    for before, write in [(b, w) for b in (0, 2) for w in range(5)]:
        for share in (0.0, 0.5, 1.0):
            folder = tmp_path / f"{before}-{write}-{share}"
            replay = Replay(folder, episodes=None, embodiment=SPEC)
            # the journal's line was whole: nothing was left to do but to sync it
            whole = write == 4 and share == 1.0
            assert replay.episodes == before + whole
            if before:
                assert same(replay, three if whole else two)
            if not whole:
                put(replay, 2)
            assert same(replay, three if before else first)
            assert same(Replay(folder, episodes=None, ram_bytes=0), three if before else first)
            if before:
                assert same(Replay(folder, episodes=2), memory)  # and the checkpoint is older
    closed = int((tmp_path / "closed").read_text())
    replay = Replay(tmp_path / "stream", episodes=None)
    assert replay.episodes in (closed, closed + 1, closed + 2) and same(
        replay, filled(replay.episodes)
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_files_that_were_cut_short_lose_the_last_episode_at_most(tmp_path):
    """Where more is gone than a kill, or a disk that lied, may take, nothing is."""
    filled(4, tmp_path / "r")
    expected = [filled(n) for n in range(6)]
    lengths = [len(expected[n]) for n in range(5)]
    checked = set()
    for path in sorted((tmp_path / "r").iterdir()):
        if path.name in ("header.json", ".lock"):
            continue
        size = path.stat().st_size
        row = (
            0
            if path.suffix == ".jsonl"
            else size // (lengths[4] + (0 if path.name == "decisions.rows" else 4))
        )
        lines = (
            np.cumsum([0, *map(len, path.read_bytes().splitlines(keepends=True))])
            if not row
            else None
        )
        for cut in {size - 1, size - max(row, 2), size // 2, size // 3, max(row, 1), 1, 0}:
            folder = tmp_path / f"{path.stem}-{cut}"
            shutil.copytree(tmp_path / "r", folder)
            os.truncate(folder / path.name, cut)
            before = contents(folder)
            if row:
                frames = 0 if path.name == "decisions.rows" else 1
                whole = max(n for n in range(5) if (lengths[n] + frames * n) * row <= cut)
            else:
                whole = max(n for n in range(5) if lines[n] <= cut)
            with pytest.raises(
                UserError, match=f"holds {whole} episodes and the checkpoint needs 4"
            ):
                Replay(folder, episodes=4)
            assert contents(folder) == before  # an error changes nothing
            checked.add(whole)
            if whole < 3:
                lacks, more = (
                    f"number {whole + 1} are not in {path.name}",
                    f"rows of 4 episodes, and {whole} are",
                )
                with pytest.raises(UserError, match=rf"is damaged .*{lacks if row else more}"):
                    Replay(folder, episodes=None, embodiment=SPEC)
                assert contents(folder) == before
                # who asks for less may
                assert same(Replay(folder, episodes=whole), expected[whole]) if whole else True
                continue
            replay = Replay(folder, episodes=None, embodiment=SPEC)
            assert same(replay, expected[whole])
            put(replay, whole)
            assert len(Replay(folder, episodes=None)) == lengths[whole + 1]
    assert checked == {0, 1, 2, 3}


def test_a_kill_while_a_folder_is_cut_or_emptied_is_told_from_damage(tmp_path, monkeypatch):
    filled(5, tmp_path / "r")

    def killed(*_: object) -> None:
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(tables.Table, "cut", killed)
        with pytest.raises(SystemExit):
            Replay(tmp_path / "r", episodes=2)
    # the journal was cut, the rows of the others are there still
    replay = Replay(tmp_path / "r", episodes=None)
    assert same(replay, filled(2))
    put(replay, 2)
    assert same(Replay(tmp_path / "r", episodes=None), filled(3))
    unlink = Path.unlink
    for step in range(4):
        deaths = iter([False] * step + [True])

        def dies(path: Path, missing_ok: bool = False, deaths=deaths) -> None:
            killed() if next(deaths) else unlink(path, missing_ok)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", dies)
            with pytest.raises(SystemExit):
                Replay(tmp_path / "r", episodes=0)
        replay = Replay(tmp_path / "r", episodes=None)
        assert replay.episodes == 0
        for i in range(3):
            put(replay, i)
        assert same(Replay(tmp_path / "r", episodes=None), filled(3))


def test_rows_that_are_not_what_was_written_are_noticed_at_the_end(tmp_path):
    """A disk that lost the last rows though it said that it had them: zeros in place of them."""
    filled(3, tmp_path / "r")
    path = tmp_path / "r" / "image%3Atop.rows"
    with path.open("r+b") as file:
        file.seek(-1000, os.SEEK_END)
        file.write(bytes(100))
    assert same(Replay(tmp_path / "r", episodes=None), filled(2))


def test_opening_reads_little_of_what_is_beyond_the_budget(tmp_path):
    if not os.path.exists("/proc/self/io"):
        pytest.skip("counts the bytes that were read")
    replay = filled(40, tmp_path / "r")

    def read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    before = read()
    again = Replay(tmp_path / "r", episodes=None, ram_bytes=40_000)
    assert read() - before < 0.1 * replay.bytes and again.episodes == 40


# -------------------------------------------------------------------------------------- a full disk
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("before", [0, 2])
def test_a_full_disk_leaves_all_as_it_was(tmp_path, monkeypatch, number, before):
    folder = tmp_path / "r"
    replay, real = filled(before, folder), tables.write_at
    content = {p.name: p.read_bytes() for p in folder.iterdir()}
    for full_at in range(5):
        calls = iter(range(100))

        def write_at(path, offset, data, full_at=full_at, calls=calls):
            if next(calls) == full_at:
                real(path, offset, data[: len(data) // 2])
                raise OSError(number, os.strerror(number))
            real(path, offset, data)

        with monkeypatch.context() as patch:
            patch.setattr(tables, "write_at", write_at)
            patch.setattr(journal, "write_at", write_at)
            with pytest.raises(
                DiskFull,
                match=r"the (disk is full|quota is used up): .*r could not be written.*unchanged",
            ):
                put(replay, 7)
        assert {p.name: p.read_bytes() for p in folder.iterdir()} == content
        assert replay.episodes == before and (not before or same(replay, filled(before)))
    put(replay, 7)
    memory = filled(before)
    put(memory, 7)
    assert same(replay, memory) and same(Replay(folder, episodes=None), memory)


# ---------------------------------------------------------------------------------------- bad input
NAN, INF = float("nan"), float("inf")
OTHER = dataclasses.replace(SPEC, name="hand", action_high=(0.1, 1.0))


def bounds(value: float, step: int = 0) -> dict[str, torch.Tensor]:
    actions = episode(0).actions.clone()
    actions[2, step, 0] = value
    return {"actions": actions}


@pytest.mark.parametrize(
    "changes, said",
    [
        (
            bounds(0.0501),
            r"rollout r0, row 4, action\[x\]: is 0.0501, beyond the -0.05 … 0.05 of the robot",
        ),
        (bounds(NAN), r"r0, row 4, action\[x\]: is nan"),
        ({"proposed": torch.full((3, 2, 2), INF)}, r"r0, row 0, proposed\[0\]: is inf"),
        (
            {"proposed": torch.zeros(3, 1, 2)},
            r"r0 has actions \[3, 2, 2\], but proposed is \[3, 1, 2\], not \[3, 2, 2\]",
        ),
        ({"is_human": torch.zeros(2, 2, dtype=torch.bool)}, r"is_human is \[2, 2\], not \[3, 2\]"),
        ({"valid": torch.ones(3, 5, dtype=torch.bool)}, r"valid is \[3, 5\], not \[3, 2\]"),
        ({"final_observation": seen(3, 2)}, "2 final observations, not 1"),
        (
            {"final_observation": Observation({}, seen(3, 1).proprio, ("x",))},
            r"image top is None in the final obs.*not \[40",
        ),
        (
            {"observations": dataclasses.replace(seen(0, 3), proprio=torch.full((3, 2), NAN))},
            r"r0, row 0, observation.state\[.*\]: is nan",
        ),
        (
            {
                n: dataclasses.replace(seen(0, k), images={"top": pixels(0, k, SIDE)})
                for n, k in (("observations", 3), ("final_observation", 1))
            },
            "is not of the robot arm .cameras .*'top'.*'hand'",
        ),
        (
            {
                n: dataclasses.replace(
                    seen(0, k), images={"top": pixels(0, k, 20), "hand": pixels(0, k, 8)}
                )
                for n, k in (("observations", 3), ("final_observation", 1))
            },
            "cameras .*20x20.*not.*40x40.*one robot and camera set",
        ),
        (
            {
                n: dataclasses.replace(seen(0, k), proprio=torch.zeros(k, 5))
                for n, k in (("observations", 3), ("final_observation", 1))
            },
            "proprio dimensions 5, not 2",
        ),
        ({"actions": torch.zeros(3, 2, 7), "proposed": None}, "action dimensions 7, not 2"),
    ],
)
def test_an_episode_with_a_mistake_is_refused_as_a_whole(tmp_path, changes, said):
    replay = filled(1, tmp_path / "r")
    content = {p.name: p.read_bytes() for p in (tmp_path / "r").iterdir()}
    with pytest.raises(UserError, match=said):
        put(replay, 0, **changes)
    assert content == {p.name: p.read_bytes() for p in (tmp_path / "r").iterdir()}
    put(replay, 1)
    assert same(replay, filled(2))


def test_rounding_and_steps_that_were_never_run_may_leave_the_bounds():
    replay = Replay(embodiment=SPEC)
    put(replay, 0, **bounds(0.05 + 1e-8))
    put(replay, 0, **bounds(0.2, step=1))  # the last chunk was cut short before it
    assert replay.episodes == 2


@pytest.mark.parametrize(
    "extra, said",
    [
        (
            {"f": torch.tensor([0.0, 1.0, INF, 0.0])},
            "extra 'f' of rollout r0 must hold finite .* 4 frames.*not finite: look at",
        ),
        (
            {"f": torch.zeros(3)},
            r"extra 'f' of rollout r0 .* one more than decisions; got shape \[3\]",
        ),
        (
            {"f": torch.zeros(4, dtype=torch.complex64)},
            r"r0 has extra:f complex64 \[\]: give numbers",
        ),
    ],
)
def test_extras_are_checked(extra, said):
    with pytest.raises(UserError, match=said):
        Replay().add(episode(0), torch.zeros(3), extra=extra)


def test_columns_stay_what_they_were():
    replay = Replay()
    replay.add(episode(0), torch.zeros(3), extra={"f": torch.zeros(4, 2)})
    for extra, said in [
        ({}, "no extra:f here"),
        ({"f": torch.zeros(4, 2), "g": torch.zeros(4)}, "no extra:g before"),
        ({"f": torch.zeros(4, 3)}, r"extra:f float32 \[3\] here, extra:f float32 \[2\] before"),
        ({"f": torch.zeros(4, 2, dtype=torch.float64)}, r"extra:f float64 \[2\] here"),
    ]:
        with pytest.raises(UserError, match=f"{said}.*one env, camera set and learner per replay"):
            replay.add(episode(0), torch.zeros(3), extra=extra)


def test_a_folder_of_something_else_is_refused_and_stays_as_it_is(tmp_path):
    filled(2, tmp_path / "r")
    with pytest.raises(EmbodimentMismatch, match=r"(?s)the replay .*r .arm.*action_high"):
        Replay(tmp_path / "r", episodes=2, embodiment=OTHER)
    assert Replay(tmp_path / "r", episodes=2).embodiment == SPEC
    with pytest.raises(UserError, match="beyond"):  # it knows its robot, though nobody said so
        put(Replay(tmp_path / "r", episodes=2), 0, **bounds(0.09))
    old = tmp_path / "old" / "0000000"
    old.mkdir(parents=True)
    for episodes in (None, 0, 1):
        with pytest.raises(
            UserError, match="earlier version of vla-rl, which kept a folder per episode: start"
        ):
            Replay(tmp_path / "old", episodes=episodes)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thesis.tex").write_text("…")
    with pytest.raises(UserError, match=r"notes holds thesis.tex, which is of no replay"):
        Replay(tmp_path / "notes")
    assert old.exists() and (tmp_path / "notes" / "thesis.tex").exists()


@pytest.mark.parametrize(
    "name, change, said",
    [
        (
            "header.json",
            lambda b: b.replace(b'"format": 2', b'"format": 3'),
            "has the format 3, this version of vla-rl reads 2",
        ),
        (
            "header.json",
            lambda b: b[:-9],
            "header.json is damaged .*: start over with --fresh, or restore",
        ),
        (
            "header.json",
            lambda b: b.replace(b"bfloat16", b"bloat16"),
            "header.json is damaged .*bloat16",
        ),
        ("header.json", None, "header.json is missing: start over"),
        ("image%3Atop.rows", None, "damaged .image%3Atop.rows is missing.: start over"),
        (
            "journal.jsonl",
            lambda b: b.replace(b'"r1"', b'"rX"'),
            "line 2 of journal.jsonl is not whole, later ones are",
        ),
    ],
)
def test_damage_that_no_kill_explains_is_an_error_that_changes_nothing(
    tmp_path, name, change, said
):
    filled(3, tmp_path / "r")
    path = tmp_path / "r" / name
    if change is None:
        path.unlink()
    else:
        path.write_bytes(change(path.read_bytes()))
    before = contents(tmp_path / "r")
    with pytest.raises(UserError, match=said):
        Replay(tmp_path / "r", episodes=None)
    assert contents(tmp_path / "r") == before
    assert Replay(tmp_path / "r").episodes == 0  # who starts over may


# ---------------------------------------------------------------------------------------- the bench
def test_the_bench_compares_equal_rows_and_leaves_nothing_behind(tmp_path):
    r = measure(1200, 40, cameras=2, chunk=4, folder=tmp_path, rounds=1, batches=2)
    frame = 2 * 5120 + 8 * 4 + 8  # images (4800 bytes, in whole blocks of a disk), proprio, text
    decision = 2 * 4 * 7 * 4 + 2 * 4 + 4  # actions twice, two masks, reward
    assert r["written"]["bytes"] == 300 * decision + 303 * frame and r["rows_in_ram"] == 300
    assert r["written"]["bytes_for_1_million_steps"] == pytest.approx(
        r["written"]["bytes"] / 1200 * 1e6
    )
    assert r["bytes_ratio"] == pytest.approx(
        300 * (4 * 40 * 40 * 3 + 4 * (8 + 8 + 28 + 2)) / r["written"]["bytes"]
    )
    assert {"tuples", "ram", "disk"} <= r["images"].keys() and r["no_images"].keys() == {
        "tuples",
        "ram",
        "disk",
    }
    for speeds in (r["images"], r["no_images"]):
        for speed in speeds.values():
            assert speed["ratio"] == pytest.approx(
                speed["per_second"] / speeds["tuples"]["per_second"]
            )
    assert list(tmp_path.iterdir()) == []
    assert "1 million steps" in text(r)


def test_the_bench_fills_tuples_with_the_replays_own_frames():
    """Row k of the tuples and decision k of the replay: the same frame, and the same next one,
    also across episodes."""
    sizes = Sizes(steps=230, size=40, cameras=2)
    tuples, replay = Tuples(sizes, 230), Replay()
    write_episodes(replay, sizes, 230)
    for seed in range(3):
        generators = [torch.Generator().manual_seed(seed) for _ in range(2)]
        rows = tuples.draw(64, generators[0], True)
        batch = replay.draw(64, generators[1])
        assert torch.equal(rows[-4], batch.observations.images["camera_0"])
        assert torch.equal(rows[-3], batch.observations.images["camera_1"])
        assert torch.equal(rows[-2], batch.next_observations.images["camera_0"])
        assert torch.equal(rows[-1], batch.next_observations.images["camera_1"])
