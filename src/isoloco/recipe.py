"""From a recipe and ``--key value`` pairs to a RunConfig: default < preset < YAML < command line."""

from __future__ import annotations

import argparse
import re
from importlib import resources
from pathlib import Path
from typing import Any

from .checks import type_name
from .config import ONE_OF, RunConfig, from_flat, options, unknown
from .presets import METHODS


def packaged(kind: str) -> dict[str, str]:
    """Texts of the recipes or studies that ship with the package, by name."""
    folder = resources.files("isoloco") / kind
    files = sorted((p for p in folder.iterdir() if p.name.endswith(".yaml")), key=lambda p: p.name)
    return {p.name.removesuffix(".yaml"): p.read_text("utf-8") for p in files}


def load_yaml(name: str, kind: str) -> tuple[str, dict[str, Any]]:
    """Label and content of a packaged recipe or study, or of a YAML file. No tag of Python is ever followed.

    Raises:
        ValueError: no such name or file, not YAML, or not a mapping.
    """
    import yaml

    known = packaged(kind)
    singular = {"recipes": "recipe", "studies": "study"}[kind]
    if name in known:
        label, text = f"{singular} {name}", known[name]
    elif name.endswith((".yaml", ".yml")):
        if not Path(name).is_file():
            raise ValueError(f"no such file: {name}")
        label, text = name, Path(name).read_text("utf-8")
    else:
        raise ValueError(unknown(singular, name, known) + " (or the path of a .yaml file)")
    try:
        tree = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"{label}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise ValueError(f"{label}: takes a mapping of options, got {type(tree).__name__}")
    return label, tree


def run_config(argv: list[str], *, prog: str, description: str) -> tuple[RunConfig, dict[str, str]]:
    """The config that a command line asks for, and where each value that was given came from.

    Raises:
        ValueError: one line that says what is wrong, with the nearest names for one that is unknown.
    """
    recipe, given = _parse(argv, prog=prog, description=description)
    return build_config(recipe, given)


def build_config(recipe: str | None, given: dict[str, Any]) -> tuple[RunConfig, dict[str, str]]:
    """Lay dotted keys over a recipe (a packaged name or the path of a YAML file)."""
    label, values, per_method = _read_recipe(recipe) if recipe else ("", {}, {})
    method = given.get("method", values.get("method", "isoloco"))
    if method not in METHODS:
        raise ValueError(unknown("method", str(method), METHODS))
    if method != values.get("method", method):
        _refuse_other_methods_values(label, values, method)
    values |= per_method.get(method, {})
    sources = dict.fromkeys(values, label)
    superseded = [key for group in ONE_OF if any(key in given for key in group) for key in group]
    if given.get("data.path") or given.get("data.per_worker"):
        superseded.append("data.tokenizer")  # prepared shards have their own
    for rule in ("reduce", "transform"):
        if f"{rule}.name" in given:
            superseded.append(f"{rule}.options")  # another rule's options
        elif f"{rule}.options" in given:
            given[f"{rule}.options"] = {**(values.get(f"{rule}.options") or {}), **given[f"{rule}.options"]}
    for key in superseded:
        values.pop(key, None)
        sources.pop(key, None)
    return from_flat(values | given), sources | dict.fromkeys(given, "command line")


def _refuse_other_methods_values(label: str, values: dict[str, Any], method: str) -> None:
    """A YAML's values for one method are no values for another that the command line names."""
    chosen_by_methods = {key for preset in METHODS.values() for key in preset}
    if clash := sorted(key for key in values if key in chosen_by_methods):
        raise ValueError(
            f"--method {method} meets {', '.join(clash)} of {label}, written for {values['method']}; move them under "
            f"per_method.{values['method']}, or give your own on the command line without the file's"
        )


def _read_recipe(name: str) -> tuple[str, dict[str, Any], dict[str, dict[str, Any]]]:
    """Label, dotted keys, and the blocks that apply to one method each."""
    label, tree = load_yaml(name, "recipes")
    per_method = tree.pop("per_method", None) or {}
    if not isinstance(per_method, dict) or not all(isinstance(block, dict) for block in per_method.values()):
        raise ValueError(f"{label}: per_method takes a mapping from method to a mapping of options")
    for method in per_method:
        if method not in METHODS:
            raise ValueError(f"{label}: " + unknown("method in per_method", str(method), METHODS))
    return label, _flatten(tree, label), {method: _flatten(block, label) for method, block in per_method.items()}


def _flatten(tree: dict[str, Any], label: str, prefix: str = "") -> dict[str, Any]:
    """Dotted keys of a nested mapping; counts such as 10e9, which YAML reads as text, become numbers."""
    known = options()
    found: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if name in known:
            found[name] = number(value) if isinstance(value, str) and known[name].type is not str else value
        elif isinstance(value, dict) and any(k.startswith(name + ".") for k in known):
            found |= _flatten(value, label, name + ".")
        else:
            raise ValueError(f"{label}: " + unknown("option", name, known))
    return found


def number(text: str) -> Any:
    """10e9 -> 10000000000; anything that is no finite number stays text."""
    try:
        value = float(text.replace("_", ""))
    except ValueError:
        return text
    if value != value or abs(value) == float("inf"):
        return text
    return int(value) if value == int(value) else value


def _parse(argv: list[str], *, prog: str, description: str) -> tuple[str | None, dict[str, Any]]:
    """The recipe (the positional, or --config) and the dotted keys that were given, converted by jsonargparse."""
    known = options()
    recipe: str | None = None
    pairs: list[str] = []
    queue = list(argv)
    while queue:
        token = queue.pop(0)
        if token in ("-h", "--help"):
            _parser(prog, description).print_help()
            raise SystemExit(0)
        if not token.startswith("-"):
            if recipe is not None:
                raise ValueError(f"unexpected {token!r}: takes one recipe (here {recipe}), then --key value pairs")
            recipe = token
            continue
        key, equals, value = token.removeprefix("--").partition("=")
        if key != "config" and key not in known and not key.startswith(("reduce.options.", "transform.options.")):
            raise ValueError(unknown("option", token.partition("=")[0], [f"--{k}" for k in known]))
        if not equals:
            if not queue or queue[0].startswith("--"):
                raise ValueError(f"--{key} needs a value")
            value = queue.pop(0)
        if key == "config":
            recipe = value
        else:
            pairs.append(f"--{key}={_spell(value, known[key].type) if key in known else value}")
    try:
        given = _parser(prog, description).parse_args(pairs, defaults=False)
    except (argparse.ArgumentError, TypeError, ValueError) as error:
        raise ValueError(_one_line(str(error), pairs)) from None
    return recipe, dict(vars(given.as_flat()))


def _spell(value: str, kind: Any) -> str:
    """Counts may be written 1e9; a list of names needs no brackets."""
    if "int" in str(kind):
        return str(number(value))
    if "list" in str(kind) and not value.startswith("["):
        return f"[{value}]"
    return value


def _one_line(message: str, pairs: list[str]) -> str:
    """jsonargparse's complaint about a value, as ours."""
    found = re.search(r'[Pp]arser key "([^"]+)"', message)
    if found and found[1] in (known := options()):
        value = next((pair.partition("=")[2] for pair in pairs if pair.startswith(f"--{found[1]}=")), "")
        return f"--{found[1]}: got {value!r}, takes {type_name(known[found[1]].type)}"
    return message


def _parser(prog: str, description: str) -> Any:
    import jsonargparse

    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = jsonargparse.ArgumentParser(
        prog=prog,
        usage=f"{prog} [RECIPE | FILE.yaml] [--KEY VALUE ...]",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        exit_on_error=False,
        default_env=False,
    )
    parser.add_class_arguments(RunConfig, as_group=False)
    return parser
