"""What DeepSpeed's and accelerate's own estimators say, written to tests/data/other_estimators.json.

Models are built on meta tensors from configurations that stand in the file; nothing is downloaded. DeepSpeed is given
their counts ("cold"): its "live" form tells parameters apart by their address, which on meta tensors is 0 for all.
accelerate and transformers are no dependencies of the project: COMMAND runs this in an environment that has them.
"""

import contextlib
import importlib.metadata
import io
import json
from pathlib import Path

COMMAND = "python -m tests.cost.other_estimators"
TO = Path(__file__).parent.parent / "data" / "other_estimators.json"
LLAMA = {"model_type": "llama", "tie_word_embeddings": False}
CONFIGS = {
    "gpt2-xl": {
        "model_type": "gpt2",
        "n_embd": 1600,
        "n_layer": 48,
        "n_head": 25,
        "n_positions": 1024,
        "vocab_size": 50257,
    },
    "llama-3.2-1b": LLAMA
    | {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
    },
    "llama-3.1-8b": LLAMA
    | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "qwen2.5-7b": {
        "model_type": "qwen2",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
    },
    "mixtral-8x7b": {
        "model_type": "mixtral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
}
CLUSTERS = ((8, 1), (8, 8))
OFFLOADS = {"none": (False, False), "optimizer": (True, False), "parameters": (True, True)}


def main():
    versions = {name: importlib.metadata.version(name) for name in ("deepspeed", "accelerate", "transformers", "torch")}
    found = {"command": COMMAND, "versions": versions, "models": {name: figures(CONFIGS[name]) for name in CONFIGS}}
    TO.write_text(json.dumps(found, indent=1) + "\n")


def figures(config):
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    model = built(config)
    count = sum(parameter.numel() for parameter in model.parameters())
    layer = max(sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules())
    total, largest = calculate_maximum_sizes(model)
    return {
        "config": config,
        "parameters": count,
        "largest_module": layer,
        "accelerate": {
            "total_size": total,
            "largest_layer": largest[0],
            "training": {dtype: estimate_training_usage(total, dtype) for dtype in ("float32", "float16", "bfloat16")},
        },
        "deepspeed": [*deepspeed(count, layer)],
    }


def built(config):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    given = dict(config)
    made = AutoConfig.for_model(given.pop("model_type"), **given)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(made)


def deepspeed(count, layer):
    with contextlib.redirect_stdout(io.StringIO()):
        from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs as three
        from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs as two
    for per_node, nodes in CLUSTERS:
        for name, (optimizer, parameters) in OFFLOADS.items():
            where = {"per_node": per_node, "nodes": nodes, "offload": name}
            if not parameters:
                host, device = two(count, per_node, nodes, optimizer, 1.5)
                yield {"stage": 2, **where, "host": host, "device": device}
            for init in (True, False):
                host, device, _ = three(count, layer, per_node, nodes, optimizer, parameters, init, 1.5)
                yield {"stage": 3, **where, "zero_init": init, "host": host, "device": device}


if __name__ == "__main__":
    main()
