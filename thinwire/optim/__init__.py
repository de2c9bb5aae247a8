"""Optimizers for methods that own momentum, to be passed as `tw.attach(..., optimizer=this)`."""

from thinwire.optim.dgc_sgd import DGCSGD

__all__ = ["DGCSGD"]
