"""Options of a rule: the keyword-only arguments of its signature, checked against their annotations."""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, NamedTuple


class Within(NamedTuple):
    """A range for ``Annotated[float, Within(...)]``: what it says to a user, and whether a value lies in it."""

    words: str
    holds: Callable[[Any], bool]


Density = Annotated[float, Within("above 0 and at most 1", lambda value: 0 < value <= 1)]
Fraction = Annotated[float, Within("between 0 and 1", lambda value: 0 <= value <= 1)]


def option_parameters(rule: Any) -> dict[str, inspect.Parameter]:
    """The options of a rule by name; an object that is no class and no function has none."""
    if not callable(rule):
        return {}
    return {name: p for name, p in inspect.signature(rule).parameters.items() if p.kind is p.KEYWORD_ONLY}


def check_options(rule: Any, options: Mapping[str, Any], *, name: str) -> None:
    """ValueError for options that the rule does not have or lacks, and for values of another type or out of range."""
    known = option_parameters(rule)
    kinds = option_kinds(rule) if known else {}
    for option, value in options.items():
        if option not in known:
            raise ValueError(f"{name} takes no option {option!r}; it takes {', '.join(known) or 'no options'}")
        if not fits(value, kinds.get(option, Any)):
            raise ValueError(f"{name}: {option} is {value!r}, takes {in_words(kinds[option])}")
    for option, p in known.items():
        if p.default is p.empty and option not in options:
            raise ValueError(f"{name} needs its option {option}: {in_words(kinds.get(option, Any))}")


@functools.cache
def option_kinds(rule: Any) -> dict[str, Any]:
    """Annotations by name; none where those of a user's function cannot be resolved here."""
    try:
        return typing.get_type_hints(rule, include_extras=True)
    except (NameError, TypeError):
        return {}


def fits(value: Any, kind: Any) -> bool:
    """Whether a value is what the annotation says; annotations of other kinds than options have accept anything."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return fits(value, args[0]) and all(limit.holds(value) for limit in args[1:] if isinstance(limit, Within))
    if origin is Literal:
        return value in args
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, arm) for arm in args)
    if origin is dict:
        return isinstance(value, Mapping) and all(fits(k, args[0]) and fits(v, args[1]) for k, v in value.items())
    if kind in (int, float):
        return isinstance(value, int | kind) and not isinstance(value, bool)
    return kind not in (bool, str, types.NoneType) or isinstance(value, kind)


def in_words(kind: Any) -> str:
    """What an option takes, for messages and tables."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return " ".join([in_words(args[0]), *(limit.words for limit in args[1:] if isinstance(limit, Within))])
    if origin is Literal:
        *others, last = map(str, args)
        return f"{', '.join(others)} or {last}" if others else last
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(in_words, args))
    if origin is dict:
        key, value = args
        return f"{{{in_words(key)}: {in_words(value)}}}"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text", types.NoneType: "nothing"}
    return words.get(kind, "anything" if kind is Any else getattr(kind, "__name__", str(kind)))
