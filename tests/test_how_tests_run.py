"""`scripts/tests.sh`, with a program in the place of pytest that ends as it is told; groups of
tests, each of which goes to one worker; and the order in which they go there."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import long_last, name_groups

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "tests.sh"
PYTEST = """#!/usr/bin/env bash
case "$*" in
*"not real_time"*) part=others ;;
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
        ("[ $part = others ] && exit 0; exit 5", 0),
        ("[ $part = in_time ] && exit 0; exit 5", 0),
        ("[ $part = others ] && exit 1; exit 0", 1),
        ("[ $part = others ] && exit 1; exit 5", 1),
        ("[ $part = in_time ] && exit 1; exit 0", 1),
    ],
)
def test_it_fails_where_a_part_does_or_none_was_chosen(run, does, status):
    found, said = run(does, "all", "-k", "a name")
    assert found == status
    assert said.split("\n")[:-1] == ["others said so", "[in real time]", "in_time said so"]


@pytest.mark.parametrize(("tiers", "without"), [("fast", " and not slow"), ("all", "")])
def test_options_are_passed_on_and_sessions_stay_one_after_the_other(run, tmp_path, tiers, without):
    assert run("exit 0", tiers, "-k", "a name", "-n", "3")[0] == 0
    others, in_time = ((tmp_path / part).read_text() for part in ("others", "in_time"))
    assert others.endswith(f" -m not real_time{without} -k a name -n 3\n")
    assert f" -m real_time{without} " in in_time and in_time.endswith(" -k a name -n 3 -n 0\n")


def test_ctrl_c_ends_it_with_what_the_sessions_said(run):
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
    assert status == 130
    assert said.endswith("[in real time]\nin_time said so\none failed\n")


@pytest.mark.xdist_group("together")
def test_a_group_is_in_the_name_by_which_a_test_is_sent_to_its_worker(request):
    if vars(request.config.option).get("loadgroup"):  # in a worker of `--dist loadgroup`
        assert request.node.nodeid.endswith("@together")
    item = pytest.Function.from_parent(request.node.parent, name="one", callobj=lambda: None)
    item._nodeid = f"{item.nodeid}@its group"  # as xdist does
    name_groups([item])
    assert item.nodeid == "tests/test_how_tests_run.py::one@its group"


def test_what_takes_long_goes_last(request):
    """Groups of which none is slow, what else is not, the other groups, the rest; each as it
    was."""
    parent = request.node.parent

    def item(name: str, *marks: pytest.MarkDecorator) -> pytest.Item:
        made = pytest.Function.from_parent(parent, name=name, callobj=lambda: None)
        for mark in marks:
            made.add_marker(mark)
        return made

    a, b, slow = pytest.mark.xdist_group("a"), pytest.mark.xdist_group("b"), pytest.mark.slow
    items = [item("1"), item("a1", a), item("2", slow), item("b1", b)]
    items += [item("b2", b, slow), item("3"), item("4", slow), item("a2", a)]
    long_last(items)
    assert [i.name for i in items] == ["a1", "a2", "1", "3", "b1", "b2", "2", "4"]
