"""Train on an IterableDataset, which the main process reads and dispatches, and continue after an epoch.
The scheduler advances once an epoch, so it is not prepared but registered for checkpoints."""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    def __init__(self, number, seed=5):
        super().__init__()
        self.number, self.seed, self.epoch = number, seed, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed)
        rows = torch.randn(self.number, 10, generator=generator)
        order = torch.randperm(self.number, generator=generator.manual_seed(self.seed + self.epoch))
        for row in rows[order]:
            yield row, row[:5].prod().view(1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--dir", type=Path, default=Path("stream"))
    parser.add_argument("--resume", type=Path)
    args = parser.parse_args()

    set_seed(21)
    accelerator = Accelerator()
    model = nn.Sequential(nn.Linear(10, 64), nn.GELU(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
    loader = DataLoader(Stream(args.rows), batch_size=args.batch)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.register_for_checkpointing(scheduler)

    first_epoch = 0
    if args.resume:
        accelerator.load_state(str(args.resume))
        first_epoch = int(args.resume.name.removeprefix("epoch")) + 1

    for epoch in range(first_epoch, args.epochs):
        loader.set_epoch(epoch)
        total = torch.zeros(2)
        for rows, targets in loader:
            loss = nn.functional.mse_loss(model(rows), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            total += torch.tensor([loss.item() * len(rows), len(rows)])
        scheduler.step()
        total = accelerator.reduce(total, reduction="sum")
        if accelerator.is_main_process:
            args.dir.mkdir(parents=True, exist_ok=True)
            with (args.dir / "log.txt").open("a") as log:
                log.write(f"epoch {epoch} loss {total[0] / total[1]:.6f} lr {scheduler.get_last_lr()[0]}\n")
        accelerator.save_state(str(args.dir / f"epoch{epoch}"))
    accelerator.end_training()


if __name__ == "__main__":
    main()
