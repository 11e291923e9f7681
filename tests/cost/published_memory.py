"""Published figures of parameters, memory and FLOPs, and how each is worked out here.

Measured peaks of runs are `measured`'s. COVERED maps a row's id to a function; LEFT_OUT names the
other rows of kinds `exact` and `formula-in-paper`, and why. Rows of links, hardware and collectives are `published`'s.
Measured utilisations are here too, because what turns a measured time into one is a formula of FLOPs.
"""

import re
from dataclasses import replace

from labkit.cost import activations, config, flops, memory, shapes, states
from labkit.cost.layout import Layout
from labkit.cost.shapes import Shape
from tests.cost import published

GIB, MIB = 2**30, 2**20
ZERO, MEGATRON = states.per_parameter("zero"), states.per_parameter("megatron")


def gpt(layers, hidden, heads=None, vocab=51200, positions=0, ffn=None, **more):
    """A GPT of these sizes; where a figure does not depend on heads, some that divide."""
    heads = heads or max(1, hidden // 64)
    return Shape(
        "gpt", layers, hidden, heads, heads, hidden // heads, ffn or 4 * hidden, vocab, positions, False, True, **more
    )


def zero_states(row):
    given = row["inputs"]
    assert (given["K"], given.get("bytes_param"), given.get("bytes_grad")) == (12, 2, 2)
    return states.state_bytes(int(given["psi"]), ZERO, given["stage"], given["Nd"]).total / 1e9


def zero_largest(row):
    """The paper's theoretical sizes take a 32 GB device as 32e9 bytes."""
    given = row["inputs"]
    return states.largest_parameters(given["gpu_gb"] * 1e9, ZERO, given["stage"], given["Nd"], given["MP"]) / 1e9


def one_layer(row, **more):
    """(bytes kept, bytes without recomputation) of a layer of the row's GPT, as the papers have it: scores kept."""
    given = row["inputs"]
    shape = gpt(given.get("L", 1), given["h"], given.get("a"))
    given = {"seq": given["s"], "micro_batch": given.get("b", 1), "tp": given.get("t", 1)}
    layout = Layout(**(given | {"flash": False} | more))
    saved = activations.layer_saved(shape, layout)
    return activations.kept(saved, shape, layout), memory.total(saved)


def layers_gib(row, **more):
    given = row["inputs"]
    return given["L"] * one_layer(row, sequence_parallel=given.get("sp", False), **more)[0] / GIB


def context_parallel_gib(row):
    """The row gives the part of the sequence that a rank has; its id has cp."""
    cp = int(re.search(r"\.cp(\d+)\.", row["id"])[1])
    return layers_gib(row, flash=True, cp=cp, seq=cp * row["inputs"]["s"])


def pipeline_gib(row):
    """The first of eight stages has an eighth of the layers, and eight microbatches in flight."""
    given = row["inputs"]
    shape, layout = gpt(given["L"], given["h"]), Layout(pp=8, microbatches=8, seq=given["s"])
    layers, _ = memory.activation_bytes(shape, layout, 0)
    return (layers - 8 * memory.total(activations.first_saved(shape, layout))) / GIB


def playbook_whole(row):
    """All layers, and the embedding's dropout mask."""
    given = row["inputs"]
    mask = activations.first_saved(gpt(given["L"], given["h"]), Layout(seq=given["s"]))[1]
    return layers_gib(row) + given["b"] * mask.num_bytes / GIB


def scores_per_hidden(row):
    """5 a s / h: the attention core, in units of s b h."""
    given = row["inputs"]
    whole, core = one_layer(row)[1], one_layer(row)[1] - one_layer(row, recompute="selective")[0]
    assert 0 < core < whole
    return core / (given["s"] * given["h"])


def selective_saving(row):
    kept, whole = one_layer(row, recompute="selective")
    return 100 * (1 - kept / whole)


def korthikanti_flops_share(row):
    """s / 6h: what the appendix adds for selective recomputation, over the layers' products without scores."""
    given = row["inputs"]
    sizes = (1, given["s"], 1, given["h"], 0)
    added = flops.korthikanti_flops(*sizes, "selective") - flops.korthikanti_flops(*sizes)
    return 100 * added / (72 * given["s"] * given["h"] ** 2)


def figure_1_states(row):
    given = row["inputs"]
    matrices = 12 * given["L"] * given["h"] ** 2
    return states.state_bytes(matrices, MEGATRON).total / (given["t"] * given["p"]) / GIB


def figure_1_activations(row):
    """Layers of the first stage with all that is in flight, by schedule."""
    given = row["inputs"]
    shape = gpt(given["L"], given["h"], given["a"])
    layout = Layout(
        tp=given["t"],
        pp=given["p"],
        seq=given["s"],
        micro_batch=given["b"],
        microbatches=given["B"] // given["b"],
        interleave=given["m"],
        flash=False,
        sequence_parallel=given["sp"],
        recompute=given["recompute"],
    )
    one = activations.kept(activations.layer_saved(shape, layout), shape, layout)
    return activations.in_flight(layout) * shapes.stage_layers(shape.layers, layout.pp)[0] * one / GIB


def figure_7(row):
    mode = row["inputs"]["mode"]
    how = "full" if mode == "full" else "selective" if "selective" in mode else "none"
    kept = one_layer(row, recompute=how, sequence_parallel="sp" in mode.split("+"))[0]
    return 100 * kept / one_layer(row, sequence_parallel=False)[1]


def narayanan_parameters(row):
    """Two h of the last norm more than the paper's formula."""
    given = row["inputs"]
    return shapes.parameters(gpt(given["l"], given["h"], given["a"], given["V"], given["s"], tied=True)) / 1e9


def counted(row):
    given = row["inputs"]
    if given.get("gpt2"):
        return shapes.parameters(gpt(given["L"], given["h"], None, given["V"], given["s"], tied=True))
    return shapes.parameters(llama(given))


def llama(given):
    dim = given.get("hd") or given["h"] // given["a"]
    return Shape(
        "row",
        given["L"],
        given["h"],
        given["a"],
        given["kv"],
        dim,
        given["f"],
        given["V"],
        tied=bool(given["tie"]),
        qkv_biases=bool(given.get("qkvbias")),
        qk_norm=bool(given.get("qknorm")),
        experts=given.get("E", 0),
        active_experts=given.get("topk", 2) if "E" in given else 0,
    )


def by_name(row):
    """The named model of the row's id."""
    return config.model(row["id"].removeprefix("params.").removesuffix(".active"))


def pythia(row):
    """Without embeddings and head: 12 L h^2 + 13 L h + 2 h."""
    shape = gpt(row["inputs"]["L"], row["inputs"]["h"], tied=True)
    return shapes.parameters(shape) - shapes.embedding_parameters(shape)


def mpt(row):
    """The row's formula has biases, as GPT has; learned positions, a tied head."""
    given = row["inputs"]
    return shapes.parameters(gpt(given["L"], given["h"], None, given["V"], given["s"], tied=True))


def playbook_states(row):
    """Of each parameter 2 bytes, and 8 of Adam's moments: the playbook counts no master weights."""
    size = {2: ZERO.parameter, 8: ZERO.moments}[row["inputs"]["bytes"]]
    return shapes.parameters(config.model(row["inputs"]["model"])) * size / GIB


def playbook_first_stage(row):
    shape = config.model(row["inputs"]["model"])
    return shapes.stage_parameters(shape, 1, row["inputs"]["pp"], 0) * ZERO.parameter / GIB


def korthikanti_percent(recompute):
    def percent(row):
        given = row["inputs"]
        done = flops.korthikanti_flops(given["B"], given["s"], given["L"], given["h"], given["V"], recompute)
        return 100 * flops.utilization(done, given["t_iter"], given["gpus"], given["peak"])

    return percent


def palm_percent(row):
    given = row["inputs"]
    return 100 * flops.palm_per_token(given["N"], given["L"], given["h"], given["s"]) * given["tps"] / given["peak"]


def nemo_teraflops(row):
    given = row["inputs"]
    per_token = flops.nemo_per_token(given["N"], given["emb"], given["L"], given["h"], given["s"])
    return per_token * given["tps"] / 1e12


def days(row):
    given = row["inputs"]
    return flops.training_days(given["T"], given["P"], given["n"], given["X"])


def days_by_iterations(row):
    given = row["inputs"]
    one = flops.narayanan_flops(given["B"], given["s"], given["l"], given["h"], given["V"])
    return given["T"] / (given["B"] * given["s"]) * one / (given["n"] * given["X"]) / flops.DAY_S


def checkpoint_terabytes(row):
    """A checkpoint holds parameters and optimizer state, no gradients."""
    return row["inputs"]["P"] * (ZERO.parameter + ZERO.optimizer) / 1e12


def deepspeed_2(row):
    given = row["inputs"]
    return states.deepspeed_zero2(int(given["P"]), given["N"], offload=given.get("offload") == "cpu")


def deepspeed_3(row):
    given = row["inputs"]
    words = given.get("offload", "none,none,init1").split(",")
    offload = {"cpu,cpu": "parameters", "none,cpu": "optimizer", "none,none": "none"}[",".join(words[:2])]
    sizes = (int(given["P"]), int(given["LL"]), given["N"])
    return states.deepspeed_zero3(*sizes, offload=offload, zero_init=words[2] == "init1")


def deepspeed_2_offload_host(row):
    """The docs' row has it without offload, and the figure of an offloaded one: 4 x 8 x 1.5 P."""
    return deepspeed_2(row)[0] / GIB


def megatron_sizes(row):
    """Megatron-LM's own report takes GPT's formula of activations for every model; so the Llamas are made GPTs."""
    model, _, _ = row["id"].removeprefix("est.megatron.").partition(".tp")
    known = {"gpt3-175b": gpt(96, 12288, 96, tied=True), "gpt-22b": gpt(48, 6144, 64, tied=True)}
    model = model.removesuffix(".dp8.act")
    shape = known.get(model) or config.model(model.replace("llama3", "llama-3").replace("llama2", "llama-2"))
    given = row["inputs"]
    pp, vpp = given["PP"], given.get("vpp", 1)
    layout = Layout(
        dp=given["DP"],
        tp=given["TP"],
        pp=pp,
        interleave=vpp,
        microbatches=8 * pp,
        seq=given["s"],
        micro_batch=given["b"],
        convention="megatron",
        zero=int(given.get("dist_opt", False)),
        recompute=given.get("recompute", "none"),
        flash=False,
    )
    return shape, layout


def megatron_states(row):
    shape, layout = megatron_sizes(row)
    held = memory.memory(shape, layout, 0)
    return (held.parameters + held.gradients + held.optimizer) / MIB


def megatron_activations(row):
    shape, layout = megatron_sizes(row)
    shape = replace(shape, gated=False, biases=True, kv_heads=shape.heads)
    return sum(memory.activation_bytes(shape, layout, 0)) / MIB


# (id, function)
COVERED = (
    (r"zero\.(t1|fig1)\.|zero\.gpt2_states|offload\.states", zero_states),
    (r"zero\.t2\..*\.theory", zero_largest),
    (r"zero\.gpt2_fp16_weights", lambda row: row["inputs"]["psi"] * ZERO.parameter / 1e9),
    (r"zero\.fused_fp32_buffer", lambda row: row["inputs"]["psi"] * states.element_bytes("fp32") / 1e9),
    (r"seqsel\.5as_h", scores_per_hidden),
    (r"seqsel\.sel_saving", selective_saving),
    (r"seqsel\.sel_flops", korthikanti_flops_share),
    (r"seqsel\.fig1\..*\.param_opt", figure_1_states),
    (r"seqsel\.fig1\..*\.act_", figure_1_activations),
    (r"seqsel\.fig7\.", figure_7),
    (r"seqsel\.t5\..*\.mfu", korthikanti_percent("none")),
    (r"seqsel\.t5\..*\.hfu", korthikanti_percent("selective")),
    (r"ptdp\.t1\..*\.params", narayanan_parameters),
    (r"ptdp\.train_time", days),
    (r"ptdp\.t2\..*\.days", days_by_iterations),
    (r"ptdp\.ckpt_size", checkpoint_terabytes),
    (r"playbook\.act_none\.", playbook_whole),
    (r"playbook\.(act_sel|tp_act|tpsp_act)\.", lambda row: layers_gib(row, flash=True)),
    (r"playbook\.cp_act\.", context_parallel_gib),
    (r"playbook\.pp8\.act", pipeline_gib),
    (r"playbook\.states\.", playbook_states),
    (r"playbook\.pp8\.params", playbook_first_stage),
    (r"params\.mixtral-8x7b\.active", lambda row: shapes.active_parameters(by_name(row))),
    (r"params\.hf_safetensors_total", lambda row: shapes.parameters(config.model("llama-2-7b")) + 32 * 64),
    (r"params\.pythia", pythia),
    (r"params\.mpt", mpt),
    (r"params\.", counted),
    (r"mbridge\..*\.tflops", nemo_teraflops),
    (r"dsdoc\.t5-3b\.z2\.none\.gpu", lambda row: states.deepspeed_zero2_before(2851e6, 8) / GIB),
    (r"ds(doc|code)\.t5-3b\.z2\..*gpu", lambda row: deepspeed_2(row)[1] / GIB),
    (r"dsdoc\.t5-3b\.z3\..*gpu", lambda row: deepspeed_3(row)[1] / GIB),
    (r"dsdoc\.t5-3b\.z2\..*cpu", deepspeed_2_offload_host),
    (r"dsdoc\.t5-3b\.z3\..*cpu$", lambda row: deepspeed_3(row)[0] / GIB),
    (r"dsdoc\.t5-large\.case1", lambda row: deepspeed_3(row)[1] / MIB),
    (r"dsdoc\.t5-large\.case2", lambda row: states.deepspeed_zero3(737670000, 32900000, 4)[1] / MIB),
    (r"est\.megatron\..*\.weight_opt", megatron_states),
    (r"est\.megatron\..*\.act", megatron_activations),
)
LEFT_OUT = (
    (r".*bubble", "idle time of pipeline schedules: no memory, no FLOPs"),
    (r"ptdp\.flops\.175B_iter", "the paper prints the formula and no figure"),
)


def rows():
    """All of kinds `exact` and `formula-in-paper` that are no wire's, and what else is covered."""
    wires = {row["id"] for row in published.family()}
    kinds = ("exact", "formula-in-paper")
    return [row for row in published.ROWS if row["id"] not in wires and (row["kind"] in kinds or work_out(row))]


def work_out(row):
    if row["formula"] == "mfu_6N12":
        return palm_percent
    return next((fn for pattern, fn in COVERED if re.match(pattern, row["id"])), None)


def reason(row):
    return next((why for pattern, why in LEFT_OUT if re.match(pattern, row["id"])), None)
