"""Classify texts of different lengths; split_batches keeps the global batch whatever the number of processes.
The validation loss is a mean over gathered samples, not over batches."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

EPOCHS = 3
LEARNING_RATE = 0.5


class TextClassifier(nn.Module):
    def __init__(self, vocabulary=50, width=24, classes=4):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width, padding_idx=0)
        self.head = nn.Linear(width, classes)

    def forward(self, input_ids):
        mask = (input_ids != 0).unsqueeze(-1)
        pooled = (self.embedding(input_ids) * mask).sum(dim=1) / mask.sum(dim=1)
        return self.head(pooled)


def make_texts(number, seed):
    generator = torch.Generator().manual_seed(seed)
    texts = []
    for _ in range(number):
        length = int(torch.randint(3, 12, (1,), generator=generator))
        ids = torch.randint(1, 50, (length,), generator=generator)
        texts.append((ids, int(ids.sum()) % 4))
    return texts


def collate(samples):
    texts, labels = zip(*samples, strict=True)
    return pad_sequence(texts, batch_first=True), torch.tensor(labels)


def main():
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True))
    set_seed(7)
    train_loader = DataLoader(make_texts(128, 1), batch_size=16, shuffle=True, collate_fn=collate)
    val_loader = DataLoader(make_texts(64, 2), batch_size=16, collate_fn=collate)
    model = TextClassifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=LEARNING_RATE, total_steps=len(train_loader) * EPOCHS, cycle_momentum=False
    )
    model, optimizer, train_loader, val_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, val_loader, scheduler
    )

    for epoch in range(EPOCHS):
        model.train()
        for input_ids, labels in train_loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(input_ids), labels)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
        model.eval()
        losses = []
        with torch.no_grad():
            for input_ids, labels in val_loader:
                loss = F.cross_entropy(model(input_ids), labels, reduction="none")
                losses.append(accelerator.gather_for_metrics(loss))
        val_loss = torch.cat(losses)
        accelerator.print(f"epoch {epoch}: validation loss {val_loss.mean():.6f} of {len(val_loss)} texts")
    accelerator.end_training()


if __name__ == "__main__":
    main()
