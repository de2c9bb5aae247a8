from __future__ import annotations

import torch

from thinwire.memory.account import Account

GOOD, BAD = torch.tensor(False), torch.tensor(True)


def opened() -> tuple[torch.Tensor, Account]:
    c = torch.tensor([1.0 + 2**-23, 2.0, 3.0, 4.0])
    account = Account(c.clone())
    account.write_off(torch.tensor([0, 2]), torch.tensor([1.0, 3.0]))
    return c, account


def test_what_is_written_off_leaves_memory_at_once():
    c, account = opened()
    assert account.c.tolist() == [2**-23, 2.0, 0.0, 4.0]
    assert torch.equal(account.accepted() + account.c, c)
    account.settle(GOOD)
    assert account.c.tolist() == [2**-23, 2.0, 0.0, 4.0]


def test_bad_step_returns_everything_exactly_once():
    c, account = opened()
    account.settle(BAD)
    account.settle(BAD)
    assert torch.equal(account.c, c)


def test_good_step_can_turn_bad_but_not_back():
    c, account = opened()
    account.bank(torch.tensor([0.0, 0.5, 0.0, 0.0]))
    account.settle(GOOD)
    assert account.c.tolist() == [2**-23, 2.5, 0.0, 4.0]
    account.settle(BAD)
    assert torch.equal(account.c, c)


def test_entries_given_back_return_exactly_in_a_bad_step_too():
    c, account = opened()
    account.give_back(torch.tensor([0, 2]), torch.tensor([1.0, 0.0]))
    assert account.accepted().tolist() == [0.0, 0.0, 3.0, 0.0]
    account.settle(BAD)
    assert torch.equal(account.c, c)


def test_rounding_of_a_bad_step_is_forgotten_even_if_it_is_nan():
    c, account = opened()
    account.bank(torch.full((4,), torch.nan))
    account.settle(BAD)
    assert torch.equal(account.c, c)


def test_places_that_repeat_carry_zeros():
    account = Account(torch.tensor([5.0, 1.0]))
    account.write_off(torch.tensor([0, 1, 0, 0]), torch.tensor([5.0, 1.0, 0.0, 0.0]))
    assert account.c.tolist() == [0.0, 0.0]
    account.settle(BAD)
    assert account.c.tolist() == [5.0, 1.0]


def test_overflow_leaves_memory_wherever_it_is():
    account = Account(torch.tensor([torch.inf, torch.inf, -torch.inf, 1.0]))
    account.write_off(torch.tensor([0]), torch.tensor([3e38]))
    assert account.c.tolist() == [0.0, 0.0, 0.0, 1.0]


def test_overflow_is_known_by_what_memory_held():
    account = Account(torch.tensor([torch.inf, torch.inf, 2.0]))
    account.write_off(torch.tensor([0, 2]), torch.tensor([3e38, 1.0]), held=account.c[[0, 2]])
    assert account.c.tolist() == [0.0, 0.0, 1.0]


def test_giving_nothing_back_leaves_a_bad_step_exact():
    c, account = opened()
    account.give_back(torch.tensor([0, 2]), torch.zeros(2))
    account.settle(BAD)
    assert torch.equal(account.c, c)
