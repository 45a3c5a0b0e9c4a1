"""jaxtyping's array annotations, or inert stand-ins where jaxtyping is not installed.

The annotations document shapes everywhere; the tests check them at run time through jaxtyping's
import hook.
"""

from __future__ import annotations

try:
    from jaxtyping import Bool, Float, Float32, Int64, UInt8
except ImportError:  # a GPU node may have torch and transformers only

    class _Inert:
        def __class_getitem__(cls, item):
            return item[0] if isinstance(item, tuple) else item

    Bool = Float = Float32 = Int64 = UInt8 = _Inert  # type: ignore[misc,assignment]

__all__ = ["Bool", "Float", "Float32", "Int64", "UInt8"]
