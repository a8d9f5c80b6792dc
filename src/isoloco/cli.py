"""The `isoloco` command: parse, then call one function. Heavy imports happen inside the commands."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from ._version import __version__

HELP = f"""isoloco {__version__}: train with workers that meet rarely, and merge their updates well.

usage: isoloco COMMAND ...

  train       train a language model by a recipe          isoloco train quickstart
  prepare     turn text into shards of tokens             isoloco prepare 'notes/*.txt' --out data/notes
  evaluate    held-out loss of a run or a model           isoloco evaluate runs/quickstart-1
  merge       merge models trained from one base          isoloco merge base expert1 expert2 -o merged
  study       the runs behind a table                     isoloco study run quickstart
  compare     runs side by side                           isoloco compare runs/quickstart-1 runs/quickstart-2
  plan        memory, bytes and steps, before training    isoloco plan quickstart --workers 16
  methods     methods, reduces and transforms             isoloco methods isoloco
  recipes     the recipes that ship with the package      isoloco recipes --copy quickstart

isoloco COMMAND --help says more.
"""


def main(argv: list[str] | None = None) -> int:
    """Entry point: 0 done, 1 out of memory, 2 bad input (one line each), 130 interrupted, 141 nobody reads on."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        with _own_warnings():
            code = _run(argv)
        sys.stdout.flush()
        return code
    except ValueError as error:
        return _tell(str(error), code=2)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes once more at exit
        return 141
    except OSError as error:
        if error.filename is None:
            raise
        return _tell(f"{error.filename}: {error.strerror}", code=2)
    except MemoryError as error:
        return _tell(str(error) or "out of memory", code=1)
    except KeyboardInterrupt as interrupt:
        return _tell("interrupted" + "".join(f"; {note}" for note in interrupt.args), code=130)


def _run(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(HELP, end="")
        return 0
    if argv[0] in ("-V", "--version"):
        print(__version__)
        return 0
    if argv[0] not in COMMANDS:
        from .config import unknown

        raise ValueError(unknown("command", argv[0], COMMANDS))
    return COMMANDS[argv[0]](argv[1:])


def _tell(line: str, *, code: int) -> int:
    from .comm import processes, rank

    who = f"rank {rank()} of {processes()}: " if processes() > 1 else ""
    print(f"isoloco: {who}{' '.join(line.split())}", file=sys.stderr)
    return code


@contextlib.contextmanager
def _own_warnings() -> Iterator[None]:
    """Our own warnings are one line each; those of libraries are for who develops with them, and asks: python -W."""

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        _tell(f"warning: {message}", code=0)

    with warnings.catch_warnings():
        if not sys.warnoptions:
            warnings.simplefilter("ignore")
            warnings.filterwarnings("default", module=r"isoloco\b")
            warnings.showwarning = show
        yield


TRAIN_HELP = """Train a language model with W workers that meet every H inner steps.

examples:
  isoloco train quickstart
  isoloco train quickstart --method diloco --workers 16 --outer.lr 0.9
  isoloco train my.yaml --budget.tokens 2e9
  isoloco train --resume runs/quickstart-1
  isoloco train my.yaml --resume auto

this launch alone:
  --resume RUN_DIR         go on with a run by its own config; the budget and what affects no result may change
  --resume auto            go on with the newest run of this very config that has not ended, or start one
  --resume-from-previous   from the last checkpoint but one (with --resume RUN_DIR)
  --profile                write a torch profiler trace of the second round to profile.json.gz in the run directory
  --elastic                be one of `workers` that come and go (extra: torchft); docs/clusters.md says how, with
    --worker-id N          which one, from 0 to workers - 1, and the same one after a restart
    --lighthouse HOST:PORT of torchft_lighthouse, or TORCHFT_LIGHTHOUSE says it

ends with 0 done, 2 bad input, 75 saved after SIGTERM or SIGUSR1 (requeue it with --resume auto), 130 saved after Ctrl-C
"""
PLAN_HELP = """What a run will take, without training: steps, memory, bytes on the wire and on disk.

examples:
  isoloco plan quickstart --workers 16
  isoloco plan quickstart --bandwidth 100Mbit --latency 30ms --tokens-per-second 20e3

over a link, for data-parallel training and each codec (--bandwidth and --tokens-per-second go together):
  --bandwidth RATE         of each worker's link, each way: 20Mbit, 1Gbit
  --latency TIME           one way: 30ms (default 0ms)
  --tokens-per-second N    what all workers compute together, as a run without a slow link reports it
"""


def _options_help(command: str, description: str) -> str:
    from .recipe import packaged
    from .reference import option_help

    return (
        f"usage: isoloco {command} [RECIPE | FILE.yaml] [--KEY VALUE ...]\n\n{description}\n"
        f"A recipe is one of {', '.join(packaged('recipes'))} (isoloco recipes), or the path of a YAML file that holds "
        f"such options.\nDefaults are in brackets; counts may be written 1e9, lists a,b.\n\n{option_help()}"
    )


def _train(argv: list[str]) -> int:
    if _asks_for_help(argv):
        print(_options_help("train", TRAIN_HELP))
        return 0
    from .comm import layout, rank
    from .data.shards import open_data
    from .launch import EXIT_CODES, Interrupts, elastic_flags, launch_flags, profile_flag
    from .recipe import run_config
    from .rundir import check_place
    from .sinks import check_extras

    command = shlex.join(["isoloco", "train", *argv])
    argv, elastic = elastic_flags(argv)
    argv, profile = profile_flag(argv)
    if profile and elastic is not None:
        raise ValueError("--profile goes without --elastic: trace a run of one process")
    argv, resume, from_previous = launch_flags(argv)
    config, sources = run_config(argv, prog="isoloco train", run=None if resume == "auto" else resume)
    layout(config)
    check_extras(config)  # what can be told before the seconds that torch takes to import; train asks again
    if resume is None and elastic is None and rank() == 0:
        check_place(config)
    for path in config.data.per_worker or filter(None, [config.data.path]):
        open_data(path)
    if elastic is not None:
        from .elastic import train_elastic

        with Interrupts() as interrupts:
            result = train_elastic(
                config, **elastic, sources=sources, quiet=False, stop=interrupts.asked, command=command
            )  # fmt: skip
        return EXIT_CODES[result.stopped_by]
    from .train import train

    with Interrupts() as interrupts:
        result = train(
            config, sources=sources, resume=resume, resume_from_previous=from_previous, quiet=False,
            stop=interrupts.asked, command=command, profile=profile,
        )  # fmt: skip
    return EXIT_CODES[result.stopped_by]


def _asks_for_help(argv: list[str]) -> bool:
    return bool({"-h", "--help"}.intersection(argv))


def _plan(argv: list[str]) -> int:
    if _asks_for_help(argv):
        print(_options_help("plan", PLAN_HELP))
        return 0
    from .links import link_flags, link_rows
    from .recipe import run_config

    argv, link = link_flags(argv)
    config, _ = run_config(argv, prog="isoloco plan")
    from .outline import outline_run
    from .plan import header_rows

    config, plan, data = outline_run(config)
    rows = [("method", config.method), *header_rows(config, plan, data_path=data)]
    width = max(len(label) for label, _ in rows)
    for label, value in rows:
        print(f"{label:<{width}}  {value}")
    if link is not None and config.workers > 1:
        print(f"\na round of {config.sync_every} steps, each worker a process on a link of its own:")
        table = link_rows(config, plan, link)
        widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
        for row in table:
            print(
                "  ".join(
                    [row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))]
                )
            )
    return 0


class _Parser(argparse.ArgumentParser):
    """Its errors are ours: one line, exit code 2."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} ({self.prog} --help)")


def _parser(command: str, description: str, *examples: str) -> _Parser:
    text = "\n".join(
        [description, "", "examples:", *(f"  isoloco {command} {example}".rstrip() for example in examples)]
    )
    return _Parser(prog=f"isoloco {command}", description=text, formatter_class=argparse.RawDescriptionHelpFormatter)


def _count(text: str) -> float:
    from .recipe import number

    value = number(text)
    if isinstance(value, str):
        raise argparse.ArgumentTypeError(f"takes a number such as 10e9, got {text!r}")
    return value


def _whole(text: str) -> int:
    value = _count(text)
    if value != int(value) or value < 1:
        raise argparse.ArgumentTypeError(f"takes a whole number of at least 1, got {text!r}")
    return int(value)


def _prepare(argv: list[str]) -> int:
    dclm, llama = "mlfoundations/dclm-baseline-1.0-parquet", "togethercomputer/LLaMA-2-7B-32K"
    parser = _parser(
        "prepare",
        "Tokenize text into shards with a manifest. One that was interrupted goes on where it was.",
        "corpus:sotu --tokenizer train:bpe:4096 --out data/sotu",
        "'books/*.txt' --tokenizer train:bpe:8192 --out data/books",
        f"{dclm} --max-tokens 10e9 --out data/dclm",
    )
    add = parser.add_argument
    add("source", nargs="*", help=f"corpus:sotu, files or globs, or a Hugging Face dataset (default: {dclm})")
    add("--out", required=True, help="directory to write")
    add(
        "--tokenizer",
        default=llama,
        help="Hugging Face name or path, a tokenizer.json, or train:bpe:VOCAB (%(default)s)",
    )
    add("--text-field", default="text", help="field of the text in .jsonl, .parquet and hub datasets (%(default)s)")
    add("--valid-tokens", type=_count, default=0.05, help="validation tokens, or a fraction below 1 (%(default)s)")
    add("--test-tokens", type=_count, default=0.05, help="test tokens, or a fraction below 1 (%(default)s)")
    add("--max-tokens", type=_whole, default=None, help="stop after so many tokens, e.g. 10e9")
    add("--shard-tokens", type=_whole, default=2**27, help="tokens of a shard (%(default)s)")
    add("--seed", type=int, default=42, help="seed of the split (%(default)s)")
    args = parser.parse_args(argv)
    from .data.prepare import prepare

    try:
        path = prepare(
            out_dir=args.out,
            source=args.source[0] if len(args.source) == 1 else args.source or dclm,
            tokenizer=args.tokenizer,
            text_field=args.text_field,
            valid_tokens=args.valid_tokens,
            test_tokens=args.test_tokens,
            max_tokens=args.max_tokens,
            shard_tokens=args.shard_tokens,
            seed=args.seed,
        )
    except KeyboardInterrupt:
        raise KeyboardInterrupt("the same command goes on from there") from None
    print(f"prepared {path}; train on it: isoloco train quickstart --data.path {shlex.quote(str(path))}")
    return 0


def _evaluate(argv: list[str]) -> int:
    parser = _parser(
        "evaluate",
        "Held-out loss of a run's model, or of any Hugging Face causal language model directory.",
        "runs/quickstart-1",
        "runs/quickstart-1 --split test",
        "my_model --data data/sotu --seq-len 128",
    )
    add = parser.add_argument
    add("model", help="run directory, or a directory that holds a model")
    add("--data", default=None, help="directory of shards (default: the run's own)")
    add("--split", default=None, choices=["train", "valid", "test"], help="default: the run's eval.split, or valid")
    add("--seq-len", type=_whole, default=None, help="tokens of a row (default: the run's)")
    add("--tokens", type=_whole, default=None, help="tokens to evaluate (default: the run's eval.tokens, or all)")
    add("--device", default="auto", help="cpu, cuda, cuda:N or auto (%(default)s)")
    args = parser.parse_args(argv)
    from .evaluate import evaluate_directory

    found = evaluate_directory(
        args.model, data_path=args.data, split=args.split, seq_len=args.seq_len, tokens=args.tokens, device=args.device
    )
    bits = "" if found.bits_per_byte is None else f", {found.bits_per_byte:.4f} bits per byte"
    print(
        f"loss {found.loss:.6f} nats per token, perplexity {found.perplexity:.3f}{bits}, {found.tokens:,} predictions"
    )
    return 0


def _merge(argv: list[str]) -> int:
    from .merging.cli import DESCRIPTION, EXAMPLES, merge_command

    return merge_command(argv, _parser("merge", DESCRIPTION, *EXAMPLES))


def _study(argv: list[str]) -> int:
    from .study_cli import DESCRIPTION, EXAMPLES, study_command

    return study_command(argv, _parser("study", DESCRIPTION, *EXAMPLES))


def _compare(argv: list[str]) -> int:
    from .compare import DESCRIPTION, EXAMPLES, compare_command

    return compare_command(argv, _parser("compare", DESCRIPTION, *EXAMPLES))


def _methods(argv: list[str]) -> int:
    parser = _parser(
        "methods", "Methods, reduces and transforms: equation, scale, cost, bytes, source.", "", "iso_c", "isoloco"
    )
    parser.add_argument("name", nargs="?", help="one method, reduce or transform")
    args = parser.parse_args(argv)
    from .methods import describe_all, describe_one

    print(describe_one(args.name) if args.name else describe_all())
    return 0


def _recipes(argv: list[str]) -> int:
    parser = _parser("recipes", "The recipes that ship with the package.", "", "--copy quickstart")
    parser.add_argument("--copy", metavar="NAME", help="write NAME.yaml into this directory, to change it")
    args = parser.parse_args(argv)
    from .config import unknown
    from .recipe import packaged

    recipes = packaged("recipes")
    if args.copy is None:
        for name, text in recipes.items():
            print(f"{name:<20} {text.splitlines()[0].lstrip('# ')}")
        return 0
    if args.copy not in recipes:
        raise ValueError(unknown("recipe", args.copy, recipes))
    target = Path(f"{args.copy}.yaml")
    if target.exists():
        raise ValueError(f"{target} exists; move it away first")
    target.write_text(recipes[args.copy], "utf-8")
    print(f"wrote {target}; run it: isoloco train {target}")
    return 0


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": _train,
    "prepare": _prepare,
    "evaluate": _evaluate,
    "merge": _merge,
    "study": _study,
    "compare": _compare,
    "plan": _plan,
    "methods": _methods,
    "recipes": _recipes,
}
