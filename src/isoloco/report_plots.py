"""Pictures of studies: each of those that the rows and runs of a study can fill."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import plots
from .config import get
from .links import Link, link_flags
from .metrics import read_metrics
from .report import Entry, entries
from .rundir import RunDir
from .study_file import Study

SHOWN = 10  # curves in one picture, the lowest
LINES = ("-", "--", ":")


@dataclass(frozen=True)
class Picture:
    """A PNG and what it shows, in words."""

    path: Path
    alt: str


Curve = tuple[list[float], list[float]]
Looks = dict[str, dict[str, Any]]  # colour and dashes of a name


def pictures(
    study: Study, rows: list[dict[str, str]], runs: Path, out: Path, *, bandwidth: str = "100Mbit"
) -> list[Picture]:
    """Draw what there is into a directory. ``runs``: where the run directories are; some pictures need them."""
    out.mkdir(parents=True, exist_ok=True)
    found = [entry for entry in entries(study, rows) if entry.losses]
    drawn = [_against(found, "workers", out), _against(found, "sync_every", out), _sensitivity(study, rows, out)]
    shown = sorted(found, key=lambda entry: entry.mean)[:SHOWN]
    read = {entry.label: curve for entry in shown if (curve := _mean_curve(entry, runs))}
    read = {e.label: read[e.label] for e in found if e.label in read}  # in the order of the study, in every picture
    if read:
        curves = {label: curve.loss for label, curve in read.items()}
        drawn.insert(0, tokens_picture(curves, out / "loss-tokens.png", what=_what(read)))
    drawn.append(_spectra(found, runs, out))
    wired = {label: run for label, run in read.items() if run.bytes_per_token is not None}
    if any(run.bytes_per_token for run in wired.values()):
        speed = statistics.median(curve.tokens_per_s for curve in wired.values())
        link = link_flags(["--bandwidth", bandwidth, "--tokens-per-second", f"{speed:.0f}"])[1]
        assert link is not None
        looks = {label: _look(i) for i, label in enumerate(read)}  # one for a cell, also where others are left out
        drawn += [_bytes(wired, looks, out), _time(wired, looks, link, bandwidth, out)]
    return [picture for picture in drawn if picture]


@dataclass(frozen=True)
class _Run:
    what: str
    loss: Curve
    bytes_per_token: float | None  # None: not known
    tokens_per_s: float


def loss_curve(run: Path) -> tuple[str, Curve]:
    """Loss against tokens, and its name: of validation where it was measured often enough, else of training."""
    records = read_metrics(run)
    evals = [(r["tokens"], r["loss"]) for r in records if r["kind"] == "eval"]
    rounds = [(r["tokens"], r["train_loss"]) for r in records if r["kind"] == "round"]
    what, points = ("validation loss", evals) if len(evals) > 4 else ("training loss", rounds)
    points = [p for p in points if p[1] is not None and math.isfinite(p[1])]
    return what, ([p[0] for p in points], [p[1] for p in points])


def _mean_curve(entry: Entry, runs: Path) -> _Run | None:
    """Mean over the seeds whose runs are there."""
    there = [runs / key for key in entry.runs if (runs / key / "metrics.jsonl").is_file()]
    named = [(what, curve) for what, curve in map(loss_curve, there) if curve[0]]
    if not named:
        return None
    curves = [curve for _, curve in named]
    length = min(len(x) for x, _ in curves)
    means = [statistics.mean(y[i] for _, y in curves) for i in range(length)]
    summaries = [RunDir.open(run).manifest.get("summary") or {} for run in there]
    wire = 0 if entry.config.workers == 1 else summaries[0].get("wire_bytes_per_worker")
    speed = [s["tokens_per_s"] for s in summaries if s.get("tokens_per_s")]
    tokens = summaries[0].get("tokens") or 1
    return _Run(
        named[0][0],
        (curves[0][0][:length], means),
        None if wire is None else wire / tokens,
        statistics.median(speed or [1.0]),
    )


def _what(read: dict[str, _Run]) -> str:
    names = {run.what for run in read.values()}
    return names.pop() if len(names) == 1 else "loss"


def draw(path: Path, fill: Callable[[Any], None], *, size: tuple[float, float] = (7.0, 4.6), panels: int = 1) -> Path:
    """A figure in our style; ``fill`` gets its axes, a list where there are several."""
    from matplotlib.figure import Figure

    with plots.style():
        figure = Figure(figsize=size)
        figure.set_layout_engine("constrained", h_pad=0.08, w_pad=0.06)
        axes = figure.subplots(1, panels, squeeze=False)[0]
        fill(axes[0] if panels == 1 else list(axes))
        return plots.save(figure, path)


def draw_curves(
    axes: Any,
    curves: dict[str, Curve],
    *,
    xlabel: str,
    ylabel: str,
    marker: str | None = None,
    looks: Looks | None = None,
) -> None:
    """A line for each curve, and a legend; colours first, then dashes, or the ``looks`` of the curves' names."""
    for i, (label, (x, y)) in enumerate(curves.items()):
        axes.plot(x, y, label=label, marker=marker, **(looks[label] if looks else _look(i)))
    axes.set(xlabel=xlabel, ylabel=ylabel)
    if len(curves) <= 8:
        axes.legend(loc="best")
    else:
        axes.get_figure().legend(loc="outside lower center", ncols=3, fontsize=8)


def _fit(axes: Any, curves: dict[str, Curve]) -> None:
    """From zero; logarithmic where one curve is far longer than another."""
    ends = [x[-1] for x, _ in curves.values()]
    if max(ends) > 8 * min(ends):
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
    else:
        axes.set_xlim(left=0)


def _look(i: int) -> dict[str, Any]:
    count = len(plots.CYCLE)
    return {"color": plots.CYCLE[i % count], "linestyle": LINES[i // count % len(LINES)]}


def scaled(curves: dict[str, Curve]) -> tuple[dict[str, Curve], str]:
    """Tokens in a unit that is easy to read, and the axis' label."""
    unit, word = plots._token_unit(max((max(x) for x, _ in curves.values()), default=0.0))
    label = f"tokens ({word})" if word else "tokens"
    return {name: ([v / unit for v in x], y) for name, (x, y) in curves.items()}, label


def tokens_picture(curves: dict[str, Curve], path: Path, *, what: str = "loss") -> Picture:
    """Loss against tokens."""
    name = what[0].upper() + what[1:]
    shown, label = scaled(curves)

    def fill(axes: Any) -> None:
        draw_curves(axes, shown, xlabel=label, ylabel=f"{what} (nats per token)")
        axes.set_title(f"{name} against tokens")
        axes.set_xlim(left=0)

    ends = ", ".join(f"{name} ends at {y[-1]:.3f}" for name, (_, y) in shown.items())
    return Picture(draw(path, fill), f"{name} against tokens, a line for each: {ends}.")


def _against(found: list[Entry], key: str, out: Path) -> Picture | None:
    """Loss against workers (relative to data-parallel training, or to one worker) or against the length of a round."""
    best: dict[str, dict[int, Entry]] = {}
    for entry in (e for e in found if not e.config.is_dp):
        points = best.setdefault(entry.config.method, {})
        x = get(entry.config, key)
        points[x] = min(points.get(x, entry), entry, key=lambda e: e.mean)
    lines = {method: dict(sorted(points.items())) for method, points in best.items() if len(points) > 1}
    if not lines:
        return None
    dp = [e.mean for e in found if e.config.is_dp]
    single = [points[1].mean for points in lines.values() if 1 in points]
    reference, word = None, ""
    if key == "workers" and (dp or single):
        reference, word = (min(dp), "data-parallel training") if dp else (min(single), "the best with one worker")
    dp_paper = [e.cell.paper for e in found if e.config.is_dp and e.cell.paper]

    def height(loss: float, against: float | None) -> float:
        return loss if against is None else 100 * (loss / against - 1)

    def fill(axes: Any) -> None:
        for i, (method, points) in enumerate(lines.items()):
            y = [height(e.mean, reference) for e in points.values()]
            deviation = [(e.deviation or 0.0) * (1 if reference is None else 100 / reference) for e in points.values()]
            axes.errorbar(list(points), y, yerr=deviation, label=method, marker="o", capsize=3, **_look(i))
            paper = {x: e.cell.paper for x, e in points.items() if e.cell.paper}
            if paper and (reference is None or dp_paper):
                against = dp_paper[0] if reference is not None else None
                style = {"linestyle": "none", "marker": "o", "markerfacecolor": "none", "markersize": 9}
                axes.plot(list(paper), [height(v, against) for v in paper.values()], color=_look(i)["color"], **style)
        if reference is not None:
            axes.axhline(0, color=plots.INK, linewidth=1, linestyle=":")
        values = sorted({x for points in lines.values() for x in points})
        axes.set_xscale("log", base=2)
        axes.set_xticks(values, [str(v) for v in values])
        axes.minorticks_off()
        name = "workers" if key == "workers" else "inner steps of a round"
        unit = "loss (nats per token)" if reference is None else f"loss over {word} (%)"
        axes.set(xlabel=name, ylabel=unit, title=f"Loss against {name}")
        axes.legend(loc="best")

    name = "workers" if key == "workers" else "inner steps of a round"
    told = "; ".join(
        f"{method}: " + ", ".join(f"{e.mean:.3f} at {x}" for x, e in points.items()) for method, points in lines.items()
    )
    return Picture(draw(out / f"loss-{key}.png", fill), f"Loss against the number of {name}. {told}.")


def _sensitivity(study: Study, rows: list[dict[str, str]], out: Path) -> Picture | None:
    """Losses of the trials along each axis that was tuned: the best over the other axes, and all of them as dots."""
    axes_of: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for cell in study.cells:
        trials = [row for row in rows if row["cell"] == cell.name and row["kind"] == "trial" and row[study.metric]]
        for axis in cell.tune:
            points = [(float(json.loads(row["options"])[axis.key]), float(row[study.metric])) for row in trials]
            if len({x for x, _ in points}) > 1:
                axes_of.setdefault(axis.key, {})[cell.name] = points
    if not axes_of:
        return None

    order = [cell.name for cell in study.cells]  # the same colour for a cell in all panels

    def fill(panels: Any) -> None:
        for axes, (key, cells) in zip(panels if isinstance(panels, list) else [panels], axes_of.items(), strict=True):
            for name, points in cells.items():
                look = _look(order.index(name))
                best: dict[float, float] = {}
                for x, y in points:
                    best[x] = min(y, best.get(x, math.inf))
                axes.plot(*zip(*points, strict=True), linestyle="none", marker=".", alpha=0.4, color=look["color"])
                axes.plot(sorted(best), [best[x] for x in sorted(best)], label=name, marker="o", **look)
            if key.endswith("lr"):
                axes.set_xscale("log", base=2)
                ticks: list[float] = []
                for x in sorted({x for points in cells.values() for x, _ in points}):
                    if not ticks or x > 1.15 * ticks[-1]:  # ladders of two cells may all but meet
                        ticks.append(x)
                axes.set_xticks(ticks, [f"{x:g}" for x in ticks], rotation=60, fontsize=8)
                axes.minorticks_off()
            axes.set(xlabel=key, ylabel="loss (nats per token)", title=f"Sensitivity to {key}")
            axes.legend(loc="best")

    count = len(axes_of)
    told = "; ".join(
        f"{key}: " + ", ".join(f"{name} lowest at {min(p, key=lambda q: q[1])[0]:g}" for name, p in cells.items())
        for key, cells in axes_of.items()
    )
    path = draw(out / "sensitivity.png", fill, size=(max(8.0, 1.5 + 5.0 * count), 4.6), panels=count)
    return Picture(path, f"Losses of the trials against what was tuned. {told}.")


def _spectra(found: list[Entry], runs: Path, out: Path) -> Picture | None:
    """Singular values of the mean delta, before and after the transform, early, midway and late in training."""
    transformed = [e for e in found if not e.config.is_dp and e.config.transform.name != "none"]
    for entry in sorted(transformed, key=lambda e: e.mean):
        for key in entry.runs:
            records = [r for r in read_metrics(runs / key) if r["kind"] == "spectra"]
            records = [r for r in records if any(v.get("after") for v in r["matrices"].values())]
            if records:
                return _draw_spectra(entry, records, out)
    return None


def _draw_spectra(entry: Entry, records: list[dict[str, Any]], out: Path) -> Picture:
    chosen = plots._spread_out(records, 3)
    names = [name for name, _ in plots._spread_out(list(records[0]["matrices"].items()), 3)]

    def fill(panels: Any) -> None:
        for axes, name in zip(panels if isinstance(panels, list) else [panels], names, strict=True):
            for colour, record in zip(plots.CYCLE, chosen, strict=False):
                values = record["matrices"][name]
                for which, dashes in (("before", "--"), ("after", "-")):
                    if sigma := values.get(which):
                        x = [i / max(len(sigma) - 1, 1) for i in range(len(sigma))]
                        y = [s if s and s > 0 else math.nan for s in sigma]
                        label = f"round {record['round']}, {which}"
                        axes.plot(x, y, linestyle=dashes, color=colour, label=label)
            axes.set_yscale("log")
            axes.set(xlabel="rank (0: largest, 1: smallest)", ylabel="singular value", title=plots._short_name(name))
            axes.legend(loc="best", fontsize=8)
        figure = (panels[0] if isinstance(panels, list) else panels).get_figure()
        figure.suptitle(f"Singular values of the mean delta, {entry.label}")

    path = draw(out / "spectra.png", fill, size=(max(8.0, 1.0 + 4.8 * len(names)), 4.6), panels=len(names))
    rounds = ", ".join(str(r["round"]) for r in chosen)
    told = f"Singular values of the mean delta of {entry.label} before and after its transform, rounds {rounds}"
    return Picture(path, f"{told}; matrices {', '.join(names)}.")


def _bytes(read: dict[str, _Run], looks: Looks, out: Path) -> Picture:
    wired = [(label, run, run.bytes_per_token) for label, run in read.items() if run.bytes_per_token]
    most = max(run.loss[0][-1] * each for _, run, each in wired)
    unit, word = (1e9, "GB") if most >= 1e10 else (1e6, "MB")
    curves = {label: ([x * each / unit for x in run.loss[0]], run.loss[1]) for label, run, each in wired}

    def fill(axes: Any) -> None:
        ylabel = f"{_what(read)} (nats per token)"
        draw_curves(axes, curves, xlabel=f"sent by each worker ({word})", ylabel=ylabel, looks=looks)
        axes.set_title("Loss against bytes")
        _fit(axes, curves)

    told = ", ".join(f"{label} sends {_short(x[-1])} {word}" for label, (x, _) in curves.items())
    return Picture(draw(out / "loss-bytes.png", fill), f"Loss against the bytes that a worker sends: {told}.")


def _short(value: float) -> str:
    """Three digits, and no exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _time(read: dict[str, _Run], looks: Looks, link: Link, bandwidth: str, out: Path) -> Picture:
    def seconds(tokens: float, run: _Run) -> float:
        return tokens / link.tokens_per_s + link.seconds(tokens * (run.bytes_per_token or 0.0), 0)

    longest = max(seconds(run.loss[0][-1], run) for run in read.values())
    unit, word = (3600.0, "hours") if longest >= 3 * 3600 else (60.0, "minutes")
    curves = {label: ([seconds(x, run) / unit for x in run.loss[0]], run.loss[1]) for label, run in read.items()}

    def fill(axes: Any) -> None:
        xlabel = f"estimated {word} at {bandwidth}/s and {link.tokens_per_s:,.0f} tokens/s of computing"
        draw_curves(axes, curves, xlabel=xlabel, ylabel=f"{_what(read)} (nats per token)", looks=looks)
        axes.set_title("Loss against estimated time on a slow link")
        _fit(axes, curves)

    told = ", ".join(f"{label} takes {_short(x[-1])} {word}" for label, (x, _) in curves.items())
    return Picture(draw(out / "loss-time.png", fill), f"Loss against estimated wall time at {bandwidth}/s: {told}.")
