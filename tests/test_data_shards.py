"""Reading shards: rows over the concatenation, the authors' layout, identity, and what is refused."""

import json
import os
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isoloco.data.shards import Shard, Split, open_data, scan


def write_shards(directory, split, tokens, cuts, dtype=np.uint16):
    for number, part in enumerate(np.split(np.asarray(tokens, dtype=dtype), cuts)):
        np.save(directory / f"{split}_{number:06d}.npy", part)


@pytest.fixture
def authors(tmp_path):
    tokens = np.random.default_rng(0).integers(0, 32000, 1005)
    write_shards(tmp_path, "train", tokens, [500, 507, 507])
    write_shards(tmp_path, "valid", tokens[:100], [])
    return tmp_path, tokens


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(1, 200),
    cuts=st.lists(st.integers(0, 200), max_size=6),
    seq_len=st.integers(1, 40),
    data=st.data(),
)
def test_rows_are_the_concatenation_cut_evenly(tokens, cuts, seq_len, data):
    stream = np.random.default_rng(1).integers(0, 2**16, tokens).astype(np.uint16)
    shards = []
    for part in np.split(stream, sorted(min(cut, tokens) for cut in cuts)):
        shards.append(Shard(path=None, tokens=len(part), dtype="uint16"))  # type: ignore[arg-type]
        shards[-1].__dict__["array"] = part
    split = Split("train", tuple(shards))
    rows = split.rows(seq_len)
    assert rows == tokens // seq_len
    wanted = data.draw(st.lists(st.integers(0, rows - 1), max_size=10)) if rows else []
    read = split.read(np.array(wanted, dtype=np.int64), seq_len)
    assert read.dtype == torch.int64
    assert read.shape == (len(wanted), seq_len)
    for row, ids in zip(wanted, read, strict=True):
        assert ids.tolist() == stream[row * seq_len : (row + 1) * seq_len].tolist()


def test_the_authors_layout_is_read_as_it_is(authors):
    directory, tokens = authors
    data = open_data(directory)
    assert list(data.splits) == ["train", "valid"]
    assert (data.tokens("train"), data.tokens("valid"), data.tokens("test")) == (1005, 100, 0)
    assert (data.vocab_size, data.eos_id, data.tokenizer_dir, data.bytes_per_token("train")) == (None,) * 4
    assert np.array_equal(data.split("train").read(np.arange(62), 16), tokens[: 62 * 16].reshape(62, 16))
    assert data.largest_id() == tokens.max()
    data.check_vocab(int(tokens.max()) + 1)
    with pytest.raises(
        ValueError, match=rf"train_00000\d\.npy holds token id {tokens.max()}, the model's vocabulary has"
    ):
        data.check_vocab(int(tokens.max()))
    data.verify()


def test_identity_is_the_content(authors, tmp_path_factory):
    directory, tokens = authors
    copy, other = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("other")
    for target, changed in ((copy, tokens), (other, np.where(np.arange(1005) == 700, tokens ^ 1, tokens))):
        write_shards(target, "train", changed, [500, 507, 507])
        write_shards(target, "valid", changed[:100], [])
    assert open_data(directory).checksum == open_data(copy).checksum != open_data(other).checksum


def test_uint32_shards(tmp_path):
    write_shards(tmp_path, "train", [70000, 1, 2, 3], [], dtype=np.uint32)
    data = open_data(tmp_path)
    assert data.split("train").read(np.array([0]), 4).tolist() == [[70000, 1, 2, 3]]
    assert data.largest_id() == 70000


def test_ten_billion_tokens_open_at_once_and_without_memory(tmp_path):
    shard = tmp_path / "train_000000.npy"
    np.save(shard, np.zeros(0, np.uint16))
    with shard.open("r+b") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<u2", "fortran_order": False, "shape": (2**30,)})
        file.truncate(file.tell() + 2**31)  # sparse: takes no disk
    for number in range(1, 10):
        (tmp_path / f"train_{number:06d}.npy").hardlink_to(shard)
    open_data(tmp_path)  # imports
    tracemalloc.start()
    started = time.perf_counter()
    data = open_data(tmp_path)
    rows = data.split("train").read(np.array([0, 78_000_000]), 128)
    seconds = time.perf_counter() - started
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert data.tokens("train") == 10 * 2**30
    assert rows.shape == (2, 128)
    assert peak < 1_000_000
    assert seconds < 0.5  # milliseconds, on a machine that does nothing else


@pytest.mark.parametrize("seq_len", [16, 1006])
def test_a_row_that_is_not_there_is_refused(authors, seq_len):
    split = open_data(authors[0]).split("train")
    for row in (-1, split.rows(seq_len)):
        with pytest.raises(ValueError, match=f"asked for row {row}"):
            split.read(np.array([row]), seq_len)


def test_missing_things_are_named(authors, tmp_path_factory):
    directory, _ = authors
    with pytest.raises(ValueError, match="has no test split, only train, valid"):
        open_data(directory).split("test")
    with pytest.raises(ValueError, match="seq_len takes 1 or more"):
        open_data(directory).split("train").rows(0)
    (directory / "train_000001.npy").unlink()
    with pytest.raises(ValueError, match=r"misses train_000001\.npy"):
        open_data(directory)
    with pytest.raises(ValueError, match="no directory"):
        open_data(directory / "nowhere")
    empty = tmp_path_factory.mktemp("empty")
    with pytest.raises(ValueError, match="holds no data"):
        open_data(empty)
    write_shards(empty, "train", [], [])
    with pytest.raises(ValueError, match="its train shards are empty"):
        open_data(empty)
    (empty / "preparing.json").write_text("{}")
    with pytest.raises(ValueError, match="unfinished preparation"):
        open_data(empty)


def corrupt(path, how):
    content = path.read_bytes()
    if how == "truncated":
        path.write_bytes(content[:-1])
    elif how == "longer":
        path.write_bytes(content + b"x")
    elif how == "header":
        path.write_bytes(b"\x00" * 20 + content[20:])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "pickle":
        np.save(path, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    elif how == "floats":
        np.save(path, np.zeros(10, np.float32))
    elif how == "matrix":
        np.save(path, np.zeros((10, 10), np.uint16))
    elif how == "archive":
        with path.open("wb") as file:
            np.savez(file, a=np.zeros(10, np.uint16))


@pytest.mark.parametrize("how", ["truncated", "longer", "header", "empty", "pickle", "floats", "matrix", "archive"])
def test_a_bad_shard_is_named_in_one_line(authors, how):
    directory, _ = authors
    corrupt(directory / "train_000002.npy", how)
    with pytest.raises(ValueError, match=r"shard .*train_000002\.npy (is|holds)") as raised:
        open_data(directory)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("content", ["{", "[]", '{"format": "other"}', '{"format": "isoloco-shards-1"}', "\udcff"])
def test_a_bad_manifest_is_named_in_one_line(tmp_path, content):
    (tmp_path / "manifest.json").write_text(content, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(ValueError, match=r"manifest\.json (is not a manifest|has format)") as raised:
        open_data(tmp_path)
    assert "\n" not in str(raised.value)


def test_the_manifest_is_believed_and_checked(tmp_path):
    np.save(tmp_path / "train_000000.npy", np.arange(10, dtype=np.uint16))
    shard = {"file": "train_000000.npy", "tokens": 10, "max_id": 9, "blake2b": "0"}
    splits = {"train": {"documents": 1, "text_bytes": 40, "tokens": 10, "shards": [shard]}}
    manifest = {"format": "isoloco-shards-1", "dtype": "uint16", "vocab_size": 10, "eos_id": 0, "splits": splits}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    data = open_data(tmp_path)
    assert (data.vocab_size, data.eos_id, data.bytes_per_token("train")) == (10, 0, 4.0)
    assert data.largest_id() == 9
    with pytest.raises(ValueError, match="changed since it was prepared"):
        data.verify()
    shard["tokens"] += 1
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"train_000000\.npy changed since it was prepared"):
        open_data(tmp_path)
    (tmp_path / "train_000000.npy").unlink()
    with pytest.raises(ValueError, match=r"train_000000\.npy is missing"):
        open_data(tmp_path)


def bytes_read() -> int:
    """By this process so far, through read calls; Linux tells."""
    told = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(told["rchar"])


@pytest.mark.slow
@pytest.mark.skipif(not os.access("/proc/self/io", os.R_OK), reason="only Linux counts what a process reads")
def test_a_large_shard_is_read_once_and_again_when_it_changed(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shard = tmp_path / "train_000000.npy"
    header = np.lib.format.open_memmap(shard, mode="w+", dtype=np.uint16, shape=(2**25,))  # 64 MiB, sparse
    del header
    digest, largest = scan(shard)
    told = {"file": shard.name, "tokens": 2**25, "max_id": largest, "blake2b": digest}
    splits = {"train": {"documents": 1, "text_bytes": 40, "tokens": 2**25, "shards": [told]}}
    manifest = {"format": "isoloco-shards-1", "dtype": "uint16", "vocab_size": 10, "eos_id": 0, "splits": splits}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))

    def cost() -> int:
        before = bytes_read()
        open_data(tmp_path).verify()
        return bytes_read() - before

    time.sleep(2.1)  # a file that was just written is not remembered
    first, second = cost(), cost()
    assert first > 2**26
    assert second < 2**17
    (note,) = (tmp_path / "cache" / "isoloco" / "checked").iterdir()
    note.write_text("[")
    assert cost() > 2**26
    before = shard.stat()
    with shard.open("r+b") as file:
        file.seek(2**25)
        file.write(b"1")
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(ValueError, match=r"train_000000\.npy changed since it was prepared"):
        open_data(tmp_path).verify()
    time.sleep(2.1)
    for _ in range(2):  # what was wrong once stays wrong, remembered or not
        with pytest.raises(ValueError, match="changed since it was prepared"):
            open_data(tmp_path).verify()
