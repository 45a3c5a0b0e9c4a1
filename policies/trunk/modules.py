"""A `torch.nn.ModuleList` that says of which class its modules are, for type checkers; when run
it is that class."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Generic, TypeVar, overload

from torch import nn

if TYPE_CHECKING:
    M = TypeVar("M", bound=nn.Module)

    class Modules(nn.ModuleList, Generic[M]):
        def __init__(self, modules: Iterable[M] | None = None) -> None: ...

        def __iter__(self) -> Iterator[M]: ...

        @overload
        def __getitem__(self, idx: slice) -> Modules[M]: ...

        @overload
        def __getitem__(self, idx: int) -> M: ...

        def __getitem__(self, idx: int | slice) -> M | Modules[M]: ...
else:
    Modules = nn.ModuleList
