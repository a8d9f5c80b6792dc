"""Merging checkpoints of any size: one tensor at a time from safetensors to safetensors, and going on after a stop."""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
import struct
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._version import __version__
from ..files import check_inside
from ..model import TOKENIZER_FILES
from .checkpoint import DTYPES, INDEX, SINGLE, Checkpoint, fingerprint, sha256
from .plan import Plan, check_output
from .tensors import Merger

STATE = "merge.json"  # in a merge that has not ended: what it is of
Progress = Callable[[int, int, str], None]


def merge_files(
    plan: Plan,
    out: str | Path,
    *,
    device: str = "cpu",
    with_sha256: bool = False,
    progress: Progress = lambda done, total, what: None,
) -> Path:
    """Write the merged model: safetensors, config, tokenizer and a model card that says what it was made of.

    It grows in a hidden directory beside ``out`` and is renamed when it is whole. A merge that was interrupted goes on
    behind the last whole file, if recipe, versions and inputs are still the same, else it starts afresh.

    Args:
        plan: from `make_plan`.
        out: a directory that does not exist.
        device: where tensors are computed.
        with_sha256: put sha256 of all files on the card too, beside their fingerprints; a second for each GB.
        progress: called with bytes done, bytes in all, and the tensor's name, whenever some were written.

    Raises:
        ValueError: the output exists, no room on the disk, values that are not finite.
    """
    out = Path(out)
    partial = out.with_name(f".{out.name}.partial")
    inputs = {
        model.name: {path.name: fingerprint(path) for path in model.files} for model in (plan.base, *plan.experts)
    }
    identity = _identity(plan, inputs, device)
    there = _files_there(partial, plan, identity)
    check_output(plan, out, there_bytes=sum(plan.nbytes(name) for file in there for name in plan.shards[file]))
    if not there:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        (partial / STATE).write_text(json.dumps({"identity": identity}), "utf-8")
    merger = Merger(plan.base, plan.experts, plan.recipe, seed=plan.request.seed, device=device)
    done = 0
    for file, names in plan.shards.items():
        if file not in there:
            _write(
                partial / file,
                plan,
                names,
                merger,
                lambda wrote, name, done=done: progress(done + wrote, plan.total_bytes, name),
            )
        done += sum(map(plan.nbytes, names))
    _write_rest(plan, partial)
    (partial / "README.md").write_text(_card(plan, inputs, partial, with_sha256=with_sha256), "utf-8")
    (partial / STATE).unlink()
    partial.rename(out)
    return out


def _identity(plan: Plan, inputs: dict[str, dict[str, str]], device: str) -> str:
    """Whatever the bytes of the output depend on."""
    rules = {name: repr((plan.recipe.rule(name), plan.dtypes[name])) for name in plan.dtypes}
    facts = [rules, plan.shards, list(inputs.values()), plan.request.seed, device, __version__, torch.__version__]
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()


def _files_there(partial: Path, plan: Plan, identity: str) -> set[str]:
    """Files that an interrupted merge of the same inputs has finished."""
    state = partial / STATE
    if not state.is_file() or json.loads(state.read_text("utf-8")).get("identity") != identity:
        return set()
    return {
        file
        for file, names in plan.shards.items()
        if (path := partial / file).is_file()
        and path.stat().st_size == len(_header(plan, names)) + sum(map(plan.nbytes, names))
    }


def _write(path: Path, plan: Plan, names: list[str], merger: Merger, wrote: Callable[[int, str], None]) -> None:
    """One safetensors file, piece by piece: sizes are known, so the header goes first."""
    growing = path.with_name(path.name + ".part")
    done = 0
    try:
        with growing.open("wb", buffering=0) as file:
            file.write(_header(plan, names))
            for name in _in_file_order(plan, names):
                kind = DTYPES[plan.dtypes[name]]
                for piece in merger.pieces(name):
                    _write_all(file, piece.to(kind))
                done += plan.nbytes(name)
                wrote(done, name)
        growing.rename(path)
    except OSError as error:
        raise ValueError(
            f"{growing}: {error.strerror}; make room, and the same command goes on behind the last whole file"
        ) from None


def _write_all(file: Any, piece: Tensor) -> None:
    data = piece.contiguous().view(torch.uint8).numpy().data
    while data:
        data = data[file.write(data) :]


def _in_file_order(plan: Plan, names: list[str]) -> list[str]:
    """Wide dtypes first, so that every tensor is aligned."""
    return sorted(names, key=lambda name: -DTYPES[plan.dtypes[name]].itemsize)


def _header(plan: Plan, names: list[str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name in _in_file_order(plan, names):
        end = start + plan.nbytes(name)
        shape = list(plan.base.specs[name].shape)
        header[name] = {"dtype": plan.dtypes[name], "shape": shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _write_rest(plan: Plan, directory: Path) -> None:
    """Everything but weights and card: index, config, tokenizer."""
    if SINGLE not in plan.shards:
        weight_map = {name: file for file, names in plan.shards.items() for name in names}
        index = {"metadata": {"total_size": plan.total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", "utf-8")
    config = dict(plan.base.config)
    if plan.request.dtype:
        keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["torch_dtype"]  # all versions read that
        config |= dict.fromkeys(keys, plan.request.dtype)
    if config:
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    for pattern in ("generation_config.json", *TOKENIZER_FILES):
        for path in plan.base.directory.glob(pattern):
            if path.is_file():
                check_inside(path, plan.base.directory)
                shutil.copyfile(path, directory / path.name)


def _card(plan: Plan, inputs: dict[str, dict[str, str]], directory: Path, *, with_sha256: bool) -> str:
    """The model card: recipe, versions, and what tells the files apart."""

    def files(model: Checkpoint) -> list[str]:
        shas = {path.name: sha256(path) for path in model.files} if with_sha256 else {}
        return [
            f"- `{file}`: {mark}" + (f", sha256 {shas[file]}" if file in shas else "")
            for file, mark in inputs[model.name].items()
        ]

    models = [("base", plan.base), *((f"expert {i}", expert) for i, expert in enumerate(plan.experts, 1))]
    written = {file: fingerprint(directory / file) for file in plan.shards}
    versions = {
        "isoloco": __version__, "torch": torch.__version__, "transformers": version("transformers"),
        "python": platform.python_version(),
    }  # fmt: skip
    lines = [
        "---", "library_name: transformers", "tags:", "- merge", "- isoloco", "---", "",
        f"# {directory.name.removeprefix('.').removesuffix('.partial')}", "",
        f"{len(plan.experts)} experts merged into their base by isoloco.", "",
        "## Recipe", "", "```yaml", plan.request.recipe().strip(), "```", "",
        *(f"- {label}: {text}" for label, text in plan.rows()[:-1]), "",
        "## Inputs", "",
        "Fingerprint: blake2b of a file's size, header and 256 samples of 4 kB of its data.", "",
        *(line for label, model in models for line in [f"{label}: {model.name}", "", *files(model), ""]),
        "## Output", "",
        *(f"- `{file}`: {mark}" + (f", sha256 {sha256(directory / file)}" if with_sha256 else "")
          for file, mark in written.items()), "",
        "## Versions", "",
        *(f"- {name} {number}" for name, number in versions.items()), "",
    ]  # fmt: skip
    return "\n".join(lines)
