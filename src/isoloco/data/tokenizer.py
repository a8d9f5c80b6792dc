"""Tokenizers: from the Hugging Face Hub, a directory or a tokenizer.json, or trained here."""

import contextlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..files import check_tokenizer
from .sources import first_line, hub_revision

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

EOS = "<|endoftext|>"  # of a tokenizer trained here
SMALLEST_BPE = 257  # 256 bytes and the end of a document
# how a tokenizer.json that comes alone may call the end of a document
_EOS_NAMES = (EOS, "</s>", "<|end_of_text|>", "<eos>", "<|eos|>", "<|im_end|>", "[EOS]")


@dataclass(frozen=True)
class Tokenizer:
    """Text to token ids."""

    backend: "Backend"
    eos: str
    original: Any = None
    """The Hugging Face tokenizer it came from, if any: its other files are kept too."""

    @cached_property
    def eos_id(self) -> int:
        """The token that ends a document."""
        token = self.backend.token_to_id(self.eos)
        assert token is not None  # no tokenizer is made without
        return token

    @cached_property
    def vocab_size(self) -> int:
        """Largest token id plus one."""
        return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    def dtype(self) -> str:
        """What its ids are stored as."""
        return "uint16" if self.vocab_size <= 2**16 else "uint32"

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Token ids of every text, without special tokens: text that looks like one is encoded as text."""
        encode = getattr(self.backend, "encode_batch_fast", self.backend.encode_batch)  # fast: no offsets
        return [np.array(encoding.ids, dtype=self.dtype) for encoding in encode(texts, add_special_tokens=False)]

    def save(self, directory: Path) -> None:
        """Write what AutoTokenizer loads: tokenizer.json and tokenizer_config.json."""
        if self.original is not None:
            self.original.save_pretrained(directory)
            return
        directory.mkdir(parents=True)
        self.backend.save(str(directory / "tokenizer.json"))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": self.eos,
            "clean_up_tokenization_spaces": False,
        }
        (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def bpe_size(spec: str) -> int | None:
    """VOCAB of `train:bpe:VOCAB`, None for any other tokenizer. Raises ValueError for a size below 257."""
    if not spec.startswith("train:"):
        return None
    match = re.fullmatch(r"train:bpe:(\d+)", spec)
    if not match:
        raise ValueError(f"tokenizer {spec!r} is not known: to train one, write train:bpe:VOCAB, as train:bpe:2048")
    if int(match[1]) < SMALLEST_BPE:
        raise ValueError(
            f"tokenizer {spec}: a byte-level vocabulary takes {SMALLEST_BPE} entries or more (256 bytes and {EOS})"
        )
    return int(match[1])


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE with `vocab_size` entries, the first of them `<|endoftext|>`; the same texts give the same one.

    Raises ValueError where the texts have too few pairs for so many entries.
    Source: Sennrich et al., 2016, Neural machine translation of rare words with subword units; on bytes as in GPT-2.
    """
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[EOS], initial_alphabet=alphabet, show_progress=False
    )  # type: ignore[call-arg]
    backend.train_from_iterator(texts, trainer)
    size = backend.get_vocab_size()
    if size < vocab_size:
        raise ValueError(
            f"train:bpe:{vocab_size}: the training text makes no more than {size} entries (train:bpe:{size})"
        )
    return _ready(backend, EOS, f"train:bpe:{vocab_size}")


def load_tokenizer(spec: str) -> Tokenizer:
    """A tokenizer.json, a Hugging Face directory, or a name on the Hub; never code of the repository.

    Raises ValueError where there is none, where it has no fast form, and where no token ends a document.
    """
    from tokenizers import Tokenizer as Backend

    path = Path(spec).expanduser()
    if path.is_file() and not (path.parent / "tokenizer_config.json").exists():
        try:
            backend = Backend.from_file(str(path))
        except Exception as error:
            if type(error) is not Exception:  # the binding raises a bare one for whatever it cannot read
                raise
            raise ValueError(f"{path} is not a tokenizer.json: {first_line(error)}") from None
        special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
        return _ready(backend, next((name for name in _EOS_NAMES if name in special), None), spec)
    loaded = _auto(str(path.parent if path.is_file() else path) if path.exists() else spec)
    if not getattr(loaded, "backend_tokenizer", None):
        raise ValueError(f"tokenizer {spec} has no fast form (tokenizer.json): choose one that has")
    return _ready(loaded.backend_tokenizer, loaded.eos_token, spec, original=loaded)


def reload(directory: Path, eos: str) -> Tokenizer:
    """The tokenizer that `save` wrote, without importing transformers."""
    from tokenizers import Tokenizer as Backend

    return _ready(Backend.from_file(str(directory / "tokenizer.json")), eos, str(directory))


def _auto(name: str) -> Any:
    from transformers import AutoTokenizer

    if Path(name).is_dir():
        check_tokenizer(Path(name))
        attempts = [{"local_files_only": True}]
    else:
        attempts = [{"local_files_only": True}, {}]  # what was downloaded before needs no network
    for number, options in enumerate(attempts):
        if number:
            hub_revision(
                name, "model"
            )  # one line and at once where it cannot be reached, instead of a minute of retries
        try:
            return AutoTokenizer.from_pretrained(name, trust_remote_code=False, **options)
        except (AttributeError, LookupError, OSError, TypeError, ValueError) as error:  # for its files' content too
            failure = first_line(error)
    raise ValueError(f"cannot load tokenizer {name}: {failure}")


def _ready(backend: "Backend", eos: str | None, spec: str, *, original: Any = None) -> Tokenizer:
    from tokenizers import Tokenizer as Backend

    if eos is None or backend.token_to_id(eos) is None:
        raise ValueError(
            f"tokenizer {spec} has no token that ends a document (EOS): set eos_token in its tokenizer_config.json"
        )
    backend = Backend.from_str(backend.to_str())  # not the caller's own object
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True
    return Tokenizer(backend, eos, original)


@contextlib.contextmanager
def own_threads() -> Iterator[None]:
    """Encode in threads of ours, not of the tokenizers library, which warns in every process that is forked later."""
    name = "TOKENIZERS_PARALLELISM"
    if name in os.environ:  # the user's own choice
        yield
        return
    os.environ[name] = "false"
    try:
        yield
    finally:
        del os.environ[name]
