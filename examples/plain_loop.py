"""Two workers in a plain training loop, no language model: a network learns which arm of two spirals a point is on.

    torchrun --nproc-per-node 2 examples/plain_loop.py

What is isoloco's are the lines marked with `<--`; the rest is any loop. A stopped run goes on with --resume.
"""

import argparse
import math
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import isoloco


def spirals(seed, size=128):
    """Points [B, 2] on two arms and which arm each is on [B]; they depend on the seed alone."""
    keyed = torch.Generator().manual_seed(seed)
    arm = torch.randint(2, (size,), generator=keyed)
    turn = torch.rand(size, generator=keyed) * 3 * math.pi
    angle = turn + math.pi * arm
    points = torch.stack([turn * angle.cos(), turn * angle.sin()], 1) / 5
    return points + 0.05 * torch.randn(size, 2, generator=keyed), arm


def main(steps, every, state_dir, resume):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    hidden = [layer for inputs in (2, 64, 64) for layer in (nn.Linear(inputs, 64), nn.ReLU())]
    model = nn.Sequential(*hidden, nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    outer = isoloco.IsoLoCo(model.parameters(), lr=1.0, momentum=0.6)  # <--
    sync = isoloco.DiLoCo(model, outer, sync_every=every)  # <--

    first, saved = 0, Path(state_dir) / f"worker{rank}.pt"  # every worker has a state of its own
    if resume:
        state = torch.load(saved, weights_only=True)
        first = state["step"]
        optimizer.load_state_dict(state["optimizer"])
        sync.load_state_dict(state["sync"])
    for step in range(first, steps):
        points, arm = spirals(seed=1 + rank + 2 * step)  # every worker reads data of its own
        loss = F.cross_entropy(model(points), arm)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if sync.step() and rank == 0 and sync.round % 10 == 0:  # <--
            print(f"round {sync.round:3}  loss {loss.item():.3f}", flush=True)

    saved.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"step": steps, "optimizer": optimizer.state_dict(), "sync": sync.state_dict()}, saved)
    points, arm = spirals(seed=0, size=2000)
    accuracy = (model(points).argmax(1) == arm).float().mean().item()
    if rank == 0:
        print(f"accuracy {accuracy:.3f} after {sync.round} rounds")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--sync-every", type=int, default=20)
    parser.add_argument("--state", default="runs/plain_loop", help="directory of the workers' states")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    main(args.steps, args.sync_every, args.state, args.resume)
