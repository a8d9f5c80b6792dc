"""`isoloco merge`: parse, then call `make_plan` and `merge_files`. Torch is imported once the words are understood."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .request import Request, read_request

DESCRIPTION = """Merge models that were trained from one base, by the rules that merge workers in training.

A model is a directory with safetensors, a run's directory, or org/model[@revision] on the Hugging Face Hub. In place of
models one YAML file says it all: with the keys of these options, or one of mergekit's (linear, task_arithmetic, ties,
dare_linear). Options of a rule: --reduce.options.KEY VALUE and --transform.options.KEY VALUE (isoloco methods NAME)."""
EXAMPLES = (
    "base expert1 expert2 -o merged",
    "base expert1 expert2 --reduce.name ties --reduce.options.density 0.5 --scale 0.8 -o merged",
    "base expert1 expert2 --transform.name iso_c --where embedding transform.name=none -o merged",
    "recipe.yaml --dry-run -o merged",
)


def merge_command(argv: list[str], parser: argparse.ArgumentParser) -> int:
    """Run the command; ``parser`` has its name and description."""
    argv, options = _rule_options(argv)
    add = parser.add_argument
    add("models", nargs="+", metavar="MODEL", help="BASE EXPERT..., or a YAML file")
    add("-o", "--out", metavar="DIR", help="directory to write; it must not exist")
    add("--reduce.name", dest="reduce", metavar="RULE", help="how deltas become one: mean, ties, dare, tsv, iso_cts")
    add(
        "--transform.name",
        dest="transform",
        metavar="RULE",
        help="what is done to it: none, iso_c, clip_high, clip_low",
    )
    add("--weights", metavar="A,B,...", help="one number for each expert (1)")
    add("--scale", type=float, help="step from the base, mergers' lambda (1)")
    add("--scale-like", choices=["mean", "sum"], help="as large as the experts' mean or sum (the rule's own scale)")
    add(
        "--where", action="append", nargs="+", default=[], metavar=("PATTERN", "KEY=VALUE"),
        help="other settings for a role (embedding, head, matrix, vector) or a glob of names; may be repeated",
    )  # fmt: skip
    add("--dtype", choices=["float64", "float32", "float16", "bfloat16"], help="of the output (the base's)")
    add("--seed", type=int, help="of the masks that dare draws (42)")
    add("--shard-size", type=_bytes, metavar="BYTES", help="largest file (5e9)")
    add("--device", default="cpu", help="cpu, cuda or cuda:N (%(default)s)")
    add("--dry-run", action="store_true", help="say what would be done, and how much memory it takes")
    add("--sha256", action="store_true", help="put sha256 of all files on the model card")
    add("--quiet", action="store_true", help="no progress")
    args = parser.parse_args(argv)
    request = _request(args, options)
    if args.out is None and not args.dry_run:
        raise ValueError("takes -o DIR, the directory to write")
    if args.out is not None and Path(args.out).exists():
        raise ValueError(f"{args.out} exists: give another directory with -o, or move it away")
    return _run(args, request)


def _run(args: argparse.Namespace, request: Request) -> int:
    from ..console import Screen, size
    from .files import merge_files
    from .plan import check_output, make_plan

    screen = Screen(quiet=args.quiet and not args.dry_run)
    plan = make_plan(request)
    screen.table("merge", plan.rows())
    if args.dry_run:
        if args.out is not None:
            check_output(plan, Path(args.out))
        return 0

    def progress(done: int, total: int, name: str) -> None:
        screen.progress(f"{size(done)} of {size(total)}  {name}", fraction=done / total)

    try:
        out = merge_files(plan, args.out, device=args.device, with_sha256=args.sha256, progress=progress)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("the same command goes on behind the last whole file") from None
    finally:
        screen.pause()
    screen.line(f"\nmerged into {out}")
    return 0


def _request(args: argparse.Namespace, options: dict[str, dict[str, Any]]) -> Request:
    """What the YAML file says, and over it the command line."""
    if len(args.models) == 1:
        if not args.models[0].endswith((".yaml", ".yml")):
            raise ValueError(f"takes a base and one expert or more, or a YAML file; got only {args.models[0]}")
        request = read_request(args.models[0])
    else:
        request = Request(base=args.models[0], experts=args.models[1:])
    settings = _settings(args, options)
    if request.prepare is not None and (settings or args.where):
        raise ValueError(f"{args.models[0]} is mergekit's: change settings there, or write them in isoloco's keys")
    for rule in ("reduce", "transform"):
        before = request.settings.get(rule)
        if rule in settings and "name" not in settings[rule] and before is not None:
            before = before if isinstance(before, dict) else {"name": before}
            settings[rule] = {**before, "options": {**(before.get("options") or {}), **settings[rule]["options"]}}
    request.settings |= settings
    request.where |= {pattern: _overrides(pairs) for pattern, *pairs in args.where}
    request.dtype = args.dtype or request.dtype
    request.seed = request.seed if args.seed is None else args.seed
    request.shard_bytes = args.shard_size or request.shard_bytes
    return request


def _settings(args: argparse.Namespace, options: dict[str, dict[str, Any]]) -> dict[str, Any]:
    given = {"weights": args.weights and _numbers(args.weights), "scale": args.scale, "scale_like": args.scale_like}
    found = {key: value for key, value in given.items() if value is not None}
    for rule in ("reduce", "transform"):
        name, own = getattr(args, rule), options[rule]
        if name is not None or own:
            found[rule] = ({} if name is None else {"name": name}) | ({"options": own} if own else {})
    return found


def _rule_options(argv: list[str]) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """Take --reduce.options.KEY VALUE and --transform.options.KEY VALUE out of the command line."""
    rest: list[str] = []
    found: dict[str, dict[str, Any]] = {"reduce": {}, "transform": {}}
    queue = list(argv)
    while queue:
        word = queue.pop(0)
        key, equals, value = word.partition("=")
        rule, _, option = key.removeprefix("--").partition(".options.")
        if not key.startswith("--") or rule not in found or not option:
            rest.append(word)
            continue
        if not equals:
            if not queue:
                raise ValueError(f"{key} needs a value (isoloco merge --help)")
            value = queue.pop(0)
        found[rule][option] = _value(value)
    return rest, found


def _overrides(pairs: list[str]) -> dict[str, Any]:
    """KEY=VALUE pairs as settings: reduce.name=mean, reduce.options.density=0.5, scale=0, weights=1,2."""
    found: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        rule, _, part = key.partition(".")
        if not equals or not key:
            raise ValueError(f"--where takes PATTERN KEY=VALUE..., got {pair!r}")
        if key == "weights":
            found[key] = _numbers(value)
        elif not part:
            found[key] = _value(value)
        elif part == "name":
            found.setdefault(rule, {})["name"] = value
        elif part.startswith("options."):
            found.setdefault(rule, {}).setdefault("options", {})[part.removeprefix("options.")] = _value(value)
        else:
            raise ValueError(f"--where: unknown key {key!r}, takes reduce.name, reduce.options.KEY and their like")
    if not pairs:
        raise ValueError("--where takes PATTERN KEY=VALUE...")
    return found


def _value(text: str) -> Any:
    """A value as YAML reads it, and numbers such as 1e-3."""
    import yaml

    from ..recipe import numbers

    return numbers(yaml.safe_load(text))


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"weights takes numbers such as 1,0.5, got {text!r}") from None


def _bytes(text: str) -> int:
    from ..recipe import number

    value = number(text)
    if isinstance(value, str) or value < 1:
        raise argparse.ArgumentTypeError(f"takes a number of bytes such as 5e9, got {text!r}")
    return int(value)
