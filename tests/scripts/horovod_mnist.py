"""A training script in Horovod's documented style; only its import line differs.

Usage: python horovod_mnist.py
"""

import os
import sys

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn, optim

import thinwire.horovod as hvd


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, kernel_size=3)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=3)
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = F.relu(self.fc1(x.flatten(1)))
        return F.log_softmax(self.fc2(x), dim=1)


hvd.init()
torch.manual_seed(42 + hvd.rank())
torch.set_num_threads(1)
digits = load_digits()
dataset = torch.utils.data.TensorDataset(
    torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, torch.tensor(digits.target)
)
sampler = torch.utils.data.distributed.DistributedSampler(
    dataset, num_replicas=hvd.size(), rank=hvd.rank()
)
loader = torch.utils.data.DataLoader(dataset, batch_size=64, sampler=sampler)

model = Net()
optimizer = optim.SGD(model.parameters(), lr=0.1 * hvd.size(), momentum=0.5)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    compression=hvd.Compression.fp16,
    op=hvd.Average,
)

losses = []
for epoch in range(5):
    sampler.set_epoch(epoch)
    for data, target in loader:
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        with optimizer.skip_synchronize():
            optimizer.step()
        losses.append(loss.item())

mean_loss = hvd.allreduce(torch.tensor(losses[-5:]).mean(), name="loss")
weights = torch.cat([p.detach().flatten() for p in model.parameters()])[None]
identical = bool((hvd.allgather(weights) == weights).all())
names = hvd.broadcast_object({"classes": 10} if hvd.rank() == 0 else None)
if hvd.rank() == 0:
    print(
        f"ranks {hvd.size()} first {losses[0]:.3f} last {float(mean_loss):.3f} identical {identical} {names}"
    )
hvd.barrier()
sys.stdout.flush()
os._exit(0)
