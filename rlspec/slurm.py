"""Run one command on the nodes of SLURM: `python -I slurm.py run …` beside rlspec, `… node …` once on each node.

`run` starts a step in the allocation that it finds itself in, or else a batch job, and prints what the nodes print. On
each node torchrun starts the ranks; they meet on the first node of the step, at a port that is free there. Each node
leaves a file that says how its torchrun ended, and these files are what counts: srun returns 0 for a task that ignored
SIGTERM. It stands alone, since it also runs on nodes where rlspec is not installed, beside a tree that may be another
rlspec; all that it leaves lies in the folder that RLSPEC_SLURM names, which every node must see.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

FOLDER, TIME_LIMIT, QUEUE_LIMIT = "RLSPEC_SLURM", "RLSPEC_TIME_LIMIT", "RLSPEC_QUEUE_LIMIT"
POLL = 0.2  # seconds between two looks at the log
ASK = 1.0  # seconds between two questions to slurmctld
SILENT = 120.0  # seconds without an answer from slurmctld before a job is given up
PORT_WAIT = 300.0  # seconds in which the first node must name its port
PATIENCE = 60.0  # seconds that the other nodes get to notice that the ranks of one have failed
LINGER = 70.0  # seconds in which a shared file system may hide a new file; NFS caches a folder for up to 60
GRACE = 3.0  # seconds between two signals of rising force to srun, and for slurm to close a job that has ended
BAD = {"BOOT_FAIL", "CANCELLED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT"}
OVER = {*BAD, "COMPLETED"}
SAID = {
    "TIMEOUT": "reached the time limit of its job",
    "CANCELLED": "was cancelled (scancel)",
    "NODE_FAIL": "lost a node",
    "OUT_OF_MEMORY": "ran out of memory",
    "PREEMPTED": "was preempted",
    "BOOT_FAIL": "could not boot a node",
    "DEADLINE": "reached its deadline",
}
NEVER = {"AccountNotAllowed", "BadConstraints", "InvalidAccount", "InvalidQOS", "PartitionConfig",
         "PartitionNodeLimit", "PartitionTimeLimit", "QOSNotAllowed"}  # fmt: skip
CANCELLED = re.compile(r"\*\*\* (?:STEP|JOB) (\S+) .*CANCELLED AT \S+(?: DUE TO ([A-Z ]+))?[^*]*\*\*\*")
FAULT = re.compile(r"(?:srun|slurmstepd|sbatch): error: .*")


def argv(
    python: str, words: Sequence[str], *, nodes: int, processes: int, gpus: bool, options: Sequence[str]
) -> tuple[str, ...]:
    """The command line of `run`; `words` are a script or `-m MODULE` and its arguments."""
    sizes = ["--nodes", str(nodes), "--processes", str(processes), *(["--gpus"] if gpus else [])]
    more = [f"--option={option}" for option in options]
    return (python, "-I", str(Path(__file__).resolve()), "run", *sizes, *more, "--", python, *words)


def environment(folder: Path, time_limit: float | None, queue_limit: float) -> dict[str, str]:
    """What `run` is told beside its command line. All times in seconds."""
    limits = {QUEUE_LIMIT: str(queue_limit)} | ({} if time_limit is None else {TIME_LIMIT: str(time_limit)})
    return {FOLDER: str(folder), **limits}


def result(folder: Path) -> dict[str, Any]:
    """`reason` (None: all nodes ended well, or a rank's own words say more), `job`, `step`, `nodes`, `returncodes`."""
    found = _load(folder / "result.json")
    return found or {"reason": "the launcher of the slurm job left no result", "job": None, "nodes": []}


def _load(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _save(path: Path, data: Mapping[str, Any]) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(data), encoding="utf-8")
    partial.replace(path)


# On each node


def node(arguments: argparse.Namespace) -> int:
    """torchrun for the ranks of this node; its return code, also left in a file."""
    folder, place = Path(os.environ[FOLDER]), os.environ["SLURM_NODEID"]
    name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    step = {key: os.environ.get(f"SLURM_{key.upper()}") for key in ("job_id", "step_id")}
    _save(folder / f"started-{place}.json", {"node": name, **step})
    with _held_port() as held:  # until this node's part is over
        first, port = _rendezvous(folder, held.getsockname()[1] if place == "0" else None)
        returncode = _torchrun(arguments, name, f"{first}:{port}")
    _save(folder / f"ended-{place}.json", {"node": name, "returncode": returncode})
    return returncode if returncode >= 0 else 128 - returncode


def _torchrun(arguments: argparse.Namespace, name: str, endpoint: str) -> int:
    python, *rest = arguments.command
    command = [python, "-m", "torch.distributed.run", "--nnodes", str(arguments.nodes),
               "--nproc-per-node", str(arguments.processes), "--rdzv-id", arguments.token, "--rdzv-backend", "c10d",
               "--rdzv-endpoint", endpoint, "--local-addr", name, *rest]  # fmt: skip
    child = subprocess.Popen(command)
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda received, frame: child.send_signal(received))
    return child.wait()


def _held_port() -> socket.socket:
    """Bound to a free port: torchrun, whose store asks for SO_REUSEADDR, too, can listen there, and nobody gets it."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("", 0))
    return held


def _rendezvous(folder: Path, port: int | None) -> tuple[str, int]:
    """The first node of the step, and its port, which that node gives."""
    file = folder / "rendezvous.json"
    if port is not None:
        nodes = subprocess.run(
            ["scontrol", "show", "hostnames", os.environ["SLURM_STEP_NODELIST"]],
            capture_output=True, text=True, check=True,
        ).stdout.split()  # fmt: skip
        _save(file, {"host": nodes[0], "port": port, "nodes": nodes})
    until = time.monotonic() + PORT_WAIT
    while (found := _load(file)) is None:
        if time.monotonic() > until:
            raise SystemExit(f"{file} did not appear: is the run's folder on a file system that all nodes see?")
        time.sleep(POLL)
    return str(found["host"]), int(found["port"])


# Beside rlspec


class Run:
    """One job or step while it lasts."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.folder = Path(os.environ[FOLDER])
        self.log = self.folder / "nodes.log"
        self.time_limit = float(os.environ[TIME_LIMIT]) if TIME_LIMIT in os.environ else None
        self.queue_limit = float(os.environ.get(QUEUE_LIMIT, "14400"))
        self.name = f"rlspec-{uuid.uuid4().hex[:12]}"
        self.reason: str | None = None
        self.job: str | None = None
        self.state = ""
        self.signum = 0
        self.pending = ""
        self._since = 0.0
        self._failing = 0.0
        self._closing = 0.0
        self.gave_up = False
        self._read = 0
        self._heard = time.monotonic()

    def srun(self) -> list[str]:
        """The step: one task a node, which is never killed because of another (`--wait=0`)."""
        given = self.arguments
        size = [f"--nodes={given.nodes}", f"--ntasks={given.nodes}", "--ntasks-per-node=1", "--cpu-bind=none"]
        ends = ["--wait=0", "--kill-on-bad-exit=0", "--quit-on-interrupt"]
        gpus = [f"--gpus-per-node={given.processes}"] if given.gpus else []
        logs = [f"--output={self.log}", "--open-mode=append", f"--job-name={self.name}"]
        shape = ["--nodes", str(given.nodes), "--processes", str(given.processes), "--token", self.name]
        node_task = [sys.executable, "-I", str(Path(__file__).resolve()), "node", *shape, "--", *given.command]
        own = ["--overlap", *given.option] if self.inside else []  # rlspec may itself be a step of the allocation
        return ["srun", *size, *ends, *gpus, *logs, *own, *node_task]

    @property
    def inside(self) -> bool:
        return "SLURM_JOB_ID" in os.environ

    def main(self) -> int:
        self._clear()
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, self._asked)
        self.log.touch()
        try:
            returncode = self._step() if self.inside else self._batch()
        except OSError as error:
            self.reason, returncode = f"{error.filename or 'slurm'}: {error.strerror}", 1
        self._tail()
        return self._end(returncode)

    def _asked(self, signum: int, frame: FrameType | None) -> None:
        self.signum = self.signum or signum

    def _clear(self) -> None:
        """A job of an earlier try is cancelled: no next arm beside it. On another cluster its number is another job."""
        earlier = _load(self.folder / "job.json")
        if earlier is not None:
            command = ["scancel", "--quiet", f"--jobname={earlier['name']}", str(earlier["job"])]
            subprocess.run(command, capture_output=True, check=False)
        for file in self.folder.iterdir():
            file.unlink()

    def _step(self) -> int:
        """srun inside an allocation, in a session of its own, so that a Ctrl-C reaches it once and by our hand."""
        have = os.environ.get("SLURM_JOB_NUM_NODES", "")
        self.job = os.environ["SLURM_JOB_ID"]
        if have.isdigit() and int(have) < self.arguments.nodes:
            self.reason = f"the allocation {self.job} has {have} nodes, the spec wants {self.arguments.nodes}"
            return 1
        errors = self.folder / "srun.log"
        with errors.open("wb") as sink:
            srun = subprocess.Popen(self.srun(), stdin=subprocess.DEVNULL, stdout=sink, stderr=sink,
                                    start_new_session=True)  # fmt: skip
            stopping = iter((signal.SIGINT, signal.SIGTERM, signal.SIGKILL))
            begun, next_signal = time.monotonic(), 0.0
            while srun.poll() is None:
                self._tail()
                if self._overdue(begun) and time.monotonic() > next_signal:
                    srun.send_signal(next(stopping, signal.SIGKILL))
                    next_signal = time.monotonic() + GRACE
                time.sleep(POLL)
        said = errors.read_bytes().decode("utf-8", "replace")
        sys.stdout.write(said)
        return srun.returncode

    def _batch(self) -> int:
        """A batch job from a login node, asked after until it is over. `sbatch --wait` would sleep ever longer."""
        given, script = self.arguments, self.folder / "job.sh"
        script.write_text(f"#!/bin/bash\nexec {shlex.join(self.srun())}\n", encoding="utf-8")
        limit = [] if self.time_limit is None else [f"--time={int(self.time_limit // 60) + 2}"]
        gpus = [f"--gpus-per-node={given.processes}"] if given.gpus else []
        size = [f"--nodes={given.nodes}", "--ntasks-per-node=1", "--exclusive", "--mem=0", *gpus, *limit]
        files = [f"--output={self.folder / 'batch.log'}", f"--job-name={self.name}", "--no-requeue", "--export=ALL"]
        done = subprocess.run(["sbatch", "--parsable", *size, *files, *given.option, str(script)],
                              capture_output=True, text=True, check=False)  # fmt: skip
        if done.returncode:
            self.reason = f"sbatch refused the job: {_last(done.stderr) or _last(done.stdout)}"
            return done.returncode
        self.job = done.stdout.strip().split(";")[0]
        _save(self.folder / "job.json", {"job": self.job, "name": self.name})
        begun, asked, cancelled = time.monotonic(), 0.0, False
        while not self._over():
            self._tail()
            if time.monotonic() - asked >= ASK:
                self._ask()
                asked = time.monotonic()
            if not cancelled and (self._overdue(begun) or self._hopeless()):
                subprocess.run(["scancel", self.job], capture_output=True, check=False)
                cancelled = True
            time.sleep(POLL)
        with contextlib.suppress(OSError):
            sys.stdout.write((self.folder / "batch.log").read_text(encoding="utf-8", errors="replace"))
        return 0 if self.state == "COMPLETED" else 1

    def _over(self) -> bool:
        """Whether the job has ended, by slurm or, where that is silent or slow to close it, by the nodes' files."""
        if self.state in OVER:
            return True
        now = time.monotonic()
        if len(list(self.folder.glob("ended-*.json"))) == self.arguments.nodes:
            self._closing = self._closing or now
            return now - self._closing > 10 * GRACE
        if now - self._heard > SILENT:
            self.reason = self.reason or f"slurm has not said for {SILENT:.0f} s what became of job {self.job}"
            return True
        return False

    def _ask(self) -> None:
        done = subprocess.run(["scontrol", "show", "job", "--oneliner", str(self.job)], capture_output=True, text=True,
                              check=False)  # fmt: skip
        found = dict(re.findall(r"(JobState|Reason|NodeList)=(\S+)", done.stdout))
        if "JobState" in found:
            self.state, self._heard = found["JobState"], time.monotonic()
            self.pending = found.get("Reason", "")

    def _hopeless(self) -> bool:
        """A request that this cluster will never grant."""
        if self.state != "PENDING" or self.pending not in NEVER:
            return False
        self.reason = self.reason or f"slurm will never start job {self.job}: {self.pending}"
        return True

    def _overdue(self, begun: float) -> bool:
        """Whether it must end: somebody asked, it waits for too long, or it runs for too long."""
        now, started = time.monotonic(), self._started()
        if self.signum:
            self.reason = self.reason or f"stopped by {signal.Signals(self.signum).name}"
        elif not started and now - begun > self.queue_limit:
            why = f" ({self.pending})" if self.pending not in ("", "None") else ""
            wanted = f"{self.arguments.nodes} nodes" if self.arguments.nodes > 1 else "a node"
            self.reason = self.reason or f"waited {duration(self.queue_limit)} for {wanted} and got none{why}"
        elif self.time_limit is not None and started and now - self._since > self.time_limit:
            self.reason = self.reason or f"time limit {duration(self.time_limit)} reached"
        elif self._failed() and now - self._failing > PATIENCE:
            self.gave_up = True  # the reason is the failed ranks'
        return self.reason is not None or self.gave_up

    def _started(self) -> bool:
        if not self._since and any(self.folder.glob("started-*.json")):
            self._since = time.monotonic()
        return bool(self._since)

    def _failed(self) -> bool:
        """Whether the ranks of a node have failed; `--wait=0` leaves the others running."""
        ended = () if self._failing else self.folder.glob("ended-*.json")
        if any((_load(file) or {}).get("returncode") for file in ended):
            self._failing = time.monotonic()
        return bool(self._failing)

    def _tail(self) -> None:
        """What the nodes have printed since the last look goes to our own output."""
        with contextlib.suppress(OSError), self.log.open("rb") as file:
            file.seek(self._read)
            while block := file.read(1 << 16):
                self._read += len(block)
                sys.stdout.buffer.write(block)
        sys.stdout.flush()

    def _end(self, returncode: int) -> int:
        """Leave the result; 0 only if every node says that it ended well."""
        ended = self._ended()
        codes = [ended[at]["returncode"] if at in ended else None for at in range(self.arguments.nodes)]
        started = [_load(self.folder / f"started-{at}.json") or {} for at in range(self.arguments.nodes)]
        nodes = (_load(self.folder / "rendezvous.json") or {}).get("nodes") or [one.get("node") for one in started]
        reason = None if self.gave_up else self.reason or self._cut_short() or self._lost(codes, nodes, returncode)
        _save(self.folder / "result.json", {
            "reason": reason, "job": self.job, "step": started[0].get("step_id"), "nodes": [n for n in nodes if n],
            "returncodes": codes, "state": self.state or None,
        })  # fmt: skip
        if reason is None and all(code == 0 for code in codes):
            return 0
        if reason is not None:
            print(f"slurm: {reason}", flush=True)
        failed = [code for code in codes if code]
        return 128 + self.signum if self.signum else failed[0] if failed and 0 < failed[0] < 256 else 1

    def _ended(self) -> dict[int, dict[str, Any]]:
        """Node number -> what its file says; a shared file system may show it late."""
        until = time.monotonic() + (0.0 if self.reason or self.gave_up else LINGER)
        while True:
            found = {at: _load(self.folder / f"ended-{at}.json") for at in range(self.arguments.nodes)}
            if None not in found.values() or time.monotonic() > until or self._cut_short():
                return {at: one for at, one in found.items() if one is not None}
            time.sleep(POLL)

    def _cut_short(self) -> str | None:
        """What slurm itself did to the job."""
        if self.state in SAID:
            return f"job {self.job} {SAID[self.state]}"
        found = CANCELLED.search(self._printed())
        if found is None:
            return None
        due = (found[2] or "").strip().lower()
        said = {"time limit": "reached the time limit of its job", "node failure": "lost a node",
                "preemption": "was preempted", "": "was cancelled (scancel)"}  # fmt: skip
        return f"step {found[1]} {said.get(due, f'was cancelled due to {due}')}"

    def _lost(self, codes: Sequence[int | None], nodes: Sequence[str | None], returncode: int) -> str | None:
        """Nodes that left no result."""
        silent = [str(nodes[at] if at < len(nodes) and nodes[at] else f"number {at}") for at, c in enumerate(codes)
                  if c is None]  # fmt: skip
        if not silent:
            return None
        said = FAULT.findall(self._printed())
        why = said[-1] if said else f"slurm returned {returncode}"
        return f"no result from node {', '.join(silent)}: {why}"

    def _printed(self) -> str:
        texts = []
        for name in ("batch.log", "srun.log", "nodes.log"):
            with contextlib.suppress(OSError):
                texts.append((self.folder / name).read_bytes()[-(1 << 16) :].decode("utf-8", "replace"))
        return "\n".join(texts)


def _last(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def duration(seconds: float) -> str:
    """As a spec has it: 90s, 30m, 2h."""
    for unit, size in (("h", 3600), ("m", 60)):
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:g}{unit}"
    return f"{seconds:g}s"


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="slurm.py")
    commands = parser.add_subparsers(dest="what", required=True)
    for name in ("run", "node"):
        command = commands.add_parser(name)
        command.add_argument("--nodes", type=int, required=True)
        command.add_argument("--processes", type=int, required=True)
        command.add_argument("--token")
        command.add_argument("--gpus", action="store_true")
        command.add_argument("--option", action="append", default=[])
        command.add_argument("command", nargs="+")
    arguments = parser.parse_args(words)
    return node(arguments) if arguments.what == "node" else Run(arguments).main()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
