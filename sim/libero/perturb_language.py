"""Other words for LIBERO's instructions, by templates: padding, synonyms, descriptions instead of
nouns, another order.

LIBERO-Plus has its paraphrases written by a language model; these follow its kinds (synonyms,
descriptions instead of nouns, politeness padding) from tables that cover the words of all 130
tasks. Level 1 pads, 2 replaces verbs, 3 verbs and nouns, 4 nouns by descriptions; 5 does that and
also turns the order round, or replaces verbs and pads where it cannot. Words stand for things in
the scene: what LIBERO calls a cabinet has drawers in most scenes, and is a shelf in some. No
replacement ends with a preposition, for one may follow it ("the bowl from table center").
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

PADDING = (
    "please {}",
    "could you please {}",
    "when you have a moment, {}",
    "hello robot, i would like you to {}",
    "be so kind as to {}, thank you",
)
VERBS = {
    "pick up": ("grab", "lift", "take", "get hold of"),
    "place": ("set", "lay", "deposit"),
    "put": ("set", "lay", "deposit"),
    "stack": ("pile", "set"),
    "push": ("slide", "shove"),
    "open": ("pull open",),
    "close it": ("shut it", "push it shut"),
    "close": ("shut", "push shut"),
    "turn on": ("switch on", "activate"),
    "turn off": ("switch off", "deactivate"),
}
SYNONYMS = {
    "alphabet soup": ("letter soup", "tin of letter soup"),
    "bbq sauce": ("barbecue sauce", "barbecue dressing"),
    "black bowl": ("dark bowl", "black basin"),
    "white bowl": ("pale bowl", "white basin"),
    "bowl": ("basin", "crock"),
    "book": ("volume", "hardcover"),
    "butter": ("block of butter", "butter pack"),
    "caddy": ("desk organizer", "holder"),
    "cabinet": ("set of drawers", "chest of drawers"),
    "chocolate pudding": ("chocolate dessert", "chocolate custard"),
    "cookie box": ("box of biscuits", "biscuit box"),
    "cream cheese box": ("box of soft cheese",),
    "cream cheese": ("soft cheese", "cheese spread"),
    "frying pan": ("skillet", "pan"),
    "ketchup": ("catsup", "ketchup bottle"),
    "microwave": ("microwave oven",),
    "milk": ("milk carton", "carton of milk"),
    "moka pots": ("coffee makers", "espresso pots"),
    "moka pot": ("coffee maker", "espresso pot"),
    "mug": ("cup", "beaker"),
    "orange juice": ("juice of oranges", "orange drink"),
    "plate": ("serving plate", "platter"),
    "rack": ("stand", "holder"),
    "ramekin": ("small baking dish", "custard cup"),
    "salad dressing": ("salad sauce", "vinaigrette"),
    "shelf": ("shelf unit", "rack"),
    "stove": ("cooker", "hob"),
    "tomato sauce": ("tomato puree", "pasta sauce"),
    "tray": ("serving board", "carrying board"),
    "basket": ("hamper", "crate"),
    "wine bottle": ("bottle of wine",),
    "wine rack": ("bottle stand", "bottle holder"),
    "drawer": ("pull-out compartment", "sliding compartment"),
}
DESCRIPTIONS = {
    "alphabet soup": ("can of broth with pasta letters",),
    "bbq sauce": ("smoky sauce for grilled meat",),
    "black bowl": ("dark round vessel for cereal",),
    "white bowl": ("pale round vessel for cereal",),
    "bowl": ("round vessel for cereal",),
    "book": ("bound stack of printed pages",),
    "butter": ("dairy spread for bread",),
    "caddy": ("thing that keeps desk items apart",),
    "cabinet": ("piece of furniture with drawers",),
    "chocolate pudding": ("box with the brown dessert",),
    "cookie box": ("box of baked sweets",),
    "cream cheese box": ("box with the white spread for bagels",),
    "cream cheese": ("white spread for bagels",),
    "frying pan": ("flat cookware with a handle",),
    "ketchup": ("red sauce for french fries",),
    "microwave": ("appliance that warms food quickly",),
    "milk": ("white drink from a cow",),
    "moka pots": ("devices that brew espresso",),
    "moka pot": ("device that brews espresso",),
    "mug": ("vessel with a handle for hot drinks",),
    "orange juice": ("drink pressed from citrus fruit",),
    "plate": ("flat round piece of tableware",),
    "rack": ("frame that holds bottles",),
    "ramekin": ("little round dish for souffles",),
    "salad dressing": ("liquid that is poured over lettuce",),
    "shelf": ("piece of furniture with two boards",),
    "stove": ("appliance with a burner",),
    "tomato sauce": ("can of red sauce for pasta",),
    "tray": ("flat board for carrying things",),
    "basket": ("woven container for groceries",),
    "wine bottle": ("tall glass container of wine",),
    "wine rack": ("frame that holds bottles",),
    "drawer": ("part that slides out",),
}
# Where the "cabinet" is this fixture: two boards on top of each other, and no drawer.
_SHELF = "wooden_two_layer_shelf"
SHELF_SYNONYMS = SYNONYMS | {
    "cabinet": ("shelf unit", "rack"),
    "cabinet shelf": ("wooden ledge", "wooden board"),
}
SHELF_DESCRIPTIONS = DESCRIPTIONS | {
    "cabinet": ("piece of furniture with two boards",),
    "cabinet shelf": ("flat wooden surface for storage",),
}
_PICK_AND_PLACE = re.compile(r"pick up (?P<what>.+?) and (?:place|put) it (?P<where>.+)")
_CHANGE = re.compile(r"(?P<verb>open|close|turn on|turn off) (?P<what>[^,]+?)(?! and )")
_STATES = {"open": "open", "close": "closed", "turn on": "switched on", "turn off": "switched off"}


def paraphrase(
    instruction: str, level: int, rng: np.random.Generator, things: Collection[str] = ()
) -> str:
    """``instruction`` in the words of ``level`` 1 ... 5, see the module's text; never the
    instruction itself.

    ``rng`` picks among the alternatives; ``things`` are the categories of the scene's objects and
    fixtures. A sentence without a word of the tables is padded instead.
    """
    verbs = _replacer(VERBS, rng)
    synonyms, descriptions = (
        (SHELF_SYNONYMS, SHELF_DESCRIPTIONS) if _SHELF in things else (SYNONYMS, DESCRIPTIONS)
    )
    nouns = _replacer(descriptions if level >= 4 else synonyms, rng)
    pad = PADDING[rng.integers(len(PADDING))]
    text = instruction
    if level == 2:
        text = verbs(text)
    elif level == 3:
        text = nouns(verbs(text))
    elif level == 4:
        text = nouns(text)
    elif level == 5:
        turned = _turned_round(text)
        text = nouns(verbs(text) if turned is None else turned)
        if turned is None:
            text = pad.format(text)
    return pad.format(text) if level == 1 or text == instruction else text


def _replacer(table: Mapping[str, Sequence[str]], rng: np.random.Generator) -> Callable[[str], str]:
    """A function that replaces each phrase of ``table`` by one alternative, the same wherever it
    occurs."""
    chosen = {phrase: words[int(rng.integers(len(words)))] for phrase, words in table.items()}
    pattern = re.compile(
        r"\b(" + "|".join(sorted(map(re.escape, table), key=len, reverse=True)) + r")(s?)\b"
    )
    return lambda text: pattern.sub(lambda m: chosen[m[1]] + m[2], text)


def _turned_round(text: str) -> str | None:
    """The goal first; None for a sentence that is neither one pick-and-place nor one thing to
    open, close or switch."""
    if match := _PICK_AND_PLACE.fullmatch(text):
        return f"{match['where']} is where {match['what']} should end up, so bring it there"
    if " and " not in text and (match := _CHANGE.fullmatch(text)):
        return f"{match['what']} should be {_STATES[match['verb']]}, so see to that"
    return None
