"""Train a small language model on sequences with different numbers of tokens.
The loss of a step is divided by the tokens of all its micro-batches on all processes."""

import argparse
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Sequences(Dataset):
    def __init__(self, number=96, length=12, vocabulary=40):
        generator = torch.Generator().manual_seed(11)
        self.ids = torch.randint(1, vocabulary, (number, length), generator=generator)
        self.lengths = torch.randint(2, length + 1, (number,), generator=generator)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        input_ids = self.ids[index].clone()
        labels = torch.roll(input_ids, -1)
        labels[self.lengths[index] - 1 :] = -100
        return {"input_ids": input_ids, "labels": labels}


class LanguageModel(nn.Module):
    def __init__(self, vocabulary=40, width=32, length=12, dropout=0.0):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.zeros(length, width))
        layer = nn.TransformerEncoderLayer(width, 2, 64, dropout=dropout, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, input_ids):
        mask = nn.Transformer.generate_square_subsequent_mask(input_ids.shape[1])
        hidden = self.layers(self.tokens(input_ids) + self.positions, mask=mask, is_causal=True)
        return self.head(hidden)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--accumulation", type=int, default=2)
    parser.add_argument("--dropout", type=float, default=0.0)
    args = parser.parse_args()

    accelerator = Accelerator(gradient_accumulation_steps=args.accumulation)
    set_seed(1234)
    model = LanguageModel(dropout=args.dropout)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    loader = DataLoader(Sequences(), args.batch_size, shuffle=True, generator=torch.Generator().manual_seed(3))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    for epoch in range(args.epochs):
        iterator = iter(loader)
        for _ in range(len(loader) // args.accumulation):
            batches = [next(iterator) for _ in range(args.accumulation)]
            num_tokens = sum((batch["labels"] != -100).sum() for batch in batches)
            num_tokens = accelerator.reduce(num_tokens, reduction="sum")
            step_loss = 0.0
            for i, batch in enumerate(batches):
                last = i == len(batches) - 1
                with nullcontext() if last else accelerator.no_sync(model):
                    logits = model(batch["input_ids"])
                    loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
                    loss = loss * args.accumulation * accelerator.num_processes / num_tokens
                    accelerator.backward(loss)
                    step_loss += accelerator.gather(loss.detach()).mean().item() / args.accumulation
            optimizer.step()
            optimizer.zero_grad()
            accelerator.print(f"epoch {epoch} loss {step_loss:.6f} tokens {int(num_tokens)}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
