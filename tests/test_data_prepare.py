"""Preparing text: every document once, the same bytes every time, interrupted or not."""

import itertools
import json
import os
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest

from isoloco.config import DataConfig
from isoloco.data import preparation, progress, text, writer
from isoloco.data.prepare import ensure, prepare
from isoloco.data.shards import open_data
from isoloco.data.splits import key_of
from isoloco.data.tokenizer import load_tokenizer, train_bpe

DOCUMENTS = [
    f"Document {i}: the quick brown fox, number {i * i % 17}.\n\n  Then a second line{' and more' * (i % 5)}.\n"
    for i in range(60)
]


@pytest.fixture(scope="session")
def tokenizer_json(tmp_path_factory):
    """A tokenizer.json alone, so that most tests need not train one."""
    directory = tmp_path_factory.mktemp("tokenizer")
    train_bpe(DOCUMENTS, 300).save(directory / "full")
    return str((directory / "full" / "tokenizer.json").rename(directory / "tokenizer.json"))


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("\n<|endoftext|>\n".join(DOCUMENTS), encoding="utf-8", newline="")
    return str(path)


def contents(directory):
    return {p.relative_to(directory).as_posix(): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def tokens_of(data, split):
    if not data.tokens(split):
        return []
    return data.split(split).read(np.arange(data.tokens(split)), 1)[:, 0].tolist()


def documents_of(data, split, tokenizer):
    """The documents of a split, as text; each must end in one EOS."""
    ids, documents = tokens_of(data, split), [[]]
    for token in ids:
        if token == data.eos_id:
            documents.append([])
        else:
            documents[-1].append(token)
    assert documents.pop() == []
    return [tokenizer.backend.decode(part, skip_special_tokens=False) for part in documents]


def check_every_document_once(directory, tokenizer_spec, documents):
    data, tokenizer = open_data(directory), load_tokenizer(tokenizer_spec)
    found = {split: documents_of(data, split, tokenizer) for split in data.splits}
    assert Counter(itertools.chain(*found.values())) == Counter(documents)
    for split, parts in found.items():
        facts = data.split(split)
        assert facts.documents == len(parts)
        assert facts.text_bytes == sum(len(part.encode()) for part in parts)
        assert data.bytes_per_token(split) == facts.text_bytes / facts.tokens
    data.verify()
    return found


def test_every_document_is_in_one_split_with_one_end(tmp_path, source, tokenizer_json):
    out = prepare(out_dir=tmp_path / "out", source=source, tokenizer=tokenizer_json, shard_tokens=97)
    found = check_every_document_once(out, tokenizer_json, DOCUMENTS)
    for split, (low, high) in {"valid": (0, 0.05), "train": (0.05, 0.95), "test": (0.95, 1)}.items():
        assert found[split] == [d for d in DOCUMENTS if low <= key_of(d, 42) < high]  # in the order of the source
    shards = open_data(out).split("train").shards
    assert len(shards) > 5
    assert {shard.tokens for shard in shards[:-1]} == {97}
    assert sorted(p.name for p in out.iterdir() if p.suffix != ".npy") == ["manifest.json", "tokenizer"]


def test_numbers_of_tokens_take_the_documents_of_the_smallest_and_largest_keys(tmp_path, source, tokenizer_json):
    options = {"source": source, "tokenizer": tokenizer_json, "valid_tokens": 100, "test_tokens": 200}
    found = check_every_document_once(prepare(out_dir=tmp_path / "out", **options), tokenizer_json, DOCUMENTS)
    data = open_data(tmp_path / "out")
    ordered = sorted(DOCUMENTS, key=lambda document: key_of(document, 42))
    for split, size, nearest in (("valid", 100, ordered), ("test", 200, ordered[::-1])):
        assert set(found[split]) == set(nearest[: len(found[split])])
        last = max(found[split], key=nearest.index)
        encoded = load_tokenizer(tokenizer_json).encode([last])[0]
        assert data.tokens(split) >= size > data.tokens(split) - len(encoded) - 1


def test_copies_of_a_document_go_together(tmp_path, tokenizer_json):
    path = tmp_path / "copies.jsonl"
    path.write_text("".join(json.dumps({"text": f"text {i % 20}"}) + "\n" for i in range(60)))
    out = prepare(
        out_dir=tmp_path / "out", source=str(path), tokenizer=tokenizer_json, valid_tokens=0.3, test_tokens=0.3
    )
    found = check_every_document_once(out, tokenizer_json, [f"text {i % 20}" for i in range(60)])
    assert len(found) == 3
    assert all(count == 3 for parts in found.values() for count in Counter(parts).values())


def test_the_training_split_ends_at_the_document_that_reaches_max_tokens(tmp_path, source, tokenizer_json):
    options = {"source": source, "tokenizer": tokenizer_json, "valid_tokens": 1, "test_tokens": 0}
    whole = open_data(prepare(out_dir=tmp_path / "whole", **options))
    part = open_data(prepare(out_dir=tmp_path / "part", **options, max_tokens=500))
    tokens = tokens_of(part, "train")
    assert 500 <= len(tokens) < 600
    assert tokens == tokens_of(whole, "train")[: len(tokens)] or part.split("valid").documents == 1
    assert list(part.splits) == ["train", "valid"]


def test_text_that_looks_like_the_end_of_a_document_is_text(tmp_path, tokenizer_json):
    path = tmp_path / "odd.jsonl"
    odd = ["a <|endoftext|> b", "<|endoftext|>", "\n<|endoftext|>\n", "plain"]
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in odd))
    out = prepare(out_dir=tmp_path / "out", source=str(path), tokenizer=tokenizer_json, valid_tokens=0, test_tokens=0)
    assert check_every_document_once(out, tokenizer_json, odd)["train"] == odd


def test_documents_without_text_are_left_out_and_counted(tmp_path, tokenizer_json):
    path = tmp_path / "blank.jsonl"
    path.write_text('{"text": ""}\n\n{"text": null}\n{"text": "a"}\n{"text": " \\n"}\n{"text": "b"}\n')
    out = prepare(out_dir=tmp_path / "out", source=str(path), tokenizer=tokenizer_json, valid_tokens=0, test_tokens=0)
    assert check_every_document_once(out, tokenizer_json, ["a", "b"])
    assert json.loads((out / "manifest.json").read_text())["empty_documents"] == 3


def test_the_same_bytes_twice_and_a_split_for_each_seed(tmp_path, source):
    options = {"source": source, "tokenizer": "train:bpe:280", "shard_tokens": 500}
    code = "import json, sys; from isoloco.data.prepare import prepare; prepare(**json.loads(sys.argv[1]))"
    first = prepare(out_dir=tmp_path / "a", **options)
    arguments = json.dumps({"out_dir": str(tmp_path / "b"), **options})
    environment = {**os.environ, "PYTHONHASHSEED": "7", "TOKENIZERS_PARALLELISM": "true"}
    ran = subprocess.run([sys.executable, "-W", "error", "-c", code, arguments], env=environment, capture_output=True)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, b"", b"")
    other = prepare(out_dir=tmp_path / "c", **options, seed=1)
    assert contents(first) == contents(tmp_path / "b")
    assert open_data(first).checksum == open_data(tmp_path / "b").checksum != open_data(other).checksum


def test_a_trained_tokenizer_has_seen_training_text_only_and_loads_in_transformers(tmp_path, monkeypatch):
    documents = [f"{'abcdefgh'[i % 8] * 3}{i} held text {i}" for i in range(40)]
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    seen = []
    monkeypatch.setattr(
        preparation.tokenizers, "train_bpe", lambda texts, size: train_bpe((seen.append(t) or t for t in texts), size)
    )
    for number, (valid, test) in enumerate([(0.2, 0.2), (30, 40), (0.2, 40)]):
        seen.clear()
        out = tmp_path / str(number)
        prepare(out_dir=out, source=str(path), tokenizer="train:bpe:265", valid_tokens=valid, test_tokens=test)
        found = check_every_document_once(out, str(out / "tokenizer"), documents)
        assert seen
        assert set(seen) <= set(found["train"])
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(out / "tokenizer")
    data = open_data(out)
    assert (loaded.eos_token, loaded.eos_token_id, len(loaded)) == ("<|endoftext|>", data.eos_id, data.vocab_size)
    assert loaded("held text é", add_special_tokens=False).input_ids == (
        load_tokenizer(str(out / "tokenizer")).encode(["held text é"])[0].tolist()
    )
    assert loaded.decode(loaded("held text é").input_ids) == "held text é"
    options = {"source": str(path), "valid_tokens": 0.2, "test_tokens": 40}
    again = open_data(prepare(out_dir=tmp_path / "again", tokenizer=str(out / "tokenizer"), **options))
    assert again.checksum == data.checksum
    assert AutoTokenizer.from_pretrained(again.tokenizer_dir).eos_token == "<|endoftext|>"


def test_long_documents_give_the_same_tokens_in_pieces(tmp_path, monkeypatch, tokenizer_json):
    paragraphs = [f"Line {i}, and  spaces.\nNext\n\n\tIndented.\n" for i in range(200)]
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"text": "".join(paragraphs)}) + "\n" + json.dumps({"text": "short"}) + "\n")
    plain = tmp_path / "long.txt"
    plain.write_text("".join(paragraphs) + "\n<|endoftext|>\nshort", newline="")
    options = {"tokenizer": tokenizer_json, "valid_tokens": 0, "test_tokens": 0}
    whole = open_data(prepare(out_dir=tmp_path / "whole", source=str(path), **options))
    monkeypatch.setattr(text, "PIECE_CHARS", 64)
    for number, cut in enumerate([path, plain]):
        data = open_data(prepare(out_dir=tmp_path / str(number), source=str(cut), **options))
        assert data.split("train").documents == 2
        assert data.split("train").text_bytes == whole.split("train").text_bytes
        assert tokens_of(data, "train") == tokens_of(whole, "train")


def test_a_large_vocabulary_takes_uint32(tmp_path, source):
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    words = {f"w{i}": i for i in range(69_998)} | {"fox": 69_998, "[UNK]": 69_999}
    backend = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens([AddedToken("</s>", special=True)])
    backend.enable_truncation(4)  # must not cut documents
    backend.save(str(tmp_path / "words.json"))
    out = prepare(out_dir=tmp_path / "out", source=source, tokenizer=str(tmp_path / "words.json"))
    data = open_data(out)
    assert (data.vocab_size, data.eos_id, data.largest_id()) == (70_001, 70_000, 70_000)
    assert np.load(out / "train_000000.npy").dtype == np.uint32
    ids = tokens_of(data, "train")
    assert ids.count(69_998) == data.split("train").documents == ids.count(70_000)


class Killed(BaseException):
    pass


@pytest.fixture
def kill_at(monkeypatch):
    """Ends the process, as it were, at the n-th time that something on disk is made to last."""
    counted = {"calls": 0, "at": None}

    def dying(function):
        def call(*args):
            counted["calls"] += 1
            if counted["calls"] == counted["at"]:
                raise Killed
            return function(*args)

        return call

    monkeypatch.setattr(writer.os, "replace", dying(os.replace))
    monkeypatch.setattr(writer.os, "fsync", dying(lambda _: None))  # the process ends, not the machine
    monkeypatch.setattr(preparation, "CHECKPOINT_S", 0.0)

    def arm(at):
        counted.update(calls=0, at=at)

    return arm


@pytest.mark.parametrize(
    "sizes",
    [
        {"valid_tokens": 0.2, "test_tokens": 0.2},
        {"valid_tokens": 60, "test_tokens": 60},
        {"valid_tokens": 1, "test_tokens": 0, "max_tokens": 300},
    ],
)
def test_killed_anywhere_and_resumed_gives_the_same_bytes(tmp_path, monkeypatch, kill_at, tokenizer_json, sizes):
    path = tmp_path / "text.txt"
    path.write_text("\n<|endoftext|>\n".join(DOCUMENTS[:10]), newline="")
    options = {"source": str(path), "tokenizer": tokenizer_json, "shard_tokens": 90, **sizes}
    monkeypatch.setattr(preparation, "CHECKPOINT_S", 1e9)
    expected = contents(prepare(out_dir=tmp_path / "whole", **options))
    monkeypatch.setattr(preparation, "CHECKPOINT_S", 0.0)
    finished, at = False, 0
    while not finished:
        at += 5 if at > 12 else 1  # the beginning densely, then a sample
        out = tmp_path / str(at)
        kill_at(at)
        try:
            prepare(out_dir=out, **options)
            finished = True
        except Killed:
            kill_at(9)  # and again a little later
            try:
                prepare(out_dir=out, **options)
            except Killed:
                kill_at(None)
                prepare(out_dir=out, **options)
        assert contents(out) == expected
    assert at > 20


def test_killed_for_real_and_resumed_gives_the_same_bytes(tmp_path, source):
    options = {
        "source": source,
        "tokenizer": "train:bpe:280",
        "shard_tokens": 300,
        "valid_tokens": 50,
        "progress": False,
    }
    expected = contents(prepare(out_dir=tmp_path / "whole", **options))
    code = (
        "import json, os, signal, sys\n"
        "from isoloco.data import preparation\n"
        "preparation.CHECKPOINT_S, save = 0.0, preparation.Preparation._save\n"
        "def saved(self):\n"
        "    save(self)\n"
        "    if self.documents == 40: os.kill(os.getpid(), signal.SIGKILL)\n"
        "preparation.Preparation._save = saved\n"
        "from isoloco.data.prepare import prepare\n"
        "prepare(**json.loads(sys.argv[1]))"
    )
    out = tmp_path / "out"
    arguments = json.dumps({"out_dir": str(out), **options})
    assert subprocess.run([sys.executable, "-c", code, arguments]).returncode == -9
    with pytest.raises(ValueError, match="unfinished preparation"):
        open_data(out)
    with pytest.raises(ValueError, match=r"holds data of other settings \(seed was 42, now 43\)"):
        prepare(out_dir=out, **options, seed=43)
    encoded = []
    with pytest.MonkeyPatch.context() as patch:
        plain = preparation._encoded
        patch.setattr(preparation, "_encoded", lambda *a: (encoded.append(1) or entry for entry in plain(*a)))
        patch.setattr(preparation.contextlib, "closing", lambda thing: __import__("contextlib").nullcontext(thing))
        prepare(out_dir=out, **options)
    assert len(encoded) == 20  # the other forty were not encoded again
    assert contents(out) == expected


def test_prepared_data_is_left_as_it_is(tmp_path, source, tokenizer_json):
    options = {"out_dir": tmp_path / "out", "source": source, "tokenizer": tokenizer_json}
    prepare(**options)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    prepare(**options)
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    with pytest.raises(ValueError, match=r"holds data of other settings \(valid_tokens was 0\.05, now 0\.1\)"):
        prepare(**options, valid_tokens=0.1)
    os.utime(source, ns=(1, 1))
    with pytest.raises(ValueError, match=r"holds data of other settings \(source"):
        prepare(**options)


@pytest.mark.dist
def test_a_source_is_prepared_once_for_all_processes(tmp_path, monkeypatch, source, tokenizer_json):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = {"source": source, "tokenizer": tokenizer_json}
    code = (
        "import json, sys; from isoloco.config import DataConfig; from isoloco.data.prepare import ensure\n"
        "print(ensure(DataConfig(**json.loads(sys.argv[1])), seed=5))"
    )
    command = [sys.executable, "-c", code, json.dumps(config)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate()[0].strip() for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert outputs[0] == outputs[1] == str(ensure(DataConfig(**config), seed=5))
    assert os.path.relpath(outputs[0], tmp_path).startswith("cache/isoloco/data/texttxt-tokenizerjson-")
    open_data(outputs[0]).verify()
    assert ensure(DataConfig(**config), seed=6) != ensure(DataConfig(**config), seed=5)
    monkeypatch.chdir(tmp_path)
    assert ensure(DataConfig(source="text.txt", tokenizer=tokenizer_json), seed=5) == ensure(
        DataConfig(**config), seed=5
    )
    assert ensure(DataConfig(path="anywhere"), seed=5).name == "anywhere"


def test_what_a_person_sees(tmp_path, source, monkeypatch, capsys):
    monkeypatch.setattr(progress, "QUIET_S", 0.0)
    monkeypatch.setattr(progress, "LINE_S", 0.0)
    prepare(
        out_dir=tmp_path / "a", source=source, tokenizer="train:bpe:280", max_tokens=500, valid_tokens=0, test_tokens=0
    )
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("training the tokenizer: 0.0 MB")
    assert lines[-1].startswith("tokenizing: ")
    assert ", 100%, 0 min left" in lines[-1]
    prepare(out_dir=tmp_path / "b", source=source, tokenizer="train:bpe:280", progress=False)
    assert capsys.readouterr().err == ""


def test_the_environment_and_forks_are_left_alone(tmp_path, source):
    code = (
        "import json, os, sys; from isoloco.data.prepare import prepare\n"
        "prepare(**json.loads(sys.argv[1]))\n"
        "assert 'TOKENIZERS_PARALLELISM' not in os.environ\n"
        "from isoloco.data.tokenizer import reload\n"
        "import pathlib\n"
        "tokenizer = reload(pathlib.Path(json.loads(sys.argv[1])['out_dir']) / 'tokenizer', '<|endoftext|>')\n"
        "child = os.fork()\n"
        "tokenizer.backend.encode_batch(['a', 'b'])\n"
        "if child: os.waitpid(child, 0)\n"
        "else: os._exit(0)"
    )
    options = {"out_dir": str(tmp_path / "out"), "source": source, "tokenizer": "train:bpe:280"}
    environment = {name: value for name, value in os.environ.items() if name != "TOKENIZERS_PARALLELISM"}
    ran = subprocess.run(
        [sys.executable, "-c", code, json.dumps(options)], env=environment, capture_output=True, text=True
    )
    assert (ran.returncode, ran.stderr) == (0, "")
