"""overview.png: what it draws for each kind of run, and that it leaves nothing behind."""

import math
import struct
import subprocess
import sys

import pytest

from isoloco import plots
from isoloco.config import RunConfig, to_dict
from isoloco.tracking import RunDir, Tracker

H, W, ROUNDS = 10, 2, 6


def run(path, method: str, *, rounds: int = ROUNDS, sigma=(1.0, 0.5, 0.1), after=(0.5, 0.5, 0.5)) -> RunDir:
    conf = RunConfig(out_dir=str(path), method=method, workers=W, sync_every=H, global_batch_size=4)
    run_dir = RunDir.create(conf)
    run_dir.update(parameters=1_310_000)
    run_dir.write_config(to_dict(conf), {})
    with Tracker(run_dir, config=conf, total_rounds=ROUNDS, total_steps=ROUNDS * H, quiet=True) as t:
        for r in range(1, rounds + 1):
            for worker in range(W):
                for step in range((r - 1) * H + 1, r * H + 1):
                    fields = {"loss": 5 / r, "grad_norm": 2 / step + worker, "lr": 1e-3 / step, "tokens": step * 1000}
                    t.inner(round=r, step=step, worker=worker, **fields)
            tokens = r * H * 1000
            t.round({"round": r, "step": r * H, "tokens": tokens, "train_loss": 5 / r, "train_loss_spread": 0.2})
            loss = 5 / r + (0.1 if r < ROUNDS else 1.0)
            fields = {
                "split": "valid",
                "loss": loss,
                "perplexity": math.exp(loss),
                "bits_per_byte": None,
                "eval_s": 0.0,
            }
            t.evaluation(round=r, step=r * H, tokens=tokens, **fields)
            if method != "dp":
                values = {"before": list(sigma), "after": list(after), "stable_rank": 1.3, "rms_over_mean": 1.2}
                t.spectra(
                    round=r, step=r * H, matrices={"model.layers.0.q_proj.weight": values, "lm_head.weight": values}
                )
    return run_dir


@pytest.fixture
def drawn(monkeypatch):
    """Figures instead of files: to look into, and to spare the time of their rendering."""
    figures = []

    def keep(figure, path):
        figures.append(figure)
        return path

    monkeypatch.setattr(plots, "save", keep)
    return figures


def labels(axes) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_a_run_with_a_transform(tmp_path, drawn):
    plots.overview(run(tmp_path / "r", "isoloco").path)
    loss, spectra = drawn[0].axes
    assert drawn[0].get_suptitle().split("     ") == ["isoloco", "W = 2", "H = 10", "1.31 M parameters"]
    assert (loss.get_xlabel(), loss.get_ylabel()) == ("tokens (thousands)", "loss (nats per token)")
    assert labels(loss) == ["train, mean of a round", "spread over workers", "validation", "best, 1.1000"]
    train, valid, best = loss.lines
    assert list(train.get_xdata()) == [10, 20, 30, 40, 50, 60]
    assert list(train.get_ydata()) == [5 / r for r in range(1, 7)]
    assert list(best.get_xdata()) == [50], "the best, not the last"
    assert valid.get_ydata()[-1] > valid.get_ydata()[-2]
    assert spectra.get_yscale() == "log"
    assert labels(spectra) == ["layers.0.q_proj", "lm_head", "before", "after iso_c"]
    assert [list(line.get_ydata()) for line in spectra.lines[:2]] == [[1.0, 0.5, 0.1], [0.5, 0.5, 0.5]]
    assert list(spectra.lines[0].get_xdata()) == [0, 0.5, 1]


def test_a_run_without_a_transform_shows_one_curve_for_each_matrix(tmp_path, drawn):
    plots.overview(run(tmp_path / "r", "diloco", after=(1.0, 0.5, 0.1)).path)
    spectra = drawn[0].axes[1]
    assert labels(spectra) == ["layers.0.q_proj", "lm_head"]
    assert len(spectra.lines) == 2


def test_data_parallel_training_shows_gradient_norm_and_learning_rate(tmp_path, drawn):
    plots.overview(run(tmp_path / "r", "dp").path)
    _, norm, lr = drawn[0].axes
    assert (norm.get_ylabel(), lr.get_ylabel(), lr.get_xlabel()) == ("gradient norm", "learning rate", "inner step")
    assert list(norm.lines[0].get_ydata()[:2]) == [2.5, 1.5], "the mean over the workers"
    assert len(lr.lines[0].get_ydata()) == ROUNDS * H
    assert "H = " not in drawn[0].get_suptitle()
    drawn[0].draw_without_rendering()


@pytest.mark.parametrize("sigma", [(0.0, 0.0, 0.0), (1.0, 0.0, 1e-20, math.nan), (0.3,)])
def test_spectra_that_a_log_axis_cannot_hold(tmp_path, drawn, sigma):
    plots.overview(run(tmp_path / "r", "isoloco", rounds=1, sigma=sigma, after=sigma).path)
    drawn[0].draw_without_rendering()
    axes = drawn[0].axes[1]
    bottom, top = axes.get_ylim()
    assert axes.get_yscale() == ("log" if sigma[0] else "linear")
    assert top > bottom
    assert sigma[0] == 0 or top / bottom < 10**8


def test_a_run_that_ended_before_its_first_round_has_a_picture(tmp_path):
    assert plots.overview(run(tmp_path / "r", "isoloco", rounds=0).path).stat().st_size > 10_000
    bare = RunDir.create(RunConfig(out_dir=str(tmp_path / "bare")))
    assert plots.overview(bare.path).exists()


def test_a_directory_without_a_run_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="no run directory"):
        plots.overview(tmp_path)


def test_equal_runs_have_equal_pictures_and_nothing_is_left_behind(tmp_path):
    import matplotlib

    before = dict(matplotlib.rcParams)
    pictures = [plots.overview(run(tmp_path / name, "isoloco", rounds=2).path).read_bytes() for name in "ab"]
    assert pictures[0] == pictures[1]
    assert pictures[0].startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">II", pictures[0][16:24]) == (1875, 780)
    assert dict(matplotlib.rcParams) == before
    left = {p.name for p in (tmp_path / "a").iterdir()} - {"run.lock"}  # which whoever claimed the run may leave
    assert left == {"run.json", "config.yaml", "metrics.jsonl", "overview.png"}


def test_drawing_needs_no_pyplot_and_importing_no_matplotlib(tmp_path):
    path = run(tmp_path / "r", "isoloco", rounds=1).path
    code = f"""
import sys
from isoloco import plots, tracking
assert not {{"matplotlib", "rich", "torch", "tensorboard"}} & set(sys.modules)
plots.overview({str(path)!r})
assert "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
