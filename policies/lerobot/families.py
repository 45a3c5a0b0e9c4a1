"""The families of lerobot's policies that are known here, by lerobot's name, and what is
particular to each. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class _Family:
    """``head`` "module:Class" of `policies.lerobot`; ``tokenizer``: what its processors name, of a
    family that is told what to do; ``prompt``: how they put it, with ``state`` as long as it gets;
    ``resizes``: it takes pictures of any size; ``spares``: it does without some of its pictures;
    ``padded``: its postprocessor takes actions as wide as the model's; ``steps``: lerobot's setting
    of a flow's number of them; ``since``: the lerobot that
    first runs it here."""

    head: str
    tokenizer: str = ""
    prompt: str = "{text}\n"
    resizes: bool = False
    spares: bool = False
    padded: bool = False
    steps: str = ""
    since: str = "0.4"

    def make_head(self, policy: Any) -> Any:
        return self.head_class()(policy)

    def head_class(self) -> Callable[[Any], Any]:
        module, _, name = self.head.partition(":")
        return vars(import_module(f"policies.lerobot.{module}"))[name]


_PALIGEMMA = "google/paligemma-3b-pt-224"
FAMILIES = {
    "act": _Family("heads:RegressionHead"),
    "diffusion": _Family("heads:DiffusionHead"),
    "smolvla": _Family(
        "flows:SmolVLAHead",
        "HuggingFaceTB/SmolVLM2-500M-Video-Instruct",
        resizes=True,
        spares=True,
        steps="num_steps",
    ),
    # (lerobot 0.4 runs the two on a patched transformers alone)
    "pi0": _Family(
        "flows:Pi0Head",
        _PALIGEMMA,
        resizes=True,
        spares=True,
        steps="num_inference_steps",
        since="0.6",
    ),
    "pi05": _Family(
        "flows:Pi0Head",
        _PALIGEMMA,
        "Task: {text}, State: {state};\nAction: ",
        resizes=True,
        spares=True,
        steps="num_inference_steps",
        since="0.6",
    ),
    "xvla": _Family(
        "xvla:XVLAHead",
        "facebook/bart-large",
        "{text}",
        spares=True,
        steps="num_denoising_steps",
        since="0.6",
    ),
    "multi_task_dit": _Family(
        "dit:make_head", "openai/clip-vit-base-patch16", "{text}", since="0.6"
    ),
    "evo1": _Family(
        "evo1:Evo1Head",
        "OpenGVLab/InternVL3-1B-hf",
        resizes=True,
        spares=True,
        padded=True,
        steps="num_inference_timesteps",
        since="0.6",
    ),
    "eo1": _Family(
        "eo1:EO1Head",
        "Qwen/Qwen2.5-VL-3B-Instruct",
        resizes=True,
        steps="num_denoise_steps",
        since="0.6",
    ),
}

# Others of lerobot's, and why they are not above.
_AROUND = "lerobot builds it around {} from a hub, which was not at hand"
LEFT_OUT = {
    "pi0_fast": "its actions are tokens, which no head here decodes",
    "vqbet": "its actions are codes, which no head here decodes",
    "groot": _AROUND.format("the base checkpoint of GR00T N1.7"),
    "wall_x": _AROUND.format("WALL-OSS's weights and processor"),
    "molmoact2": _AROUND.format("MolmoAct2's weights"),
    "vla_jepa": _AROUND.format("weights of Qwen3-VL and V-JEPA"),
    "fastwam": "it denoises videos along with actions",
    "lingbot_va": "it denoises videos along with actions",
    "tdmpc": "it plans with a world model",
    "gaussian_actor": "it is an actor of lerobot's own RL",
}
