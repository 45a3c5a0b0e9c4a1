"""A word-level tokenizer for instructions, in plain Python, that encodes any text.

Words of the vocabulary have an id each; every other word falls into one of a few hash buckets, so a
held-out paraphrase still encodes, always to the same ids, on every machine.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterable

from vla_rl.errors import UserError

PAD_ID = 0
_WORD = re.compile(r"[a-z]+|[0-9]|[^\sa-z0-9]")

# Words of table-top manipulation. More can be added per policy; what is not listed is hashed.
_DEFAULT_TEXT = """
a an the and or then of on in into onto to from at by with it its that this up down over under above below inside
outside beside between behind front near next left right top bottom middle center back side edge corner away off out
all both one two three first second last each other another same please robot arm gripper hand you your
pick lift raise grasp grab hold take get bring carry move put place set lay drop release let go leave stack unstack
push pull slide open close shut turn rotate twist switch press reach touch insert remove wipe pour fold hang hook
assemble disassemble pour sort align tilt flip lower keep stop start until while without
object thing item block cube box ball can bottle cup mug bowl plate dish pan pot lid bread cereal milk soda apple
banana orange lemon carrot tomato sauce soup butter cheese cream cookie pudding chocolate juice ketchup book
spoon fork knife tool hammer nut peg ring round square bin basket tray drawer cabinet door handle knob lever button
stove microwave rack shelf table desk counter surface floor wall wine caddy compartment container holder stand
red green blue yellow orange purple pink black white gray grey brown silver gold dark light small large big tiny
tall short long wide wooden metal plastic empty full closed opened high higher low into air upward upwards ground
"""
DEFAULT_WORDS = tuple(dict.fromkeys(_DEFAULT_TEXT.split()))


class WordTokenizer:
    """Words to ids: 0 pads, then ``hash_buckets`` ids for unknown words, then one id per word of
    ``words``."""

    def __init__(self, words: Iterable[str] = DEFAULT_WORDS, hash_buckets: int = 128):
        if hash_buckets < 1:
            raise UserError(f"hash_buckets is {hash_buckets}: unknown words need at least 1 bucket")
        self.words = tuple(dict.fromkeys(words))
        self.hash_buckets = hash_buckets
        self._ids = {word: 1 + hash_buckets + i for i, word in enumerate(self.words)}

    @property
    def vocab_size(self) -> int:
        return 1 + self.hash_buckets + len(self.words)

    def encode(self, text: str, length: int) -> list[int]:
        """``length`` ids, right-padded with 0; words past ``length`` are cut off."""
        ids = [self._word_id(word) for word in _WORD.findall(text.lower())][:length]
        return ids + [PAD_ID] * (length - len(ids))

    def _word_id(self, word: str) -> int:
        known = self._ids.get(word)
        return known if known is not None else 1 + zlib.crc32(word.encode()) % self.hash_buckets

    def to_json(self) -> str:
        """The content of ``tokenizer.json``; `from_json` inverts it."""
        return json.dumps(
            {"type": "word", "hash_buckets": self.hash_buckets, "words": list(self.words)}, indent=1
        )

    @classmethod
    def from_json(cls, text: str) -> WordTokenizer:
        data = json.loads(text)
        if data.get("type") != "word":
            raise UserError(
                f"tokenizer.json has type {data.get('type')!r}, expected 'word': is it "
                "another model's file?"
            )
        return cls(data["words"], data["hash_buckets"])
