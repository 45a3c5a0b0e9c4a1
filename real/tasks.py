"""What an episode is about, as one text that messages, journals and the console show:
``NAME/NUMBER: INSTRUCTION``."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """``name`` is the world's, ``number`` its initial state's (-1: it chooses); ``instruction`` is
    what the policy reads.

    ``horizon`` (control steps; 0: none) is not part of the text.
    """

    name: str
    instruction: str
    number: int = -1
    horizon: int = 0

    @property
    def text(self) -> str:
        place = f"{self.name}/{self.number}" if self.number >= 0 else self.name
        return f"{place}: {self.instruction}"


def spoken(instruction: str, horizon: int = 0) -> Task:
    """A task of which nothing but the instruction is known; its name is one word, so that its
    text can be parsed."""
    return Task(re.sub(r"[\s/:]+", "_", instruction), instruction, horizon=horizon)


def parse(text: str) -> Task:
    """Any text is one: without ``NAME:`` in front, which has no space in it, all of it is name
    and instruction."""
    place, colon, instruction = text.partition(": ")
    if not colon or " " in place:
        return Task(text, text)
    name, slash, number = place.rpartition("/")
    if slash and number.isascii() and number.isdigit():
        return Task(name, instruction, int(number))
    return Task(place, instruction)
