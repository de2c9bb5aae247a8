"""Cells: what the learning evidence consists of, task by task, in the order of importance.

The training settings are the same for all methods of a task. Where they differ from the task's preset it is because there are
few epochs, or to have more of them:

    cifar10-resnet20      64 images per worker in place of 128: twice as many steps; 0.025 x 8 workers as the peak rate, the best
                          of 0.05, 0.1 and 0.2 in all after six epochs, for dense, TopK, ADTopK and ACP-SGD; bf16 autocast and channels_last
    wikitext2-lstm        4 workers of 40 streams in place of 8 of 80: a pass waits for its 70 words one after the other, whatever
                          the number of streams, so that half as many passes take half the time. AdamW at 0.002 under a cosine,
                          which does not have to wait for a plateau. Not in bf16: torch would compute LSTMs in fp16, whose gradients
                          need a loss scale
    wikitext2-small-gpt   bf16 autocast; its rows are compared with dense in bf16 and not with earlier ones in fp32
    squad-minilm          4 workers of 8 windows, 32 in a step as in BERT's own recipe; bf16 autocast
    all three with text   no clipping: after the exchange it would cut sparse updates, which have a larger norm, and not dense ones

Every sparse method, and not only DGC, has the warm-up of densities of DGC's paper: an epoch each at 25, 6.3, 1.5 and 0.4 %, as
far as they lie above the final density. ACP-SGD has a rank in place of a density and begins at once with all it has.
On CIFAR-10 every sparse method has DGC's momentum correction too, without masking, which forgets the part of a gradient that
momentum would still have brought; the variants show what each of the two makes. Others there: ACP-SGD with as many bytes as
PowerSGD, beside PowerSGD; and OkTopK at 8 %, where 8 workers end with as many entries as with TopK at 1 %. On text the optimizer is Adam, to which
momentum correction does not belong: plain residuals for all, the first two epochs dense for all, in place of the one at 25 %,
and 5 % beside 1 %, because the published jobs with Adam ask for 5 to 10. Variants called adam choose in
Adam's scale, with its momentum before compression, and keep from the dense epochs what it divides by, or refresh it.
What they are judged by comes first in every study of text. On SQuAD, which has few epochs, the first is dense and the rest at 1 %.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

WORKERS = 8
FEWER_WORKERS = 4
"""Where passes are long or many, and the time for them short."""
RANK = 4
"""Of the factors of low-rank methods."""
WARMUP = (0.25, 0.063, 0.015, 0.004)
"""Densities of the first epochs, as far as they are above the one that follows."""
LOW_RANK = ("acpsgd", "powersgd")
QUANTIZED = ("quantized", "quantized-4bit", "quantized-2bit", "quantized-1bit")
"""They send everything, and do so from the first step on, unless it is in Adam's scale."""
WITHOUT_DENSITY = ("dense", *LOW_RANK, *QUANTIZED)
RESIDUAL = {"memory": {"kind": "Residual"}}
MASKED = {"memory": {"kind": "MomentumCorrection", "masking": True}}
UNMASKED = {"memory": {"kind": "MomentumCorrection", "masking": False}}
REFRESHED = {"adam_scale": {"divisor": {"kind": "Refresh", "every": 50}, "limit": 3.0}}
COLD = {**UNMASKED, "density_warmup": []}
"""The final density from the first step on. `tw.Auto`, too, compresses after some thirty dense steps."""
VARIANTS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "adtopk-residual": ("adtopk", RESIDUAL),
    "dgc-masked": ("dgc", MASKED),
    "adtopk-cold": ("adtopk", COLD),
    "topk-cold": ("topk", COLD),
    "acpsgd-rank8": ("acpsgd", {"rank": 2 * RANK}),
    "adtopk-adam": ("adtopk", {"adam_scale": {}}),
    "topk-adam": ("topk", {"adam_scale": {}}),
    "quantized-1bit-adam": ("quantized-1bit", REFRESHED),
    "quantized-1bit-adam-sums4": ("quantized-1bit", {**REFRESHED, "sum_bits": 4}),
    "quantized-stochastic": ("quantized", {"rounding": "stochastic"}),
    "quantized-4bit-stochastic": ("quantized-4bit", {"rounding": "stochastic"}),
    "quantized-4bit-sums16": ("quantized-4bit", {"sum_bits": 16}),
    "quantized-4bit-none": ("quantized-4bit", {"memory": {"kind": "NoMemory"}}),
}
"""Name in the tables: a method, and what is another one in it; shows which part of a method makes a difference."""


def base_of(method: str) -> str:
    """thinwire's name of a method or variant."""
    return VARIANTS[method][0] if method in VARIANTS else method


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One training: a method at a density from a seed."""

    task: str
    method: str
    """Its name in the tables: one of thinwire's, or a variant of one."""
    density: float | None
    seed: int
    epochs: int
    turn: int
    """The smaller, the more important."""
    workers: int
    training: Mapping[str, Any]
    own: Mapping[str, Any]
    """The method's settings beside the density."""

    @property
    def key(self) -> str:
        density = "" if self.density is None else f"@{self.density:g}"
        return f"{self.task}/{self.method}{density}#{self.seed}"

    def settings(
        self, source: Mapping[str, Any], device: str, graph: bool, steps: int | None
    ) -> dict[str, Any]:
        """As a file for `thinwire train` would say it; `steps` ends it early."""
        density = {} if self.density is None else {"density": self.density}
        return {
            "task": {"name": self.task, **source},
            "method": {"name": base_of(self.method), **density, **self.own},
            "training": {**self.training, "epochs": self.epochs, "seed": self.seed},
            "run": {
                "simulate_workers": self.workers,
                "graph": graph,
                "device": device,
                "steps": steps,
            },
        }


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Some methods at one density; the cells of a batch are equally important."""

    methods: Sequence[str]
    density: float
    seeds: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Study:
    """All cells of one task."""

    task: str
    batches: Sequence[Batch]
    """The most important ones first."""
    urgent: int
    """Epochs are chosen so that the batches up to this one can be finished."""
    most: int
    """Epochs, if there is time for so many."""
    fewest: int
    share: float
    """Of the time, relative to the other tasks."""
    training: Mapping[str, Any]
    own: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Settings of single methods."""
    warmup: Sequence[float] = ()
    """Densities of the first epochs of every method that has a density."""
    dense_epochs: int = 0
    """Epochs before those, of every method, in which nothing is compressed."""
    workers: int = WORKERS

    def cells(self, epochs: int) -> list[Cell]:
        return [
            Cell(
                task=self.task,
                method=method,
                density=None if base_of(method) in WITHOUT_DENSITY else batch.density,
                seed=seed,
                epochs=epochs,
                turn=turn,
                workers=self.workers,
                training=self.training,
                own=self._own(method, batch.density),
            )
            for turn, batch in enumerate(self.batches)
            for seed in batch.seeds
            for method in batch.methods
        ]

    def _own(self, method: str, density: float) -> dict[str, Any]:
        base, changes = VARIANTS.get(method, (method, {}))
        own = dict(self.own.get(method, {}))
        if base in LOW_RANK:
            own["rank"] = RANK
        if base not in WITHOUT_DENSITY and self.warmup:
            own["density_warmup"] = [early for early in self.warmup if early > density]
        # Without a number of steps, quantised values in Adam's scale would wait until the second moments have settled.
        at_once = base in ("dense", *QUANTIZED) and "adam_scale" not in changes
        if self.dense_epochs and not at_once:
            own["dense_epochs"] = self.dense_epochs
        return {**own, **changes}

    def only(self, methods: Sequence[str]) -> Study:
        batches = [
            replace(batch, methods=[name for name in batch.methods if name in methods])
            for batch in self.batches
        ]
        return replace(self, batches=batches)

    def only_at(self, densities: Sequence[float]) -> Study:
        return replace(self, batches=[b for b in self.batches if b.density in densities])

    def only_from(self, seeds: Sequence[int]) -> Study:
        batches = [
            replace(batch, seeds=[seed for seed in batch.seeds if seed in seeds])
            for batch in self.batches
        ]
        return replace(self, batches=batches)

    def with_batch_size(self, size: int) -> Study:
        """Another batch per worker, the learning rate in proportion."""
        lr = self.training["lr"] * size / self.training["batch_size"]
        return replace(self, training={**self.training, "batch_size": size, "lr": lr})


def studies() -> list[Study]:
    methods = ("dense", "adtopk", "dgc", "oktopk", "acpsgd")
    seeds = (0, 1, 2)
    residuals = {"dgc": RESIDUAL}
    sums = "quantized-1bit-adam-sums4"
    adam = ("dense", "quantized-4bit", "topk-adam", "quantized-1bit-adam", sums)
    texts = (
        Batch(methods=adam, density=0.01, seeds=(0,)),
        Batch(methods=("dense", sums), density=0.01, seeds=seeds[1:]),
        Batch(methods=(*methods[1:], "adtopk-adam"), density=0.01, seeds=(0,)),
        Batch(methods=("adtopk", "dgc"), density=0.05, seeds=(0,)),
    )
    everybody = (*methods, "topk")
    safe = QUANTIZED[:2]
    rounded = (*safe, *(f"{name}-stochastic" for name in safe))
    coarse = ("quantized-4bit-sums16", "quantized-4bit-none", *QUANTIZED[2:])
    quantized = (
        *(Batch(methods=rounded, density=1.0, seeds=(seed,)) for seed in seeds),
        Batch(methods=coarse, density=1.0, seeds=(0,)),
    )
    # One of them is among the first already.
    more = replace(quantized[0], methods=[name for name in rounded if name not in adam])
    images = ("adtopk-residual", "dgc-masked", "acpsgd-rank8", "powersgd")
    return [
        Study(
            task="cifar10-resnet20",
            batches=(
                *(Batch(methods=everybody, density=0.01, seeds=(seed,)) for seed in seeds),
                Batch(methods=("dgc",), density=0.001, seeds=seeds),
                Batch(methods=images, density=0.01, seeds=(0,)),
                *(
                    Batch(methods=("adtopk-cold", "topk-cold"), density=0.01, seeds=(seed,))
                    for seed in seeds
                ),
                Batch(methods=("oktopk",), density=0.08, seeds=(0,)),
                Batch(methods=("adtopk", "oktopk", "topk"), density=0.001, seeds=seeds),
                *quantized,
            ),
            urgent=3,
            most=30,
            fewest=15,
            share=0.62,
            warmup=WARMUP,
            own=dict.fromkeys(("adtopk", "dgc", "oktopk", "topk"), UNMASKED),
            training={
                "batch_size": 64,
                "lr": 0.025,
                "warmup_epochs": 5,
                "precision": "bf16",
                "channels_last": True,
            },
        ),
        Study(
            task="wikitext2-lstm",
            batches=texts,
            urgent=0,
            most=10,
            fewest=5,
            share=0.22,
            training={
                "batch_size": 40,
                "optimizer": "adamw",
                "lr": 0.002,
                "lr_scaling": "none",
                "schedule": "cosine",
                "warmup_steps": 50,
                "clip_norm": "none",
            },
            own=residuals,
            warmup=WARMUP[1:],
            dense_epochs=2,
            workers=FEWER_WORKERS,
        ),
        Study(
            task="wikitext2-small-gpt",
            batches=(*texts, more, *quantized[1:]),
            urgent=0,
            most=10,
            fewest=5,
            share=0.16,
            training={"batch_size": 16, "lr": 0.001, "clip_norm": "none", "precision": "bf16"},
            own=residuals,
            warmup=WARMUP[1:],
            dense_epochs=2,
        ),
        Study(
            task="squad-minilm",
            batches=[Batch(methods=adam, density=0.01, seeds=(seed,)) for seed in seeds],
            urgent=0,
            most=3,
            fewest=2,
            share=0.1,
            training={"batch_size": 8, "lr": 1e-4, "clip_norm": "none", "precision": "bf16"},
            dense_epochs=1,
            workers=FEWER_WORKERS,
        ),
    ]


def quick_studies() -> list[Study]:
    """Three of the tasks with a few steps of two workers."""
    by_task = {study.task: study for study in studies()}
    images, text = by_task["cifar10-resnet20"], by_task["wikitext2-small-gpt"]
    questions = by_task["squad-minilm"]
    few: dict[str, Any] = {"workers": 2, "urgent": 0, "most": 2, "fewest": 1}
    return [
        replace(
            images,
            batches=(
                Batch(methods=("dense", "adtopk"), density=0.01, seeds=(0, 1)),
                Batch(methods=("dgc",), density=0.001, seeds=(0,)),
            ),
            training={**images.training, "batch_size": 96},
            **few,
        ),
        replace(
            text,
            batches=(Batch(methods=("dense", "dgc"), density=0.01, seeds=(0,)),),
            training={**text.training, "batch_size": 96, "warmup_epochs": 1},
            **few,
        ),
        replace(
            questions,
            batches=(Batch(methods=("dense", "topk-adam"), density=0.01, seeds=(0,)),),
            training={**questions.training, "batch_size": 96, "warmup_epochs": 1},
            **few,
        ),
    ]
