"""One page for a study or for some runs: a single file, tables and pictures inside, readable on a phone."""

from __future__ import annotations

import base64
import html
import struct
import tempfile
from pathlib import Path

from .report import RENDER, Table, html_table, tables_of
from .report_plots import Picture, pictures
from .study_board import Board

CSS = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff; }
body { margin: 0 auto; max-width: 62rem; padding: 1rem; }
h1 { font-size: 1.5rem; line-height: 1.25; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap; }
th:first-child, .words { text-align: left; }
th:first-child { position: sticky; left: 0; background: #fff; }
thead th { border-bottom: 2px solid #555; }
figure { margin: 1.5rem 0; } img { max-width: min(100%, 48rem); height: auto; }
.panels { max-width: none; width: max(100%, 58rem); }
@media (max-width: 40rem) {
  table { font-size: .8rem; } th, td { padding: .25rem .35rem; } .words { white-space: normal; min-width: 6rem; }
}
figcaption, .note { color: #555; font-size: .85rem; }
code, pre { font-size: .9em; } pre { overflow-x: auto; background: #f5f5f5; padding: .6rem; }
"""


def build_page(title: str, notes: list[str], tables: list[Table], drawn: list[Picture], commands: list[str]) -> str:
    """HTML that refers to nothing outside itself. Each picture's words are its alternative text and its caption."""
    parts = [f"<h1>{html.escape(title)}</h1>", *(f"<p class=note>{html.escape(note)}</p>" for note in notes)]
    for table in tables:
        if table.caption != title:
            parts.append(f"<h2>{html.escape(table.caption)}</h2>")
        parts.append(f"<div class=scroll>{html_table(table)}</div>")
    for picture in drawn:
        data = picture.path.read_bytes()
        width, height = struct.unpack(">II", data[16:24])  # of the PNG's header
        kind = " class=panels" if width > 2 * height else ""  # several side by side: scrolled where they do not fit
        alt = html.escape(picture.alt, quote=True)
        image = f'<img{kind} alt="{alt}" src="data:image/png;base64,{base64.b64encode(data).decode()}">'
        parts.append(f"<figure><div class=scroll>{image}</div><figcaption>{alt}</figcaption></figure>")
    if commands:
        parts.append(f"<h2>Made by</h2><pre>{html.escape(chr(10).join(commands))}</pre>")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title><style>{CSS}</style></head>\n"
        "<body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def page(board: Board, rows: list[dict[str, str]], *, bandwidth: str, command: str) -> str:
    """The page of a study."""
    with tempfile.TemporaryDirectory() as folder:
        return _page(board, rows, _drawn(board, rows, Path(folder), bandwidth), command)


def write_report(
    board: Board, rows: list[dict[str, str]], out: str | Path, *, bandwidth: str, command: str
) -> list[Path]:
    """Tables as .md, .csv and .tex, pictures as .png, and index.html with all of it, into a directory."""
    out = Path(out)
    drawn = _drawn(board, rows, out, bandwidth)
    written = []
    for kind, suffix in (("markdown", "md"), ("csv", "csv"), ("latex", "tex")):
        for name, table in zip(("table", "layout"), reversed(tables_of(board.study, rows)), strict=False):
            written.append(out / f"{name}.{suffix}")
            written[-1].write_text(RENDER[kind](table) + "\n", "utf-8")
    index = out / "index.html"
    index.write_text(_page(board, rows, drawn, command), "utf-8")
    return [*written, *(picture.path for picture in drawn), index]


def _drawn(board: Board, rows: list[dict[str, str]], out: Path, bandwidth: str) -> list[Picture]:
    return pictures(board.study, rows, board.root / "runs", out, bandwidth=bandwidth)


def _page(board: Board, rows: list[dict[str, str]], drawn: list[Picture], command: str) -> str:
    study = board.study
    reports, trials = (len({row["run"] for row in rows if row["kind"] == kind}) for kind in ("report", "trial"))
    seeds = f"the seed{'s' * (len(study.seeds) > 1)} {', '.join(map(str, study.seeds))}"
    notes = [
        f"Study {study.name}: {reports} runs with {seeds}{f' and {trials} trials of the search' * (trials > 0)}. "
        f"Losses are nats per token on held-out text, "
        f"{'the lowest' if study.metric.endswith('best') else 'the last'} of each run; spread: largest minus smallest "
        f"over the seeds{'; *: the optimum lies at the edge of what was tried' * (trials > 0)}."
    ]
    if any(cell.paper is not None for cell in study.cells):
        notes.append("In brackets or in the column paper (open circles in pictures): what the paper reports.")
    tables = tables_of(study, rows)
    if len(tables) == 2:
        tables = [tables[0], Table(tables[1].head, tables[1].body, tables[1].bold, "All cells")]
    return build_page(study.title, notes, tables, drawn, [command, command.replace("study run", "study report")])
