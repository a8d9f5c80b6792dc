"""What several test files share: one thread, a tiny prepared data directory, studies over a small recipe."""

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


@pytest.fixture
def study(tmp_path, monkeypatch):
    """Makes a board of a study, try.yaml in the current directory, from YAML text over a small recipe."""
    from isoloco.study_board import Board
    from isoloco.study_file import load

    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text("method: isoloco\nworkers: 2\nglobal_batch_size: 8\nbudget: {steps: 4}\n")

    def make(text: str) -> Board:
        Path("try.yaml").write_text(f"name: try\nrecipe: small.yaml\n{text}")
        return Board(load("try.yaml"), tmp_path / "studies")

    return make
