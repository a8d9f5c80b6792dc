"""A training that only tells: the calls that a Tracker hears, with made-up numbers."""

import math

from isoloco.config import RunConfig
from isoloco.tracking import RunDir, Tracker

H, W, ROUNDS = 5, 2, 4


def config(out_dir, **fields) -> RunConfig:
    return RunConfig(out_dir=str(out_dir), workers=W, sync_every=H, global_batch_size=4, **fields)


def tracker(run_dir: RunDir, conf: RunConfig, **options) -> Tracker:
    return Tracker(run_dir, config=conf, total_rounds=ROUNDS, total_steps=ROUNDS * H, **options)


def play(t: Tracker, *, first: int = 1, last: int = ROUNDS, slow: float = 1.0) -> None:
    """What a training tells: ``slow`` scales only what takes time."""
    for r in range(first, last + 1):
        for worker in range(W):
            for k in range(1, H + 1):
                step = (r - 1) * H + k
                loss = 8 / math.sqrt(step) + 0.1 * worker
                t.inner(round=r, step=step, worker=worker, loss=loss, grad_norm=1.0, lr=1e-3, tokens=step * 64)
                t.progress(
                    round=r, step_in_round=k, steps_of_round=H, worker_index=worker, workers=W, loss=loss,
                    tokens_per_s=100.0 / slow,
                )  # fmt: skip
        t.round(
            {
                "step": r * H, "round": r, "tokens": r * H * 64, "train_loss": 8 / r, "train_loss_spread": 0.1,
                "delta_norm": 0.5, "delta_cosine": 0.2, "dropped": [], "sent_bytes": 100, "received_bytes": 50,
                "inner_s": 2.0 * slow, "reduce_s": 0.1 * slow, "outer_s": 0.1 * slow, "eval_s": 0.0,
                "tokens_per_s": 64.0 / slow, "resources_s": {"mfu": None, "peak_memory_bytes": int(1000 * slow)},
            }
        )  # fmt: skip
        loss = [3.0, 2.5, 2.8, 2.6][r - 1]
        t.evaluation(
            round=r, step=r * H, tokens=r * H * 64, split="valid", loss=loss, perplexity=math.exp(loss),
            bits_per_byte=loss / 3, eval_s=0.2 * slow,
        )  # fmt: skip
