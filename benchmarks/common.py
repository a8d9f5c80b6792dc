"""What the benchmarks share: facts of the machine, process CPU time, bars, one table, and files of results."""

from __future__ import annotations

import csv
import json
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, kw_only=True)
class Bar:
    """What a benchmark has to reach; ``passed`` None: it says nothing about this machine."""

    what: str
    measured: str
    passed: bool | None

    def __str__(self) -> str:
        verdict = {True: "pass", False: "FAIL", None: "not applicable"}[self.passed]
        return f"{verdict:>14}  {self.what}: {self.measured}"


def machine() -> dict[str, Any]:
    return {
        "cpu": _cpu_name(),
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "bf16_instructions": has_bf16(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def has_bf16() -> bool:
    """Whether the CPU multiplies bfloat16 in hardware."""
    return any(bool(value) for name, value in torch.cpu.get_capabilities().items() if "bf16" in name)


def cpu_seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    """Process CPU time of one call and what it returns: other processes on the machine hardly count."""
    start = time.process_time()
    result = work()
    return time.process_time() - start, result


def report(name: str, rows: Sequence[dict[str, Any]], bars: Sequence[Bar], *, out: Path | None) -> int:
    """Print one table and the bars, write ``name.json`` and ``name.csv``; 1 if a bar fails, else 0."""
    facts = machine()
    print("  ".join(f"{key} {value}" for key, value in facts.items()), end="\n\n")
    columns = list(rows[0])
    cells = [columns, *([_cell(row[column]) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    for line in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    print()
    for bar in bars:
        print(bar)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        result = {"machine": facts, "bars": [asdict(bar) for bar in bars], "rows": rows}
        (out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        with (out / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows({column: _cell(row[column]) for column in columns} for row in rows)
    return int(any(bar.passed is False for bar in bars))


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
