"""Pictures of a plan: buckets on the time line, step time against link rate, and who wins where. All of it predicted."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from thinwire.plan import Decision, Plan
from thinwire.tools.figures import add_legend, make_figure, tidy
from thinwire.tools.palette import COLOURS, WORK, Styles, find_method

FORMS = "soD^v"


def draw_timeline(path: Path, decision: Decision) -> None:
    """Every bucket of dense and of the choice: ready, encoding, waiting for the link, on the link."""
    figure = make_figure(10, 6)
    axes = figure.subplots(2, 1, sharex=False)
    for panel, plan in zip(axes, (decision.dense, decision.chosen), strict=True):
        draw_buckets(panel, plan)
    add_legend(figure, axes)
    figure.suptitle("Buckets on the time line (predicted)")
    figure.savefig(path)


def draw_buckets(panel, plan: Plan) -> None:  # type: ignore[no-untyped-def]
    for index, span in enumerate(plan.prediction.spans, start=1):
        pieces = (
            (span.ready, span.encoded, WORK["encode"], "encode"),
            (span.encoded, span.sent, WORK["waits"], "waits for the link"),
            (span.sent, span.arrived, WORK["travels"], "on the link"),
        )
        for begin, end, colour, label in pieces:
            label = label if index == 1 else "_"
            panel.barh(index, 1e3 * (end - begin), left=1e3 * begin, color=colour, label=label)
    silent = plan.prediction.spans[-1].ready
    panel.axvline(1e3 * silent, color=WORK["compute"], linewidth=1.5, label="backward ends")
    panel.set(title=f"{plan.name}: {1e3 * plan.prediction.step_s:.1f} ms", ylabel="bucket")
    panel.yaxis.get_major_locator().set_params(integer=True)
    panel.set_xlabel("ms after the first bucket is ready")
    panel.invert_yaxis()
    tidy(panel)


def draw_rates(path: Path, by_rate: Mapping[int, Decision], workers: int) -> None:
    """The step time of every candidate, and of the choice, against the link's rate."""
    figure = make_figure(10, 5)
    panel = figure.subplots()
    styles = Styles()
    rates = list(by_rate)
    names = [plan.name for plan in by_rate[rates[0]].uniform]
    for index, name in enumerate(names):
        times = [1e3 * by_rate[rate].uniform[index].prediction.step_s for rate in rates]
        look = styles.look(find_method(name), name)
        panel.plot(rates, times, marker="o", markersize=3, label=name, linewidth=1.5, **look)
    chosen = [1e3 * by_rate[rate].chosen.prediction.step_s for rate in rates]
    panel.plot(rates, chosen, color="black", linestyle=":", linewidth=3, label="chosen")
    silent = 1e3 * by_rate[rates[0]].dense.prediction.silent_s
    panel.axhline(silent, label="no communication", **styles.look("no_sync", "no_sync"))
    panel.set(xscale="log", yscale="log", xlabel="Gbit/s", ylabel="ms per step")
    panel.set_title(f"Step time against link rate, {workers} workers (predicted)")
    tidy(panel)
    panel.set_xticks(rates, [str(rate) for rate in rates])
    panel.minorticks_off()
    add_legend(figure, [panel])
    figure.savefig(path)


def draw_map(path: Path, won: Mapping[tuple[int, int], str]) -> None:
    """Which candidate is chosen, if one has to do for all buckets, over link rates and workers."""
    rates = sorted({rate for rate, _ in won})
    workers = sorted({count for _, count in won})
    names = list(dict.fromkeys(won.values()))
    figure = make_figure(9, 6)
    panel = figure.subplots()
    styles = Styles()
    for name in names:
        places = [(rates.index(r), workers.index(w)) for (r, w), one in won.items() if one == name]
        x, y = zip(*places, strict=True)
        colour, dash = styles.find(find_method(name), name)
        # Settings of one method have its colour, and are told apart by their form.
        panel.scatter(x, y, s=400, marker=FORMS[dash], color=COLOURS[colour], label=name)
    panel.set_xticks(range(len(rates)), [str(rate) for rate in rates])
    panel.set_yticks(range(len(workers)), [str(count) for count in workers])
    panel.set(xlabel="Gbit/s", ylabel="workers")
    panel.set_title("Least compression that is fast enough, one method for all buckets (predicted)")
    legend = figure.legend(loc="outside right upper", frameon=False, fontsize="small")
    for handle in legend.legend_handles:
        handle.set_sizes([80])
    figure.savefig(path)
