"""The terminal and the words that a user types there: any script, any encoding, streams and
folders that are gone."""

from __future__ import annotations

import errno
import io
import json
import os
import pty
import re
import resource
import signal
import subprocess
import sys
import time

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from vla_rl import cli
from vla_rl.config import compose, override
from vla_rl.config.overrides import _typed, spoken
from vla_rl.config.robot import compose as compose_session
from vla_rl.errors import ConfigError, UserError
from vla_rl.files import explained, replacing_file, require_new, write_whole
from vla_rl.storage import disk_full, is_disk_full
from vla_rl.terminal import ready_streams

COMMAND = [sys.executable, "-m", "vla_rl"]


# -------------------------------------------------------------------------------------------- words
READ = [  # what is typed, and the value that Hydra makes of it
    ("name=机器人", "机器人"),
    ("name=mein lauf ü", "mein lauf ü"),
    ("name=it's", "it's"),
    ("name=a\\", "a\\"),
    ("name=1e3", "1e3"),
    ("name=true", "true"),
    ("name=007", "007"),
    ("name=2026-11-27", "2026-11-27"),
    ("name='x'", "x"),
    ("name=null", None),
    ("output_dir=/tmp/a,b", "/tmp/a,b"),
    ("output_dir=/tmp/a[b]", "/tmp/a[b]"),
    ("output_dir=/tmp/a=b", "/tmp/a=b"),
    ("output_dir=/tmp/#1 (2)", "/tmp/#1 (2)"),
    ("dataset=./größe 数据", "./größe 数据"),
    ("checkpoint=/Users/André/ckpt", "/Users/André/ckpt"),
    ("wandb.project=研究", "研究"),
    ("env.root=/путь, и", "/путь, и"),
    ("tasks=[reach_réd, b]", ["reach_réd", "b"]),
    ("tasks=[it's, b]", ["it's", "b"]),
    ("tasks=[a,b]", ["a", "b"]),
    ("x=[[ü],2]", [["ü"], 2]),
    ("x={a: é, b: [ü, 2]}", {"a": "é", "b": ["ü", 2]}),
    ("x=[' é,x', b]", [" é,x", "b"]),
    ("x=[]", []),
    ("rl.iterations=3", 3),
    ("x=1.5", 1.5),
    ("name=${output_dir}/é", "${output_dir}/é"),
]


@pytest.mark.parametrize(("typed", "value"), READ)
def test_a_value_in_any_script_is_read_as_it_stands(typed, value):
    word = spoken(typed, ("name", "output_dir", "dataset", "checkpoint"))
    override = OverridesParser.create().parse_override(f"++{word}")
    assert not override.is_sweep_override() and override.value() == value


def test_what_is_taken_away_stays_as_it_is():
    assert spoken("~nothing", ("name",)) == "~nothing"


UNREADABLE = [
    ('name="half', 'the quote " is opened and not closed', """ "name='\\"half'" """),
    ("x='half", "the quote ' is opened and not closed", """ "x='\\\\'half'" """),
    ('x="a"b', 'the quote " is closed before the end', """ "x='\\"a\\"b'" """),
    ("tasks=[a", "[ is opened and not closed: write ] behind", """ "tasks='[a'" """),
    ('tasks=[a,"b]', "close every quote and bracket", """ "tasks='[a,\\"b]'" """),
    (
        "rl.fallback_reward={a:1",
        "{ is opened and not closed: write }",
        """ "rl.fallback_reward='{a:1'" """,
    ),
    ("x={é:1}", "each word of ASCII letters", "run=./mine.yaml"),
    ("x={'é':1}", "each word of ASCII letters", "run=./mine.yaml"),
    ("x={a}", "a mapping is written x={word: value, word: value}", """ "x='{a}'" """),
    ("seed=1,2", "names several values", "seed=[...]"),
    ("seed=choice(1,2)", "names several values", """ "seed='choice(1,2)'" """),
    ('name="$(rm x)', "is opened and not closed", """ "name='\\"\\$(rm x)'" """),
]


@pytest.mark.parametrize("word, said, remedy", UNREADABLE)
def test_a_word_that_hydra_cannot_read_is_named_with_how_to_quote_it(word, said, remedy):
    with pytest.raises(ConfigError) as error:
        compose(["run=toy", word])
    text = str(error.value)
    assert text.startswith(word) and said in text and remedy.strip() in text and "\n" not in text, (
        text
    )


@pytest.mark.parametrize("word", ['name="half', "tasks=[a", 'tasks=[a,"b]'])
def test_so_it_is_where_a_finished_config_or_a_session_is_changed(word):
    value = word.partition("=")[2]
    with pytest.raises(ConfigError, match=f"^{re.escape(word)}: .* type "):
        override(compose(["run=toy"]), [word])
    with pytest.raises(ConfigError, match=f"^{re.escape(f'robot.tasks={value}')}: .* type "):
        compose_session(["robot=fake", f"robot.tasks={value}"])


@pytest.mark.parametrize(
    "value", ['"half', "it's", "a,b", "[a", "{é:1}", "$HOME `x` \\ \"y\" 'z'", "Ünal"]
)
def test_what_the_remedy_says_is_read_as_the_text(value):
    """Typed in a shell."""
    said = subprocess.run(
        ["sh", "-c", f"printf %s {_typed('dataset', value)}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert compose(["run=toy", said.stdout]).dataset == value


@pytest.mark.parametrize(
    "word, kind",
    [("name=[a]", "list"), ("checkpoint=[a,b]", "list"), ("wandb.project={a: 1}", "mapping")],
)
def test_a_key_that_takes_one_text_takes_no_list(word, kind):
    with pytest.raises(ConfigError, match=f"this key takes one text, and that is a {kind}"):
        compose(["run=toy", word])


def test_a_config_has_the_name_and_places_that_were_typed(monkeypatch):
    monkeypatch.setenv("HOME", "/home/José")
    config = compose(
        ["run=toy", "name=ürün/机器 1", "output_dir=~/läufe", "dataset=~/数据", "checkpoint="]
    )
    assert (
        str(config.run_dir) == "/home/José/läufe/ürün/机器 1"
        and config.dataset == "/home/José/数据"
    )


@pytest.mark.parametrize(
    ("typed", "part"),
    [
        ("größe=3", "unknown config key 'größe' (value '3')"),
        ("name=\udcfc", "no character of this terminal's encoding. Set LC_ALL=C.UTF-8"),
        ("seed=дрей", "seed = 'дрей'"),
        ("env.type=机器人", "env.type is '机器人'"),
    ],
)
def test_what_cannot_be_is_named_in_its_own_letters(typed, part):
    with pytest.raises(ConfigError) as caught:
        compose(["run=toy", typed])
    assert part in str(caught.value)


# ------------------------------------------------------------------------------------------ streams
@pytest.mark.parametrize(
    ("encoding", "shown"),
    [
        ("ascii", "+ 3 -> x^3 d\\xe9mo \\u673a"),
        ("latin-1", "+ 3 -> x³ démo \\u673a"),
        ("utf-8", "✓ 3 → x³ démo 机"),
    ],
)
def test_a_terminal_without_utf8_gets_plain_letters(monkeypatch, encoding, shown):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding, errors="strict"))
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    ready_streams()
    print("✓ 3 → x³ démo 机", flush=True)
    assert raw.getvalue().decode(encoding) == f"{shown}\n"


@pytest.mark.slow
def test_streams_that_are_closed_and_a_folder_that_was_deleted(tmp_path):
    """No file of a command gets the number of a closed stream, so that nothing is written into
    it."""
    show = (
        "import os; from vla_rl.terminal import ready_streams\nready_streams(); f = "
        "os.open('file', os.O_CREAT | os.O_RDWR)\nprint('lost'); os.write(1, b'lost'); nowhere = "
        "os.readlink('/proc/self/fd/1') == '/dev/null'\nraise SystemExit(0 if f > 2 and nowhere "
        "else 1)"
    )
    closed = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", show]
    assert (
        subprocess.run(closed, cwd=tmp_path).returncode == 0
        and (tmp_path / "file").read_bytes() == b""
    )
    gone = tmp_path / "gone"
    gone.mkdir()
    script = f'cd {gone} && rmdir {gone} && exec "$@"'
    done = subprocess.run(
        ["sh", "-c", script, "sh", *COMMAND, "train", "run=toy"], capture_output=True, text=True
    )
    assert done.returncode == 2 and done.stderr.startswith("error: the working folder was deleted")


# -------------------------------------------------------------------------------------------- files
def test_a_file_is_there_as_a_whole_or_not_at_all(tmp_path):
    """``ulimit -f``: what was there before stays, and nothing half-written is left; the message
    names file and limit."""
    target = tmp_path / "result.json"
    target.write_text("before")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    try:
        with pytest.raises(OSError) as caught:
            write_whole(target, "x" * 5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG and [p.name for p in tmp_path.iterdir()] == [
        "result.json"
    ]
    assert target.read_text() == "before"
    said = explained(caught.value)
    assert said is not None and said.startswith(
        f"{target}: a file may not become that large. Raise the limit (ulimit -f)"
    )
    with pytest.raises(KeyboardInterrupt), replacing_file(target) as part:
        part.write_text("half")
        raise KeyboardInterrupt
    assert target.read_text() == "before" and len(list(tmp_path.iterdir())) == 1
    write_whole(target, "ü")
    assert target.read_bytes() == "ü".encode()
    with pytest.raises(UserError, match="exists already"):
        require_new(target)


def test_the_remedy_is_that_of_what_the_system_refused(tmp_path):
    wrapped = RuntimeError("I/O error: File too large (os error 27)")  # safetensors
    for error, parts in (
        (wrapped, ("ulimit -f", "Raise that limit")),
        (OSError(errno.ENOSPC, "No space left on device"), ("the disk is full", "Free some space")),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), ("the quota is used up", "Free some space")),
    ):
        assert is_disk_full(error) and all(
            part in str(disk_full(tmp_path / "rl", error)) for part in parts
        )
    assert not is_disk_full(OSError(errno.EIO, "Input/output error"))
    none = FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")
    assert "set TMPDIR" in (explained(none) or "")


def test_a_recording_is_never_written_over(tmp_path, capsys):
    there = tmp_path / "mine.rrd"
    there.write_bytes(b"hours of work")
    assert cli.main(["export-rerun", str(tmp_path), str(there)]) == 2
    assert (
        "mine.rrd exists already" in capsys.readouterr().err
        and there.read_bytes() == b"hours of work"
    )


# ------------------------------------------------------------------------------------------ signals
@pytest.mark.slow
def test_a_terminal_that_goes_away_ends_sft_with_its_state(tmp_path):
    """An ssh connection that drops: SIGHUP, and nothing can be said any more."""
    ours, theirs = pty.openpty()
    words = [
        "run=toy",
        "collect.episodes_per_task=2",
        "sft.validation_episodes=1",
        "sft.updates=1000000",
        "sft.checkpoint_every=1000000",
        "slots.workers=0",
        f"output_dir={tmp_path}",
    ]
    process = subprocess.Popen(
        [*COMMAND, "train", *words],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    metrics = tmp_path / "toy" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while (
        not (metrics.is_file() and '"sft"' in metrics.read_text()) and time.monotonic() < deadline
    ):
        os.read(ours, 4096)
    os.close(ours)
    process.send_signal(signal.SIGHUP)
    assert process.wait(240) == 130
    state = json.loads(
        (tmp_path / "toy" / "checkpoints" / "sft" / "training_state" / "state.json").read_text()
    )
    assert state["counters"]["iteration"] > 0
