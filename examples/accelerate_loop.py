"""Workers in a loop of accelerate: it places, shards the data and accumulates; isoloco meets instead of DDP.

    accelerate launch --cpu --num_processes 2 examples/accelerate_loop.py
    torchrun --nproc-per-node 2 examples/accelerate_loop.py --cpu

`prepare` would wrap the model in DDP, which averages gradients in every step; `prepare_model(evaluation_mode=True)`
does all the rest of it. `save_state` keeps what process 0 has, so every worker saves its own state here.
"""

import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import isoloco


def parity(bits=6, size=4096):
    """Strings of +-1 [B, bits] and the product of the first three of them, as a class [B]."""
    keyed = torch.Generator().manual_seed(0)
    strings = 2.0 * torch.randint(2, (size, bits), generator=keyed) - 1
    return strings, (strings[:, :3].prod(1) > 0).long()


def main(epochs, every, cpu, accumulate):
    accelerator = Accelerator(cpu=cpu, gradient_accumulation_steps=accumulate)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(TensorDataset(*parity()), batch_size=32, shuffle=True)
    model = accelerator.prepare_model(model, evaluation_mode=True).train()
    optimizer, loader = accelerator.prepare(optimizer, loader)

    outer = isoloco.IsoLoCo(model.parameters(), lr=0.9, momentum=0.6)  # <--
    sync = isoloco.DiLoCo(model, outer, sync_every=every)  # <--
    for _ in range(epochs):
        for strings, labels in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(strings), labels)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:  # the optimizer took a step
                sync.step()  # <--

    strings, labels = (part.to(accelerator.device) for part in parity())
    accuracy = (model(strings).argmax(1) == labels).float().mean().item()
    accelerator.print(f"{accelerator.num_processes} workers, {sync.round} rounds, accuracy {accuracy:.3f}")
    accelerator.end_training()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--sync-every", type=int, default=16)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()
    main(args.epochs, args.sync_every, args.cpu, args.accumulate)
