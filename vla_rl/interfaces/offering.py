"""How a component says what it offers beyond what it must: a base class with answers for all that
is optional, which the core calls without asking, and words for what it can do."""

from __future__ import annotations

import functools
from abc import ABCMeta
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from vla_rl.errors import ConfigError
from vla_rl.moved import CAPABILITIES

if TYPE_CHECKING:
    default = property
else:

    class default:
        """A property that an attribute of the same name goes before, of a class or of an
        object."""

        def __init__(self, answer):
            self.answer, self.__doc__ = answer, answer.__doc__

        def __get__(self, thing, kind=None):
            return self if thing is None else self.answer(thing)


_PARTS = ("_modules", "_parameters", "_buffers")
_Kind = TypeVar("_Kind", bound="Offering")


class Offering(metaclass=ABCMeta):  # noqa: B024 - the hook below is what it is abstract for
    """What the bases of components share.

    ``can`` holds a word of ``words`` for each method behind it that a class has of its own; a class
    may also write ``can`` itself, where it has a method and yet does not offer it. An object whose
    class has all methods of ``required`` is an instance, whether it names the base or not (as of
    `collections.abc`); `of` gives it the rest.
    """

    required: ClassVar[tuple[str, ...]] = ()
    words: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    can: frozenset[str] = frozenset()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if hidden := _hidden(cls):
            raise TypeError(
                f"class {cls.__name__}: {hidden[0]} of {hidden[1].__name__} is hidden by what "
                "vla_rl.interfaces assumes of a component without it: name that base last, "
                f"class {cls.__name__}({hidden[1].__name__}, …)"
            )
        if "can" not in vars(cls):
            cls.can = frozenset(
                word
                for word, methods in cls.words.items()
                if all(has_own(cls, method) for method in methods)
            )
        elif isinstance(cls.can, frozenset):
            cls.can = frozenset(CAPABILITIES.get(word, word) for word in cls.can)

    @classmethod
    def __subclasshook__(cls, other: type) -> Any:
        own = _is_base(cls) and cls.required
        return True if own and all(has_own(other, name) for name in own) else NotImplemented

    @classmethod
    def of(cls: type[_Kind], thing: Any) -> _Kind:
        """``thing`` itself, which from here on answers to all of this class: a component need not
        name its base, methods of the same names will do. Raises `ConfigError` for an object whose
        class cannot be given any base."""
        if hidden := sorted(_parts(thing) & set(dir(cls))):
            raise ConfigError(
                f"{type(thing).__name__} has a submodule, weight or buffer {hidden[0]!r}, and that "
                f"is the name of a method of vla_rl.interfaces.{cls.__name__}: give it another name"
            )
        if cls not in type(thing).__mro__:
            kind = cls.class_of(type(thing))
            try:
                object.__setattr__(thing, "__class__", kind)
            except TypeError as error:
                raise _refused(type(thing), cls, error) from error
        return thing

    @classmethod
    def class_of(cls, kind: Any) -> Any:
        """`of`, for what is asked of a class before there is an object: ``kind``, or a subclass of
        it that has the rest. A function that makes objects stays as it is."""
        if not isinstance(kind, type) or cls in kind.__mro__:
            return kind
        base: Any = cls
        try:
            return _with_base(kind, base)
        except TypeError as error:
            raise _refused(kind, cls, error) from error

    @classmethod
    def can_of(cls, thing: Any) -> frozenset[str]:
        """What ``thing`` can as one of these; nothing, and it stays as it is, where it is none."""
        return cls.of(thing).can if isinstance(thing, cls) else frozenset()


def _refused(kind: type, base: type, why: TypeError) -> ConfigError:
    return ConfigError(
        f"{kind.__name__} has methods of a {base.__name__}, and cannot be given its defaults "
        f"({why}): make it a subclass of vla_rl.interfaces.{base.__name__}"
    )


def _parts(thing: Any) -> set[str]:
    """What `torch.nn.Module` keeps apart from attributes, so that those of the class hide it."""
    try:
        own = vars(thing)
    except TypeError:  # it has no attributes of its own
        return set()
    return {name for kind in _PARTS for name in own.get(kind, ())}


def _hidden(cls: type) -> tuple[str, type] | None:
    """A method that one of the bases has, and the base, where a default of these comes before."""
    ours = [part for part in cls.__mro__ if _is_base(part)]
    for name in {name for part in ours for name in vars(part) if not name.startswith("_")}:
        having = [part for part in cls.__mro__ if name in vars(part)]
        if _is_base(having[0]) and (rest := [part for part in having if not _is_base(part)]):
            return name, rest[0]
    return None


def _is_base(part: type) -> bool:
    return part.__module__.startswith(f"{__package__}.")


def has_own(cls: type, method: str) -> bool:
    """Whether the class, or a base that is not one of these, has the method."""
    for part in cls.__mro__:
        if method in vars(part):
            return not _is_base(part) and vars(part)[method] is not None
    return False


@functools.cache
def _with_base(kind: Any, base: Any) -> type:
    own = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
    }
    return type(kind.__name__, (kind, base), own)
