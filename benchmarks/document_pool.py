"""What benchmarks/tokenize.py compares with: a pool of processes that encodes a document at a time, as scripts do.

    python -m benchmarks.document_pool TEXT TOKENIZER.json TARGET

Documents of TEXT are apart by lines of <|endoftext|>; their token ids (uint16) and a 0 after each go to TARGET.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

SEPARATOR = "<|endoftext|>\n"
_encoder: Any = None  # of a process of the pool


def documents(text: Path) -> Iterator[str]:
    lines: list[str] = []
    with text.open(encoding="utf-8") as file:
        for line in file:
            if line == SEPARATOR:
                yield "".join(lines).removesuffix("\n")
                lines = []
            else:
                lines.append(line)


def load(tokenizer: str) -> None:
    global _encoder
    from tokenizers import Tokenizer

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _encoder = Tokenizer.from_file(tokenizer)
    _encoder.encode_special_tokens = True


def encode(document: str) -> np.ndarray:
    return np.array([*_encoder.encode(document).ids, 0], dtype=np.uint16)


def main(text: str, tokenizer: str, target: str) -> None:
    with multiprocessing.Pool(os.cpu_count(), load, (tokenizer,)) as workers, Path(target).open("wb") as file:
        for ids in workers.imap(encode, documents(Path(text)), chunksize=16):
            file.write(ids.tobytes())


if __name__ == "__main__":
    main(*sys.argv[1:])
