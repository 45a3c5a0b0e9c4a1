"""Who imports whom among the rooms of `vla_rl` (its packages and its single files): arrows,
circles, and what one arrow is.

    python scripts/rooms.py                    the rooms, their arrows and the circles among them
    python scripts/rooms.py learning rewards   the imports that the arrow from learning to rewards stands for

The contract "The floors of vla_rl" in pyproject.toml says which arrows there may be.
"""

from __future__ import annotations

import sys
from collections import defaultdict

import grimp

PACKAGE = "vla_rl"


def arrows() -> dict[tuple[str, str], list[tuple[str, str]]]:
    """{(room, room that it uses): the imports}, those inside functions too."""
    graph = grimp.build_graph(PACKAGE, cache_dir=None)
    found: dict[tuple[str, str], list[tuple[str, str]]] = defaultdict(list)
    for importer in sorted(graph.modules):
        for imported in sorted(graph.find_modules_directly_imported_by(importer)):
            if (
                len(ends := [m.split(".")[1] for m in (importer, imported) if m != PACKAGE]) == 2
                and ends[0] != ends[1]
            ):
                found[ends[0], ends[1]].append((importer, imported))
    return dict(found)


def circles(pairs: set[tuple[str, str]]) -> list[set[str]]:
    """The largest sets of rooms of which each reaches every other."""
    rooms = {room for pair in pairs for room in pair}
    reached = {room: {b for a, b in pairs if a == room} for room in rooms}
    for middle in rooms:
        for room in rooms:
            if middle in reached[room]:
                reached[room] |= reached[middle]
    found = {
        frozenset({room, *(other for other in reached[room] if room in reached[other])})
        for room in rooms
    }
    return sorted((set(circle) for circle in found if len(circle) > 1), key=len, reverse=True)


def main(arguments: list[str]) -> None:
    found = arrows()
    if arguments:
        for importer, imported in found.get((arguments[0], arguments[1]), []):
            print(f"{importer} -> {imported}")
        return
    pairs = set(found)
    for room in sorted({room for pair in pairs for room in pair}):
        print(f"{room:<12} uses {', '.join(b for a, b in sorted(pairs) if a == room) or 'none'}")
    both = sorted(pair for pair in pairs if pair[::-1] in pairs and pair[0] < pair[1])
    print(
        f"\n{len({r for p in pairs for r in p})} rooms, {len(pairs)} arrows, {len(both)} pairs "
        "that use each other"
    )
    print(
        "\n".join(f"a circle of {len(c)}: {', '.join(sorted(c))}" for c in circles(pairs))
        or "no circle"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
