"""The pages that are generated are those that the code gives."""

from pathlib import Path

import pytest

from isoloco import reference
from isoloco.config import options
from isoloco.presets import METHODS
from isoloco.rules import REDUCES, TRANSFORMS

DOCS = Path(__file__).parent.parent / "docs"


def test_the_pages_are_current():
    told = "run python -m isoloco.reference"
    assert (DOCS / "config.md").read_text("utf-8") == reference.config_page(), told
    methods = (DOCS / "methods.md").read_text("utf-8")
    assert methods == reference.methods_page(methods), told


def test_writing_the_pages_keeps_what_was_written_by_hand(tmp_path):
    (tmp_path / "methods.md").write_text(f"Before.\n{reference.BEGIN}\nold\n{reference.END}\nAfter.\n")
    assert reference.main([str(tmp_path)]) == 0
    methods = (tmp_path / "methods.md").read_text("utf-8")
    assert methods.startswith(f"Before.\n{reference.BEGIN}\n\n## Methods\n")
    assert methods.endswith(f"{reference.END}\nAfter.\n")
    assert "\nold\n" not in methods
    with pytest.raises(ValueError, match="no place for the tables"):
        reference.methods_page("nothing here")


def test_they_name_everything_there_is():
    config, methods = (DOCS / "config.md").read_text("utf-8"), (DOCS / "methods.md").read_text("utf-8")
    for key, option in options().items():
        [row] = [line for line in config.splitlines() if line.startswith(f"| `{key}` |")]
        assert row.endswith(f"| {option.affects} |")
    assert all(f"| `{name}` |" in methods and f"- `{name}`: " in methods for name in METHODS)
    assert all(f"### `{name}`\n" in methods for name in (*REDUCES, *TRANSFORMS))


@pytest.mark.parametrize("width", [60, 80, 110])
def test_the_help_fits_the_terminal(width):
    lines = reference.option_help(width).splitlines()
    assert max(map(len, lines)) <= max(width, 64)  # below that it would be a column of single words
    words = " ".join(" ".join(lines).split())
    assert "--workers N Replicas that train apart (W). [8]" in words
    assert "--inner.betas X,X AdamW's averages of gradient and square. [0.9, 0.95]" in words
    assert "--comm.wire float32|bfloat16|int8 Code of the deltas" in words
