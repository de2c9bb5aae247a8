"""checksum=True: a message that does not arrive as it was sent is refused by all ranks in the same step."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.contracts.adapters import make
from tests.contracts.cluster import Cluster, same_bits
from tests.models import fingerprint
from thinwire.engine.checksums import checked
from thinwire.engine.virtual import VirtualRanks
from thinwire.errors import DamageError
from thinwire.exchange.requests import Collective, Gather, Place
from thinwire.methods.base import Method

SPARSE = {"density": 0.05, "dense_fallback": False}
METHODS: dict[str, Method] = {
    "Dense": tw.Dense(),
    "ADTopK": tw.ADTopK(**SPARSE),
    "TopK, packed": tw.TopK(values="bf16", indices="packed", **SPARSE),
    "RandomK": tw.RandomK(**SPARSE),
    "OkTopK": tw.OkTopK(**SPARSE),
    "OkTopK, published": tw.OkTopK(thresholds="published", **SPARSE),
    "GTopK": tw.GTopK(**SPARSE),
    "TopKDSA": tw.TopKDSA(**SPARSE),
    "ExclusiveTopK": tw.ExclusiveTopK(**SPARSE),
    "CyclicLeader": tw.TopK(exchange=tw.exchange.CyclicLeader(), **SPARSE),
    "SignSGD": tw.SignSGD(memory=tw.memory.Residual()),
    "Quantized": tw.Quantized(),
    "PowerSGD": tw.PowerSGD(rank=2, dense_fallback=False),
    "ACPSGD": tw.ACPSGD(rank=2, dense_fallback=False),
}
TRIALS = 12


class Flipper:
    """A network that flips one bit, in what this rank sends or in what it receives."""

    def __init__(self, network) -> None:
        self.calls = 0
        self.plan: tuple[int, bool, float, int] | None = None
        self._perform = network.perform
        network.perform = self.perform

    def perform(self, batch, what=""):
        travels = any(isinstance(one, Collective) for one in batch)
        self.calls += travels
        if not travels or self.plan is None or self.plan[0] != self.calls:
            return self._perform(batch, what)
        _, sending, where, bit = self.plan
        self.plan = None
        if sending:
            return self._perform(tuple(self._damaged(one, where, bit) for one in batch), what)
        replies = self._perform(batch, what)
        for one, reply in zip(batch, replies, strict=True):
            if isinstance(one, Collective):
                self._flip(reply, where, bit)
        return replies

    def _damaged(self, request, where: float, bit: int):
        if not isinstance(request, Collective):
            return request
        tensor = request.tensor.clone()
        self._flip(tensor, where, bit)
        return replace(request, tensor=tensor)

    def _flip(self, tensor, where: float, bit: int) -> None:
        if tensor.numel():
            raw = tensor.view(-1).view(torch.uint8)
            raw[int(where * raw.numel())] ^= 1 << bit


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 24))


def train(rank: int, adapter: str, name: str, dice: random.Random | None, refused: list[str]):
    """(what every trial said, the parameters at the end). Without dice nothing is damaged, and what was refused is skipped."""
    model = model_of()
    plain = torch.optim.SGD(model.parameters(), lr=0.01)
    options = {"checksum": True, "skippable": True}
    module, optimizer, handle = make(adapter, model, plain, METHODS[name], **options)
    flipper, said, calls = Flipper(handle.reducer.driver.network), [], 1
    for trial in range(TRIALS):
        flipper.calls = 0
        if dice is not None:
            victim = dice.randrange(handle.world)
            # In every other call the ranks agree, which is understood in spite of a bit.
            call = 1 + 2 * dice.randrange((calls + 1) // 2) + (trial % 4 == 1)
            plan = (call, dice.random() < 0.5, dice.random(), dice.randrange(8))
            flipper.plan = plan if rank == victim and trial % 3 else None
        generator = torch.Generator().manual_seed(100 * trial + rank)
        optimizer.zero_grad()
        try:
            module(torch.randn(8, 24, generator=generator)).square().mean().backward()
        except DamageError as error:
            said.append(str(error))
            continue
        said.append("")
        calls = max(calls, flipper.calls)
        if refused[trial]:
            handle.discard_step()
        else:
            optimizer.step()
    handle.close()
    return said, fingerprint(model)


def damage_job(rank: int, world: int, adapter: str, name: str) -> tuple:
    said, end = train(rank, adapter, name, random.Random(1), [""] * TRIALS)
    _, wanted = train(rank, adapter, name, None, said)
    return said, end, wanted


def check(replies: list[tuple]) -> int:
    """Ranks have said the same, and end where they would have without the refused steps."""
    assert len({tuple(said) for said, _, _ in replies}) == 1
    assert len({bits for _, end, wanted in replies for bits in (end, wanted)}) == 1
    return sum(map(bool, replies[0][0]))


@pytest.mark.parametrize("name", METHODS)
def test_damaged_messages_are_refused_by_all_ranks_alike_and_training_goes_on(pools, name):
    assert check(pools(3).run(damage_job, "ddp", name)) >= 3


def test_the_same_without_ddp(pools):
    assert check(pools(3).run(damage_job, "optimizer", "GTopK")) >= 3


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
def test_checksums_change_no_bit(method):
    """But the order of sums, which is that of `deterministic`."""
    with_, without = Cluster(3, method, checksum=True), Cluster(3, method, deterministic=True)
    for seed in range(3):
        gradients = with_.random(seed)
        for left, right in zip(with_.step(gradients), without.step(gradients), strict=True):
            assert all(same_bits(left[name], right[name]) for name in left)


def hosts_job(rank: int, world: int) -> list[bool]:
    model = model_of()
    exchange = tw.exchange.Hierarchical(per_host=2)
    ddp = DistributedDataParallel(model)
    handle = tw.attach(ddp, tw.TopK(exchange=exchange, **SPARSE), checksum=True)
    flipper, refused = Flipper(handle.reducer.driver.network), []
    for trial in range(4):
        flipper.calls, flipper.plan = (
            0,
            (1 + 2 * (trial // 2), False, 0.5, 3) if rank == 1 else None,
        )
        ddp.zero_grad()
        try:
            ddp(torch.randn(8, 24)).square().mean().backward()
            refused.append(False)
        except DamageError:
            refused.append(True)
    handle.close()
    return refused


def test_damage_inside_and_between_hosts_is_refused_everywhere(pools):
    replies = pools(4).run(hosts_job)
    assert all(reply == replies[0] for reply in replies) and all(replies[0])


class DamagedRanks(VirtualRanks):
    """Virtual ranks of which one has a bit flipped in one round's last message: what it sends, or what it gets."""

    def __init__(self, world: int, round_: int, sending: bool, bit: int) -> None:
        super().__init__(world)
        self.round, self.sending, self.bit = round_, sending, bit

    def _perform(self, batches):
        self.round -= 1
        if self.round == -1 and self.sending:
            batches = [
                (
                    *batches[0][:-1],
                    replace(batches[0][-1], tensor=self._flipped(batches[0][-1].tensor)),
                ),
                *batches[1:],
            ]
        replies = super()._perform(batches)
        if self.round == -1 and not self.sending:
            replies[0][-1] = self._flipped(replies[0][-1])
        return replies

    def _flipped(self, tensor):
        damaged = tensor.clone(memory_format=torch.contiguous_format)
        raw = damaged.view(-1).view(torch.uint8)
        raw[self.bit // 8] ^= 1 << self.bit % 8
        return damaged


def outcome(rank: int, world: int):
    """What a rank ends with: all ranks' numbers, or None if it refuses them."""

    def program():
        (reply,) = yield (Gather(torch.arange(3.0) + rank, "numbers"),)
        return reply.tolist()

    try:
        return (yield from checked(program(), lambda scope: Place(rank, world)))
    except DamageError:
        return None


@pytest.mark.parametrize("sending", [True, False], ids=["sender", "receiver"])
@pytest.mark.parametrize(
    ("round_", "words", "refused"), [(0, 1, True), (1, 3, False)], ids=["fingerprint", "verdict"]
)
def test_no_bit_of_the_checksums_own_words_parts_the_ranks(sending, round_, words, refused):
    """A fingerprint that is damaged is refused by all; a verdict is understood in spite of it."""
    world, right = 3, [[float(rank + n) for n in range(3)] for rank in range(3)]
    rows = 1 if sending else world
    for bit in range(64 * words * rows):
        ranks = DamagedRanks(world, round_, sending, bit)
        ends = ranks.run([outcome(rank, world) for rank in range(world)])
        assert ends == [None if refused else right] * world, bit


def settings_job(rank: int, world: int) -> str:
    with pytest.raises(tw.UsageError, match="checksum is 'yes'"):
        make(
            "optimizer",
            m := model_of(),
            torch.optim.SGD(m.parameters()),
            tw.Dense(),
            checksum="yes",
        )
    return "fine"


def test_the_setting_is_checked(pools):
    assert pools(2).run(settings_job) == ["fine"] * 2
