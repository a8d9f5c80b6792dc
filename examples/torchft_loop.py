"""torchft's own DiLoCo with IsoLoCo as its outer optimizer: two replicas, a real Manager each, one Lighthouse, on CPUs.

    pip install 'isoloco[torchft]'
    python examples/torchft_loop.py

The only line that is isoloco's is the one marked with `<--`. torchft keeps the anchors, averages the deltas and decides
whether a round counts; the momentum travels to a replica that joins late, as torchft's state.
"""

import argparse
import math
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo

from isoloco import IsoLoCo

REPLICAS = 2


def rings(seed, size=64):
    """Points [B, 2] and whether they lie on the inner or the outer one of two rings [B]."""
    keyed = torch.Generator().manual_seed(seed)
    ring = torch.randint(2, (size,), generator=keyed)
    angle = torch.rand(size, generator=keyed) * 2 * math.pi
    points = torch.stack([angle.cos(), angle.sin()], 1) * (1 + ring[:, None])
    return points + 0.15 * torch.randn(size, 2, generator=keyed), ring


def replica(number, lighthouse, rounds, sync_every, results):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
    inner = torch.optim.AdamW(model.parameters(), lr=3e-3)
    outer = IsoLoCo(model.parameters(), lr=0.9, momentum=0.6)  # <--
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=30)),
        min_replica_size=REPLICAS,
        use_async_quorum=False,  # as their DiLoCo wants it
        load_state_dict=lambda state: (model.load_state_dict(state["model"]), inner.load_state_dict(state["inner"])),
        state_dict=lambda: {"model": model.state_dict(), "inner": inner.state_dict()},
        replica_id=f"replica{number}",
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        hostname="localhost",
        timeout=timedelta(seconds=30),
        quorum_timeout=timedelta(seconds=60),
    )
    step = 0
    with DiLoCo(manager, [model], inner, outer, sync_every=sync_every):
        while manager.current_step() < rounds:
            points, ring = rings(seed=1 + number + REPLICAS * step)
            F.cross_entropy(model(points), ring).backward()
            inner.step()
            inner.zero_grad()
            step += 1
    points, ring = rings(seed=0, size=2000)
    accuracy = (model(points).argmax(1) == ring).float().mean().item()
    digest = sum(p.double().abs().sum().item() for p in model.parameters())
    results.put((number, outer.transformed, accuracy, digest))
    manager.shutdown(wait=False)


def main(rounds, sync_every):
    """Start a lighthouse and replicas; of each: matrices transformed, accuracy, a number that all weights go into."""
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=REPLICAS, join_timeout_ms=20_000)
    context = mp.get_context("spawn")
    results = context.Queue()
    address = f"http://localhost:{lighthouse.address().rpartition(':')[2]}"
    children = [
        context.Process(target=replica, args=(number, address, rounds, sync_every, results))
        for number in range(REPLICAS)
    ]
    for child in children:
        child.start()
    found = sorted(results.get(timeout=300) for _ in children)
    for child in children:
        child.join()
    lighthouse.shutdown()
    return [rest for _, *rest in found]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--sync-every", type=int, default=20)
    args = parser.parse_args()
    for number, (transformed, accuracy, digest) in enumerate(main(args.rounds, args.sync_every)):
        print(f"replica {number}: {transformed} matrices by Iso-C, accuracy {accuracy:.3f}, weights {digest:.9f}")
