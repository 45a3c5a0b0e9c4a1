"""RoboTwin's fifty tasks by name, and how long an episode may be under each protocol (standard
library only).

Limits count actions. The official ones stand in the checkout itself
(``task_config/_eval_step_limit.yml``); those of SimpleVLA-RL (Li et al. 2025, arXiv 2509.09674) are
those of its published recipes, those of RLinf stand in its configs
``examples/embodiment/config/env/robotwin_*.yaml``, which exist for ten tasks.
"""

from __future__ import annotations

TASKS = (
    "adjust_bottle",
    "beat_block_hammer",
    "blocks_ranking_rgb",
    "blocks_ranking_size",
    "click_alarmclock",
    "click_bell",
    "dump_bin_bigbin",
    "grab_roller",
    "handover_block",
    "handover_mic",
    "hanging_mug",
    "lift_pot",
    "move_can_pot",
    "move_pillbottle_pad",
    "move_playingcard_away",
    "move_stapler_pad",
    "open_laptop",
    "open_microwave",
    "pick_diverse_bottles",
    "pick_dual_bottles",
    "place_a2b_left",
    "place_a2b_right",
    "place_bread_basket",
    "place_bread_skillet",
    "place_burger_fries",
    "place_can_basket",
    "place_cans_plasticbox",
    "place_container_plate",
    "place_dual_shoes",
    "place_empty_cup",
    "place_fan",
    "place_mouse_pad",
    "place_object_basket",
    "place_object_scale",
    "place_object_stand",
    "place_phone_stand",
    "place_shoe",
    "press_stapler",
    "put_bottles_dustbin",
    "put_object_cabinet",
    "rotate_qrcode",
    "scan_object",
    "shake_bottle",
    "shake_bottle_horizontally",
    "stack_blocks_three",
    "stack_blocks_two",
    "stack_bowls_three",
    "stack_bowls_two",
    "stamp_seal",
    "turn_switch",
)
BOXES_ONLY = (
    "blocks_ranking_rgb",
    "blocks_ranking_size",
    "handover_block",
    "stack_blocks_three",
    "stack_blocks_two",
)

LIMITS = ("official", "simplevla", "rlinf")
_SIMPLEVLA = {
    "shake_bottle": 75,
    "pick_dual_bottles": 100,
    "place_container_plate": 150,
    "place_shoe": 250,
    "handover_block": 400,
    "stack_blocks_two": 400,
    "stack_bowls_two": 400,
    "blocks_ranking_rgb": 600,
    "put_bottles_dustbin": 800,
}
_SIMPLEVLA_OTHERS = 200
RLINF = {
    "adjust_bottle": 200,
    "beat_block_hammer": 200,
    "click_bell": 400,
    "handover_block": 400,
    "lift_pot": 200,
    "move_can_pot": 200,
    "pick_dual_bottles": 100,
    "place_container_plate": 150,
    "place_empty_cup": 200,
    "place_shoe": 400,
}


def step_limit(task: str, protocol: str, official: dict[str, int]) -> int:
    """Actions that an episode may take. ``official``: what the checkout says. KeyError where
    RLinf has none of that task."""
    if protocol == "rlinf":
        return RLINF[task]
    if protocol == "simplevla":
        return _SIMPLEVLA.get(task, _SIMPLEVLA_OTHERS)
    # which is what RoboTwin takes for a task that it has no limit for
    return int(official.get(task, 1000))
