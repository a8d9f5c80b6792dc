"""Bad input to `prepare`: one line that says what is wrong, and nothing left behind."""

import gzip
import json

import pytest
import zstandard

from isoloco.data import sources, tokenizer
from isoloco.data.prepare import prepare

TEXT = "".join(f"line {i} of some text that goes on\n<|endoftext|>\n" for i in range(30))


@pytest.fixture
def failing(tmp_path):
    """Calls prepare, which must fail; checks that it leaves nothing, and returns the message."""
    (tmp_path / "text.txt").write_text(TEXT)

    def call(**options):
        options = {"source": str(tmp_path / "text.txt"), "tokenizer": "train:bpe:270", "progress": False, **options}
        with pytest.raises(ValueError) as raised:
            prepare(out_dir=tmp_path / "out", **options)
        assert not (tmp_path / "out").exists()
        message = str(raised.value)
        assert "\n" not in message
        return message

    return call


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source": "corpus:sotus"}, "unknown corpus 'sotus'"),
        ({"source": "nowhere.jsonl"}, "no file nowhere.jsonl: a source takes"),
        ({"source": "nowhere/*.txt"}, "no file nowhere/*.txt: a source takes"),
        ({"source": "a b"}, "source 'a b' is neither a file nor the name of a dataset on the Hub"),
        ({"source": ["corpus:sotu", "nowhere.txt"]}, "no file corpus:sotu"),
        ({"tokenizer": "train:bpe:256"}, "takes 257 entries or more"),
        ({"tokenizer": "train:wordpiece:1000"}, "to train one, write train:bpe:VOCAB"),
        ({"tokenizer": "train:bpe:50000"}, "the training text makes no more than"),
        ({"valid_tokens": -1}, "valid_tokens takes a fraction below 1 or a number of tokens, got -1"),
        ({"test_tokens": float("nan")}, "test_tokens takes a fraction below 1 or a number of tokens, got nan"),
        ({"valid_tokens": 0.5, "test_tokens": 0.5}, "leave nothing to train on"),
        ({"valid_tokens": 10**9}, "has no document to train on"),
        ({"valid_tokens": 1e-9}, "has no document in its valid split"),
        ({"test_tokens": 1e-9}, "has no document in its test split"),
        ({"shard_tokens": 0}, "shard_tokens takes 1 or more, got 0"),
        ({"max_tokens": 0}, "max_tokens takes 1 or more, got 0"),
    ],
)
def test_bad_settings(failing, options, message):
    assert message in failing(**{"valid_tokens": 1, "test_tokens": 1, **options})


def record(**fields):
    return json.dumps(fields).encode() + b"\n"


GOOD = record(text="good", id=1)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", GOOD + b'{"text": oops}\n', "a.jsonl, line 2 is not JSON (Expecting value at character 9)"),
        ("a.jsonl", GOOD + record(body="x", id=2), "line 2 has no field 'text': its fields are body, id"),
        ("a.jsonl", GOOD + b'["x"]\n', "line 2 has no field 'text': it is not an object"),
        ("a.jsonl", GOOD + record(text=5), "field 'text' of"),
        ("a.jsonl", '{"text": "café"}\n'.encode("latin-1"), "a.jsonl: it is not UTF-8"),
        ("a.txt", "café".encode("latin-1"), "a.txt: it is not UTF-8"),
        ("a.jsonl", b"", "has no document to train on"),
        ("a.txt", b"", "has no document to train on"),
        ("a.jsonl.gz", gzip.compress(GOOD * 9, mtime=0)[:-9], "cannot read"),
        ("a.jsonl.gz", b"not gzip", "cannot read"),
        ("a.jsonl.zst", zstandard.compress(GOOD * 9)[:-3], "a.jsonl.zst: the compressed file ends early"),
        ("a.jsonl.zst", b"not zstandard", "cannot read"),
        ("a.parquet", b"PAR1 and then nothing", "cannot read"),
    ],
)
def test_bad_files(failing, tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    told = failing(source=str(path))
    assert message in told
    assert name in told


def test_bad_parquet_fields(failing, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"body": ["a"], "id": [1]}), tmp_path / "a.parquet")
    assert "has no field 'text': its fields are body, id" in failing(source=str(tmp_path / "a.parquet"))
    assert "field 'id' of" in failing(source=str(tmp_path / "a.parquet"), text_field="id")


def test_unknown_kinds_of_file(failing, tmp_path):
    (tmp_path / "a.csv").write_text("a,b")
    assert "file type of" in failing(source=str(tmp_path / "a.csv"))
    (tmp_path / "folder").mkdir()
    assert "holds no text: a source takes files of .txt, .jsonl" in failing(source=str(tmp_path / "folder"))


def test_bad_tokenizers(failing, tmp_path, monkeypatch):
    from tokenizers import Tokenizer, models

    backend = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    backend.save(str(tmp_path / "no_eos.json"))
    assert "has no token that ends a document (EOS)" in failing(tokenizer=str(tmp_path / "no_eos.json"))
    (tmp_path / "bad.json").write_text("{}")
    assert "is not a tokenizer.json" in failing(tokenizer=str(tmp_path / "bad.json"))
    (tmp_path / "folder").mkdir()
    assert "cannot load tokenizer" in failing(tokenizer=str(tmp_path / "folder"))

    def unreachable(name, kind, **_):
        raise ValueError(f"cannot reach {kind} {name}")

    monkeypatch.setattr(tokenizer, "hub_revision", unreachable)
    assert failing(tokenizer="nobody/no-such-tokenizer") == "cannot reach model nobody/no-such-tokenizer"


def test_a_hub_that_cannot_be_reached(failing, monkeypatch):
    import huggingface_hub

    def refuse(*_, **__):
        raise ConnectionError("Name or service not known\nsecond line")

    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", refuse)
    message = failing(source="mlfoundations/dclm-baseline-1.0-parquet")
    assert message == (
        "cannot reach dataset mlfoundations/dclm-baseline-1.0-parquet on the Hugging Face Hub: "
        "Name or service not known"
    )
    for spec, shown in (("a/b:sub@main", "a/b"), ("squad", "squad")):
        assert f"cannot reach dataset {shown} on" in failing(source=spec)


def test_directories_that_are_not_ours_are_left_alone(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    options = {"source": str(tmp_path / "text.txt"), "tokenizer": "train:bpe:270", "progress": False}
    with pytest.raises(ValueError, match="is not empty and holds no preparation"):
        prepare(out_dir=tmp_path, **options)
    with pytest.raises(ValueError, match="is a file: out_dir takes a directory"):
        prepare(out_dir=tmp_path / "text.txt", **options)
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="in its valid split"):
        prepare(out_dir=tmp_path / "empty", **options, valid_tokens=1e-9)
    assert list((tmp_path / "empty").iterdir()) == []


def test_what_breaks_off_is_kept_and_finished(tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text(TEXT)
    options = {"source": str(tmp_path / "text.txt"), "tokenizer": "train:bpe:270", "valid_tokens": 1, "test_tokens": 1}
    whole = prepare(out_dir=tmp_path / "whole", **options)
    plain = sources.Files.read
    monkeypatch.setattr("isoloco.data.preparation.BATCH_CHARS", 100)

    def broken(self, cursor=None):
        for number, piece in enumerate(plain(self, cursor)):
            if number == 20 and self.name.endswith("text.txt"):
                raise sources.Interrupted("cannot read text.txt: the network is gone")
            yield piece

    prepare_module = __import__("isoloco.data.preparation", fromlist=["x"])
    trained = prepare_module.Preparation._make_tokenizer

    def make_tokenizer(self):
        made = trained(self)
        monkeypatch.setattr(sources.Files, "read", broken)
        return made

    monkeypatch.setattr(prepare_module.Preparation, "_make_tokenizer", make_tokenizer)
    with pytest.raises(ValueError, match="the network is gone; the same command goes on from here"):
        prepare(out_dir=tmp_path / "out", **options)
    monkeypatch.undo()
    prepare(out_dir=tmp_path / "out", **options)
    for path in whole.rglob("*"):
        if path.is_file():
            assert path.read_bytes() == (tmp_path / "out" / path.relative_to(whole)).read_bytes()
