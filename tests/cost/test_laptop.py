"""The laptop's figures: kept and found again, never for another machine, and no trouble with the file is fatal."""

import dataclasses
import json
import os

import pytest

from labkit.cost import laptop
from labkit.cost.laptop import Laptop

MINE = Laptop(4, 2.0, 5e9, 8e9, 12 * 2**30, 60e-6, 1.5e9, 30e-6, "2026-01-31T10:00:00+00:00", "here")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "deeper" / "machine.json"


def found(path, num_ranks=4, cores=2.0, host="here"):
    return laptop.load(num_ranks, cores, host, path)


def test_what_was_measured_is_found_again_for_the_same_host_cores_and_ranks_only(path):
    assert found(path) is None
    assert laptop.save(MINE, path) == ""
    assert found(path) == found(path, cores=2) == MINE
    assert found(path, num_ranks=2) is found(path, cores=8.0) is found(path, host="there") is None


def test_saving_keeps_the_others_and_replaces_the_same(path):
    two, again = dataclasses.replace(MINE, num_ranks=2), dataclasses.replace(MINE, flops=6e9)
    for each in (MINE, two, again):
        laptop.save(each, path)
    assert (found(path), found(path, num_ranks=2)) == (again, two)
    assert os.listdir(path.parent) == [path.name], "no temporary file is left"


def test_it_lies_in_the_learners_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path))
    laptop.save(MINE)
    assert (tmp_path / laptop.NAME).exists() and laptop.load(4, 2.0, "here") == MINE


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"version": 2, "laptops": []}', '{"version": 1, "laptops": [{"num_ranks": 4}]}', '{"version": 1}'],
)
def test_a_broken_file_is_as_good_as_none_and_is_written_anew(path, text):
    path.parent.mkdir()
    path.write_text(text)
    assert found(path) is None
    assert laptop.save(MINE, path) == "" and found(path) == MINE


def test_a_file_from_before_a_figure_was_measured_is_as_good_as_none(path):
    laptop.save(MINE, path)
    data = json.loads(path.read_text())
    del data["laptops"][0]["busy_share"]
    path.write_text(json.dumps(data))
    assert found(path) is None


def test_figures_that_nothing_can_have_are_not_read(path):
    laptop.save(MINE, path)
    for broken in (0, -1.0, None, "fast", float("nan")):
        data = json.loads(path.read_text())
        data["laptops"][0]["flops"] = broken
        path.write_text(json.dumps(data))
        assert found(path) is None


def test_a_folder_that_cannot_be_made_is_told_and_not_raised(tmp_path):
    (tmp_path / "file").write_text("")
    told = laptop.save(MINE, tmp_path / "file" / "machine.json")
    assert "cannot be written" in told and "\n" not in told
    assert found(tmp_path / "file" / "machine.json") is None


def test_a_full_disk_leaves_what_was_there(path, monkeypatch):
    laptop.save(MINE, path)

    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(laptop.os, "fsync", full)
    assert "No space left" in laptop.save(dataclasses.replace(MINE, flops=6e9), path)
    assert found(path) == MINE and os.listdir(path.parent) == [path.name]


def test_its_cluster_has_a_device_per_rank_and_shares_the_cores():
    cluster = laptop.cluster_of(MINE)
    assert (cluster.size, cluster.num_nodes, cluster.node.cores) == (4, 1, 2.0)
    assert cluster.node.device.peak("float32") == 5e9 and cluster.node.device.memory_bytes == 3 * 2**30
    assert dataclasses.replace(MINE, busy_share=0.3) != MINE and cluster.node.busy_share == 1.0
    assert laptop.cluster_of(dataclasses.replace(MINE, busy_share=0.3)).node.busy_share == 0.3
    assert (cluster.node.intra.alpha_s, cluster.node.intra.call_s) == (60e-6, 30e-6)
    assert "here" in cluster.node.source and "4 ranks busy" in cluster.node.source


def test_a_wrong_figure_is_told():
    with pytest.raises(ValueError, match="bandwidth of a laptop cannot be 0"):
        dataclasses.replace(MINE, bandwidth=0)
