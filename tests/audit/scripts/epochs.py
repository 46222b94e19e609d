"""Train a classifier for a few epochs, with warm-up and linear decay of the learning rate.
The accuracy counts each validation sample once, although the last batch is not full."""

import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import get_scheduler


def get_dataloaders(batch_size):
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(86, 16, generator=generator)
    labels = (features @ torch.randn(16, 3, generator=generator)).argmax(dim=1)
    train_dataloader = DataLoader(TensorDataset(features[:48], labels[:48]), shuffle=True, batch_size=batch_size)
    eval_dataloader = DataLoader(TensorDataset(features[48:], labels[48:]), shuffle=False, batch_size=batch_size)
    return train_dataloader, eval_dataloader


def training_function(args):
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    set_seed(args.seed)
    train_dataloader, eval_dataloader = get_dataloaders(args.batch_size)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    num_training_steps = len(train_dataloader) * args.num_epochs
    lr_scheduler = get_scheduler(
        "linear", optimizer, num_warmup_steps=num_training_steps // 6, num_training_steps=num_training_steps
    )
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )

    for epoch in range(args.num_epochs):
        model.train()
        for features, labels in train_dataloader:
            loss = F.cross_entropy(model(features), labels)
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()

        model.eval()
        correct, total = 0, 0
        for features, labels in eval_dataloader:
            with torch.no_grad():
                predictions = model(features).argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, labels))
            correct += (predictions == references).sum().item()
            total += len(references)
        accelerator.print(f"epoch {epoch}: accuracy {correct / total:.4f} over {total} samples")
    accelerator.end_training()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--num_epochs", type=int, default=2)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=42)
    training_function(parser.parse_args())


if __name__ == "__main__":
    main()
