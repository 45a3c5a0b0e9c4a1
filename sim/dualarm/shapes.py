"""What everything is made of: boxes that the physics feels, and boxes and cylinders that are drawn
(numpy only).

Lengths in metres, angles in radians. The world: x to the right, y forwards (away from the arms), z
upwards, 0 on the table. A `Thing` is one rigid body, or a base with a button that moves down on it.
Nothing here needs SAPIEN, and no file is read.
"""

from __future__ import annotations

from dataclasses import dataclass

from sim.dualarm import kinematics as arm

Color = tuple[float, float, float]
WHITE, GREY, DARK, STEEL = (
    (0.86, 0.87, 0.88),
    (0.45, 0.47, 0.50),
    (0.10, 0.10, 0.12),
    (0.75, 0.75, 0.78),
)
RED, BLUE, GREEN, YELLOW = (
    (0.85, 0.08, 0.08),
    (0.08, 0.20, 0.85),
    (0.05, 0.55, 0.20),
    (0.95, 0.70, 0.05),
)
WOOD, TABLE, FLOOR = (0.45, 0.27, 0.12), (0.62, 0.53, 0.42), (0.25, 0.27, 0.30)


@dataclass(frozen=True)
class Part:
    """A "box" of ``size`` half lengths, or a "cylinder" of ``size`` (radius, half length along
    ``axis``), only drawn."""

    kind: str
    size: tuple[float, ...]
    color: Color
    at: tuple[float, float, float] = (0.0, 0.0, 0.0)
    axis: str = "z"
    yaw: float = 0.0  # of a box, about z
    drawn: bool = True
    solid: bool = True


@dataclass(frozen=True)
class Thing:
    """An object. ``rest`` is the height of its origin when it stands, ``grasp`` that of the fingers
    above the origin.

    ``kind`` "free" moves, "fixed" does not, "button" is fixed and has ``cap`` on it, which goes
    down by ``travel``. Fingers that hold it open along ``opens``, an angle from its x axis; turns
    by ``symmetry`` about z make no difference. ``grips``: where along its x axis it is to be held,
    for the left hand and for the right; () means at its origin.
    """

    name: str
    parts: tuple[Part, ...]
    rest: float
    mass: float = 0.1
    kind: str = "free"
    grasp: float = 0.0
    top: float = 0.0  # above the origin
    cap: tuple[Part, ...] = ()
    travel: float = 0.0
    opens: float = 0.0
    symmetry: float = 2.0 * arm.QUARTER
    grips: tuple[float, ...] = ()


@dataclass(frozen=True)
class Link:
    """A link of the arm: its joint turns about (or slides along) ``axis`` at ``at`` in the frame
    of link ``parent``."""

    name: str
    parent: str
    axis: str
    at: tuple[float, float, float]
    low: float
    high: float
    mass: float
    parts: tuple[Part, ...]
    slides: bool = False


FINGER_TRAVEL = 0.04  # of each finger; the pads touch at 0
FINGERTIP = 0.012  # that the fingers reach beyond the grasp point

_GAP = 0.0005  # half the distance between closed pads
_L, _H = arm.LOW.tolist(), arm.HIGH.tolist()


def _finger(side: int) -> tuple[Part, ...]:
    y = side * (_GAP + 0.006)
    return (
        Part("box", (0.030, 0.006, 0.010), DARK, (-0.018, y, 0.0)),
        Part("box", (0.014, 0.0062, 0.0102), YELLOW, (0.0, y, 0.0), solid=False),
    )


BASE = (
    Part("cylinder", (0.055, 0.02), DARK, (0.0, 0.0, 0.02), solid=False),
    Part("cylinder", (0.042, 0.05), WHITE, (0.0, 0.0, 0.06), solid=False),
    Part("box", (0.036, 0.036, 0.055), WHITE, (0.0, 0.0, 0.055), drawn=False),
)
LINKS = (
    Link(
        "column",
        "base",
        "z",
        (0.0, 0.0, arm.COLUMN),
        _L[0],
        _H[0],
        0.6,
        (Part("cylinder", (0.040, 0.036), GREY, (0.0, 0.0, 0.07), axis="y", solid=False),),
    ),
    Link(
        "upper",
        "column",
        "y",
        (0.0, 0.0, arm.SHOULDER - arm.COLUMN),
        _L[1],
        _H[1],
        0.6,
        (Part("box", (arm.UPPER / 2, 0.026, 0.026), WHITE, (arm.UPPER / 2, 0.0, 0.0)),),
    ),
    Link(
        "fore",
        "upper",
        "y",
        (arm.UPPER, 0.0, 0.0),
        _L[2],
        _H[2],
        0.4,
        (
            Part("cylinder", (0.032, 0.030), GREY, axis="y", solid=False),
            Part("box", (arm.ROLL / 2, 0.022, 0.022), WHITE, (arm.ROLL / 2, 0.0, 0.0)),
        ),
    ),
    Link(
        "roll",
        "fore",
        "x",
        (arm.ROLL, 0.0, 0.0),
        _L[3],
        _H[3],
        0.2,
        (
            Part(
                "box",
                ((arm.FORE - arm.ROLL) / 2, 0.019, 0.019),
                WHITE,
                ((arm.FORE - arm.ROLL) / 2, 0.0, 0.0),
            ),
        ),
    ),
    Link(
        "wrist",
        "roll",
        "y",
        (arm.FORE - arm.ROLL, 0.0, 0.0),
        _L[4],
        _H[4],
        0.15,
        (Part("cylinder", (0.024, 0.022), GREY, axis="y", solid=False),),
    ),
    Link(
        "hand",
        "wrist",
        "x",
        (arm.WRIST, 0.0, 0.0),
        _L[5],
        _H[5],
        0.15,
        (
            Part("cylinder", (0.022, 0.012), GREY, (-0.016, 0.0, 0.0), axis="x", solid=False),
            Part("box", (0.012, 0.050, 0.016), DARK, (0.008, 0.0, 0.0)),
        ),
    ),
    Link(
        "finger_a",
        "hand",
        "y",
        (arm.GRASP - arm.WRIST, 0.0, 0.0),
        0.0,
        FINGER_TRAVEL,
        0.03,
        _finger(1),
        slides=True,
    ),
    Link(
        "finger_b",
        "hand",
        "-y",
        (arm.GRASP - arm.WRIST, 0.0, 0.0),
        0.0,
        FINGER_TRAVEL,
        0.03,
        _finger(-1),
        slides=True,
    ),
)


def _block(color: str, rgb: Color) -> Thing:
    half = 0.024
    part = Part("box", (half, half, half), rgb)
    return Thing(f"{color}_block", (part,), half, 0.06, top=half, symmetry=arm.QUARTER)


def _bell(color: str, rgb: Color) -> Thing:
    """The origin is on the table; a round cap on a dome."""
    base = (
        Part("cylinder", (0.042, 0.008), DARK, (0.0, 0.0, 0.008), solid=False),
        Part("cylinder", (0.034, 0.010), rgb, (0.0, 0.0, 0.024), solid=False),
        Part("box", (0.030, 0.030, 0.017), rgb, (0.0, 0.0, 0.017), drawn=False),
    )
    cap = (
        Part("cylinder", (0.020, 0.010), STEEL, (0.0, 0.0, 0.044), solid=False),
        Part("box", (0.018, 0.018, 0.010), STEEL, (0.0, 0.0, 0.044), drawn=False),
    )
    return Thing(f"{color}_bell", base, 0.0, kind="button", top=0.054, cap=cap, travel=0.012)


def _cup() -> Thing:
    """The origin is in its middle; the handle points along x, so that fingers close along y."""
    half = 0.035
    sides = tuple(
        Part("box", (0.024, 0.010, half), GREEN, yaw=i * arm.QUARTER / 2, drawn=False)
        for i in range(4)
    )
    return Thing(
        "cup",
        (
            *sides,
            Part("cylinder", (0.026, half), GREEN, solid=False),
            Part("cylinder", (0.021, 0.001), WHITE, (0.0, 0.0, half), solid=False),
            Part("box", (0.008, 0.004, 0.018), GREEN, (0.033, 0.0, 0.0), solid=False),
        ),
        half,
        0.08,
        grasp=0.012,
        top=half,
        opens=arm.QUARTER,
    )


COASTER_TOP = 0.006
THINGS: dict[str, Thing] = {
    t.name: t
    for t in (
        _block("red", RED),
        _block("blue", BLUE),
        _bell("red", RED),
        _bell("blue", BLUE),
        _cup(),
        Thing(
            "coaster",
            (
                Part("cylinder", (0.055, COASTER_TOP / 2), WOOD, solid=False),
                Part("box", (0.048, 0.048, COASTER_TOP / 2), WOOD, drawn=False),
            ),
            COASTER_TOP / 2,
            kind="fixed",
            top=COASTER_TOP / 2,
        ),
        Thing(
            "bar",
            (
                Part("box", (0.13, 0.055, 0.022), WOOD),
                Part("box", (0.045, 0.014, 0.014), YELLOW, (0.175, 0.0, 0.0)),
                Part("box", (0.045, 0.014, 0.014), YELLOW, (-0.175, 0.0, 0.0)),
            ),
            0.022,
            0.25,
            top=0.022,
            opens=arm.QUARTER,
            grips=(-0.18, 0.18),
        ),
        Thing(
            "stick",
            (
                Part("box", (0.10, 0.014, 0.014), YELLOW),
                Part("box", (0.012, 0.0145, 0.0145), RED, solid=False),
            ),
            0.014,
            0.06,
            top=0.014,
            opens=arm.QUARTER,
            grips=(-0.06, 0.06),
        ),
    )
}
