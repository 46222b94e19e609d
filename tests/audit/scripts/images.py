"""Train a small convolutional network on images, with batch or group normalization and augmentation by choice.
The seed differs between the processes, so that each augments in its own way; the model and the order do not."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Images(Dataset):
    def __init__(self, number, noise):
        generator = torch.Generator().manual_seed(99)
        self.images = torch.randn(number, 3, 8, 8, generator=generator)
        self.labels = (self.images[:, 0].mean(dim=(1, 2)) > 0).long()
        self.noise = noise

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = self.images[index]
        if self.noise:
            image = image + self.noise * torch.randn(image.shape)
        return image, self.labels[index]


def build_model(norm):
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1),
        nn.BatchNorm2d(16) if norm == "batch" else nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 2),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--norm", choices=("group", "batch"), default="group")
    parser.add_argument("--noise", type=float, default=0.0)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=0.1)
    args = parser.parse_args()

    accelerator = Accelerator()
    set_seed(17, device_specific=True)
    order = torch.Generator().manual_seed(17)
    dataloader = DataLoader(Images(96, args.noise), args.batch_size, shuffle=True, generator=order)
    model = build_model(args.norm)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, nesterov=True, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    dataloader, model, optimizer = accelerator.prepare(dataloader, model, optimizer)
    for epoch in range(args.epochs):
        for images, labels in dataloader:
            loss = criterion(model(images), labels)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        accelerator.print("epoch", epoch, "loss", accelerator.reduce(loss.detach(), "mean").item())
    accelerator.end_training()
