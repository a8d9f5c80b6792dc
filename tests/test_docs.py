"""What the README and docs say holds: links resolve, commands parse, snippets run, messages and figures are real."""

from __future__ import annotations

import ast
import contextlib
import csv
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from isoloco import cli, recipe
from isoloco.config import options, unknown
from isoloco.launch import elastic_flags, launch_flags, profile_flag
from isoloco.links import link_flags

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md")]
)
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.S | re.M)


def text_of(page: str) -> str:
    return (ROOT / page).read_text("utf-8")


def blocks(page: str) -> Iterator[tuple[str, str, str]]:
    """Code blocks: language ("" for an indented one), text, and the line before."""
    text = text_of(page)
    for found in FENCE.finditer(text):
        yield found[2], found[3], text[: found.start()].rstrip("\n").rpartition("\n")[2]
    for found in re.finditer(r"(?<=\n\n)((?: {4}[^\n]*\n+)+)", FENCE.sub("", text)):
        yield "", re.sub(r"^ {4}", "", found[1], flags=re.M), ""


# -- links


def slug(heading: str) -> str:
    """The anchor that GitHub and the site give a heading."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip().lower()
    return re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    return {slug(found) for found in re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text("utf-8")), re.M)}


def broken_links(page: str) -> list[str]:
    text = re.sub(r"`[^`\n]*`", "", FENCE.sub("", text_of(page)))
    wrong = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            wrong.append(target)
    return wrong


@pytest.mark.parametrize("page", PAGES)
def test_links_and_anchors_resolve(page):
    assert broken_links(page) == []


@pytest.mark.parametrize("page", PAGES)
def test_files_that_are_named_exist(page):
    named = re.findall(r"`((?:src|tests|docs|examples|benchmarks)/[\w./-]*\w)`", text_of(page))
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_no_page_is_unfinished(page):
    assert re.findall(r"^(?:[A-Z ]{4,}|.*\b(?:TODO|TBD|FIXME)\b.*)$", FENCE.sub("", text_of(page)), re.M) == []


def test_every_page_is_on_the_site():
    def listed(entry: Any) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        else:
            for below in entry.values() if isinstance(entry, dict) else entry:
                yield from listed(below)

    nav = yaml.safe_load(text_of("mkdocs.yml"))["nav"]
    assert sorted(f"docs/{page}" for page in listed(nav)) == [page for page in PAGES if page.startswith("docs/")]


# -- commands


class Parsed(Exception):
    """Raised once the real parser has taken a command line."""


def dry(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Parse a command line of isoloco as the command does, and stop there. ValueError if it cannot be parsed."""
    command, argv = words[0], [{"LAMBDA": "1", "LR": "1", "N": "1"}.get(word, word) for word in words[1:]]
    if command not in cli.COMMANDS:
        raise ValueError(unknown("command", command, cli.COMMANDS))
    if command in ("train", "plan"):
        argv = shlex.split(shlex.join(argv).replace("--method NAME", "--method isoloco"))
        argv = ["quickstart" if w in ("NAME", "RECIPE") or re.fullmatch(r"[\w/]+\.yaml", w) else w for w in argv]
        if command == "plan":
            argv, _ = link_flags(argv)
        else:
            with monkeypatch.context() as patched:
                patched.setenv("TORCHFT_LIGHTHOUSE", "host:29510")
                argv, _ = elastic_flags(argv)
            argv, resume, _ = launch_flags(profile_flag(argv)[0])
            if resume not in (None, "auto"):
                assert not argv or argv[0].startswith("--")
                argv = ["quickstart", *argv]
        recipe.run_config(argv, prog=f"isoloco {command}")
        return
    real = cli._Parser.parse_args

    def parse_args(self: cli._Parser, *args: Any) -> None:
        raise Parsed(real(self, *args))

    with monkeypatch.context() as patched:
        patched.setattr(cli._Parser, "parse_args", parse_args)
        with pytest.raises(Parsed):
            cli.COMMANDS[command](argv)


def command_lines(text: str) -> Iterator[str]:
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        line = line.strip()
        if re.match(r"(\w+=\S+ )*(\.venv/bin/)?(isoloco|torchrun|python|pytest|make) ", line):
            yield line


def commands(page: str) -> list[tuple[str, bool]]:
    """Every command of a page, and whether it is whole: lines of code blocks are, code within the text may not be."""
    found = [(line, True) for _, block, _ in blocks(page) for line in command_lines(block)]
    prose = FENCE.sub("", text_of(page)).replace("\\|", "|")
    found += [
        (" ".join(code.split()), False)
        for code in re.findall(r"`((?:\w+=\S+ )?(?:isoloco|torchrun|python|pytest|make)\s[^`]+)`", prose)
    ]
    return [(line, whole) for line, whole in found if "COMMAND" not in line]


def check_command(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [word for word in shlex.split(line.partition(" | ")[0], comments=True) if word != "..."]
    while re.fullmatch(r"\w+=.*", words[0]):
        words.pop(0)
    program, rest = words[0].removeprefix(".venv/bin/"), words[1:]
    if "-m" in rest and "isoloco" in rest and program in ("torchrun", "python"):
        program, rest = "isoloco", rest[rest.index("isoloco") + 1 :]
    if program == "isoloco":
        if len(rest) > 1 and rest[1] not in ("--help", "|"):
            dry(rest, monkeypatch)
        else:
            assert rest[0] in (*cli.COMMANDS, "--help", "--version", "train|")
    elif program == "make":
        targets = [word for word in rest if re.fullmatch(r"[a-z]+(-[a-z]+)*", word)]
        known = re.findall(r"^([a-z-]+):.*##", text_of("Makefile"), re.M)
        assert [word for word in targets if word not in known] == []
    elif rest[0] == "-m":
        module = rest[1].replace(".", "/")
        if not rest[1].startswith(("timeit", "venv", "build", "torch")):
            files = (f"{base}/{module}{end}" for base in (".", "src") for end in (".py", "/__main__.py"))
            assert any((ROOT / file).exists() for file in files), module
    else:
        files = [word for word in rest if word.endswith(".py")]
        assert [name for name in files if not name.startswith(("train", "/")) and not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)])
def test_commands_parse(page, monkeypatch):
    wrong = {}
    for line, whole in commands(page):
        try:
            check_command(line, monkeypatch)
        except (ValueError, AssertionError) as error:
            if whole or "arguments are required" not in str(error):
                wrong[line] = str(error)
    assert wrong == {}


def test_a_command_that_is_none_is_noticed(monkeypatch):
    for line in (
        "isoloco train quickstart --worker 8",
        "isoloco fly now",
        "isoloco merge --scale high base a -o b",
        "isoloco plan quickstart --bandwidth fast",
        "python -m benchmarks.nothing",
        "make nothing",
    ):
        with pytest.raises((ValueError, AssertionError)):
            check_command(line, monkeypatch)


def test_errors_are_quoted_as_they_are(capsys):
    pairs = re.findall(r"^ *\$ isoloco (.*)\n *(isoloco: .*)$", "".join(map(text_of, PAGES)), re.M)
    assert pairs
    for command, said in pairs:
        assert cli.main(shlex.split(command)) == 2
        assert capsys.readouterr().err == f"{said}\n"


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_help_shows_examples_that_parse(command, capsys, monkeypatch):
    with contextlib.suppress(SystemExit):  # argparse's own way to end
        assert cli.main([command, "--help"]) == 0
    examples = [
        line.strip() for line in capsys.readouterr().out.splitlines() if line.startswith(f"  isoloco {command}")
    ]
    assert examples
    for line in examples:
        check_command(line, monkeypatch)


@pytest.mark.parametrize("page", PAGES)
def test_options_that_are_named_exist(page):
    known = options()
    groups = {key.partition(".")[0] for key in known if "." in key}
    for name in re.findall(r"`(?:--)?([a-z]+\.[a-z_.]+[a-z])(?: [^`]*)?`", text_of(page)):
        group = name.partition(".")[0]
        file = name.endswith((".py", ".md", ".json", ".yaml", ".safetensors"))
        if group in groups and name not in groups and ".options." not in name and not file:
            assert any(key == name or key.startswith(f"{name}.") for key in known), name


# -- snippets

GIVEN = {  # what the reader of a page has already
    "docs/merging.md": "import torch, isoloco\nbase, a, b = (torch.nn.Linear(6, 4) for _ in range(3))",
    "docs/data.md": "",
}


def snippets(page: str) -> Iterator[tuple[str, str]]:
    for language, block, before in blocks(page):
        if language == "python" or (language == "" and re.match(r"(from \S+ )?import ", block)):
            yield block, before


@pytest.mark.parametrize("page", [page for page in PAGES if any(snippets(page))])
def test_snippets_run(page, tmp_path, monkeypatch, shards):
    """In order; one that a file's name stands before is that file, one after `<!-- not run -->` is only compiled."""
    from isoloco import rules

    monkeypatch.setattr(rules, "REDUCES", dict(rules.REDUCES))
    monkeypatch.setattr(rules, "TRANSFORMS", dict(rules.TRANSFORMS))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("data").mkdir()
    Path("data/books").symlink_to(shards)
    for block, before in snippets(page):
        code = compile(block, page, "exec")
        if named := re.search(r"`(\w+\.py)`", before):
            Path(named[1]).write_text(block, "utf-8")
        if before != "<!-- not run -->":
            space: dict[str, Any] = {"__name__": "snippet"}
            exec(GIVEN.get(page, ""), space)
            exec(code, space)


@pytest.mark.parametrize("page", [page for page in PAGES if any(language == "yaml" for language, *_ in blocks(page))])
def test_yaml_is_what_it_says(page, tmp_path, monkeypatch):
    from isoloco.merging.request import read_request
    from isoloco.study import load

    monkeypatch.chdir(tmp_path)
    for language, block, _ in blocks(page):
        if language == "yaml":
            tree = yaml.safe_load(block)
            Path("file.yaml").write_text(block, "utf-8")
            if "cells" in tree:
                assert load("file.yaml").cells
            elif "base" in tree or "merge_method" in tree:
                assert read_request("file.yaml").experts
            else:
                recipe.build_config("file.yaml", {})


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git apply")
@pytest.mark.slow
def test_the_diff_that_adds_a_rule_does(tmp_path):
    [diff] = [block for language, block, _ in blocks("docs/extending.md") if language == "diff"]
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    (tmp_path / "rule.diff").write_text(diff, "utf-8")
    subprocess.run(["git", "apply", "rule.diff"], cwd=tmp_path, check=True)
    code = (
        "from isoloco.testing import check_rule\nfrom isoloco.rules import bind\nimport torch\n"
        "for power in (0.0, 0.3, 1.0): check_rule('soften', power=power)\n"
        "x = torch.randn(5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)\n"
        "for power, name in ((0.0, 'iso_c'), (1.0, 'none')):\n"
        "    torch.testing.assert_close(bind('soften', {'power': power})(x), bind(name)(x))\n"
        "print('holds')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "src")},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "holds\n", done.stderr
    added = [line for line in diff.splitlines() if re.match(r"\+(?!\+\+)", line)]
    assert sum(line.startswith("+def ") for line in added) == 1
    assert sum('"soften"' in line for line in added) == 1


# -- messages and figures


def source_text() -> str:
    """Every string of the source, one after the other; what is filled in left out."""
    parts: list[str] = []
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts.append("".join(v.value if isinstance(v, ast.Constant) else "\0" for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                parts.append(node.value)
    return "\n".join(parts)


def test_messages_of_the_troubleshooting_page_are_real():
    source = source_text()
    rows = re.findall(r"^\| `(.*?)` \|", text_of("docs/troubleshooting.md"), re.M)
    assert len(rows) > 30
    for message in rows:
        pieces = [piece.strip(" `:;,'") for piece in re.split(r"\.\.\.|\d+|'[^']*'|\w+\.yaml|HOST:PORT", message)]
        assert any(len(piece) >= 9 for piece in pieces), message
        assert [piece for piece in pieces if len(piece) >= 9 and not said(piece, source)] == [], message


def said(piece: str, source: str) -> bool:
    """Whether the source says these words; one of them may have been filled in."""
    return piece in source or any(piece.replace(f" {word}", " \0", 1) in source for word in piece.split(" "))


def test_every_flag_of_the_authors_has_its_row():
    rows = re.findall(
        r"^\| `--(\w+)` \| (.*?) \|", text_of("docs/from-the-authors-code.md").partition("## Flags")[2], re.M
    )
    assert len({name for name, _ in rows}) == len(rows) == 46


def rows_of(path: str) -> list[dict[str, str]]:
    with (ROOT / path).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_figures_of_the_readme_are_those_of_the_rows():
    readme = text_of("README.md")
    losses: dict[str, list[float]] = {}
    for row in rows_of("docs/results/mini_table1.csv"):
        if row["kind"] == "report":
            losses.setdefault(row["cell"], []).append(float(row["valid_loss_last"]))
    dp, diloco, isoloco = (sum(losses[name]) / len(losses[name]) for name in ("dp", "diloco", "isoloco"))
    assert f"DP {dp:.3f}, DiLoCo {diloco:.3f}, IsoLoCo {isoloco:.3f}" in readme
    sent = {
        (r["kind"], r["processes"]): float(r["kernel_sent_MB"]) for r in rows_of("benchmarks/results/wire_bytes.csv")
    }
    assert f"{sent['additive', '8']:.0f} MB; gathering" in readme
    assert f"the authors' code does: {sent['all_gather', '8']:.0f} MB" in readme
    points = [
        (int(r["workers"]), float(r["bytes/parameter"]))
        for r in rows_of("benchmarks/results/memory.csv")
        if r["state"] == "device"
    ]
    middle = [sum(axis) / len(axis) for axis in zip(*points, strict=True)]
    slope = sum((w - middle[0]) * (b - middle[1]) for w, b in points) / sum((w - middle[0]) ** 2 for w, _ in points)
    assert f"{slope:.1f} bytes per parameter, none" in readme
    assert "12 kills in one elastic run" in readme
    assert len(rows_of("benchmarks/results/elastic_kills.csv")) == 12
    steps = {row["step"]: row for row in rows_of("benchmarks/results/outer_step.csv")}
    exact, fast, naive = (float(steps[name]["cpu_s"]) for name in ("exact", "fast", "naive"))
    assert f"{exact:.1f} CPU seconds exact, {fast:.1f} fast" in readme
    assert f"an SVD {naive:.1f}, and {1 / float(steps['exact']['extra_memory_share']):.1f} times" in readme
