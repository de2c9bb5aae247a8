"""Presets: the published training jobs, each data x model with the hyper-parameters of its paper.

Batch sizes are per worker. Rates that a job multiplies by the number of workers say so with `lr_scaling`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from thinwire.recipes.config import Training


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A job by its parts' names."""

    data: str
    """In `thinwire.recipes.data.DATASETS`."""
    model: str
    """In `thinwire.recipes.models.MODELS`."""
    training: Training
    about: str
    """Whose job it is, and what was changed; a line of `thinwire train --list`."""


DIGITS = Training(epochs=40, batch_size=32, lr=0.05, warmup_steps=50)
MNIST = Training(
    epochs=10, batch_size=64, lr=0.01, lr_scaling="linear", momentum=0.5, schedule="constant"
)
CIFAR10 = Training(
    epochs=200,
    batch_size=128,
    lr=0.1,
    lr_scaling="linear",
    weight_decay=1e-4,
    warmup_epochs=5,
)
CIFAR10_VGG = Training(
    epochs=161,
    batch_size=16,
    lr=0.1,
    weight_decay=1e-4,
    schedule="multistep",
    milestones=(81, 122, 155),
    warmup_epochs=10,
)
CIFAR100 = Training(
    epochs=80,
    batch_size=32,
    lr=0.0125,
    lr_scaling="linear",
    weight_decay=5e-5,
    schedule="multistep",
    milestones=(30, 60, 80),
    warmup_epochs=5,
)
IMAGENET = replace(CIFAR100, epochs=90)
VIT = Training(epochs=80, batch_size=32, lr=5e-5, optimizer="adamw", schedule="linear")
LSTM = Training(
    epochs=80,
    batch_size=80,
    lr=0.001,
    lr_scaling="linear",
    optimizer="adam",
    weight_decay=1.2e-6,
    schedule="plateau",
    gamma=0.5,
    patience=3,
    clip_norm=0.1,
)
TRANSFORMER = Training(
    epochs=120,
    batch_size=64,
    lr=0.002,
    lr_scaling="linear",
    optimizer="adam",
    weight_decay=1.2e-5,
    warmup_steps=100,
)
SMALL_GPT = Training(
    epochs=10,
    batch_size=16,
    lr=0.001,
    optimizer="adamw",
    betas=(0.9, 0.95),
    weight_decay=0.1,
    decay_norms=False,
    warmup_steps=100,
    clip_norm=1.0,
)
GPT2 = Training(epochs=30, batch_size=2, lr=5e-5, optimizer="adamw", schedule="linear")
SQUAD = Training(
    epochs=3,
    batch_size=4,
    lr=3e-5,
    optimizer="adamw",
    eps=1e-6,
    weight_decay=0.01,
    decay_norms=False,
    schedule="linear",
    warmup_epochs=0.3,
    clip_norm=1.0,
)
WIKIPEDIA = Training(
    epochs=3,
    batch_size=8,
    lr=2e-4,
    optimizer="adamw",
    eps=1e-6,
    weight_decay=0.01,
    decay_norms=False,
    schedule="linear",
    warmup_epochs=0.3,
)
AN4 = Training(
    epochs=160,
    batch_size=2,
    lr=0.001,
    weight_decay=1e-4,
    schedule="exponential",
    gamma=1 / 1.01,
    clip_norm=400.0,
)

PRESETS: dict[str, Preset] = {
    "digits": Preset(
        data="digits",
        model="small-cnn",
        training=DIGITS,
        about="1,797 real digits that scikit-learn brings along; ours",
    ),
    "mnist": Preset(
        data="mnist", model="cnn", training=MNIST, about="ACP-SGD's example: 2 + 2 layers"
    ),
    "fashion-mnist": Preset(
        data="fashion-mnist",
        model="cnn",
        training=replace(MNIST, momentum=0.9, schedule="cosine"),
        about="the network of mnist on pictures of clothes; ours",
    ),
    "cifar10-resnet20": Preset(
        data="cifar10", model="resnet20", training=CIFAR10, about="DGC's; 8 workers there"
    ),
    "cifar10-resnet110": Preset(
        data="cifar10", model="resnet110", training=CIFAR10, about="DGC's; 8 workers there"
    ),
    "cifar10-vgg16": Preset(
        data="cifar10", model="vgg16", training=CIFAR10_VGG, about="Ok-Topk's; 16 workers there"
    ),
    "cifar100-vgg16": Preset(
        data="cifar100", model="vgg16", training=CIFAR100, about="ADTopk's; 8 workers there"
    ),
    "cifar100-resnet50": Preset(
        data="cifar100", model="resnet50", training=CIFAR100, about="ADTopk's; 8 workers there"
    ),
    "imagenet-resnet50": Preset(
        data="imagenet",
        model="resnet50",
        training=replace(IMAGENET, weight_decay=1e-4, nesterov=True, decay_norms=False),
        about="DGC's; 8 to 256 workers there",
    ),
    "imagenet-resnet152": Preset(
        data="imagenet",
        model="resnet152",
        training=CIFAR100,
        about="ADTopk's; 8 workers there, and the settings of its CIFAR-100 jobs",
    ),
    "imagenet-vgg16bn": Preset(
        data="imagenet", model="vgg16bn", training=IMAGENET, about="DGC's; 8 to 256 workers there"
    ),
    "imagenet-vit-large": Preset(
        data="imagenet",
        model="vit-large",
        training=VIT,
        about="ADTopk's, meant for pretrained weights; its 80,000 epochs are read as 80",
    ),
    "wikitext2-lstm": Preset(
        data="wikitext2",
        model="lstm",
        training=LSTM,
        about="ADTopk's, clipped after the exchange and without its local extra step, which lets replicas drift",
    ),
    "wikitext2-transformer": Preset(
        data="wikitext2-100",
        model="transformer",
        training=TRANSFORMER,
        about="ADTopk's sizes in pre-norm blocks; cosine in place of its inverse square root",
    ),
    "wikitext2-small-gpt": Preset(
        data="wikitext2-100",
        model="small-gpt",
        training=SMALL_GPT,
        about="4 layers of width 256 on words, plain torch; ours",
    ),
    "wikitext2-gpt2": Preset(
        data="wikitext2-gpt2", model="gpt2", training=GPT2, about="ADTopk's job on the smaller text"
    ),
    "wikitext2-gpt2-large": Preset(
        data="wikitext2-gpt2",
        model="gpt2-large",
        training=GPT2,
        about="ADTopk's job on the smaller text",
    ),
    "wikitext103-gpt2": Preset(
        data="wikitext103-gpt2",
        model="gpt2",
        training=GPT2,
        about="ADTopk's; 8 workers there, meant for pretrained weights",
    ),
    "wikitext103-gpt2-large": Preset(
        data="wikitext103-gpt2",
        model="gpt2-large",
        training=GPT2,
        about="ADTopk's in the extended paper, meant for pretrained weights",
    ),
    "squad-bert-base": Preset(
        data="squad",
        model="bert-base",
        training=SQUAD,
        about="ADTopk's; 8 workers there, meant for pretrained weights",
    ),
    "squad-bert-large": Preset(
        data="squad",
        model="bert-large",
        training=SQUAD,
        about="ADTopk's with BERT's 3 epochs in place of 30, meant for pretrained weights",
    ),
    "wikipedia-bert": Preset(
        data="wikipedia",
        model="bert-base",
        training=WIKIPEDIA,
        about="Ok-Topk's; 32 workers there, with Adam's bias correction, which it leaves out",
    ),
    "an4-lstm": Preset(
        data="an4",
        model="deepspeech",
        training=AN4,
        about="Ok-Topk's; 32 workers there, 160 epochs as in the paper, where its script stops after 10",
    ),
    "chars": Preset(
        data="chars",
        model="small-gpt",
        training=SMALL_GPT,
        about="the small GPT on characters of a text that every machine has; ours",
    ),
}
