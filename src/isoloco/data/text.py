"""Documents in plain text, and long documents in pieces, so that memory is bounded whatever their length."""

import io
from collections.abc import Iterable, Iterator
from typing import TextIO

SEPARATOR = "<|endoftext|>"  # a line of this between two documents of a text file
PIECE_CHARS = 2**18  # longer documents are read and encoded in pieces of about this length


def lines_of(file: TextIO) -> Iterator[str]:
    """The lines of a file, an endless one in parts."""
    while line := file.readline(PIECE_CHARS):
        yield line


def cut(text: str) -> Iterator[tuple[str, bool]]:
    """A document in pieces, each with whether it is the last."""
    if len(text) <= PIECE_CHARS:
        yield text, True
    else:
        yield from split_documents(lines_of(io.StringIO(text, newline="\n")), None)


def split_documents(lines: Iterable[str], separator: str | None) -> Iterator[tuple[str, bool]]:
    """Documents between lines of the separator alone (to which the line end before it belongs), in pieces.

    A piece ends where a line that is not blank is followed by one that does not begin with space: there the usual
    byte-level tokenizers give the same tokens for the pieces as for the whole. Where four times the length has no such
    place, it ends anywhere.
    """
    held: list[str] = []
    size, previous = 0, "\n"
    for line in lines:
        begins = previous.endswith("\n")
        if separator and begins and line.rstrip("\r\n") == separator:
            yield "".join(held).removesuffix("\n").removesuffix("\r"), True
            held, size = [], 0
        else:
            seam = begins and not previous.isspace() and not line[0].isspace()
            if held and ((size >= PIECE_CHARS and seam) or size >= 4 * PIECE_CHARS):
                yield "".join(held), False
                held, size = [], 0
            held.append(line)
            size += len(line)
        previous = line
    if held:
        yield "".join(held), True
