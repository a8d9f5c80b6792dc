"""Pictures of runs, drawn with matplotlib's object interface (no windows, no global state)."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

from . import console
from .tracking import RunDir, read_metrics

# Okabe and Ito's colours: told apart by everyone, and in print
BLUE, ORANGE, GREEN, PURPLE, SKY, RED = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00"
INK, FAINT = "#222222", "#B8B8B8"
CYCLE = (BLUE, ORANGE, GREEN, PURPLE, RED, SKY)
STYLE: dict[str, Any] = {
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.labelsize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#555555",
    "axes.grid": True,
    "grid.color": "#E6E6E6",
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
}
MATRICES_SHOWN = 4


def overview(run_dir: str | Path) -> Path:
    """overview.png of a run: loss against tokens, and what its outer steps did to the mean delta.

    Left: train loss (mean of a round; the band is the spread over the workers), validation loss, its best. Right: singular
    values of a few matrices of the mean delta, before and after the transform, at the last record; for a run without
    such records gradient norm and learning rate. Errors: ValueError where there is no run.
    """
    import matplotlib

    with matplotlib.rc_context(STYLE):
        return _overview(RunDir.open(run_dir))


def _overview(run: RunDir) -> Path:
    import yaml
    from matplotlib.figure import Figure

    records = read_metrics(run.path)
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        by_kind.setdefault(record["kind"], []).append(record)
    text = run.path / "config.yaml"
    config = yaml.safe_load(text.read_text("utf-8")) if text.exists() else {}

    figure = Figure(figsize=(12.5, 5.2), layout="constrained")
    figure.suptitle(_title(run, config), fontsize=13.5, fontweight="bold", color=INK)
    left, right = figure.subfigures(1, 2)
    _draw_loss(left.subplots(), by_kind)
    if by_kind.get("spectra"):
        _draw_spectra(right.subplots(), by_kind["spectra"][-1], (config.get("transform") or {}).get("name"))
    else:
        _draw_steps(right, by_kind.get("inner", []))
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
    parts = [str(config.get("method", run.path.name))]
    parts += [f"{letter} = {config[key]}" for letter, key in (("W", "workers"), ("H", "sync_every")) if key in config]
    parameters = run.manifest.get("parameters") or run.manifest["summary"].get("parameters")
    if parameters:
        parts.append(f"{console.count(parameters)} parameters")
    return "     ".join(parts)


def _draw_loss(axes: Any, by_kind: dict[str, list[dict[str, Any]]]) -> None:
    rounds = [r for r in by_kind.get("round", []) if _finite(r.get("train_loss"))]
    evals = [r for r in by_kind.get("eval", []) if _finite(r.get("loss"))]
    unit, word = _token_unit(max((r["tokens"] for r in [*rounds, *evals]), default=0))
    if rounds:
        x = [r["tokens"] / unit for r in rounds]
        mean = [r["train_loss"] for r in rounds]
        half = [(r.get("train_loss_spread") or 0.0) / 2 for r in rounds]
        if any(half):
            low, high = (
                [m - h for m, h in zip(mean, half, strict=True)],
                [m + h for m, h in zip(mean, half, strict=True)],
            )
            axes.fill_between(x, low, high, color=SKY, alpha=0.3, linewidth=0, label="spread over workers")
        axes.plot(x, mean, color=BLUE, label="train, mean of the round", marker="o" if len(x) == 1 else None)
    if evals:
        axes.plot(
            [r["tokens"] / unit for r in evals], [r["loss"] for r in evals], color=RED, linewidth=1.2,
            marker="o", markersize=5, markerfacecolor="white", label=_split_name(evals[-1].get("split")),
        )  # fmt: skip
        best = min(evals, key=lambda r: r["loss"])
        axes.plot(
            best["tokens"] / unit,
            best["loss"],
            marker="*",
            markersize=15,
            color=RED,
            linestyle="none",
            label=f"best {best['loss']:.4f}",
        )
    axes.set(xlabel=f"tokens ({word})" if word else "tokens", ylabel="loss (nats per token)", title="Loss")
    axes.set_xlim(left=0)
    if rounds or evals:
        axes.legend(loc="upper right")
    else:
        _say(axes, "no round was finished")


def _draw_spectra(axes: Any, record: dict[str, Any], transform: str | None) -> None:
    shown = _spread_out(list(record["matrices"].items()), MATRICES_SHOWN)
    transformed = any(values.get("after") for _, values in shown)
    for colour, (name, values) in zip(CYCLE, shown, strict=False):
        for which, dashes in (("before", "--" if transformed else "-"), ("after", "-")):
            if sigma := values.get(which):
                x = [i / max(len(sigma) - 1, 1) for i in range(len(sigma))]
                y = [s if s > 0 else math.nan for s in sigma]  # a log axis has no place for zero
                axes.plot(x, y, linestyle=dashes, color=colour)
        axes.plot([], [], color=colour, label=_short_name(name))
    axes.set_yscale("log")
    axes.set(xlabel="rank (0: largest, 1: smallest)", ylabel="singular value", xlim=(0, 1))
    axes.set_title(f"Singular values of the mean delta, round {record['round']}")
    if transformed:
        axes.plot([], [], color=INK, linestyle="--", linewidth=1.4, label="before")
        axes.plot([], [], color=INK, linestyle="-", linewidth=1.4, label=f"after {transform or 'the transform'}")
    axes.legend(loc="best")


def _draw_steps(figure: Any, inner: list[dict[str, Any]]) -> None:
    top, bottom = figure.subplots(2, 1, sharex=True)
    by_step: dict[int, list[dict[str, Any]]] = {}
    for record in inner:
        by_step.setdefault(record["step"], []).append(record)
    steps = sorted(by_step)
    norms = [[r["grad_norm"] for r in by_step[s] if _finite(r["grad_norm"])] for s in steps]
    top.set(title="Inner steps", ylabel="gradient norm")
    bottom.set(xlabel="inner step", ylabel="learning rate")
    if not steps:
        _say(top, "no inner step was recorded")
        return
    known = [(s, n) for s, n in zip(steps, norms, strict=True) if n]
    if any(len(n) > 1 for _, n in known):
        x = [s for s, _ in known]
        top.fill_between(x, [min(n) for _, n in known], [max(n) for _, n in known], color=SKY, alpha=0.3, linewidth=0)
    top.plot([s for s, _ in known], [sum(n) / len(n) for _, n in known], color=BLUE)
    if known:
        top.set_yscale("log")
    bottom.plot(steps, [by_step[s][0]["lr"] for s in steps], color=ORANGE)
    bottom.set_xlim(left=0)
    bottom.set_ylim(bottom=0)
    bottom.ticklabel_format(axis="y", style="sci", scilimits=(-3, 3))


def _finite(value: Any) -> bool:
    return value is not None and math.isfinite(value)


def _token_unit(most: float) -> tuple[float, str]:
    for unit, word in ((1e9, "billions"), (1e6, "millions"), (1e3, "thousands")):
        if most >= unit:
            return unit, word
    return 1.0, ""


def _split_name(split: str | None) -> str:
    return {"valid": "validation", "test": "test"}.get(split or "valid", str(split))


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
