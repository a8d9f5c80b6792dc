"""isoloco: training with rare communication, where the step between workers merges their updates.

Importing this package imports no torch: public names are looked up when they are first used (PEP 562).
"""

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

from ._version import __version__

# public name -> module that defines it
_PUBLIC = {
    "RunConfig": "config",
    "merge": "merging.tensors",
    "train": "train",
    "simulate": "simulate",
    "OuterOptimizer": "outer",
    "IsoLoCo": "outer",
    "DiLoCo": "loop",
}

__all__ = ["DiLoCo", "IsoLoCo", "OuterOptimizer", "RunConfig", "__version__", "merge", "simulate", "train"]

if TYPE_CHECKING:
    from .config import RunConfig
    from .loop import DiLoCo
    from .merging.tensors import merge
    from .outer import IsoLoCo, OuterOptimizer
    from .simulate import simulate
    from .train import train


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(f".{_PUBLIC[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})


class _Package(types.ModuleType):
    """`isoloco.train` is the function, also once its module of the same name has been imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _PUBLIC and isinstance(value, types.ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
