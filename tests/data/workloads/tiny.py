"""A small healthy workload of a user's own: one linear layer over random rows."""

import torch


class Tiny:
    name = "tiny"
    data = None
    seq_len = 16

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Linear(64, 64)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def loss_of(self, b: int) -> torch.Tensor:
        rows = torch.ones(b * self.seq_len, 64)
        return self.model(rows).square().mean()

    def named_weights(self):
        return self.model.named_parameters()


def make(settings):
    return Tiny(settings.seed)


def raises(settings):
    raise RuntimeError("the tokenizer of this team is not here")


class Hangs(Tiny):
    def loss_of(self, b):
        import time

        while True:
            time.sleep(1)


def hangs(settings):
    return Hangs(settings.seed)


class Exits(Tiny):
    def loss_of(self, b):
        import os

        os._exit(7)


def exits(settings):
    return Exits(settings.seed)


class Greedy(Tiny):
    def loss_of(self, b):
        held = torch.ones(1 << 28)  # 1 GiB a row, whatever the cap
        return super().loss_of(b) + held[:1].sum() * 0


def greedy(settings):
    return Greedy(settings.seed)


class Wide(Tiny):
    def loss_of(self, b):
        held = torch.ones(b, 1 << 19)  # 2 MiB a row: the edge is near, and each step is quick
        return super().loss_of(b) + held[:, :1].sum() * 0


def wide(settings):
    return Wide(settings.seed)
