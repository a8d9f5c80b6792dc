"""Trainings killed with SIGKILL in every phase end as those that were not (more of it: benchmarks/kill_matrix.py)."""

import pytest
from benchmarks.kill_matrix import METHODS, PHASES, run_matrix

pytestmark = [pytest.mark.slow, pytest.mark.dist]


def test_a_dozen_kills_change_nothing(tmp_path):
    kills = {phase: 1 if phase in ("start", "end") else 2 for phase in PHASES}
    outcomes = run_matrix(tmp_path, kills=kills, methods=list(METHODS), seed=1, most=3)
    killed = [outcome for outcome in outcomes if outcome.hit != "none"]
    assert len(killed) >= 12
    assert [outcome for outcome in outcomes if outcome.differences] == []
    # where the machine is busy a short phase may be missed
    assert len({outcome.hit for outcome in killed} & set(PHASES)) >= 5
