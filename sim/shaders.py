"""SAPIEN's shader packs without a table that it works out anew in every process, for nothing.

The packs look reflections of an environment map up in a table, which SAPIEN fills when a camera
draws its first picture: about ten seconds of CPU time with a software driver. Without an
environment map the light that the table weighs is black, so that the pictures are the same, byte by
byte, when a copy of the pack leaves it out. Do not use it for scenes with such a map.
"""

from __future__ import annotations

import functools
import re
import shutil
import tempfile
from pathlib import Path

from sim.vulkan import quiet_import

_TABLE = re.compile(r"layout\s*\([^)]*\)\s*uniform\s+sampler2D\s+samplerBRDFLUT\s*;")
_LOOK_UP = re.compile(r"texture\(\s*samplerBRDFLUT\s*,[^;]*?\)\s*\.(xy|rg)\b")
_SHARED = "common"  # what packs include


@functools.cache
def _folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="vla-rl-shaders-")  # gone when the process ends


@functools.cache
def pack(name: str) -> str:
    """The folder of SAPIEN's shader pack ``name``, as `sapien.render.set_camera_shader_dir` takes
    it: a copy without the table, or the pack itself where it has none (or another release writes it
    differently).

    The whole path: SAPIEN would take an entry of that name in the working directory for the pack.
    """
    source = Path(quiet_import("Rendering with SAPIEN").__file__).parent / "vulkan_shader"
    texts = {
        file.name: file.read_text(encoding="utf-8")
        for file in sorted((source / name).iterdir())
        if file.is_file()
    }
    changed = {file: without_table(text) for file, text in texts.items()}
    if changed == texts or any("samplerBRDFLUT" in text for text in changed.values()):
        return str(source / name)
    copies = Path(_folder().name)
    if not (copies / _SHARED).exists():
        shutil.copytree(source / _SHARED, copies / _SHARED)
    (copies / name).mkdir()
    for file, text in changed.items():
        (copies / name / file).write_text(text, encoding="utf-8")
    return str(copies / name)


def without_table(text: str) -> str:
    """A shader's source without the table, whose values become 0."""
    return _LOOK_UP.sub("vec2(0.0)", _TABLE.sub("", text))
