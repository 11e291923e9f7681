"""`labkit estimate`: what it prints, its JSON against CONTRIBUTING.md, its changes at their word, one-line errors."""

import json
import re
import shlex

import pytest

from labkit import cli
from tests.house.source import ROOT

LLAMA_CONFIG = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}


@pytest.fixture
def say(capsys):
    """Run the command: (exit code, stdout, stderr)."""

    def run(words):
        code = cli.main(["estimate", *shlex.split(words)])
        return code, *capsys.readouterr()

    return run


def told(say, words):
    code, out, _ = say(f"{words} --json")
    found = json.loads(out)
    assert code == (0 if found["fits"] else 1)
    return found


@pytest.mark.parametrize(
    "words, code, want",
    [
        ("llama-3.1-8b", 1, "Does not fit: 75.74 GiB too much."),
        ("llama-3.1-8b --gpus 8 --zero 3", 0, "Fits: "),
        ("gpt2 --device T4 --precision fp16", 0, "T4 16 GiB"),
        ("mixtral-8x7b --gpus 64 --tp 8 --zero 1", 0, "active"),
        ("llama-3.1-8b --gpus 8 --zero 3 --program torchtitan", 0, "pytorch/torchtitan@9dec370"),
        ("llama-3.1-405b --gpus 512 --tp 8 --pp 16 --seq 8192 --microbatches 32", 1, "stage 1 of 16"),
        ("llama-3.1-8b --gpus 2 --zero 2 --offload optimizer --activations eager --convention deepspeed", 0, "host"),
    ],
)
def test_a_table_a_bar_and_a_verdict_in_80_columns(words, code, want, say):
    got, out, err = say(words)
    assert (got, err) == (code, "") and want in out
    assert max(map(len, out.splitlines())) <= 80 and "\x1b" not in out
    names = ("parameters", "gradients", "optimizer", "activations", "logits and loss", "buffers", "context and gaps")
    for part in (*names, "needed"):
        assert re.search(rf"^\w? *{part} +[\d.]+", out, re.MULTILINE), part
    assert ("Cheapest changes" in out) == (code == 1) and "Assumed:" in out
    assert ("no more devices first, then the least device time" in " ".join(out.split())) == (code == 1)


def test_the_bar_has_every_part_to_scale(say):
    _, out, _ = say("llama-3.1-8b --gpus 8 --zero 3")
    bar = next(line for line in out.splitlines() if line.startswith("|P"))
    shares = {name: int(share) for name, share in re.findall(r"^([A-Z]) .* (\d+)%$", out, re.MULTILINE)}
    drawn = {name: bar.count(name) for name in "PGOALBC"}
    filled = sum(drawn.values())
    assert all(count == pytest.approx(filled * shares[name] / 100, abs=1.5) for name, count in drawn.items())
    needed = float(re.search(r"needed +([\d.]+)", out)[1])
    assert filled == pytest.approx(60 * needed / 80, abs=2)


def test_the_json_is_what_contributing_says(say):
    found = told(say, "llama-3.1-8b --gpus 8")
    table = (ROOT / "CONTRIBUTING.md").read_text().split("**An estimate**")[1].split("**Check ids**")[0]
    rows = re.findall(r"^\| (`[^|]+`) \|", table, re.MULTILINE)
    assert [key for row in rows for key in re.findall(r"`(\w+)`", row)] == list(found)
    assert int(re.search(r"^\| `version` \| (\d+)", table, re.MULTILINE)[1]) == found["version"] == 2
    assert found["fits"] == (found["needed_bytes"] <= found["device_bytes"])
    assert list(found["overhead_bytes"]) == ["in_flight", "gaps", "nccl", "context"]
    assert found["needed_bytes"] == found["memory_bytes"]["total"] + sum(found["overhead_bytes"].values())
    held = found["memory_bytes"]
    assert list(held) == ["parameters", "gradients", "optimizer", "activations", "buffers", "total"]
    assert held["total"] == sum(list(held.values())[:-1]) and all(isinstance(size, int) for size in held.values())
    assert set(found["changes"][0]) == {"options", "total", "needed", "slowdown"}


@pytest.mark.parametrize(
    "words",
    [
        "llama-3.1-8b",
        "llama-3.1-8b --gpus 8 --device A100-40",
        "llama-3.1-70b --gpus 64 --tp 8 --micro-batch 4 --no-flash --no-sequence-parallel --device A100-80",
        "mixtral-8x7b --gpus 16 --pp 4 --activations eager",
        "llama-3.1-405b --device A100-80 --tp 8 --pp 9",
        "mixtral-8x7b --gpus 16 --zero 1",
        "llama-3.1-70b --gpus 64 --zero 3 --shard-within 8",
        "llama-3.1-70b --gpus 16 --zero 3 --zeropp all",
        "llama-3.1-8b --gpus 8 --zero 3 --program torchtitan --device A100-40 --micro-batch 4 --seq 8192",
    ],
)
def test_a_change_given_as_options_does_what_was_promised(words, say):
    found = told(say, words)
    assert not found["fits"] and len(found["changes"]) == 3
    for change in found["changes"]:
        taken = told(say, f"{words} {change['options']}")
        assert taken["fits"] and taken["memory_bytes"]["total"] == change["total"]
        assert taken["needed_bytes"] == change["needed"] <= taken["device_bytes"]


def test_a_config_json_is_as_good_as_a_name(say, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_CONFIG))
    named = told(say, "llama-3.1-8b --gpus 8 --zero 1")
    for place in (tmp_path, tmp_path / "config.json"):
        read = told(say, f"{place} --gpus 8 --zero 1")
        assert read["memory_bytes"] == named["memory_bytes"] and read["parameters"] == 8030261248


def test_files_and_copies_beyond_a_group_are_told(say):
    found = told(say, "llama-3.1-8b --gpus 8 --zero 3 --offload nvme --device A100-40")
    part = -(-8030261248 // 8)
    assert found["disk_bytes"] == part * (12 + 2) and found["host_bytes"] == part * 2
    assert found["memory_bytes"]["parameters"] == found["memory_bytes"]["optimizer"] == 0
    assert set(found["communication_bytes"]) == {"dp", "host", "disk"}
    found = told(say, "llama-3.1-8b --gpus 16 --zero 3 --shard-within 8")
    assert found["layout"]["shard_within"] == 8 and set(found["communication_bytes"]) == {"shard", "dp"}
    found = told(say, "mixtral-8x7b --gpus 64 --tp 2 --ep 8 --zero 1")
    assert found["layout"]["ep"] == 8 and set(found["communication_bytes"]) == {"dp", "tp", "ep"}
    found = told(say, "llama-3.1-8b --gpus 64 --zero 3 --zeropp all")
    assert found["buffer_bytes"]["secondary"] == 2 * part and "shard" in found["communication_bytes"]


@pytest.mark.parametrize(
    "words",
    [
        "llama-3.1-8b --gpus 64 --zero 3 --zeropp all",
        "llama-3.1-8b --gpus 64 --zero 3 --shard-within 8",
        "mixtral-8x7b --gpus 64 --tp 2 --pp 2 --cp 2 --ep 8 --zero 1",
        "llama-3.1-8b --gpus 8 --zero 3 --offload nvme",
    ],
)
def test_the_lines_of_traffic_have_their_words_apart(words, say):
    moved = told(say, words)["communication_bytes"]
    lines = say(words)[1].split("sent by one device in one step, GB\n")[1].split("FLOPs:")[0].splitlines()
    due = [[axis, op, f"{size / 1e9:.3f}"] for axis, ops in moved.items() for op, size in ops.items()]
    assert [line.split() for line in lines] == due and len({len(line) for line in lines}) == 1


def test_the_list_has_every_model_and_its_parameters(say):
    code, out, _ = say("--list")
    assert code == 0 and re.search(r"^llama-3.1-8b +8,030,261,248$", out, re.MULTILINE)


def test_defaults_are_one_device_and_as_many_microbatches_as_stages(say):
    for words, want in (("gpt2", (1, 1, 1, 1024)), ("llama-3.1-8b --tp 2 --pp 4", (8, 1, 4, 4096))):
        layout = told(say, words)["layout"]
        assert tuple(layout[key] for key in ("gpus", "dp", "microbatches", "seq")) == want


@pytest.mark.parametrize(
    "words, want",
    [
        ("", "name a model"),
        ("llama-9b", "no model is called 'llama-9b'; near are"),
        ("nothing/config.json", "there is no file nothing/config.json"),
        ("llama-3.1-8b --tp 3", "1, 2, 4, 8, 16 or 32 would do"),
        ("llama-3.1-8b --pp 40", "1 to 32 would do"),
        ("llama-3.1-8b --gpus 6 --tp 4", "4 or 8 would do"),
        ("llama-3.1-8b --gpus 0", "gpus must be 1 or more"),
        ("llama-3.1-8b --tp 0", "tp must be a whole number of 1 or more"),
        ("llama-3.1-8b --gpus -8 --tp 4", "gpus must be 1 or more, not -8"),
        ("llama-3.1-8b --zero 4", "0, 1, 2, 3, not 4"),
        ("llama-3.1-8b --device H1000", "known: T4"),
        ("llama-3.1-8b --device T4", "it has fp32, fp16"),
        ("llama-3.1-8b --program megatron", "common, nanotron, torchtitan, torchtune"),
        ("llama-3.1-8b --program torchtitan", "torchtitan has no zero 0; zero 3 would do"),
        ("llama-3.1-8b --precision fp8", "bf16, fp16, fp32, not 'fp8'"),
        ("llama-3.1-8b --offload optimizer", "needs ZeRO stage 1, 2 or 3"),
        ("gpt2 --seq 2048", "gpt2 has 1024 positions"),
        ("llama-3.1-8b --gpus 8 --cp 3 --seq 4098", "6 or 9 would do"),
        ("llama-3.1-8b --seq -1", "seq must be a whole number of 1 or more, not -1"),
        ("llama-3.1-8b --interleave 2", "with pp 2, 2 would do"),
        ("llama-3.1-8b --offload nvme --zero 2", "needs ZeRO stage 3, not 2; offload optimizer would do"),
        ("llama-3.1-8b --offload tape", "none, optimizer, parameters, nvme, not 'tape'"),
        ("llama-3.1-8b --gpus 8 --ep 2", "1 would do"),
        ("mixtral-8x7b --gpus 6 --ep 4", "1 or 2 would do, or --gpus 4 (dp 4)"),
        ("mixtral-8x7b --gpus 12 --ep 3", "ep 3 does not divide the 8 experts of mixtral-8x7b; 1, 2 or 4 would do"),
        ("llama-3.1-8b --gpus 8 --zero 3 --shard-within 3", "1, 2, 4 or 8 would do"),
        ("llama-3.1-8b --gpus 8 --shard-within 4", "needs ZeRO stage 1, 2 or 3"),
        ("llama-3.1-8b --gpus 8 --zero 3 --zeropp some", "of qwz, hpz, qgz, joined by +; not 'some'"),
        (
            "llama-3.1-8b --gpus 12 --zero 3 --zeropp hpz",
            "per-node 8 does not divide dp x cp = 12; 1, 2, 3, 4 or 6 would",
        ),
        (
            "llama-3.1-8b --gpus 64 --tp 8 --zero 3 --zeropp hpz --per-node 8",
            "tp 8 x per-node 8 is more than the 8 GPUs",
        ),
    ],
)
def test_bad_input_is_one_clear_line(words, want, say):
    code, out, err = say(words)
    assert (code, out) == (1, "") and want in err
    assert err.startswith("labkit: ") and err.count("\n") == 1


@pytest.mark.parametrize(
    "words, option",
    [
        ("mixtral-8x7b --ep 8", "--ep"),
        ("mixtral-8x7b --ep 8 --tp 2 --pp 2", "--ep"),
        ("mixtral-8x7b --ep 8 --cp 2", "--ep"),
        ("mixtral-8x7b --gpus 6 --ep 4", "--ep"),
        ("mixtral-8x7b --gpus 12 --ep 3", "--ep"),
        ("mixtral-8x7b --gpus 12 --ep 8 --zero 1", "--ep"),
        ("llama-3.1-8b --gpus 8 --ep 2", "--ep"),
        ("llama-3.1-8b --zero 3 --shard-within 3 --gpus 8", "--shard-within"),
        ("llama-3.1-8b --zero 3 --shard-within 4 --tp 2", "--shard-within"),
        ("llama-3.1-8b --gpus 12 --zero 3 --zeropp all", "--per-node"),
        ("llama-3.1-8b --gpus 64 --tp 8 --zero 3 --zeropp all --per-node 8", "--per-node"),
        ("llama-3.1-8b --gpus 64 --zero 3 --zeropp all --per-node 7", "--per-node"),
        ("llama-3.1-8b --gpus 48 --tp 4 --zero 3 --zeropp all --per-node 5", "--per-node"),
    ],
)
def test_each_value_that_would_do_does(words, option, say):
    code, _, err = say(words)
    assert code == 1 and " would do" in err
    advice = err.split(";")[1].split(" would do")
    ways = [f"{option} {number}" for number in re.findall(r"\d+", advice[0])]
    ways += re.findall(r"--gpus \d+", advice[1])
    assert ways
    for way in ways:
        _, out, err = say(f"{words} {way} --json")
        assert err == "" and json.loads(out)["layout"]["dp"] >= 1


def test_the_text_has_no_figure_in_bytes(say):
    for words in ("llama-3.1-8b", "llama-3.1-8b --gpus 4 --zero 3 --offload nvme"):
        _, out, _ = say(words)
        told = out.split("Assumed:")[1]
        assert not re.search(r"\d{6}", told) and re.search(r"\d\.\d\d GiB of (files|logits)", " ".join(told.split()))


@pytest.mark.parametrize(
    "text, want",
    [
        ("{", "is not JSON: Expecting property name"),
        ("", "is not JSON"),
        ("[1]", "is an object with keys like model_type, not list"),
        ("\x00", "is not JSON"),
        ("[" * 100000, "is not JSON"),
        ('{"model_type": "bert"}', "model_type 'bert' is not one of gpt2, llama"),
        ('{"model_type": 3}', "model_type 3 is not one of gpt2, llama"),
        ('{"model_type": "llama"}', "has no"),
        (json.dumps(LLAMA_CONFIG | {"hidden_size": "4096"}), "hidden_size must be a whole number of 1 or more"),
        (json.dumps(LLAMA_CONFIG | {"num_hidden_layers": -2}), "num_hidden_layers must be a whole number"),
        (json.dumps(LLAMA_CONFIG | {"vocab_size": None}), "has no vocab_size, which a llama needs"),
        (json.dumps(LLAMA_CONFIG | {"num_attention_heads": 33}), "33 heads do not divide the hidden size 4096"),
        (json.dumps(LLAMA_CONFIG | {"num_key_value_heads": 5}), "5 kv heads do not divide 32 heads"),
        (json.dumps(LLAMA_CONFIG | {"tie_word_embeddings": "no"}), "tie_word_embeddings must be true or false"),
    ],
)
def test_a_malformed_config_is_one_clear_line(text, want, say, tmp_path):
    (tmp_path / "config.json").write_text(text)
    for place in (tmp_path / "config.json", tmp_path):
        code, out, err = say(str(place))
        assert (code, out, err.count("\n")) == (1, "", 1) and "config.json" in err and want in err


def test_a_config_that_is_no_text_and_a_folder_without_one_are_one_clear_line(say, tmp_path):
    code, out, err = say(str(tmp_path))
    assert (code, out, err.count("\n")) == (1, "", 1) and "give a config.json" in err
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    code, out, err = say(str(tmp_path))
    assert (code, out, err.count("\n")) == (1, "", 1) and "cannot be read" in err


def test_a_number_that_is_none_is_misuse(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["estimate", "gpt2", "--tp", "two"])
    assert stop.value.code == 2


def test_numbers_of_gpus_are_proposed_only_for_axes_that_the_model_has(say):
    code, out, err = say("llama-3.1-8b --gpus 8 --tp 3")
    assert (code, out) == (1, "") and "tp 3 does not divide the 32 heads" in err and "gpus" not in err
