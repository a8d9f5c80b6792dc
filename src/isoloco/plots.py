"""Pictures of runs, drawn with matplotlib's object interface: no windows, no state that outlives a call."""

from __future__ import annotations

import math
import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from . import console
from .metrics import read_metrics
from .rundir import RunDir

# Okabe and Ito's colours: told apart by everyone, and in print
BLUE, ORANGE, GREEN, PURPLE, SKY, RED = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00"
CYCLE = (BLUE, ORANGE, GREEN, PURPLE, RED, SKY)
INK = "#222222"
STYLE: dict[str, Any] = {
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.labelsize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#555555",
    "axes.grid": True,
    "grid.color": "#E6E6E6",
    "legend.fontsize": 9.5,
    "legend.framealpha": 0.85,
    "legend.edgecolor": "none",
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
}
MATRICES_SHOWN = 4
DECADES_SHOWN = 4  # of singular values, below the largest: a few that are almost zero would take most of the panel


def style() -> AbstractContextManager[None]:
    """The look of our figures, whatever a user's matplotlibrc says; as a context."""
    import matplotlib.style

    return matplotlib.style.context(["default", STYLE])


def overview(run_dir: str | Path) -> Path:
    """overview.png of a run: loss against tokens, and what its outer steps did to the mean delta.

    Left: train loss (mean of a round; the band is the spread over the workers), validation loss, its best. Right:
    singular values of a few matrices of the mean delta, before and after the transform, at the last record; for a run
    without such records gradient norm and learning rate. Errors: ValueError where there is no run.
    """
    import yaml
    from matplotlib.figure import Figure

    run = RunDir.open(run_dir)
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for found in read_metrics(run.path):
        by_kind.setdefault(found["kind"], []).append(found)
    resolved = run.path / "config.yaml"
    config = yaml.safe_load(resolved.read_text("utf-8")) if resolved.exists() else {}
    with style():
        figure = Figure(figsize=(12.5, 5.2))
        figure.set_layout_engine("constrained", h_pad=0.08, w_pad=0.06)
        figure.suptitle(_title(run, config), fontsize=13.5, fontweight="bold", color=INK)
        left, right = figure.subfigures(1, 2, wspace=0.03, squeeze=False)[0]
        _draw_loss(left.subplots(), by_kind.get("round", []), by_kind.get("eval", []))
        if by_kind.get("spectra"):
            _draw_spectra(right.subplots(), by_kind["spectra"][-1], (config.get("transform") or {}).get("name"))
        else:
            top, bottom = right.subplots(2, 1, sharex=True)
            _draw_steps(top, bottom, by_kind.get("inner", []))
        return save(figure, run.path / "overview.png")


def save(figure: Any, path: Path) -> Path:
    """Write a figure as PNG, whole or not at all."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        figure.savefig(temporary, format="png", dpi=150, metadata={"Software": None})
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def _title(run: RunDir, config: dict[str, Any]) -> str:
    method = config.get("method", run.path.name)
    letters = (("W", "workers"),) if method == "dp" else (("W", "workers"), ("H", "sync_every"))
    parts = [method, *(f"{letter} = {config[key]}" for letter, key in letters if key in config)]
    if parameters := run.manifest.get("parameters") or run.manifest["summary"].get("parameters"):
        parts.append(f"{console.count(parameters)} parameters")
    return "     ".join(parts)


def _draw_loss(axes: Any, rounds: list[dict[str, Any]], evals: list[dict[str, Any]]) -> None:
    rounds = [r for r in rounds if _finite(r.get("train_loss"))]
    evals = [r for r in evals if _finite(r.get("loss"))]
    unit, word = _token_unit(max((r["tokens"] for r in [*rounds, *evals]), default=0))
    if rounds:
        x = [r["tokens"] / unit for r in rounds]
        middle = [r["train_loss"] for r in rounds]
        half = [(r.get("train_loss_spread") or 0.0) / 2 for r in rounds]
        axes.plot(x, middle, color=BLUE, label="train, mean of a round", marker="o" if len(x) == 1 else None)
        if any(half):
            low, high = ([m + sign * h for m, h in zip(middle, half, strict=True)] for sign in (-1, 1))
            axes.fill_between(x, low, high, color=SKY, alpha=0.4, linewidth=0, label="spread over workers")
    if evals:
        points = {"marker": "o", "markersize": 5, "markerfacecolor": "white", "linewidth": 1.2}
        split = {"valid": "validation"}.get(evals[-1]["split"], evals[-1]["split"])
        axes.plot([r["tokens"] / unit for r in evals], [r["loss"] for r in evals], color=RED, label=split, **points)
        best = min(evals, key=lambda r: r["loss"])
        star = {"marker": "*", "markersize": 14, "linestyle": "none", "label": f"best, {best['loss']:.4f}"}
        axes.plot(best["tokens"] / unit, best["loss"], color=RED, zorder=3, **star)
    axes.set(xlabel=f"tokens ({word})" if word else "tokens", ylabel="loss (nats per token)", title="Loss")
    axes.set_xlim(left=0)
    if rounds or evals:
        axes.legend(loc="upper right")
    else:
        _say(axes, "no round has ended yet")


def _draw_spectra(axes: Any, found: dict[str, Any], transform: str | None) -> None:
    from matplotlib.lines import Line2D

    shown = _spread_out(list(found["matrices"].items()), MATRICES_SHOWN)
    transformed = transform != "none" and any(values.get("after") for _, values in shown)
    largest = 0.0
    legend = []
    for colour, (name, values) in zip(CYCLE, shown, strict=False):
        for which, dashes in (("before", "--"), ("after", "-")) if transformed else (("before", "-"),):
            if sigma := values.get(which):
                x = [i / max(len(sigma) - 1, 1) for i in range(len(sigma))]
                y = [s if _finite(s) and s > 0 else math.nan for s in sigma]  # a log axis has no place for zero
                axes.plot(x, y, linestyle=dashes, color=colour, marker="o" if len(x) == 1 else None)
                largest = max([largest, *(s for s in y if s > 0)])
        legend.append(Line2D([], [], color=colour, label=_short_name(name)))
    if transformed:
        legend.append(Line2D([], [], color=INK, linestyle="--", linewidth=1.4, label="before"))
        name = (transform or "the transform").rpartition(":")[2]  # of package.module:function
        legend.append(Line2D([], [], color=INK, linewidth=1.4, label=f"after {name}"))
    axes.set_title(f"Singular values of the mean delta, round {found['round']}")
    axes.set(xlabel="rank (0: largest, 1: smallest)", ylabel="singular value", xlim=(0, 1))
    if not largest:
        _say(axes, "the mean delta is zero")
        return
    axes.set_yscale("log")
    axes.set_ylim(bottom=max(axes.get_ylim()[0], largest / 10**DECADES_SHOWN))
    axes.legend(handles=legend, loc="best")


def _draw_steps(top: Any, bottom: Any, inner: list[dict[str, Any]]) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    by_step: dict[int, list[dict[str, Any]]] = {}
    for found in inner:
        by_step.setdefault(found["step"], []).append(found)
    norms = {s: [r["grad_norm"] for r in by_step[s] if _finite(r["grad_norm"])] for s in sorted(by_step)}
    norms = {s: values for s, values in norms.items() if values}
    top.set(title="Inner steps", ylabel="gradient norm")
    bottom.set(xlabel="inner step", ylabel="learning rate")
    if not inner:
        _say(top, "no inner step has been recorded")
        return
    if any(len(values) > 1 for values in norms.values()):
        low, high = map(min, norms.values()), map(max, norms.values())
        top.fill_between(list(norms), list(low), list(high), color=SKY, alpha=0.4, linewidth=0, label="over workers")
    top.plot(list(norms), [sum(values) / len(values) for values in norms.values()], color=BLUE)
    if any(max(values) > 0 for values in norms.values()):
        top.set_yscale("log")
        low, high = top.get_ylim()
        top.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        top.yaxis.set_minor_formatter(top.yaxis.get_major_formatter() if high / low < 10 else NullFormatter())
    bottom.plot(sorted(by_step), [by_step[s][0]["lr"] for s in sorted(by_step)], color=ORANGE)
    bottom.set_xlim(left=0)
    bottom.set_ylim(bottom=0)
    bottom.ticklabel_format(axis="y", style="sci", scilimits=(-3, 3), useMathText=True)


def _finite(value: Any) -> bool:
    return value is not None and math.isfinite(value)


def _token_unit(most: float) -> tuple[float, str]:
    for unit, word in ((1e9, "billions"), (1e6, "millions"), (1e3, "thousands")):
        if most >= unit:
            return unit, word
    return 1.0, ""


def _spread_out(items: list[Any], number: int) -> list[Any]:
    """At most ``number`` of them, evenly spaced, first and last included."""
    if len(items) <= number:
        return items
    return [items[round(i * (len(items) - 1) / (number - 1))] for i in range(number)]


def _short_name(name: str) -> str:
    """model.layers.3.self_attn.q_proj.weight -> layers.3.self_attn.q_proj"""
    return name.removeprefix("model.").removeprefix("transformer.").removesuffix(".weight")


def _say(axes: Any, text: str) -> None:
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color="#777777")
