"""The data sets by name; what each function needs is imported when it is called for."""

from __future__ import annotations

DATASETS: dict[str, str] = {
    "digits": "thinwire.recipes.data.digits:load",
    "mnist": "thinwire.recipes.data.mnist:load_mnist",
    "fashion-mnist": "thinwire.recipes.data.mnist:load_fashion_mnist",
    "cifar10": "thinwire.recipes.data.cifar:load_cifar10",
    "cifar100": "thinwire.recipes.data.cifar:load_cifar100",
    "imagenet": "thinwire.recipes.data.imagenet:load",
    "wikitext2": "thinwire.recipes.data.wikitext:load_wikitext2",
    "wikitext2-100": "thinwire.recipes.data.wikitext:load_wikitext2_long",
    "wikitext103": "thinwire.recipes.data.wikitext:load_wikitext103",
    "wikitext2-gpt2": "thinwire.recipes.data.wikitext:load_wikitext2_gpt2",
    "wikitext103-gpt2": "thinwire.recipes.data.wikitext:load_wikitext103_gpt2",
    "squad": "thinwire.recipes.data.squad:load_squad",
    "squad-256": "thinwire.recipes.data.squad:load_squad_short",
    "wikipedia": "thinwire.recipes.data.wikipedia:load",
    "an4": "thinwire.recipes.data.an4:load",
    "chars": "thinwire.recipes.data.chars:load",
}
"""'module:function' of each; a function takes DataOptions and gives Data."""
