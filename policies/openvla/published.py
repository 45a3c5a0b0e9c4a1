"""What a published folder does not record about itself, held against how its publishers use it.

A wrong chunk length, camera, decoding or dialect makes a checkpoint useless without any error, so
each is refused where the folder shows another. Sources: openvla-oft `constants.py`, `LIBERO.md`
(arXiv 2502.19645); SimpleVLA-RL `run_openvla_oft_rl_{libero,twin2}.sh` and its `constants.py`;
RLinf `openvla_oft` (``implement_version``).
"""

from __future__ import annotations

from policies.openvla.checkpoint import PARTS, STATISTICS, Source, part_file
from policies.openvla.config import OpenVLAConfig
from vla_rl.errors import ConfigError, EmbodimentMismatch
from vla_rl.types import EmbodimentSpec

# Chunk lengths by the first or the last letters of the statistics' name: openvla-oft picks one by
# the platform, SimpleVLA-RL one of four for RoboTwin (ROBOT_PLATFORM ALOHA, ALOHA_12, ALOHA_8,
# ALOHA_6), and no published folder records it.
CHUNKS: dict[str, dict[str, tuple[int, ...]]] = {
    "official": {"libero": (8,), "aloha": (25,), "bridge": (5,), "_1k": (25, 12, 8, 6)},
    "rlinf": {"libero": (8,)},
}
# statistics that only a folder with all of OpenVLA's pre-training has
_OXE = "fractal20220817_data"
# in the modelling file that openvla-oft copies beside its weights, not in openvla's
_OFT_CODE = "NUM_ACTIONS_CHUNK"


def check_published(
    config: OpenVLAConfig, source: Source, statistics: str, embodiment: EmbodimentSpec, l1: bool
) -> None:
    """Raise where ``config`` runs the folder otherwise than it was published; ``l1``: by the L1
    head.

    `ConfigError` and `EmbodimentMismatch` name the option, what shows that it is wrong, and what to
    set.
    """
    _check_actions(config, source, embodiment)
    _check_decoding(config, source)
    _check_dialect(config, source)
    _check_chunk(config, source, statistics)
    _check_cameras(config, source, statistics, l1)


def _check_actions(config: OpenVLAConfig, source: Source, embodiment: EmbodimentSpec) -> None:
    if config.action_space == "unit" and embodiment.frame == "joints":
        raise EmbodimentMismatch(
            f"policy.action_space=unit takes the actions of {source.where} for shares of a range, "
            f"as LIBERO's controller has them, but those of embodiment {embodiment.name} are "
            "positions of joints: set policy.action_space=embodiment (and "
            "policy.normalization=minmax for ALOHA and RoboTwin)"
        )


def _check_decoding(config: OpenVLAConfig, source: Source) -> None:
    """One token after the other, each seeing the last, and all at once from empty places are two
    models."""
    oft, why = _is_oft(source)
    if oft is None or oft == (config.decoding == "parallel"):
        return
    kind, decoding, chunk = (
        ("OpenVLA-OFT", "parallel", 8) if oft else ("OpenVLA", "autoregressive", 1)
    )
    raise ConfigError(
        f"policy.decoding={config.decoding}, but {source.folder} is a checkpoint of {kind} "
        f"({why}): set policy.decoding={decoding} and policy.chunk_length={chunk}, or another that "
        "it was trained with"
    )


def _is_oft(source: Source) -> tuple[bool | None, str]:
    """Whether a folder is OFT's (None: it does not say), and what shows it."""
    folder = source.folder
    if folder is None:
        return None, ""
    for part in PARTS[:2]:
        if (file := part_file(folder, part)) is not None:
            return True, f"it has {file.name}"
    code = folder / "modeling_prismatic.py"  # read as text, never run
    if code.is_file():
        oft = _OFT_CODE in code.read_text("utf-8", errors="replace")
        return oft, f"its {code.name} {'imports' if oft else 'does not know'} {_OFT_CODE}"
    if _OXE in source.statistics and not (folder / STATISTICS).is_file():
        return False, f"its norm_stats are those of the pre-training, {_OXE} among them"
    return None, ""


def _check_dialect(config: OpenVLAConfig, source: Source) -> None:
    if source.folder is None or config.decoding != "parallel":
        return
    parts = [part for part in PARTS[:2] if part_file(source.folder, part)]
    if config.dialect == "rlinf" and parts:
        raise ConfigError(
            f"policy.dialect=rlinf, but {source.folder} has a {parts[0]} in openvla-oft's form: "
            "set policy.dialect=official (policy.image_path=pil_bicubic for RLinf's way with it, "
            "implement_version: official)"
        )
    names = [source.folder.resolve().name, str(source.config.get("_name_or_path") or "")]
    rlinf = next((name for name in names if "rlinf" in name.lower()), "")
    if config.dialect == "official" and config.image_path == "auto" and rlinf:
        raise ConfigError(
            f"policy.dialect=official, but {source.folder} calls itself {rlinf!r}: take "
            "policy=openvla_oft_rlinf for what RLinf trained with implement_version: rlinf; with "
            "implement_version: official, set policy.image_path=pil_bicubic (or jpeg_lanczos, if "
            "openvla-oft or SimpleVLA-RL trained it)"
        )


def _check_chunk(config: OpenVLAConfig, source: Source, statistics: str) -> None:
    if any(source.config.get(key) is not None for key in ("chunk_length", "num_actions_chunk")):
        return
    expected: tuple[int, ...] = (1,)
    if config.decoding == "autoregressive":
        why = "an autoregressive OpenVLA is published with chunks of 1 control step"
    else:
        table = CHUNKS[config.dialect]
        found = (
            n
            for name, n in table.items()
            if statistics.startswith(name) or statistics.endswith(name)
        )
        expected = next(found, (config.chunk_length,))
        steps = " or ".join(map(str, expected))
        why = (
            f"with statistics {statistics!r} OpenVLA-OFT is published with chunks of {steps} "
            "control steps"
        )
    if config.chunk_length not in expected:
        raise ConfigError(
            f"policy.chunk_length is {config.chunk_length}, but {why}, and {source.where} records no other: set "
            f"policy.chunk_length={expected[0]}. If this checkpoint was trained with {config.chunk_length}, say so in its "
            f'config.json: "chunk_length": {config.chunk_length}'
        )


def _check_cameras(config: OpenVLAConfig, source: Source, statistics: str, l1: bool) -> None:
    """LIBERO's: openvla-oft's L1 heads read two pictures, SimpleVLA-RL's and RLinf's tokens one."""
    if source.config.get("num_images_in_input") is not None or config.decoding != "parallel":
        return
    expected, given = 2 if l1 else 1, len(config.cameras) or 1
    if statistics.startswith("libero") and given != expected:
        head = "with an L1 head" if l1 else "with discrete tokens"
        cameras = "its third-person and its wrist camera" if l1 else "its third-person camera alone"
        raise ConfigError(
            f"policy.cameras has {given} of the env's cameras, but with statistics {statistics!r} an OpenVLA-OFT {head} is "
            f"published for {expected}, and {source.where} records no other: name {cameras}. If this checkpoint was trained "
            f'with {given}, say so in its config.json: "num_images_in_input": {given}'
        )
