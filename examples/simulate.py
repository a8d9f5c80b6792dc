"""An image classifier trained by eight simulated workers, and a rule of your own: the median of their deltas.

    python examples/simulate.py

The images are made here: 8 x 8 pictures of a bar, a cross, a box and so on, shifted and noisy. Nothing is tuned, so
that the accuracies show how it is done, not which method is best.
"""

import torch
import torch.nn.functional as F
from torch import nn

from isoloco import simulate
from isoloco.config import InnerConfig

SHAPES = torch.zeros(6, 8, 8)
SHAPES[0, 2:6, 3] = SHAPES[1, 3, 2:6] = 1  # bars
SHAPES[2, 2:6, 3] = SHAPES[2, 3, 2:6] = 1  # a cross
SHAPES[3, 2:6, 2:6] = 1  # a block
SHAPES[4, 2:6, 2:6] = 1 - F.pad(torch.ones(2, 2), (1, 1, 1, 1))  # a box
SHAPES[5, range(2, 6), range(2, 6)] = 1  # a diagonal


def draw(seed, size=32):
    """Images [B, 64] and labels [B] that depend on the seed alone."""
    keyed = torch.Generator().manual_seed(seed)
    labels = torch.randint(len(SHAPES), (size,), generator=keyed)
    shifts = torch.randint(-2, 3, (size, 2), generator=keyed).tolist()
    images = torch.stack([SHAPES[y].roll(by, (0, 1)) for y, by in zip(labels, shifts, strict=True)])
    return (images + 0.3 * torch.randn(size, 8, 8, generator=keyed)).flatten(1), labels


def median(deltas_WS, weights_W, *, shrink=1.0):
    """A reduce is any function of the stacked deltas; keyword-only arguments become its options."""
    return shrink * deltas_WS.median(0).values


def accuracy(model):
    images, labels = draw(seed=0, size=1000)
    with torch.no_grad():
        return (model(images).argmax(1) == labels).float().mean().item()


for name, options in {"diloco": {}, "isoloco": {}, "diloco_sgd": {"reduce": median}}.items():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, len(SHAPES)))
    result = simulate(
        model,
        lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        lambda worker, step: draw(seed=1 + worker + 8 * step),
        workers=8, sync_every=10, rounds=12, method=name, inner=InnerConfig(lr=1e-2), evaluate=accuracy, **options,
    )  # fmt: skip
    rule = f"{name}, median" if options else name
    print(f"{rule:<20} loss {result.losses[-1]:.3f}  accuracy {result.evaluations[-1][1]:.3f}")
