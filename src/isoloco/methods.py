"""`isoloco methods`: the methods as rows of a table, and what the rules say of themselves in their docstrings."""

from __future__ import annotations

from typing import Any

from .config import unknown
from .presets import METHODS

SUMMARIES = {
    "dp": "data-parallel baseline: gradients averaged every step, no outer step",
    "diloco_sgd": "DiLoCo with a plain outer step: the mean delta times the outer lr",
    "diloco": "DiLoCo: the mean delta, then Nesterov momentum",
    "muloco": "DiLoCo with Muon inside the workers",
    "ties": "outer SGD on deltas merged by TIES",
    "dare": "outer SGD on deltas merged by DARE",
    "tsv": "outer SGD on deltas merged by TSV-M",
    "iso_cts": "outer SGD on deltas merged by Iso-CTS",
    "iso_c": "outer SGD on the mean delta with a flat spectrum (Iso-C)",
    "isoloco": "IsoLoCo: the mean delta with a flat spectrum, then Nesterov momentum",
    "isoloco_fast": "IsoLoCo with the polar factor by matrix products",
    "isoloco_muon": "IsoLoCo with Muon inside the workers",
}

HEADER = ("method", "inner", "inner lr", "reduce", "transform", "momentum", "outer lr")


def describe_all() -> str:
    """The table of methods, then one line for each reduce and transform."""
    from .rules import REDUCES, TRANSFORMS, describe

    lines = ["methods (isoloco train RECIPE --method NAME)", ""]
    table = [HEADER, *(_row(name) for name in METHODS)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        lines.append("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    for title, rules in (("reduces (--reduce.name)", REDUCES), ("transforms (--transform.name)", TRANSFORMS)):
        lines += ["", title, ""]
        lines += [f"  {name:<10} {describe(name)['summary']}" for name in rules]
    return "\n".join([*lines, "", "isoloco methods NAME says more of one."])


def describe_one(name: str) -> str:
    """All that is known of one method, reduce or transform. ValueError with the nearest names if there is none."""
    from .rules import REDUCES, TRANSFORMS, describe

    parts = []
    if name in METHODS:
        parts.append(_describe_method(name))
    if name in REDUCES or name in TRANSFORMS:
        parts.append(_describe_rule(describe(name)))
    if not parts:
        raise ValueError(unknown("method, reduce or transform", name, {**METHODS, **REDUCES, **TRANSFORMS}))
    return "\n\n".join(parts)


def markdown() -> str:
    """The generated part of docs/methods.md."""
    from .rules import REDUCES, TRANSFORMS, describe

    lines = ["## Methods", "", "| " + " | ".join(HEADER) + " |", "|" + "---|" * len(HEADER)]
    lines += ["| " + " | ".join([f"`{name}`", *_row(name)[1:]]) + " |" for name in METHODS]
    lines += ["", *(f"- `{name}`: {text}" for name, text in SUMMARIES.items())]
    for title, rules in (("Reduces", REDUCES), ("Transforms", TRANSFORMS)):
        lines += ["", f"## {title}"]
        for name in rules:
            facts = describe(name)
            lines += ["", f"### `{name}`", "", facts["summary"], ""]
            if facts["equation"]:
                lines.append(f"- equation: `{facts['equation']}`")
            lines += [f"- {key}: {facts[key]}" for key in ("scale", "cost", "bytes", "source") if facts[key]]
            lines += [f"- option `{option}`: {_option(o)}" for option, o in facts["options"].items()]
    return "\n".join(lines) + "\n"


def _row(name: str) -> tuple[str, ...]:
    preset = METHODS[name]
    momentum = preset.get("outer.momentum", 0.0)
    kind = "none" if not momentum else f"{'Nesterov' if preset.get('outer.nesterov') else 'heavy ball'} {momentum:g}"
    inner = {"adamw": "AdamW", "muon": "Muon"}[preset["inner.optimizer"]]
    inner_lr = f"{preset['inner.lr']:g}"
    if "reduce.name" not in preset:
        return (name, inner, inner_lr, "-", "-", "-", "-")
    return (name, inner, inner_lr, preset["reduce.name"], preset["transform.name"], kind, f"{preset['outer.lr']:g}")


def _describe_method(name: str) -> str:
    preset = METHODS[name]
    width = max(map(len, preset))
    return "\n".join(
        [f"{name}: {SUMMARIES[name]}", "", *(f"  {key:<{width}}  {value}" for key, value in preset.items())]
    )


def _describe_rule(facts: dict[str, Any]) -> str:
    lines = [f"{facts['name']} ({facts['kind']}): {facts['summary']}", ""]
    lines += [f"  {key:<9} {facts[key]}" for key in ("equation", "scale", "cost", "bytes", "source") if facts[key]]
    lines += [f"  option    {option}: {_option(o)}" for option, o in facts["options"].items()]
    return "\n".join(lines)


def _option(option: dict[str, Any]) -> str:
    default = option["default"]
    told = "nothing" if default is None else str(default).lower() if isinstance(default, bool) else default
    return f"{option['takes']} (default {told})"
