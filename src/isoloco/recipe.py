"""From a recipe and ``--key value`` pairs to a RunConfig: default < preset < YAML < command line."""

from __future__ import annotations

import argparse
import json
import math
import re
import typing
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any

from .checks import alternatives, type_name
from .config import ONE_OF, Option, RunConfig, flat, from_flat, options, unknown
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
        try:
            label, text = name, Path(name).read_text("utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"{name}: not valid YAML: it is not UTF-8 text") from None
    else:
        raise ValueError(unknown(singular, name, known) + " (or the path of a .yaml file)")
    try:
        tree = yaml.load(text, _plain_loader()) or {}
    except RecursionError:
        raise ValueError(f"{label}: not valid YAML: nested too deep") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise ValueError(f"{label}{where}: not valid YAML: {getattr(error, 'problem', None) or error}") from None
    if not isinstance(tree, dict):
        raise ValueError(f"{label}: takes a mapping of options, got {type(tree).__name__}")
    return label, tree


def _plain_loader() -> Any:
    """YAML's safe loader, which follows no tag of Python; a key that comes twice and aliases are errors too."""
    import yaml

    class Loader(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):  # a few lines of them can stand for more than memory holds
                raise yaml.MarkedYAMLError(None, None, "takes no alias; write it out", self.peek_event().start_mark)
            return super().compose_node(parent, index)

        def construct_object(self, node: Any, deep: bool = False) -> Any:
            try:
                return super().construct_object(node, deep)
            except (AttributeError, LookupError, TypeError, ValueError):  # a date of no calendar, a tag of YAML's own
                told = f"{node.value!r} is not what its form or tag says"
                raise yaml.MarkedYAMLError(None, None, told, node.start_mark) from None

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            for number, (key, _) in enumerate(node.value):
                if any(key.value == other.value for other, _ in node.value[:number]):
                    raise yaml.MarkedYAMLError(None, None, f"{key.value!r} comes twice", key.start_mark)
            return super().construct_mapping(node, deep)

    return Loader


def run_config(argv: list[str], *, prog: str, run: str | None = None) -> tuple[RunConfig, dict[str, str]]:
    """The config that a command line asks for, and where each value that was given came from.

    ``run``: a run directory whose own config takes the place of a recipe.

    Raises:
        ValueError: one line that says what is wrong, with the nearest names for one that is unknown.
    """
    recipe, given = _parse(argv, prog=prog)
    if run is None:
        if recipe is None and not given:
            raise ValueError(f"takes a recipe or a YAML file, as in {prog} quickstart (isoloco recipes lists them)")
        return build_config(recipe, given)
    if recipe is not None:
        raise ValueError(f"--resume {run} goes by that run's own config: leave {recipe} out")
    from .resume import config_of

    return build_config(None, given, base=(f"run {run}", flat(config_of(run))))


def build_config(
    recipe: str | None, given: dict[str, Any], *, base: tuple[str, dict[str, Any]] | None = None
) -> tuple[RunConfig, dict[str, str]]:
    """Lay dotted keys over a recipe (a packaged name or the path of a YAML file), or over labelled values."""
    label, values = base or ("", {})
    per_method: dict[str, dict[str, Any]] = {}
    if recipe:
        label, values, per_method = _read_recipe(recipe)
    written_for = values.get("method")
    method = given.get("method", written_for or "isoloco")
    if not isinstance(method, str) or method not in METHODS:
        raise ValueError(unknown("method", str(method), METHODS))
    given = dict(given)
    superseded = [key for group in ONE_OF if any(key in given for key in group) for key in group]
    if given.get("data.path") or given.get("data.per_worker"):
        # prepared shards have their own
        superseded += ["data.tokenizer", "data.max_tokens", "data.text_field", "data.valid_tokens", "data.test_tokens"]
    for rule in ("reduce", "transform"):
        if f"{rule}.name" in given:
            superseded.append(f"{rule}.options")  # another rule's options
    values = {key: value for key, value in values.items() if key not in superseded}
    if written_for not in (None, method):
        _refuse_other_methods_values(label, values.keys() - given.keys(), method=method, written_for=written_for)
    values |= {key: value for key, value in per_method.get(method, {}).items() if key not in superseded}
    for key in ("reduce.options", "transform.options"):
        if isinstance(given.get(key), dict) and isinstance(values.get(key), dict):
            given[key] = {**values[key], **given[key]}
    return from_flat(values | given), dict.fromkeys(values, label) | dict.fromkeys(given, "command line")


def _refuse_other_methods_values(label: str, keys: Iterable[str], *, method: str, written_for: str) -> None:
    """A YAML's values for one method are no values for another that the command line names."""
    chosen_by_methods = {key for preset in METHODS.values() for key in preset}
    if clash := sorted(chosen_by_methods.intersection(keys)):
        raise ValueError(
            f"--method {method} meets {', '.join(clash)} of {label}, written for {written_for}: move them under "
            f"per_method.{written_for} there, or give them on the command line too"
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
    return label, flatten(tree, label), {method: flatten(block, label) for method, block in per_method.items()}


def flatten(tree: dict[str, Any], label: str, prefix: str = "") -> dict[str, Any]:
    """Dotted keys of a nested mapping; counts such as 10e9, which YAML reads as text, become numbers."""
    known = options()
    found: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if name in found:
            raise ValueError(f"{label}: {name} comes twice, once under a heading and once as a dotted key")
        if name in known:
            text = {str, list[str]}.intersection(alternatives(known[name].type))
            found[name] = value if text else numbers(value)
        elif isinstance(value, dict | None) and any(k.startswith(name + ".") for k in known):
            below = flatten(value or {}, label, name + ".")
            if twice := sorted(below.keys() & found.keys()):
                raise ValueError(f"{label}: {twice[0]} comes twice, once under a heading and once as a dotted key")
            found |= below
        else:
            raise ValueError(f"{label}: " + unknown("option", name, known))
    return found


def numbers(value: Any) -> Any:
    """Counts such as 10e9 within a value of a YAML file, as numbers."""
    if isinstance(value, dict):
        return {name: numbers(part) for name, part in value.items()}
    if isinstance(value, list):
        return [numbers(part) for part in value]
    return number(value) if isinstance(value, str) else value


def number(text: str) -> Any:
    """10e9 -> 10000000000; anything that is no finite number stays text."""
    try:
        value = float(text.replace("_", ""))
    except ValueError:
        return text
    if not math.isfinite(value):
        return text
    return int(value) if value == int(value) else value


def _parse(argv: list[str], *, prog: str) -> tuple[str | None, dict[str, Any]]:
    """The recipe (the positional, or --config) and the dotted keys that were given, converted by jsonargparse."""
    known = options()
    recipes: list[str] = []
    pairs: dict[str, str] = {}
    queue = list(argv)
    while queue:
        token = queue.pop(0)
        if not token.startswith("-"):
            recipes.append(token)
            continue
        key, equals, value = token.removeprefix("--").partition("=")
        if key != "config" and key not in known and not key.startswith(("reduce.options.", "transform.options.")):
            named = token.partition("=")[0]
            raise ValueError(f"{unknown('option', named, [f'--{k}' for k in known])} ({prog} --help)")
        if not equals:
            if not queue or queue[0].startswith("--"):
                raise ValueError(f"--{key} needs a value ({prog} --help)")
            value = queue.pop(0)
        if key == "config":
            recipes.append(value)
        else:
            pairs[key] = value
    if len(recipes) > 1:
        raise ValueError(f"takes one recipe or file, got {' and '.join(recipes)}; options are --key value pairs")
    return (recipes[0] if recipes else None), _converted(pairs, known)


def _converted(pairs: dict[str, str], known: dict[str, Option]) -> dict[str, Any]:
    """Values of the types that RunConfig declares."""
    import jsonargparse

    parser = jsonargparse.ArgumentParser(exit_on_error=False, default_env=False)
    parser.add_class_arguments(RunConfig, as_group=False)
    words = [f"--{key}={_spell(value, known[key].type) if key in known else value}" for key, value in pairs.items()]
    try:
        given = parser.parse_args(words, defaults=False)
    except (argparse.ArgumentError, TypeError, ValueError) as error:
        found = re.search(r'[Pp]arser key "([^"]+)"', str(error))
        if found and found[1] in known:
            value = pairs.get(found[1], "")
            raise ValueError(f"--{found[1]}: got {value!r}, takes {type_name(known[found[1]].type)}") from None
        raise ValueError(str(error)) from None
    return dict(vars(given.as_flat()))


def _spell(value: str, kind: Any) -> str:
    """Counts may be written 1e9; lists need neither brackets nor quotes."""
    kinds = alternatives(kind)
    if int in kinds:
        return str(number(value))
    if not value.startswith("["):
        parts = [part.strip() for part in value.split(",") if part.strip()]
        if list[str] in kinds:
            return json.dumps(parts)
        if any(typing.get_origin(each) is tuple for each in kinds):
            return json.dumps([number(part) for part in parts])
    return value
