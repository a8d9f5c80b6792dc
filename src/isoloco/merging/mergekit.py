"""mergekit's YAML files, for the four methods that are rows of our table: what they mean here.

    linear            base - mean of w_i (base - model_i), the base being the first model where none is named
    task_arithmetic   mean, sum-like (normalize: false, the default) or mean-like
    ties              ties; normalize is true, as by default
    dare_linear       dare, sum-like (normalize: false, the default) or mean-like

A weight or density may be a number, a gradient (numbers over the layers, interpolated) or a list of filters. lambda is
our scale. int8_mask only saves mergekit memory. The arithmetic is float32 here whatever ``dtype`` says, which is what
the output gets. Exact ties of signs give 0, and DARE's masks are our own draws.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from ..config import unknown
from .request import Request

METHODS = ("linear", "task_arithmetic", "ties", "dare_linear")
KEYS = ("merge_method", "models", "base_model", "parameters", "dtype", "out_dtype", "tokenizer_source")
PARAMETERS = {
    "linear": ("weight", "normalize"),
    "task_arithmetic": ("weight", "normalize", "lambda", "int8_mask"),
    "ties": ("weight", "density", "normalize", "lambda", "int8_mask", "rescale"),
    "dare_linear": ("weight", "density", "normalize", "lambda", "int8_mask", "rescale"),
}
_LAYER = re.compile(r"\.(\d+)\.")


def request_of(tree: Mapping[str, Any], text: str) -> Request:
    """What one of mergekit's files asks for. ValueError for a method, key or value that has no counterpart here."""
    method = tree["merge_method"]
    if method not in METHODS:
        raise ValueError(f"merge_method {method} is not one of {', '.join(METHODS)}; see isoloco methods for our rules")
    if extra := [key for key in tree if key not in KEYS]:
        raise ValueError(f"{', '.join(map(str, extra))} of mergekit has no counterpart here; leave it out")
    models = [_model(entry, method) for entry in _list(tree.get("models"))]
    base = tree.get("base_model", models[0][0] if method == "linear" else None)
    if not isinstance(base, str):
        raise ValueError(f"{method} takes base_model: NAME")
    if tree.get("tokenizer_source", "base") not in ("base", base):
        raise ValueError(f"tokenizer_source: the merged model gets the base's, {base}; leave it out")
    shared = tree.get("parameters") or {}
    _check_parameters(shared, method)
    experts = [(name, own) for name, own in models if name != base or (method == "linear" and {**shared, **own})]
    if not experts:
        raise ValueError("names no model beside the base")

    def prepare(config: Mapping[str, Any]) -> Callable[[str], dict[str, Any]]:
        layers = next((config[key] for key in ("num_hidden_layers", "n_layer", "num_layers") if key in config), 0)
        return lambda name: _settings(method, shared, [own for _, own in experts], name, layers)

    return Request(
        base=base, experts=[name for name, _ in experts], prepare=prepare, text=text,
        dtype=tree.get("out_dtype") or tree.get("dtype"), settings={"reduce": _REDUCES[method]},
    )  # fmt: skip


_REDUCES = {"linear": "mean", "task_arithmetic": "mean", "ties": "ties", "dare_linear": "dare"}


def _settings(
    method: str, shared: Mapping[str, Any], experts: list[Mapping[str, Any]], name: str, layers: int
) -> dict[str, Any]:
    """Settings of one tensor."""

    def value(own: Mapping[str, Any], key: str, default: Any) -> Any:
        for parameters in (own, shared):
            if key in parameters and (found := _evaluate(parameters[key], name, layers)) is not None:
                return found
        if default is None:
            raise ValueError(f"{method}: a model has no {key} for {name}")
        return default

    weights = [value(own, "weight", None) for own in experts]
    normalize = value({}, "normalize", method in ("linear", "ties"))
    rescale = value({}, "rescale", method == "dare_linear")
    if method == "ties" and not normalize:
        raise ValueError("ties with normalize: false has no counterpart here; leave it out")
    if method == "ties" and rescale:
        raise ValueError("ties with rescale: true has no counterpart here; leave it out")
    if method == "linear" and not normalize and abs(sum(weights) - 1) > 1e-6:
        raise ValueError(f"linear with normalize: false takes weights that sum to 1, got {weights} for {name}")
    found = {
        "weights": weights,
        "scale": value({}, "lambda", 1.0),
        "scale_like": "mean" if normalize else "sum",
    }
    if method in ("ties", "dare_linear"):
        options = {"rescale": rescale} if method == "dare_linear" else {}
        found["expert_options"] = [{"density": value(own, "density", 1.0), **options} for own in experts]
    return found


def _evaluate(setting: Any, name: str, layers: int) -> Any:
    """A number or flag; a gradient at the tensor's layer; or the first filter that the name holds."""
    if not isinstance(setting, list):
        return setting
    if all(isinstance(part, int | float) for part in setting):
        place = _place(name, layers) * (len(setting) - 1)
        low = int(place)
        high = min(len(setting) - 1, low + 1)
        return setting[low] + (place - low) * (setting[high] - setting[low])
    for part in setting:
        if not isinstance(part, Mapping) or not {"value"} <= part.keys() <= {"value", "filter"}:
            raise ValueError(f"takes numbers or a list of filter and value, got {part!r}")
        if part.get("filter") in (None, "*") or str(part["filter"]) in name:
            return _evaluate(part["value"], name, layers)
    return None


def _place(name: str, layers: int) -> float:
    """Depth of a tensor: 0 before the first layer and in it, 1 in the last and behind it."""
    layer = _LAYER.search(name)
    if layer is not None:
        return min(1.0, int(layer[1]) / (layers - 1)) if layers > 1 else 1.0
    return 0.0 if "emb" in name or "wte" in name or "wpe" in name else 1.0


def _model(entry: Any, method: str) -> tuple[str, Mapping[str, Any]]:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("model"), str):
        raise ValueError(f"models takes a list of model: NAME, got {entry!r}")
    if extra := sorted(entry.keys() - {"model", "parameters"}):
        raise ValueError(f"{', '.join(extra)} of a model of mergekit has no counterpart here; leave it out")
    own = entry.get("parameters") or {}
    _check_parameters(own, method)
    return entry["model"], own


def _check_parameters(parameters: Mapping[str, Any], method: str) -> None:
    for key in parameters:
        if key not in PARAMETERS[method]:
            raise ValueError(unknown(f"parameter of {method}", str(key), PARAMETERS[method]))


def _list(models: Any) -> list[Any]:
    if not isinstance(models, list) or not models:
        raise ValueError("takes models: a list of model: NAME and its parameters")
    return models
