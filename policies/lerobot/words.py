"""A tokenizer of some hundred words for policies that are trained from nothing: it needs no hub.

Words that robots are told, and numbers from -1 to 256 (π0.5 writes the robot's state into its
prompt), are one token each; others are spelt. ``policy.vlm=nano`` names the files that `write`
made of it (`policies.settings.NANO_WORDS`).
"""

from __future__ import annotations

from pathlib import Path

_SPECIAL = ("<pad>", "<unk>", "<bos>", "<eos>")
_WORDS = (
    "Task State Action pick place lift raise stack open close put push pull turn reach move insert "
    "up down off left right on in of to into onto the a an and it from near next with red green "
    "blue yellow white black cube block can bread milk cereal bowl plate cup box drawer door "
    "handle lever basket bin table robot arm gripper object take grab grasp hold bring set drop go "
    "touch keep cubes blocks bar square coaster goal spot area top over at by two both one hands "
    "hand level"
)


def vocabulary() -> list[str]:
    """Each token once, in the order of its number."""
    letters = [chr(code) for code in range(33, 127)]
    numbers = [str(number) for number in range(-1, 257)]
    spelt = [*letters, *(f"##{letter}" for letter in letters)]
    return list(dict.fromkeys([*_SPECIAL, *spelt, *numbers, *_WORDS.split()]))


def write(folder: Path) -> None:
    """The tokenizer's files, as transformers reads them."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    numbered = {word: number for number, word in enumerate(vocabulary())}
    tokenizer = Tokenizer(models.WordPiece(numbered, unk_token="<unk>"))
    apart = pre_tokenizers.Split(Regex(r"[^\w\-]"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), apart])
    names = dict(zip(("pad_token", "unk_token", "bos_token", "eos_token"), _SPECIAL))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
