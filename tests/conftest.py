"""What several test files share: one thread, and a tiny prepared data directory."""

import itertools
import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test reads from the network


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    """Threads of several test processes would only slow each other down, and sums depend on how many there are."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def shards(tmp_path_factory) -> Path:
    """Shards of three dozen short documents of the embedded corpus, with a tokenizer of 300 entries of their own."""
    from isoloco.data.prepare import prepare
    from isoloco.data.sources import Corpus

    directory = tmp_path_factory.mktemp("shards")
    pieces = itertools.islice((p.text for p in Corpus("sotu").read() if p.last), 36)
    source = directory / "texts.txt"
    source.write_text("\n<|endoftext|>\n".join(text[:600].strip() for text in pieces) + "\n", "utf-8")
    return prepare(
        out_dir=directory / "data", source=str(source), tokenizer="train:bpe:300",
        valid_tokens=0.2, test_tokens=0.1, progress=False,
    )  # fmt: skip
