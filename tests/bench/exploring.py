"""A move of a slider, from its value to the new picture: an explorer against `interact` with a fresh figure, in turn.

Both run in a real kernel, with IPython's inline pictures, as in a notebook. Of the schedule editor, a move is a click
on its grid. A picture that no slider moves (`cut`) is timed alone. Left out: the way to the browser and back.
"""

import json

START = """
%matplotlib inline
import json, statistics, time
import ipywidgets
import matplotlib.pyplot as plt
from labkit.cost import comm, hardware


def move(control, value):
    began = time.perf_counter()
    control.value = value
    return time.perf_counter() - began


def ours(place):
    return move(found.controls[moved], place)


shown, show = [], plt.show
plt.show = lambda: shown.append(show())


def theirs(place):
    before = len(shown)
    took = move(fresh_one.children[0], place)
    assert len(shown) == before + 1, "nothing was drawn; interact hides an error"
    return took

"""
COLLECTIVES = """
from labkit.labs.lab01 import Sweep
from labkit.view import curves, explore

sizes = explore.SIZES
sweeps = [Sweep("all_reduce", n, sizes[:6], tuple((n * 1e-3,) for _ in range(6))) for n in (2, 4)]
found = explore.collectives(sweeps, within="NVLink 4", nodes=2)


def fresh(size, op="all_reduce"):
    group = explore.group_of(4, 2, hardware.link("NVLink 4"), hardware.link("InfiniBand NDR"))
    lines = [
        curves.Curve(name, sizes, [comm.group_time_s(op, s, group, name) for s in sizes], number=at)
        for at, name in enumerate(explore.ALGORITHMS)
    ]
    ax = curves.times([*lines, *explore._points(sweeps, op)], explore.reading(op, size, "ring", group))
    ax.axvline(size)
    plt.show()


fresh_one = ipywidgets.interactive(fresh, size=list(sizes), op=ipywidgets.fixed("all_reduce"))
moved, places = "size", (sizes[3], sizes[9], sizes[14], sizes[19])
"""
BUCKETS = """
from labkit.labs import lab02
from labkit.labs.lab02 import recut
from labkit.view import buckets, curves, plot

naive = lab02.record_step(lambda model: model, lab02.torchs_average, world_size=2)
found = buckets.buckets(naive)
device, sizes = hardware.device("T4"), buckets.SIZES
backward = recut.backward_of(naive, device)


def fresh(size):
    one, by_size = buckets.cuts(backward, device, hardware.link("PCIe 3"), 4)
    figure, (top, below) = plt.subplots(2, 1, figsize=(8.2, 4.6), layout="constrained")
    lanes = [(name, [each[1:] for each in buckets.bars(cut, backward) if each[0] == lane])
             for cut in (one, by_size[size]) for lane, name in enumerate(buckets.LANES[:2])]
    plot.timeline(lanes, buckets.reading(one, by_size[size], size), top)
    curves.lines([("in buckets", sizes, [by_size[s].time_s for s in sizes], "line")], "bucket size", "s", ax=below)
    plt.show()


fresh_one = ipywidgets.interactive(fresh, size=list(sizes))
moved, places = "bucket_bytes", (sizes[2], sizes[6], sizes[9], sizes[12])
"""
MEMORY = """
from labkit.view import memory as explorer

found = explorer.memory()


def fresh(**values):
    words, held, _, room, card = explorer.reading(None, **values)
    ax = explorer.stacked([held], ["formula"], words)
    ax.axhline(room / 1e9)
    plt.show()


fixed = {name: ipywidgets.fixed(control.value) for name, control in found.controls.items() if name != "seq"}
fresh_one = ipywidgets.interactive(fresh, seq=list(found.controls["seq"].options), **fixed)
moved, places = "seq", (512, 2048, 8192, 32768)
"""
ZERO = """
from labkit.view import zero

found = zero.zero(model="llama-3.1-8b")


def fresh(ranks, **values):
    stages = zero.stages(ranks=ranks, **values)
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.6, 4.2), layout="constrained")
    names = ["no ZeRO", "stage 1", "stage 2", "stage 3"]
    zero.stacked(names, {kind: [s.kept[kind] for s in stages] for kind in zero.KINDS}, "bytes per parameter", ax=left)
    for op, colour in zero.OPS.items():
        right.bar(names, [s.sent.get(op, 0.0) for s in stages], color=colour, label=op)
    right.legend()
    figure.suptitle(zero.reading(stages, values["model"], ranks))
    plt.show()


fixed = {name: ipywidgets.fixed(control.value) for name, control in found.controls.items() if name != "ranks"}
fresh_one = ipywidgets.interactive(fresh, ranks=list(zero.RANKS), **fixed)
moved, places = "ranks", (4, 16, 128, 1024)
"""
OFFLOAD = """
from labkit.view import offload

found = offload.offload()
moved, places = "tokens", tuple(offload.TOKENS[at] for at in (1, 3, 5, 7))


def fresh(tokens, overlap, **values):
    setup, overlap = offload.Setup(**values), overlap == offload.OVERLAP[0]
    for state in offload.STATES:
        style = "-" if offload.fits(setup, state) else "--"
        plt.loglog(offload.TOKENS, offload.times(setup, state, overlap), style, label=state)
    plt.axvline(tokens)
    plt.title(offload.reading(setup, tokens, overlap), fontsize=8)
    plt.legend()
    plt.grid()
    plt.show()


fixed = {name: ipywidgets.fixed(control.value) for name, control in found.controls.items() if name != "tokens"}
fresh_one = ipywidgets.interactive(fresh, tokens=list(offload.TOKENS), **fixed)
"""
TENSOR = """
from labkit.view import curves, tensor

found = tensor.tensor()


def fresh(hidden, ranks, **values):
    set_to = tensor.Setting(**values)
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.0, 3.6), layout="constrained")
    for each in tensor.RANKS:
        left.plot(tensor.HIDDEN, [100 * cut.share for cut in tensor.times(set_to, each)])
        right.plot(tensor.HIDDEN, tensor.faster(set_to, each), label=f"{each} ranks")
    for ax in (left, right):
        curves.doubling_axis(ax, tensor.HIDDEN)
        ax.grid()
        ax.axvline(hidden)
    right.set_yscale("log", base=2)
    right.legend()
    figure.suptitle(tensor.reading(ranks, hidden, set_to), fontsize=9)
    plt.show()


fixed = {name: ipywidgets.fixed(control.value) for name, control in found.controls.items() if name != "hidden"}
fresh_one = ipywidgets.interactive(fresh, hidden=list(tensor.HIDDEN), **fixed)
moved, places = "hidden", (512, 1024, 2048, 8192)
"""
PIPELINE = """
from labkit.view import gantt, pipeline

found = pipeline.pipeline(name="ZB-H1")


def fresh(microbatches, **values):
    timing = pipeline.played(microbatches=microbatches, **values)
    left, right = gantt.with_kept(timing, pipeline.reading(timing, microbatches), "a rank's work")
    left.axvline(1.0)
    plt.show()


fixed = {name: ipywidgets.fixed(control.value) for name, control in found.controls.items() if name != "microbatches"}
fresh_one = ipywidgets.interactive(fresh, microbatches=list(pipeline.MICROBATCHES), **fixed)
moved, places = "microbatches", (4, 6, 12, 16)
"""
EDITOR = """
from labkit.schedule import grid
from labkit.schedule.zero_bubble import zb_h1
from labkit.view import draft, editor, gantt, plot

drawn = draft.read(grid.text(zb_h1(4, 8)))
found = editor.editor(drawn.text)
at = drawn.rows[3].index("3W4")
texts = {"erase": draft.erase(drawn, 3, at).text, "W": drawn.text}
places = ("erase", "W", "erase", "W")


def ours(kind):
    found.kind.value = kind
    began = time.perf_counter()
    found.cell(3, at).click()
    took = time.perf_counter() - began
    assert found.text == texts[kind]
    return took


def fresh(kind):
    look = draft.look(draft.read(texts[kind]))
    figure, ax = plt.subplots(figsize=(8.6, 2.6), layout="constrained")
    for span in look.spans:
        colour, length = plot.COLOURS[gantt.KINDS[span.action.kind][0]], span.end_s - span.start_s
        ax.barh(span.rank, length, left=span.start_s, color=colour, edgecolor="black")
        ax.text((span.start_s + span.end_s) / 2, span.rank, span.action.microbatch, ha="center", va="center")
    ax.set_title(look.sentence, fontsize=8)
    ax.set_ylim(3.5, -0.5)
    plt.show()


fresh_one = ipywidgets.interactive(fresh, kind=["W", "erase"])
"""
CUT = """
from labkit.cost.named import named
from labkit.view import cut

shape, places = named("llama-3.1-8b"), (1, 2, 4, 8)


def ours(ranks):
    began = time.perf_counter()
    cut.layer(shape, ranks)
    plt.show()
    return time.perf_counter() - began


theirs = ours
"""
EXPLORERS = {
    "collectives": COLLECTIVES, "buckets": BUCKETS, "memory": MEMORY, "zero": ZERO, "offload": OFFLOAD,
    "tensor": TENSOR, "pipeline": PIPELINE, "editor": EDITOR,
}  # fmt: skip
PICTURES = {"cut": CUT}
END = """
pairs = [(ours(place), theirs(place)) for _ in range(ROUNDS) for place in places]
print("BENCH" + json.dumps([statistics.median(column) for column in zip(*pairs)]))
"""


def main(rounds: int = 6) -> None:
    """Print both medians in ms and their ratio, for each explorer; then what a picture by itself takes."""
    for name, cell in EXPLORERS.items():
        ours, theirs = medians(START + cell + END.replace("ROUNDS", str(rounds)))
        print(f"{name}, a median of {4 * rounds} moves")
        print(f"explorer: slider to new picture   {ours * 1e3:6.0f} ms  (to be at most 100)")
        print(f"interact with a fresh figure      {theirs * 1e3:6.0f} ms")
        print(f"interact / explorer               {theirs / ours:6.1f} x  (to be at least 2)")
    for name, cell in PICTURES.items():
        ours, _ = medians(START + cell + END.replace("ROUNDS", str(rounds)))
        print(f"{name}, a median of {4 * rounds} pictures")
        print(f"drawn and shown                   {ours * 1e3:6.0f} ms  (to be at most 100)")


def medians(cell: str) -> tuple[float, float]:
    """Seconds of a move, by the explorer and by `interact`, as a cell in a kernel of its own finds them."""
    import nbclient
    import nbformat

    cells = [nbformat.v4.new_code_cell(cell)]
    notebook = nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": {"name": "python3", "display_name": ""}})
    nbclient.NotebookClient(notebook, timeout=300).execute()
    told = "".join(output.get("text", "") for output in notebook.cells[0].outputs)
    ours, theirs = json.loads(told.split("BENCH")[1].splitlines()[0])
    return ours, theirs


if __name__ == "__main__":
    main()
