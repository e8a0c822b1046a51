from __future__ import annotations

import pytest

from rlspec import machine

H200 = "NVIDIA H200, 9.0, 143771, 570.86.15"


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """A machine on which nvidia-smi prints what is given."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def prints(text, code=0):
        script = tmp_path / "nvidia-smi"
        script.write_text(f"#!/bin/sh\nprintf '%s' '{text}'\nexit {code}\n")
        script.chmod(0o755)

    return prints


def test_no_gpu_without_nvidia_smi(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.gpus() == []


def test_gpus(smi):
    smi(f"{H200}\n{H200}\n")
    one, two = machine.gpus()
    gpu = machine.Gpu(name="NVIDIA H200", capability=(9, 0), memory_gib=143771 / 1024, driver="570.86.15")
    assert one == two == gpu


@pytest.mark.parametrize("text", ["", "No devices were found\n", "NVIDIA X, [N/A], 1, 2\n", "a,b\n"])
def test_what_is_no_gpu(smi, text):
    smi(text)
    assert machine.gpus() == []


def test_a_gpu_that_shares_the_hosts_memory_does_not_say_how_much(smi):
    smi("NVIDIA GB10, 12.1, [N/A], 580.1\n")
    (gpu,) = machine.gpus()
    assert gpu.capability == (12, 1) and gpu.memory_gib == 0
    assert machine.unmet({"memory_gib": 8}) == ["8 GiB of GPU memory are needed, here: 0.0 GiB"]


def test_a_tool_that_fails_says_nothing(smi):
    smi(H200, code=9)
    assert machine.gpus() == []


UNMET = [
    ({}, []),
    ({"device": "cpu"}, []),
    ({"device": "cuda"}, []),
    ({"gpus": 2, "capability": "9.0", "memory_gib": 140}, []),
    ({"gpus": 3}, ["3 GPUs are needed, here: 2"]),
    ({"capability": ">=8.9"}, []),
    ({"capability": "8.9"}, ["compute capability 8.9 is needed, here: 9.0"]),
    ({"capability": ">=10.0"}, ["compute capability >=10.0 is needed, here: 9.0"]),
    ({"memory_gib": 141}, ["141 GiB of GPU memory are needed, here: 140.4 GiB"]),
    ({"pinned_weights": True}, ["pinned weights are needed, and the spec has none"]),
    ({"pinned_weights": False}, []),
    ({"packages": ["click", "no-such-package"]}, ["package 'no-such-package' is not installed here"]),
    ({"weights": ["/no/such/folder"]}, ["there is no folder /no/such/folder with weights"]),
    ({"commands": ["nvidia-smi", "x"], "gpus": 9}, ["program 'x' is not on PATH", "9 GPUs are needed, here: 2"]),
]


@pytest.mark.parametrize(("requires", "reasons"), UNMET)
def test_unmet(smi, requires, reasons):
    smi(f"{H200}\n{H200}\n")
    assert machine.unmet(requires) == reasons


@pytest.mark.parametrize("requires", [{"device": "cuda"}, {"gpus": 1}, {"capability": ">=1.0"}, {"memory_gib": 0.1}])
def test_anything_of_a_gpu_is_unmet_without_one(tmp_path, monkeypatch, requires):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.unmet(requires) == ["no CUDA device here (nvidia-smi lists none)"]


def test_gpus_that_differ_must_all_meet_a_requirement(smi):
    smi(f"{H200}\nNVIDIA L4, 8.9, 23034, 570.86.15\n")
    assert machine.unmet({"capability": ">=9.0"}) == ["compute capability >=9.0 is needed, here: 8.9, 9.0"]
    assert machine.unmet({"memory_gib": 24}) == ["24 GiB of GPU memory are needed, here: 22.5 GiB"]
    said = machine.unmet({"memory_gib": 24}, estimate=22.8)
    assert said == ["24 GiB of GPU memory are needed (23 by estimate), here: 22.5 GiB"]


def test_facts(smi):
    smi(f"{H200}\n")
    facts = dict(machine.facts())
    assert facts["GPU"] == "NVIDIA H200, 140 GiB, sm_90" and facts["driver"] == "570.86.15"
    assert facts["slurm"] == "not on PATH" and facts["torch"] == machine.version("torch")


def test_version_of_what_is_not_installed():
    assert machine.version("no-such-distribution") is None
