"""The launcher slurm on a real SLURM of two nodes; without SLURM what it decides from its files."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlspec import slurm
from rlspec.launch import argv, execute
from rlspec.model import Launch
from tests import slurm_cluster
from tests.processes import LONG, wait_for
from tests.tiny import PATTERN, report, rlspec, run_folder, save, statuses

# torchrun in the place of torch's, for tests that are about slurm: it starts the ranks of its node, and no more.
TORCHRUN = """
import argparse, os, subprocess, sys

parser = argparse.ArgumentParser()
for name in ("nnodes", "nproc-per-node", "rdzv-id", "rdzv-backend", "rdzv-endpoint", "local-addr"):
    parser.add_argument(f"--{name}")
parser.add_argument("command", nargs=argparse.REMAINDER)
given = parser.parse_args()
count, node = int(given.nproc_per_node), int(os.environ["SLURM_NODEID"])
host, port = given.rdzv_endpoint.split(":")
ranks = []
for local in range(count):
    more = {"RANK": node * count + local, "WORLD_SIZE": int(given.nnodes) * count, "MASTER_ADDR": host,
            "MASTER_PORT": port}
    environment = {**os.environ, **{name: str(value) for name, value in more.items()}}
    ranks.append(subprocess.Popen([sys.executable, *given.command], env=environment))
sys.exit(max(rank.wait() for rank in ranks))
"""
# Each rank prints where it is; rank 0 prints the steps. What is to happen on the way stands in the environment.
TRAINER = """
import os, signal, sys, time

rank = int(os.environ["RANK"])
print(f"rank {rank} of {os.environ['WORLD_SIZE']} on {os.environ['SLURMD_NODENAME']} meets at "
      f"{os.environ['MASTER_ADDR']} gpus {os.environ.get('CUDA_VISIBLE_DEVICES', 'none')}", flush=True)
offset, deaf = float(os.environ.get("OFFSET", "0")), os.environ.get("DEAF")
if deaf:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
for step in range(1, 7):
    if str(step) == os.environ.get("HANG_AT") and not os.path.exists(os.environ["FIXED"]):
        open(os.environ["FIXED"] + f".{rank}", "w").close()
        time.sleep(600)
    if rank == int(os.environ.get("FAILS", "-1")) and step == 3:
        raise ValueError(f"a bad day of rank {rank}")
    if rank == 0:
        print(f"step {step}/6 loss={4 / step + (step > 1) * offset * step!r} step_time=0.1", flush=True)
"""


def spec(folder, cluster_environment, nodes=2, processes=1, trainer=TRAINER, **changes):
    """Three arms that differ by 1 and by 2 floors."""
    place = folder / "stand-in"
    (place / "torch" / "distributed").mkdir(parents=True, exist_ok=True)
    for name in ("__init__", "distributed/__init__", "distributed/run"):
        (place / "torch" / f"{name}.py").write_text(TORCHRUN if name.endswith("run") else "")
    (folder / "train.py").write_text(trainer)
    common = {"PYTHONPATH": str(place), "FIXED": str(folder / "fixed"), **cluster_environment}
    arms = [
        {"name": "base0", "role": "base", "environment": common},
        {"name": "base1", "role": "base", "environment": {**common, "OFFSET": "0.0001"}},
        {"name": "feat0", "role": "feature", "environment": {**common, "OFFSET": "0.0002"}},
    ]
    data = {
        "kind": "correctness",
        "question": "Alike on two nodes?",
        "model": "char-gpt",
        "mesh": {"pp": 1},
        "trainer": {
            "name": "command",
            "command": ["{python}", str(folder / "train.py")],
            "reader": {"name": "regex", "pattern": PATTERN},
            "steps": 6,
        },
        "launch": {"name": "slurm", "nodes": nodes, "processes_per_node": processes},
        "arms": arms,
        "judgments": [{"check": "drift", "metric": "loss"}],
        **changes,
    }
    return save(folder / "spec.yaml", data)


# Without SLURM


def test_the_command_line():
    launch = Launch(name="slurm", nodes=2, processes_per_node=8, gpus=True, options=("--partition=gpu",))
    made = argv(launch, ["/env/python3", "-u", "x.py", "--n", "1"])
    script = str(Path(slurm.__file__).resolve())
    assert made == ("/env/python3", "-I", script, "run", "--nodes", "2", "--processes", "8", "--gpus",
                    "--option=--partition=gpu", "--", "/env/python3", "x.py", "--n", "1")  # fmt: skip


def made_run(monkeypatch, folder, nodes=2, processes=1):
    monkeypatch.setenv(slurm.FOLDER, str(folder))
    given = argparse.Namespace(nodes=nodes, processes=processes, gpus=True, option=["--qos=x"], command=["python", "a"])
    return slurm.Run(given)


def test_a_step_is_one_task_a_node_that_nothing_kills(monkeypatch, tmp_path):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    words = made_run(monkeypatch, tmp_path).srun()
    wanted = {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--wait=0", "--quit-on-interrupt",
              "--gpus-per-node=1", f"--output={tmp_path / 'nodes.log'}"}  # fmt: skip
    assert wanted <= set(words) and "--qos=x" not in words and words[-2:] == ["python", "a"]
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    first, second = made_run(monkeypatch, tmp_path).srun(), made_run(monkeypatch, tmp_path).srun()
    assert "--qos=x" in first, "inside an allocation they are srun's, else sbatch's"
    assert first != second, "a name of its own for each arm"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("slurmstepd: error: *** STEP 5.0 ON n1 CANCELLED AT 2026-11-29T14:03:12 DUE TO TIME LIMIT ***",
         "step 5.0 reached the time limit of its job"),
        ("slurmstepd: error: *** STEP 5.0 ON n1 CANCELLED AT 2026-11-29T14:03:12 ***",
         "step 5.0 was cancelled (scancel)"),
        ("slurmstepd: error: *** JOB 5 ON n1 CANCELLED AT 2026-11-29T14:03:12 DUE TO PREEMPTION ***",
         "step 5 was preempted"),
        ("slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-29T14:03:12 DUE TO NODE FAILURE, SEE SLURMCTLD "
         "LOG FOR DETAILS ***", "step 7.0 lost a node"),
        ("srun: error: Node failure on n2", "no result from node n1, n2: srun: error: Node failure on n2"),
        ("nothing of note", "no result from node n1, n2: slurm returned 0"),
    ],
)  # fmt: skip
def test_what_slurm_did_to_a_step(monkeypatch, tmp_path, line, words):
    run = made_run(monkeypatch, tmp_path)
    monkeypatch.setattr(slurm, "LINGER", 0)
    (tmp_path / "nodes.log").write_text(f"step 1\n{line}\n")
    (tmp_path / "rendezvous.json").write_text(json.dumps({"host": "n1", "port": 1, "nodes": ["n1", "n2"]}))
    assert run._end(0) == 1 and slurm.result(tmp_path)["reason"] == words


def test_files_of_the_nodes_are_the_truth(monkeypatch, tmp_path):
    monkeypatch.setattr(slurm, "LINGER", 0)
    assert "left no result" in slurm.result(tmp_path)["reason"]
    for at, code in enumerate((0, 0)):
        (tmp_path / f"ended-{at}.json").write_text(json.dumps({"node": f"n{at}", "returncode": code}))
    assert made_run(monkeypatch, tmp_path)._end(7) == 0 and slurm.result(tmp_path)["reason"] is None
    (tmp_path / "ended-1.json").write_text(json.dumps({"node": "n1", "returncode": 3}))
    assert made_run(monkeypatch, tmp_path)._end(0) == 3 and slurm.result(tmp_path)["reason"] is None
    (tmp_path / "ended-1.json").unlink()
    assert made_run(monkeypatch, tmp_path)._end(0) == 1 and "no result from node" in slurm.result(tmp_path)["reason"]


def test_a_machine_without_slurm_is_blocked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = spec(tmp_path, {})
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent) + ":/nowhere")
    done = rlspec("run", path)
    assert done.code == 5 and "program 'srun' is not on PATH" in done.out


def test_the_port_is_torchruns_alone():
    with slurm._held_port() as held, socket.socket() as other, socket.socket() as store:
        address = ("", held.getsockname()[1])
        with pytest.raises(OSError, match="in use"):
            other.bind(address)
        store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        store.bind(address)
        store.listen()


@pytest.mark.parametrize("limit, waited", [(60.0, "time limit 1m reached"), (None, None)])
def test_the_time_limit_is_the_nodes_and_not_the_queues(monkeypatch, tmp_path, limit, waited):
    """An hour in the queue is none of it; then it counts from when the first node is seen to have started."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(slurm, "time", clock)
    run = made_run(monkeypatch, tmp_path)
    run.time_limit, clock.now = limit, 3600.0
    assert not run._overdue(0.0)
    (tmp_path / "started-1.json").write_text("{}")
    assert not run._overdue(0.0)
    clock.now += 59.0
    assert not run._overdue(0.0)
    clock.now += 2.0
    assert run._overdue(0.0) == (limit is not None) and run.reason == waited


# On two nodes


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    made = slurm_cluster.start(tmp_path_factory.mktemp("slurm"))
    yield made
    made.stop()


@pytest.fixture
def here(cluster, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    yield tmp_path
    assert cluster.settled(), "no job is left behind"


def log_of(arm):
    (path,) = Path.cwd().glob(f"logging/*/*/{run_folder().name}/*-{arm}.log")
    return path.read_text()


def test_three_arms_on_two_nodes(here):
    done = rlspec("run", spec(here, {}, processes=2))
    assert done.code == 0, done.out + done.err
    assert report()["verdicts"][0]["statistic"] == pytest.approx(2)
    places = re.findall(r"rank \d of \d on 127\.0\.0\.\d", log_of("feat0"))  # several may share a line
    assert sorted(places) == [f"rank {rank} of 4 on 127.0.0.{rank // 2 + 1}" for rank in range(4)]
    assert log_of("feat0").count("meets at 127.0.0.1") == 4, "the first node of the step"
    seen = next(arm for arm in report()["arms"] if arm["name"] == "feat0")["provenance"]["slurm"]
    assert seen["job"].isdigit() and seen["nodes"] == ["127.0.0.1", "127.0.0.2"] and seen["returncodes"] == [0, 0]


def when(condition, action):
    """Do something as soon as a condition holds, beside the test. `result()` raises where that never came."""

    def wait():
        wait_for(condition)
        action()

    return ThreadPoolExecutor(1).submit(wait)


def test_an_arm_that_is_cancelled_runs_again(here, cluster):
    """scancel from outside is an ERROR with the reason; the retry completes the run, and the verdict is the same."""
    path = spec(here, {})
    data = path.read_text().replace("OFFSET: '0.0002'", "OFFSET: '0.0002'\n    HANG_AT: '3'")
    path.write_text(data)
    killer = when((here / "fixed.1").exists, lambda: cluster.ask("scancel", "--user=root"))
    done = rlspec("run", path)
    killer.result()
    assert done.code == 4 and statuses(report())["feat0"] == "failed", done.out
    assert "was cancelled (scancel)" in done.out
    (here / "fixed").touch()
    done = rlspec("run", path, "--retry-errors")
    assert done.code == 0 and report()["verdicts"][0]["statistic"] == pytest.approx(2)
    assert statuses(report()) == {"base0": "reused", "base1": "reused", "feat0": "done"}


def arm(here, cluster, *, time_limit=None, queue_limit=600.0, nodes=2, options=(), gpus=False, inside=None, **more):
    """One arm through the launcher alone: its outcome and its result. Inside an allocation where `inside` names one."""
    spec(here, {})
    folder = here / "job.slurm"
    folder.mkdir(exist_ok=True)
    launch = Launch(name="slurm", nodes=nodes, processes_per_node=1, options=options, gpus=gpus)
    environment = {
        **os.environ, **cluster.environment, "PYTHONPATH": str(here / "stand-in"), "FIXED": str(here / "fixed"),
        **slurm.environment(folder, time_limit, queue_limit), **(inside or {}), **more,
    }  # fmt: skip
    outcome = execute(argv(launch, [sys.executable, str(here / "train.py")]), cwd=here, environment=environment,
                      log=here / "arm.log", time_limit=LONG)  # fmt: skip
    return outcome, slurm.result(folder)


def test_a_request_that_cannot_be_met_does_not_wait(here, cluster):
    outcome, told = arm(here, cluster, nodes=3, queue_limit=LONG)
    assert outcome.returncode and not told["nodes"], told
    assert "slurm will never start job" in told["reason"] or "sbatch refused the job" in told["reason"]
    outcome, told = arm(here, cluster, queue_limit=1.5, options=("--begin=now+1hour",))
    assert told["reason"].startswith("waited 1.5s for 2 nodes and got none"), told
    outcome, told = arm(here, cluster, options=("--partition=nowhere",))
    assert "sbatch refused the job" in told["reason"] and "partition" in told["reason"]


def test_a_time_limit_counts_from_the_start_of_the_nodes(here, cluster):
    """Its job may begin two seconds later; and however little of the arm has run by then, it is over."""
    outcome, told = arm(here, cluster, time_limit=1.0, options=("--begin=now+2",), HANG_AT="2")
    assert told["reason"] == "time limit 1s reached" and told["nodes"], told


def test_a_rank_that_fails_is_named_by_its_own_words(here, cluster):
    outcome, told = arm(here, cluster, FAILS="1")
    assert told["reason"] is None and told["returncodes"] == [0, 1]
    assert outcome.returncode == 1 and "ValueError: a bad day of rank 1" in outcome.reason


def test_a_node_that_is_lost(here, cluster):
    def lose():
        cluster.ask("scontrol", "update", "NodeName=127.0.0.2", "State=DOWN", "Reason=pulled")

    def both_are_at_work():
        return (here / "fixed.1").exists() and "step 1/6" in (here / "arm.log").read_text()

    loser = when(both_are_at_work, lose)
    outcome, told = arm(here, cluster, HANG_AT="2")
    loser.result()
    cluster.ask("scontrol", "update", "NodeName=127.0.0.2", "State=RESUME")
    assert outcome.returncode and "lost a node" in told["reason"] and outcome.step == 1, told


def test_ctrl_c_cancels_the_job(here, cluster):
    path = spec(here, {})
    path.write_text(path.read_text().replace("OFFSET: '0.0001'", "OFFSET: '0.0001'\n    HANG_AT: '3'"))
    command = [sys.executable, "-m", "rlspec", "run", str(path)]
    root = str(Path(__file__).parents[1])
    running = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": root}, stdout=subprocess.DEVNULL,
                               stderr=subprocess.PIPE, text=True)  # fmt: skip
    when((here / "fixed.1").exists, lambda: running.send_signal(signal.SIGINT)).result()
    assert "--resume` goes on" in running.communicate(timeout=LONG)[1] and running.returncode == 130


def test_only_the_job_of_the_earlier_try_is_cancelled(here, cluster, monkeypatch):
    """On another cluster that shares the file system, the number may be another job of the same user."""
    number = cluster.ask("sbatch", "--parsable", "--job-name=rlspec-mine", "--output=/dev/null", "--wrap=sleep 600")
    monkeypatch.setenv(slurm.FOLDER, str(here / "nodes"))
    (here / "nodes").mkdir()
    for name, stays in (("rlspec-other", True), ("rlspec-mine", False)):
        (here / "nodes" / "job.json").write_text(json.dumps({"job": number, "name": name}))
        slurm.Run(argparse.Namespace())._clear()
        assert (number in cluster.ask("squeue", "-h", "-t", "PD,CF,R", "-o", "%i").split()) == stays, name


def test_gpus_are_asked_for(here, cluster):
    outcome, told = arm(here, cluster, gpus=True)
    assert outcome.returncode == 0 and (here / "arm.log").read_text().count("gpus 0") == 2, told


@pytest.fixture
def allocation(cluster):
    """The environment of a job that holds both nodes, as the shell of salloc has it."""
    cluster.ask("salloc", "--nodes=2", "--quiet", "--no-shell", "--job-name=allocation")
    number = cluster.ask("squeue", "-h", "--name=allocation", "-t", "R", "-o", "%i")
    assert number.isdigit()
    yield {"SLURM_JOB_ID": number, "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "127.0.0.[1-2]"}
    cluster.ask("scancel", number)


def test_inside_an_allocation(here, cluster, allocation):
    outcome, told = arm(here, cluster, inside=allocation)
    assert outcome.returncode == 0 and told["job"] == allocation["SLURM_JOB_ID"] and told["step"] == "0"
    assert outcome.step == 6 and (here / "arm.log").read_text().count("meets at 127.0.0.1") == 2
    outcome, told = arm(here, cluster, inside=allocation, nodes=3)
    assert "has 2 nodes, the spec wants 3" in told["reason"]
    outcome, told = arm(here, cluster, inside=allocation, time_limit=1.0, HANG_AT="2")
    assert told["reason"] == "time limit 1s reached" and told["returncodes"] != [0, 0]


def test_a_step_whose_ranks_ignore_the_signal(here, cluster, allocation):
    """For tasks that ignore SIGTERM srun itself returns 0."""

    def cancel():
        started = json.loads((here / "job.slurm" / "started-1.json").read_text())
        cluster.ask("scancel", f"{started['job_id']}.{started['step_id']}")

    killer = when((here / "fixed.1").exists, cancel)
    outcome, told = arm(here, cluster, inside=allocation, HANG_AT="2", DEAF="1")
    killer.result()
    assert outcome.returncode and told["reason"] and told["returncodes"] != [0, 0], told


TORCH = """
import os
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
for step in range(1, 7):
    loss = torch.tensor([float(step + dist.get_rank())])
    dist.all_reduce(loss)
    if dist.get_rank() == 0:
        print(f"step {step}/6 loss={loss.item() / 2!r} step_time=0.1 on {dist.get_world_size()}", flush=True)
dist.destroy_process_group()
"""


def test_torchrun_and_gloo_across_both_nodes(here):
    pytest.importorskip("torch")
    path = spec(here, {}, trainer=TORCH)
    shutil.rmtree(here / "stand-in" / "torch")
    done = rlspec("run", path, "--arm", "base0")
    assert statuses(report())["base0"] == "done", done.out + log_of("base0")
    assert "step 6/6 loss=6.5 step_time=0.1 on 2" in log_of("base0")
    seen = next(one for one in report()["arms"] if one["name"] == "base0")["provenance"]
    assert seen["ranks"] == [0, 1] and seen["slurm"]["nodes"] == ["127.0.0.1", "127.0.0.2"]
