"""Elastic workers: what a meeting concludes from its cards, flags and configs, and real processes that are killed."""

from __future__ import annotations

import json
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks.elastic_kills import NETWORK, SYNC_EVERY, Crew, anchors, in_phase, options, rejoining
from benchmarks.victims import train_and_exit
from safetensors.torch import load_file

from isoloco import train
from isoloco.config import from_flat
from isoloco.launch import elastic_flags
from isoloco.meeting import Card, arrange
from isoloco.metrics import read_metrics


def card(worker: int, **changes: Any) -> Card:
    made = Card(
        worker=worker, born_s=0.0, identity="a", round=3, step=12, lineage="x", digest="", waits=False, trained=True,
        weight=4.0, loss=1.0, skipped=0, norm=1.0, group="", ticket=f"t{worker}", store="",
    )  # fmt: skip
    return replace(made, **changes)


def test_all_conclude_the_same_from_the_same_cards():
    cards = [card(2), card(0), card(1, round=2, lineage="w")]
    meeting = arrange(cards)
    assert meeting == arrange(cards[::-1])
    assert meeting.workers == [0, 1, 2]
    assert (meeting.base.worker, meeting.donors) == (0, {1: 0})
    assert (meeting.weight, [c.worker for c in meeting.counted]) == (8.0, [0, 2])


def test_those_who_are_behind_share_the_donors():
    fresh = {"round": 0, "lineage": "start", "trained": False, "weight": 0.0}
    meeting = arrange([card(0), card(1, **fresh), card(2), card(3, **fresh), card(4, **fresh)])
    assert meeting.donors == {1: 0, 3: 2, 4: 0}


def test_of_two_anchors_of_one_round_the_one_of_most_members_goes_on():
    meeting = arrange([card(0, lineage="y"), card(1), card(2)])
    assert (meeting.base.worker, meeting.donors, meeting.weight) == (1, {0: 1}, 8.0)


def test_who_has_rounded_apart_gets_the_anchor_and_still_counts():
    meeting = arrange([card(0, digest="p"), card(1, digest="q"), card(2, digest="p")])
    assert (meeting.donors, meeting.weight) == ({1: 0}, 12.0)


def test_the_later_process_of_a_worker_counts_and_another_config_does_not():
    meeting = arrange([card(0), card(1), card(1, born_s=1.0, ticket="later"), card(2, identity="b", round=9)])
    assert [c.ticket for c in meeting.cards] == ["t0", "later"]
    assert meeting.base.identity == "a"


def test_they_wait_for_each_other_only_before_anybody_has_begun():
    fresh = {"waits": True, "trained": False, "weight": 0.0}
    assert arrange([card(0, **fresh), card(1, **fresh)]).waits(3)
    assert not arrange([card(0, **fresh), card(1, **fresh)]).waits(2)
    assert not arrange([card(0), card(1, **fresh)]).waits(3)


def test_the_flags_of_a_launch(monkeypatch):
    monkeypatch.delenv("TORCHFT_LIGHTHOUSE", raising=False)
    assert elastic_flags(["quickstart", "--seed", "1"]) == (["quickstart", "--seed", "1"], None)
    given = ["a.yaml", "--elastic", "--worker-id=3", "--lighthouse", "host:29510", "--seed", "1"]
    assert elastic_flags(given) == (["a.yaml", "--seed", "1"], {"worker": 3, "lighthouse": "host:29510"})
    for bad, told in (
        (["--worker-id", "1"], "goes with --elastic"),
        (["--elastic", "--lighthouse", "h:1"], "needs --worker-id N"),
        (["--elastic", "--worker-id", "x", "--lighthouse", "h:1"], "needs --worker-id N"),
        (["--elastic", "--worker-id"], "--worker-id needs a value"),
        (["--elastic", "--worker-id", "1"], "needs --lighthouse"),
        (["--elastic", "--worker-id", "1", "--resume", "auto"], "leave --resume out"),
    ):
        with pytest.raises(ValueError, match=told):
            elastic_flags(bad)
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", "http://h:1")
    assert elastic_flags(["--elastic", "--worker-id", "1"]) == ([], {"worker": 1, "lighthouse": "http://h:1"})


@pytest.mark.parametrize(
    ("options", "worker", "told"),
    [
        ({"method": "ties"}, 0, "reduce by mean .*isoloco.*; ties reduces by ties"),
        ({"method": "dp"}, 0, "dp averages gradients every step"),
        ({"comm.wire": "int8"}, 0, "comm.wire: --elastic has no int8; leave it at float32"),
        ({"compute.processes_per_worker": 2}, 0, "processes_per_worker: --elastic has no 2; leave it at 1"),
        ({}, 8, "--worker-id: got 8, takes 0 to 7"),
    ],
)
def test_what_elastic_training_cannot_do_is_told(options, worker, told):
    from isoloco.elastic import check

    with pytest.raises(ValueError, match=told):
        check(from_flat(options), worker)


def fork(do: Callable[[], None]) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that threads of the parent are not there: none is needed
        process = os.fork()
    if process == 0:
        do()
        os._exit(1)
    return process


def wait(process: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


@pytest.fixture
def lighthouse() -> Iterator[str]:
    """The address of a Lighthouse in a process of its own."""
    coordination = pytest.importorskip("torchft.coordination", reason="needs the extra torchft")
    pytest.importorskip("torchft.process_group")
    reader, writer = os.pipe()

    def serve() -> None:
        server = coordination.LighthouseServer(
            bind="[::]:0", min_replicas=1, join_timeout_ms=15000, quorum_tick_ms=50, heartbeat_timeout_ms=1500
        )
        os.write(writer, server.address().encode())
        signal.pause()

    process = fork(serve)
    yield os.read(reader, 200).decode()
    os.kill(process, signal.SIGKILL)
    wait(process)
    os.close(reader)
    os.close(writer)


@pytest.fixture(scope="module")
def alone(shards, tmp_path_factory) -> dict[str, Any]:
    """Options of a training that one process has done: whoever is forked from it has imported everything."""
    place = tmp_path_factory.mktemp("alone")
    (place / "network.json").write_text(json.dumps(NETWORK))
    small = {"data.path": str(shards), "eval.tokens": 512, "log.every_steps": 1}
    values = options(place, "run", rounds=3, workers=2) | small
    train(from_flat(values))
    return values


@pytest.fixture
def crew(lighthouse, alone, tmp_path) -> Iterator[Callable[[int], Crew]]:
    """Makes two workers, to be started, that train so many rounds."""
    made: list[Crew] = []

    def make(rounds: int) -> Crew:
        values = alone | {"out_dir": str(tmp_path / "elastic"), "budget.steps": rounds * SYNC_EVERY}
        made.append(Crew(tmp_path, values, lighthouse, start=lambda job: fork(lambda: train_and_exit(job)), wait=wait))
        return made[-1]

    yield make
    for each in made:
        for worker in list(each.pids):
            each.kill(worker)


@pytest.mark.dist
@pytest.mark.slow
def test_undisturbed_it_is_the_run_of_one_process(crew, alone):
    two = crew(3)
    for worker in two.workers:
        two.start(worker)
    assert two.end() == {0: 0, 1: 0}
    two.pids.clear()
    runs = (two.run / "worker-0", Path(alone["out_dir"]))
    ours, theirs = (load_file(run / "model/model.safetensors") for run in runs)
    for name, tensor in theirs.items():
        assert (ours[name] - tensor).norm() <= 1e-3 * tensor.norm(), name
    first, second = (read_metrics(two.run / f"worker-{worker}") for worker in two.workers)
    rounds = [[r["train_loss"] for r in records if r["kind"] == "round"] for records in (first, second)]
    assert rounds[0] == rounds[1]
    assert len(rounds[0]) == 3
    assert [sum(r["kind"] == "eval" for r in records) for records in (first, second)] == [1, 0]
    assert all(len(set(found)) == 1 and len(found) == 2 for found in anchors(two.run).values())


@pytest.mark.dist
@pytest.mark.slow
def test_workers_that_are_killed_cost_a_round_and_come_back(crew):
    two = crew(28)
    for worker in two.workers:
        two.start(worker)
    for aim in (lambda: in_phase(two, 1, "reduce"), lambda: rejoining(two, 0, "take")):
        assert any(aim().hit for _ in range(3))
    assert two.end() == {0: 0, 1: 0}
    two.pids.clear()
    kept = anchors(two.run)
    assert all(len(set(found)) == 1 for found in kept.values())
    assert len(kept[max(kept)]) == 2
