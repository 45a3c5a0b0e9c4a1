"""`scripts/tests.sh`, with a program in the place of pytest that ends as it is told; and groups of
tests, each of which goes to one worker."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import name_groups

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "tests.sh"
PYTEST = """#!/usr/bin/env bash
case "$*" in
*"not slow and not real_time"*) part=fast ;;
*"slow and not real_time"*) part=slow ;;
*--last-failed*) part=again ;;
*) part=in_time ;;
esac
echo "$*" >"$part"
echo "$part said so"
. ./does
"""


@pytest.fixture
def run(tmp_path):
    """``run(does, *options)``: status and words; ``does`` is what each part does, in bash."""
    for folder in ("scripts", ".venv/bin"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(SCRIPT, tmp_path / "scripts")
    (tmp_path / ".venv" / "bin" / "python").write_text(PYTEST)
    (tmp_path / ".venv" / "bin" / "python").chmod(0o755)

    def of(does: str, *options: str) -> tuple[int, str]:
        (tmp_path / "does").write_text(does)
        command = ["env", "--default-signal=INT", "scripts/tests.sh", *options]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        return done.returncode, done.stdout

    return of


@pytest.mark.parametrize(
    ("does", "status"),
    [
        ("exit 0", 0),
        ("exit 5", 5),  # no test was chosen anywhere
        ("[ $part = slow ] && exit 0; exit 5", 0),
        ("[ $part = fast ] && exit 1; exit 0", 1),
        ("[ $part = fast ] && exit 1; exit 5", 1),
    ],
)
def test_it_fails_where_a_part_does_or_none_was_chosen(run, does, status):
    found, said = run(does, "all", "-k", "a name")
    assert found == status
    assert said.split("\n")[:-1] == [
        "fast said so",
        "slow said so",
        "[in real time]",
        "in_time said so",
    ]


@pytest.mark.parametrize(
    ("again", "status"),
    [(0, 0), (1, 1), (2, 2), (5, 1)],  # 5: nothing is known to have failed
)
def test_sessions_that_failed_beside_others_are_run_once_more_alone(run, tmp_path, again, status):
    does = f"""
    [ $part = in_time ] && exit 1
    [ $part = again ] && echo "beside: $(ls fast slow)" && exit {again}
    exit 0
    """
    found, said = run(does, "all", "-k", "a name")
    assert found == status
    assert said.split("[in real time]")[1].split("\n")[1:-1] == [
        "in_time said so",
        "[once more, with the machine to themselves]",
        "again said so",
        "beside: fast",
        "slow",
    ]
    options = "-k a name -n 0 --last-failed --last-failed-no-failures none\n"
    assert (tmp_path / "again").read_text().endswith(options)
    assert (tmp_path / "again").read_text().startswith("-m pytest -m real_time -o cache_dir=")


def test_options_are_passed_on_and_sessions_stay_one_after_the_other(run, tmp_path):
    assert run("exit 0", "fast", "-k", "a name", "-n", "3")[0] == 0
    assert not (tmp_path / "slow").exists()
    assert (tmp_path / "fast").read_text().endswith("-k a name -n 3\n")
    assert (tmp_path / "in_time").read_text().endswith("-k a name -n 3 -n 0\n")


def test_ctrl_c_ends_it_with_what_the_sessions_said(run, tmp_path):
    """pytest answers Ctrl-C with status 2; so do the sessions, which say first what failed."""
    does = """
    if [ $part = in_time ]; then
        trap 'echo one failed; exit 2' INT
        touch waits
        for _ in {1..600}; do sleep 0.1; done
    fi
    until [ -f waits ]; do sleep 0.05; done
    kill -INT $PPID
    exit 2
    """
    status, said = run(does, "all")
    assert status == 130 and not (tmp_path / "slow").exists()
    assert said.endswith("[in real time]\nin_time said so\none failed\n")


@pytest.mark.xdist_group("together")
def test_a_group_is_in_the_name_by_which_a_test_is_sent_to_its_worker(request):
    if vars(request.config.option).get("loadgroup"):  # in a worker of `--dist loadgroup`
        assert request.node.nodeid.endswith("@together")
    item = pytest.Function.from_parent(request.node.parent, name="one", callobj=lambda: None)
    item._nodeid = f"{item.nodeid}@its group"  # as xdist does
    name_groups([item])
    assert item.nodeid == "tests/test_how_tests_run.py::one@its group"
