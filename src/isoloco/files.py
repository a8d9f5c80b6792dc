"""What somebody else may have written is only ever data: files that lie in their directory, and no code."""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

FACTS = "isoloco.json"  # in the directories of models that a run leaves
# keys of Hugging Face configs under which a machine's own kernels are chosen, some of them code from the Hub
_IMPLEMENTATION = re.compile(r"_?(attn|experts)_implementation(_internal)?")


def check_inside(path: Path, directory: Path) -> None:
    """ValueError for a path that leads out of its directory, through ``..`` or a link.

    The Hugging Face Hub's cache, where a snapshot's files are links to blobs beside it, is one place.
    """
    home, real = directory.resolve(), path.resolve()
    blobs = [home.parent.parent / "blobs"] if home.parent.name == "snapshots" else []
    if not any(real.is_relative_to(place) for place in (home, *blobs)):
        raise ValueError(f"{path} leads out of {directory}, to {real}: put the file itself there")


def check_name(name: Any, where: Path) -> None:
    """ValueError for what is no plain file name, in a list of files that ``where`` holds."""
    if not isinstance(name, str) or not name or name in (".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise ValueError(f"{where} names the file {name!r}: takes plain names of files beside it")


def read_object(path: Path, where: str, takes: str) -> dict[str, Any]:
    """The JSON object in a file. ValueError where there is none: what to call the file, and what it takes."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # JSON or UTF-8; nested beyond reason
        raise ValueError(f"{where}: not JSON ({error}); {takes}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{where}: holds no JSON object; {takes}")
    return found


def seal(content: dict[str, Any]) -> dict[str, Any]:
    """Plain data with a checksum of itself, for a file that tells what other files have to be."""
    return {**content, "blake2b": _checksum(content)}


def unseal(sealed: dict[str, Any], path: Path, *, always: bool = True) -> dict[str, Any]:
    """What `seal` got. ValueError where that has changed, and (``always``) where there is no seal."""
    content = {key: value for key, value in sealed.items() if key != "blake2b"}
    if sealed.get("blake2b", None if always else _checksum(content)) != _checksum(content):
        raise ValueError(f"{path} is damaged: it is not what was written")
    return content


def _checksum(content: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()


def digest(path: Path) -> str:
    """blake2b of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def write_facts(directory: Path, facts: dict[str, Any], pattern: str) -> None:
    """Facts about a directory, with the checksums of its files that match, in a file of it."""
    files = {path.name: digest(path) for path in sorted(directory.glob(pattern))}
    (directory / FACTS).write_text(json.dumps(seal({**facts, "files": files}), indent=1) + "\n", encoding="utf-8")


def read_facts(directory: Path, *, check: bool = False) -> dict[str, Any] | None:
    """What `write_facts` wrote, None where it did not; ``check`` compares the files.

    Raises:
        ValueError: it, or a file, is not what was written.
    """
    path = directory / FACTS
    if not path.is_file():
        return None
    facts = unseal(read_object(path, str(path), "takes what isoloco wrote"), path)
    files = facts.get("files")
    if not isinstance(files, dict):
        raise ValueError(f"{path}: names no files; takes what isoloco wrote")
    for name, wanted in files.items() if check else ():
        check_name(name, path)
        if not (directory / name).is_file() or digest(directory / name) != wanted:
            raise ValueError(
                f"{directory / name} is damaged: it is not what was written; if it is yours, remove {path}"
            )
    return facts


def without_code(values: Any, where: str) -> Any:
    """Values of a Hugging Face config, without what another machine chose. ValueError where they ask for code."""
    if isinstance(values, list):
        return [without_code(value, where) for value in values]
    if not isinstance(values, dict):
        return values
    if "auto_map" in values:
        raise ValueError(f"{where}: asks for remote code (auto_map), which is never run; use one that transformers has")
    return {key: without_code(value, where) for key, value in values.items() if not _IMPLEMENTATION.fullmatch(key)}


def check_tokenizer(directory: Path) -> None:
    """ValueError for a tokenizer that asks for code, is damaged, or has files that lead out of its directory."""
    for path in sorted(directory.iterdir()):
        check_inside(path, directory)
    for name in ("tokenizer_config.json", "config.json"):
        if (path := directory / name).exists():
            values = without_code(read_object(path, str(path), "give a Hugging Face tokenizer"), str(path))
            if not isinstance(values.get("tokenizer_class"), str | None):
                raise ValueError(f"{path}: tokenizer_class is {values['tokenizer_class']!r}, takes a name")


def check_weights(directory: Path, where: str) -> None:
    """ValueError where a model's directory has no safetensors, or an index that names anything but files in it."""
    names: list[Any] = ["model.safetensors"]
    if not (directory / names[0]).is_file():
        index = directory / "model.safetensors.index.json"
        if not index.is_file():
            raise ValueError(f"{where}: no model.safetensors there; weights are read from safetensors files only")
        found = read_object(index, str(index), "takes the list of a model's safetensors files")
        if not isinstance(found.get("weight_map"), dict) or not isinstance(found.get("metadata"), dict):
            raise ValueError(f"{index}: has no weight_map and metadata; takes the list of a model's safetensors files")
        names = list(found["weight_map"].values())
        for name in names:
            check_name(name, index)
    for name in dict.fromkeys(names):
        if not name.endswith(".safetensors") or not (directory / name).is_file():
            raise ValueError(f"{where}: no safetensors file {name} there; weights are read from safetensors files only")
        check_inside(directory / name, directory)
    if (directory / "adapter_config.json").exists():
        raise ValueError(f"{where}: holds an adapter (adapter_config.json); merge it into the model first")


def to_disk(path: Path) -> None:
    """Make a file durable, or the names in a directory, where the system can."""
    if path.is_dir() and os.name != "posix":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
