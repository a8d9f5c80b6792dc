"""A Hugging Face model directory as a mapping of tensors, and what can be told about it before any tensor is read."""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..files import check_weights, read_object

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
FLOATS = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_HUB_NAME = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")
_SAMPLES, _SAMPLE_BYTES = 256, 4096


class Spec(NamedTuple):
    """Where a tensor is and what it is, as its file says: ``dtype`` is safetensors' name."""

    file: Path
    shape: tuple[int, ...]
    dtype: str

    @property
    def stored_bytes(self) -> int:
        return DTYPES[self.dtype].itemsize * torch.Size(self.shape).numel()


class Checkpoint(Mapping[str, Tensor]):
    """The tensors of a model directory by name, mapped into memory one at a time and for as long as they are held.

    ``name`` is what the user called it. Raises ValueError for a directory that cannot be merged: no safetensors, a LoRA
    adapter, quantized weights, a damaged file.
    """

    def __init__(self, directory: Path, name: str) -> None:
        self.directory, self.name = directory, name
        self.config = _config(directory, name)
        self.specs = _specs(directory, name)

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(self.specs[name].file, "pt") as file:  # its mapping lives on in the tensor alone
            return file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.specs)

    def __len__(self) -> int:
        return len(self.specs)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: spec.shape for name, spec in self.specs.items()}

    def label(self, name: str) -> str:
        """The file that holds a tensor."""
        return str(self.specs[name].file)

    @property
    def files(self) -> list[Path]:
        return sorted({spec.file for spec in self.specs.values()})

    @property
    def kind(self) -> str:
        """Its architecture, as its config tells it; empty where there is no config."""
        return next(iter(self.config.get("architectures") or []), str(self.config.get("model_type", "")))

    def twin(self, name: str) -> str | None:
        """Another tensor of this model that is the same bit for bit: what a tied weight is tied to."""
        spec = self.specs[name]
        same = [n for n, other in self.specs.items() if n != name and other[1:] == spec[1:] and len(spec.shape) == 2]
        return next((other for other in same if torch.equal(self[name], self[other])), None)


def find(name: str) -> Checkpoint:
    """The model of this name: a directory, a run's directory, or org/model[@revision] on the Hugging Face Hub."""
    path = Path(name).expanduser()
    if path.is_dir():
        run_model = path / "model"
        return Checkpoint(run_model if (path / "config.yaml").is_file() and run_model.is_dir() else path, name)
    hub = _HUB_NAME.fullmatch(name)
    if hub is None or path.exists():
        raise ValueError(f"{name}: no such directory; takes a model's directory, or org/model on the Hugging Face Hub")
    return Checkpoint(_download(hub["name"], hub["revision"]), name)


def _download(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HTTPError

    wanted = ["*.safetensors", "*.json", "tokenizer*", "*.model", "merges.txt", "vocab.*", "*.tiktoken", "*.jinja"]
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=wanted))
    except (HTTPError, OSError, ValueError) as error:
        told = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"{name}: no such directory, and the Hugging Face Hub cannot be reached for it ({told})"
        ) from None


def _config(directory: Path, name: str) -> dict[str, Any]:
    path = directory / "config.json"
    weights = any((directory / file).is_file() for file in (SINGLE, INDEX))
    if (directory / "adapter_config.json").is_file() and not weights:
        raise ValueError(
            f"{name} is a LoRA adapter, not a model: merge it into its base first (in peft: merge_and_unload, then "
            "save_pretrained)"
        )
    config = read_object(path, str(path), "give a Hugging Face config.json") if path.is_file() else {}
    if config.get("quantization_config"):
        raise ValueError(f"{name} is quantized (its config.json says how): give the model in full precision")
    return config


def _weight_files(directory: Path) -> list[Path]:
    if (directory / SINGLE).is_file():
        return [directory / SINGLE]
    index = read_object(directory / INDEX, str(directory / INDEX), "takes the list of a model's safetensors files")
    return sorted({directory / file for file in index["weight_map"].values()})


def _specs(directory: Path, name: str) -> dict[str, Spec]:
    found: dict[str, Spec] = {}
    check_weights(directory, name)
    for path in _weight_files(directory):
        try:
            with safe_open(path, "pt") as file:
                for key in file.keys():  # noqa: SIM118 (no mapping)
                    part = file.get_slice(key)
                    found[key] = Spec(path, tuple(part.get_shape()), part.get_dtype())
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} cannot be read ({error})") from None
    for key, spec in found.items():
        if spec.dtype not in DTYPES:
            raise ValueError(f"{key} of {spec.file} is {spec.dtype}, which is quantized: give full precision")
    return found


def fingerprint(path: Path) -> str:
    """blake2b of a safetensors file's size, header and 256 samples of 4 kB: tells files apart without reading them.

    Samples lie evenly from the first byte of the data to the last, so that whatever was trained on shows.
    """
    size = path.stat().st_size
    digest = hashlib.blake2b(size.to_bytes(8, "little"), digest_size=16)
    with path.open("rb") as file:
        head = 8 + struct.unpack("<Q", file.read(8))[0]
        digest.update(file.read(head - 8))
        room = max(0, size - head - _SAMPLE_BYTES)
        for i in range(_SAMPLES):
            file.seek(head + room * i // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
