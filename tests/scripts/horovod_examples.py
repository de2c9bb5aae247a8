"""The calls of Horovod's own PyTorch examples, in their order; only the import line differs.

Usage: python horovod_examples.py FOLDER
"""

import math
import os
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn, optim

import thinwire.horovod as hvd

folder = sys.argv[1]
hvd.init()
torch.set_num_threads(1)


def batches(steps, size=24):
    generator = torch.Generator().manual_seed(hvd.rank())
    for step in range(steps):
        # The last one is short, as the last one of an epoch is.
        count = size if step < steps - 1 else size // 3
        data = torch.randn(count, 40, generator=generator)
        yield data, data[:, :4].argmax(1)


def make_model():
    torch.manual_seed(42 + hvd.rank())
    return nn.Sequential(nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 4))


def same_everywhere(model):
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])[None]
    return bool((hvd.allgather(weights) == weights).all())


def mnist(use_adasum, fp16_allreduce, gradient_predivide_factor):
    """As in pytorch_mnist.py."""
    model = make_model()
    lr_scaler = hvd.size() if not use_adasum else 1
    optimizer = optim.SGD(model.parameters(), lr=0.05 * lr_scaler, momentum=0.5)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    compression = hvd.Compression.fp16 if fp16_allreduce else hvd.Compression.none
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=compression,
        op=hvd.Adasum if use_adasum else hvd.Average,
        gradient_predivide_factor=gradient_predivide_factor,
    )
    losses = []
    for _ in range(6):
        for data, target in batches(4):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data), target)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    average = hvd.allreduce(torch.tensor(losses[-4:]).mean(), name="avg_loss")
    assert average.item() < 0.8 * losses[0], (losses[0], average.item())
    assert same_everywhere(model)


class Metric:
    def __init__(self, name):
        self.name, self.sum, self.n = name, torch.tensor(0.0), torch.tensor(0.0)

    def update(self, val):
        self.sum += hvd.allreduce(val.detach().cpu(), name=self.name)
        self.n += 1


def imagenet(epochs, use_adasum=False, batches_per_allreduce=3, batch_size=8):
    """As in pytorch_imagenet_resnet50.py: several backwards per step, fewer of them in the last one of an epoch."""
    checkpoint_format = f"{folder}/checkpoint-{use_adasum}-{{epoch}}.pt"
    resume_from_epoch = 0
    for try_epoch in range(epochs, 0, -1):
        if Path(checkpoint_format.format(epoch=try_epoch)).exists():
            resume_from_epoch = try_epoch
            break
    resume_from_epoch = hvd.broadcast(
        torch.tensor(resume_from_epoch), root_rank=0, name="resume_from_epoch"
    ).item()
    model = make_model()
    optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.00005)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.none,
        backward_passes_per_step=batches_per_allreduce,
        op=hvd.Adasum if use_adasum else hvd.Average,
        gradient_predivide_factor=1.0,
    )
    if resume_from_epoch > 0 and hvd.rank() == 0:
        checkpoint = torch.load(checkpoint_format.format(epoch=resume_from_epoch))
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for epoch in range(resume_from_epoch, epochs):
        train_loss = Metric("train_loss")
        for data, target in batches(3):
            for param_group in optimizer.param_groups:
                param_group["lr"] = 0.05 / (epoch + 1)
            optimizer.zero_grad()
            for i in range(0, len(data), batch_size):
                loss = F.cross_entropy(model(data[i : i + batch_size]), target[i : i + batch_size])
                train_loss.update(loss)
                loss.div_(math.ceil(float(len(data)) / batch_size))
                loss.backward()
            optimizer.step()
        assert same_everywhere(model)
        if hvd.rank() == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, checkpoint_format.format(epoch=epoch + 1))
        hvd.barrier()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


for adasum in (False, True):
    mnist(adasum, fp16_allreduce=False, gradient_predivide_factor=1.0)
    mnist(adasum, fp16_allreduce=True, gradient_predivide_factor=1.0 if adasum else 2.0)
    first = imagenet(1, adasum)
    resumed = imagenet(2, adasum)
    assert not torch.equal(first, resumed)
hvd.barrier()
print("examples done", flush=True)
os._exit(0)
