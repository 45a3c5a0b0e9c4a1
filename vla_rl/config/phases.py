"""The phases of a run in their order, one row each. What they do stands in `vla_rl.run.pipeline`;
reading this imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from vla_rl.diagnostics import Diagnostic


@dataclass(frozen=True)
class Phase:
    """``says`` announces it, ``label`` names it on pages.

    ``needs``: "demonstrations", "start" (a policy), or the phase whose policy it takes; ``writes``:
    what it leaves in the run's folder, first what others need of it. One with ``steps``, (one of
    them, the config key that says how many), logs a line every so often. An evaluation ``judges``:
    (the short name of ``eval_NAME.json``, what pages call that policy); one of a policy that came
    ``beside`` another is not what the run is about, and listed before that. The ``usual`` ones run
    where ``phases`` names none; ``recorded`` ones run no episode, or need not, so that a recording
    without a simulator is enough for them (``env=dataset``). One that takes the ``last`` policy
    judges whatever was trained before it.
    """

    name: str
    says: str
    label: str
    needs: str = ""
    writes: tuple[str, ...] = ()
    steps: tuple[str, str] | None = None
    judges: tuple[str, str] | None = None
    beside: bool = False
    usual: bool = True
    recorded: bool = False
    last: bool = False
    diagnostics: tuple[Diagnostic, ...] = ()

    @property
    def trains(self) -> bool:
        """Whether it works on the tasks that are trained on, so that there must be some."""
        return bool(self.writes)


_SFT = (
    Diagnostic(
        "sft/loss",
        "SFT loss",
        "Falls and flattens; how far is set by the budget.",
        smooth=True,
        beside=("validation/loss", "trained on", "held-out demonstrations"),
    ),
    Diagnostic(
        "sft/accuracy",
        "SFT token accuracy",
        "Share of action tokens predicted exactly.",
        share=True,
        smooth=True,
    ),
)
_RL = (
    Diagnostic(
        "rollout/control_steps_to_success",
        "Control steps to success",
        "Shorter means more decisive.",
    ),
    Diagnostic(
        "reward/progress_end",
        "Progress by the reward model",
        "How episodes end in its eyes; it should rise with success, not without it.",
        share=True,
    ),
)
_ROWS = (
    Phase(
        "collect",
        "demonstrations into a LeRobotDataset",
        "demonstrations",
        writes=("dataset",),
    ),
    Phase(
        "sft",
        "supervised fine-tuning on the demonstrations",
        "SFT",
        needs="demonstrations",
        writes=("checkpoints/sft",),
        steps=("update", "sft.updates"),
        recorded=True,
        diagnostics=_SFT,
    ),
    Phase(
        "random",
        "a policy with random weights, made for what random actions show",
        "random weights",
        writes=("checkpoints/random",),
        usual=False,
    ),
    Phase(
        "eval_sft",
        "success of the starting policy on held-out initial states",
        "evaluation before",
        needs="start",
        judges=("sft", "SFT"),
    ),
    Phase(
        "reward",
        "training and judging the reward, where it is a learned one",
        "reward model",
        needs="start",
        writes=("rollouts", "reward"),
    ),
    Phase(
        "offline",
        "offline rounds: critics and a model from the data, candidates past a gate, new episodes",
        "offline rounds",
        needs="start",
        writes=("checkpoints/offline",),
        usual=False,
        recorded=True,
    ),
    Phase(
        "eval_offline",
        "success of what the offline rounds left, on the same held-out initial states",
        "evaluation after offline rounds",
        needs="offline",
        judges=("offline", "Offline"),
        usual=False,
    ),
    Phase(
        "rl",
        "online RL",
        "RL",
        needs="start",
        writes=("checkpoints/rl", "learner/state"),
        steps=("iteration", "rl.iterations"),
        recorded=True,
        diagnostics=_RL,
    ),
    Phase(
        "eval_rl",
        "success of the tuned policy on the same held-out initial states",
        "evaluation after",
        needs="rl",
        judges=("rl", "RL"),
    ),
    Phase(
        "eval_student",
        "success of the student that learned beside RL, on the same held-out initial states",
        "evaluation of the student",
        needs="rl",
        judges=("student", "Student"),
        beside=True,
        usual=False,
    ),
    Phase(
        "eval_test",
        "success of the last and of the best policy on the test set, whose states chose nothing",
        "evaluation on the test set",
        needs="start",
        usual=False,
        last=True,
    ),
    Phase(
        "eval_actions",
        "errors of actions on demonstrations that were kept out, beside simple guesses",
        "action errors",
        needs="start",
        usual=False,
        recorded=True,
    ),
    Phase("report", "writing report.html and summary.json", "report", recorded=True),
)
PHASES = {row.name: row for row in _ROWS}
USUAL_PHASES = tuple(row.name for row in _ROWS if row.usual)


def with_followers(name: str) -> set[str]:
    """The phase and those that take the policy it trained: they are open again when it is."""
    return {name, *(row.name for row in _ROWS if row.needs == name or row.last)}


def evaluations() -> dict[str, str]:
    """{short name: what pages call that policy} of the evaluations, in the order in which pages
    list them."""
    order = list(PHASES)
    place = {
        row.judges: (order.index(row.needs if row.needs in PHASES else row.name), not row.beside)
        for row in _ROWS
    }
    return dict(judges for judges in sorted(filter(None, place), key=lambda judges: place[judges]))
