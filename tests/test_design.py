"""docs/design.md against the tree: the modules that it lists, the five files of a round, and how long files are."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "isoloco"
PAGE = (ROOT / "docs" / "design.md").read_text("utf-8")


def lines(path: Path) -> int:
    return len(path.read_text("utf-8").splitlines())


def test_a_round_is_read_in_five_files_under_300_lines():
    (order,) = re.findall(r"opens (\w+(?: -> \w+)+): five files", PAGE)
    files = order.split(" -> ")
    assert len(files) == 5
    assert all(lines(PACKAGE / f"{name}.py") < 300 for name in files)


def test_no_file_is_over_400_lines():
    folders = (ROOT / folder for folder in ("src", "tests", "benchmarks", "examples"))
    assert [path for folder in folders for path in folder.rglob("*.py") if lines(path) > 400] == []


def test_the_layout_lists_every_module_and_no_other():
    layout = PAGE.partition("## Layout")[2].partition("\n## ")[0]
    listed = set(re.findall(r"\b(\w+)\.py", layout))
    own = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", "__main__", "_version"}
    assert own - listed == set()
    assert listed - {path.stem for path in PACKAGE.rglob("*.py")} == set()
