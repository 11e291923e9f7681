"""Models by name. Sizes are those of the authors' papers and of the configurations that they published.

Left out: Llama 2 34B (never published), the vision models of Llama 3.2 (layers that differ), base and chat
variants (of one size). GPT-3's paper has two slips in its Table 2.1, which are read as its own counts demand: XL with
16 heads instead of 24, 13B with a hidden size of 40 x 128 = 5120 instead of 5140.
"""

from __future__ import annotations

import difflib
import re

from labkit.cost.shapes import Shape

GPT2 = "Radford et al. 2019, Table 2, and openai/gpt-2: hparams.json"
GPT3 = "Brown et al. 2020, arXiv:2005.14165, Table 2.1"
LLAMA1 = "Touvron et al. 2023, arXiv:2302.13971, Table 2; feed-forward sizes of the published checkpoints"
LLAMA2 = "Touvron et al. 2023, arXiv:2307.09288, and config.json of meta-llama/Llama-2"
LLAMA3 = "The Llama 3 Herd of Models, arXiv:2407.21783, Table 3, and config.json of meta-llama"
QWEN25 = "Qwen2.5, arXiv:2412.15115, Table 1, and config.json of Qwen/Qwen2.5"
QWEN3 = "Qwen3, arXiv:2505.09388, Tables 1 and 2, and config.json of Qwen/Qwen3"
MISTRAL = "Jiang et al. 2023, arXiv:2310.06825, Table 1, and config.json of mistralai"
MIXTRAL = "Jiang et al. 2024, arXiv:2401.04088, Table 1, and config.json of mistralai"


def _gpt(name, layers, hidden, heads, positions, source):
    sizes = (layers, hidden, heads, heads, hidden // heads, 4 * hidden, 50257)
    return Shape(name, *sizes, positions, False, True, tied=True, max_seq=positions, source=source)


def _llama(name, layers, hidden, heads, kv_heads, ffn, vocab, max_seq, source, head_dim=0, **more):
    head_dim = head_dim or hidden // heads
    return Shape(name, layers, hidden, heads, kv_heads, head_dim, ffn, vocab, max_seq=max_seq, source=source, **more)


def _qwen25(name, layers, hidden, heads, kv_heads, ffn, tied):
    vocab = 152064 if hidden > 2048 else 151936
    sizes = (layers, hidden, heads, kv_heads, ffn, vocab)
    return _llama(name, *sizes, 32768, QWEN25, qkv_biases=True, tied=tied)


def _qwen3(name, layers, hidden, heads, kv_heads, ffn, tied=False, experts=0):
    sizes = (layers, hidden, heads, kv_heads, ffn, 151936)
    active = 8 if experts else 0
    return _llama(name, *sizes, 40960, QWEN3, 128, qk_norm=True, tied=tied, experts=experts, active_experts=active)


def models() -> tuple[Shape, ...]:
    """Every named model, family by family."""
    return *_gpts(), *_llamas(), *_qwens(), *_mistrals()


def _gpts():
    return (
        _gpt("gpt2", 12, 768, 12, 1024, GPT2),
        _gpt("gpt2-medium", 24, 1024, 16, 1024, GPT2),
        _gpt("gpt2-large", 36, 1280, 20, 1024, GPT2),
        _gpt("gpt2-xl", 48, 1600, 25, 1024, GPT2),
        _gpt("gpt3-125m", 12, 768, 12, 2048, GPT3),
        _gpt("gpt3-350m", 24, 1024, 16, 2048, GPT3),
        _gpt("gpt3-760m", 24, 1536, 16, 2048, GPT3),
        _gpt("gpt3-1.3b", 24, 2048, 16, 2048, GPT3),
        _gpt("gpt3-2.7b", 32, 2560, 32, 2048, GPT3),
        _gpt("gpt3-6.7b", 32, 4096, 32, 2048, GPT3),
        _gpt("gpt3-13b", 40, 5120, 40, 2048, GPT3),
        _gpt("gpt3-175b", 96, 12288, 96, 2048, GPT3),
    )


def _llamas():
    return (
        _llama("llama-7b", 32, 4096, 32, 32, 11008, 32000, 2048, LLAMA1),
        _llama("llama-13b", 40, 5120, 40, 40, 13824, 32000, 2048, LLAMA1),
        _llama("llama-33b", 60, 6656, 52, 52, 17920, 32000, 2048, LLAMA1),
        _llama("llama-65b", 80, 8192, 64, 64, 22016, 32000, 2048, LLAMA1),
        _llama("llama-2-7b", 32, 4096, 32, 32, 11008, 32000, 4096, LLAMA2),
        _llama("llama-2-13b", 40, 5120, 40, 40, 13824, 32000, 4096, LLAMA2),
        _llama("llama-2-70b", 80, 8192, 64, 8, 28672, 32000, 4096, LLAMA2),
        _llama("llama-3-8b", 32, 4096, 32, 8, 14336, 128256, 8192, LLAMA3),
        _llama("llama-3-70b", 80, 8192, 64, 8, 28672, 128256, 8192, LLAMA3),
        _llama("llama-3.1-8b", 32, 4096, 32, 8, 14336, 128256, 131072, LLAMA3),
        _llama("llama-3.1-70b", 80, 8192, 64, 8, 28672, 128256, 131072, LLAMA3),
        _llama("llama-3.1-405b", 126, 16384, 128, 8, 53248, 128256, 131072, LLAMA3),
        _llama("llama-3.2-1b", 16, 2048, 32, 8, 8192, 128256, 131072, LLAMA3, tied=True),
        _llama("llama-3.2-3b", 28, 3072, 24, 8, 8192, 128256, 131072, LLAMA3, tied=True),
    )


def _qwens():
    return (
        _qwen25("qwen2.5-0.5b", 24, 896, 14, 2, 4864, True),
        _qwen25("qwen2.5-1.5b", 28, 1536, 12, 2, 8960, True),
        _qwen25("qwen2.5-3b", 36, 2048, 16, 2, 11008, True),
        _qwen25("qwen2.5-7b", 28, 3584, 28, 4, 18944, False),
        _qwen25("qwen2.5-14b", 48, 5120, 40, 8, 13824, False),
        _qwen25("qwen2.5-32b", 64, 5120, 40, 8, 27648, False),
        _qwen25("qwen2.5-72b", 80, 8192, 64, 8, 29568, False),
        _qwen3("qwen3-0.6b", 28, 1024, 16, 8, 3072, True),
        _qwen3("qwen3-1.7b", 28, 2048, 16, 8, 6144, True),
        _qwen3("qwen3-4b", 36, 2560, 32, 8, 9728, True),
        _qwen3("qwen3-8b", 36, 4096, 32, 8, 12288),
        _qwen3("qwen3-14b", 40, 5120, 40, 8, 17408),
        _qwen3("qwen3-32b", 64, 5120, 64, 8, 25600),
        _qwen3("qwen3-30b-a3b", 48, 2048, 32, 4, 768, experts=128),
        _qwen3("qwen3-235b-a22b", 94, 4096, 64, 4, 1536, experts=128),
    )


def _mistrals():
    return (
        _llama("mistral-7b-v0.1", 32, 4096, 32, 8, 14336, 32000, 32768, MISTRAL),
        _llama("mistral-7b-v0.3", 32, 4096, 32, 8, 14336, 32768, 32768, MISTRAL),
        _llama("mistral-nemo-12b", 40, 5120, 32, 8, 14336, 131072, 131072, MISTRAL, 128),
        _llama("mistral-small-24b", 40, 5120, 32, 8, 32768, 131072, 32768, MISTRAL, 128),
        _llama("mistral-large-123b", 88, 12288, 96, 8, 28672, 32768, 131072, MISTRAL),
        _llama("mixtral-8x7b", 32, 4096, 32, 8, 14336, 32000, 32768, MIXTRAL, experts=8, active_experts=2),
        _llama("mixtral-8x22b", 56, 6144, 48, 8, 16384, 32768, 65536, MIXTRAL, experts=8, active_experts=2),
    )


def named(name: str) -> Shape:
    """The model of this name. ValueError names the nearest.

    Capitals, dashes, an owner before a slash and words that change no size (Meta-, -hf, -Instruct) do not matter.
    """
    wanted = re.sub(r"^meta-|-(hf|base|chat|instruct)\b", "", name.lower().rsplit("/", 1)[-1])
    found = {shape.name: shape for shape in models()}
    alike = {plain(each): shape for each, shape in found.items()}
    for spelling in (plain(wanted), plain(re.sub(r"-v\d[\d.]*$", "", wanted))):
        if spelling in alike:
            return alike[spelling]
    near = difflib.get_close_matches(wanted, found, n=3, cutoff=0.5)
    near = near or [each for each in found if each.startswith(wanted.split("-")[0][:5])][:3]
    some = ", ".join(near or ["gpt2", "llama-3.1-8b", "qwen3-8b"])
    raise ValueError(
        f"no model is called {name!r}; near are {some}. `labkit estimate --list` has all; or give a config.json"
    )


def plain(name: str) -> str:
    """A name without dashes. Dots stay: 1.3b and 13b are two models."""
    return re.sub(r"[-_ ]", "", name)
