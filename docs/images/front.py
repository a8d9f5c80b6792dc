"""The picture of the README: python docs/images/front.py draws front.png from curves.csv and spectra.csv beside it.

curves.csv is an extract of the runs behind docs/results/mini_table1.csv (three seeds, tuned), spectra.csv of one
quickstart run. They were written by

    isoloco study run mini_table1
    isoloco train quickstart --budget.tokens 200000 --eval.every_rounds 0 --out_dir runs/spectra
    python docs/images/front.py studies/mini_table1 runs/spectra
"""

import csv
import json
import statistics
import sys
from pathlib import Path

from matplotlib.figure import Figure

from isoloco.plots import save, style

HERE = Path(__file__).parent
COLOURS = {"dp": "#555555", "diloco": "#D55E00", "isoloco": "#0072B2"}
NAMES = {"dp": "data-parallel AdamW", "diloco": "DiLoCo", "isoloco": "IsoLoCo"}
MATRICES = ("layers.0.self_attn.q_proj", "layers.3.mlp.down_proj")


def read(name):
    with (HERE / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def write(name, columns, rows):
    with (HERE / name).open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([columns, *rows])


def records(run, kind):
    lines = (run / "metrics.jsonl").read_text("utf-8").splitlines()
    return [found for found in map(json.loads, lines) if found["kind"] == kind]


def extract(study, run):
    """Write curves.csv and spectra.csv anew."""
    curves = []
    for row in read("../results/mini_table1.csv"):
        if row["kind"] == "report":
            path = study / "runs" / row["run"]
            for kind, key in (("round", "train_loss"), ("eval", "loss")):
                curves += [(row["cell"], row["seed"], kind, r["tokens"], f"{r[key]:.5f}") for r in records(path, kind)]
    write("curves.csv", ("method", "seed", "kind", "tokens", "loss"), curves)
    last = records(run, "spectra")[-1]
    spectra = []
    for name, found in last["matrices"].items():
        short = name.removeprefix("model.").removesuffix(".weight")
        for which in ("before", "after"):
            spectra += [(last["round"], short, which, i, f"{s:.6g}") for i, s in enumerate(found[which])]
    write("spectra.csv", ("round", "matrix", "which", "rank", "sigma"), spectra)


def draw(path):
    with style():
        figure = Figure(figsize=(11, 4.2), layout="constrained")
        losses, spectrum = figure.subplots(1, 2)
        curves = read("curves.csv")
        for method, colour in COLOURS.items():
            by_tokens = {}
            for row in curves:
                if row["method"] == method and row["kind"] == "round":
                    by_tokens.setdefault(int(row["tokens"]), []).append(float(row["loss"]))
            x = [tokens / 1e6 for tokens in by_tokens]
            losses.fill_between(x, *zip(*((min(y), max(y)) for y in by_tokens.values()), strict=True),
                                color=colour, alpha=0.25, linewidth=0)  # fmt: skip
            held_out = [float(r["loss"]) for r in curves if r["method"] == method and r["kind"] == "eval"]
            label = f"{NAMES[method]}: {statistics.mean(held_out):.2f} held out"
            losses.plot(x, [statistics.mean(y) for y in by_tokens.values()], color=colour, label=label)
        losses.set(title="1.3 M parameters, 8 workers that meet every 15 steps", xlabel="tokens (millions)",
                   ylabel="training loss (nats per token)", xlim=(0, None))  # fmt: skip
        losses.legend()
        rows = read("spectra.csv")
        for matrix, colour in zip(MATRICES, ("#009E73", "#CC79A7"), strict=True):
            for which, dashes in (("before", "--"), ("after", "-")):
                sigma = [float(r["sigma"]) for r in rows if (r["matrix"], r["which"]) == (matrix, which)]
                x = [i / (len(sigma) - 1) for i in range(len(sigma))]
                spectrum.plot(x, sigma, dashes, color=colour, label=f"{matrix}, {which} Iso-C")
        spectrum.set(title=f"Singular values of the mean delta, round {rows[0]['round']}", yscale="log", xlim=(0, 1),
                     xlabel="rank (0: largest, 1: smallest)", ylabel="singular value")  # fmt: skip
        spectrum.legend()
        return save(figure, path)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        extract(Path(sys.argv[1]), Path(sys.argv[2]))
    print(draw(HERE / "front.png"))
