"""Configuration: Hydra composes YAML, one dataclass per component checks it, plain dataclasses come
out.

Every component group (``policy``, ``env``, ``reward``, ``algorithm``, ``critic``, ``actor``,
``collector``, ``cluster``) has a ``type`` that names an entry of `vla_rl.build`; the other keys
must fit that entry's config dataclass. The rest of the tree must fit `RunConfig`.
"""

from vla_rl.config.composition import compose, with_run
from vla_rl.config.schema import checked
from vla_rl.config.tree import (
    MACHINE_KEYS,
    RunConfig,
    as_learned,
    from_tree,
    learned_algorithm,
    load,
    override,
    save,
    to_tree,
    to_yaml,
    with_policy_changes,
)

__all__ = [
    "MACHINE_KEYS",
    "RunConfig",
    "as_learned",
    "checked",
    "compose",
    "from_tree",
    "learned_algorithm",
    "load",
    "override",
    "save",
    "to_tree",
    "to_yaml",
    "with_policy_changes",
    "with_run",
]
