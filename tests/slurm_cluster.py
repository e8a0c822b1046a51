"""A private SLURM of two nodes on the loopback, for root, without munge. `start` skips the test where it cannot be."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from tests.processes import LONG

CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation={place}/state
SlurmdSpoolDir={place}/run/spool.%n
SlurmctldPidFile={place}/run/slurmctld.pid
SlurmdPidFile={place}/run/slurmd.%n.pid
SlurmctldLogFile={place}/log/slurmctld.log
SlurmdLogFile={place}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=2
GresTypes=gpu
NodeName=127.0.0.[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port={first}-{second} CPUs=2 RealMemory=1000 Gres=gpu:2
PartitionName=debug Nodes=ALL Default=YES MaxTime=01:00:00 DefaultTime=00:10:00 State=UP
"""
PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "scontrol", "scancel", "sinfo", "squeue")


def _ports() -> tuple[int, socket.socket]:
    """The first of three ports in a row that are free, and a socket that keeps them from other tests.

    They lie below those that the system gives away by itself, so only another cluster could take them before the
    daemons do: it finds the port behind them taken.
    """
    for port in range(26000 + os.getpid() % 500 * 4, 32000, 4):
        guard = socket.socket()
        with socket.socket() as one, socket.socket() as two, socket.socket() as three:
            try:
                for offset, probe in enumerate((one, two, three, guard)):
                    probe.bind(("127.0.0.1", port + offset))
            except OSError:
                guard.close()
                continue
            return port, guard
    pytest.skip("no four free ports in a row")


class Cluster:
    """Two idle nodes named 127.0.0.1 and 127.0.0.2; `environment` makes slurm's programs speak to it."""

    def __init__(self, place: Path) -> None:
        self.place = place
        for name in ("state", "log", "run", "dev"):
            (place / name).mkdir(parents=True)
        for number in range(2):  # null devices stand in for GPUs
            os.mknod(place / "dev" / f"g{number}", 0o20666, os.makedev(1, 3))
        (place / "gres.conf").write_text(f"Name=gpu File={place}/dev/g[0-1]\n")
        host, (port, self._guard) = socket.gethostname().split(".")[0], _ports()
        conf = CONF.format(place=place, host=host, port=port, first=port + 1, second=port + 2)
        (place / "slurm.conf").write_text(conf)
        self.environment = {"SLURM_CONF": str(place / "slurm.conf")}
        self._say("slurmctld", "-f", self.environment["SLURM_CONF"])
        for node in ("127.0.0.1", "127.0.0.2"):
            self._say("slurmd", "-N", node, "-f", self.environment["SLURM_CONF"])
        if not self.settled():
            log = (place / "log" / "slurmctld.log").read_text()
            self.stop()
            pytest.fail(f"the two nodes did not become idle:\n{log[-2000:]}")

    def _say(self, *command: str) -> None:
        subprocess.run(command, env={**os.environ, **self.environment}, check=True, capture_output=True)

    def ask(self, *command: str) -> str:
        done = subprocess.run(command, env={**os.environ, **self.environment}, capture_output=True, text=True)
        return done.stdout.strip()

    def settled(self) -> bool:
        """Whether no job is left and both nodes are idle again, before long."""
        until = time.monotonic() + LONG
        while self.ask("squeue", "-h") or self.ask("sinfo", "-h", "-o", "%D %T") != "2 idle":
            if time.monotonic() > until:
                return False
            time.sleep(0.05)
        return True

    def stop(self) -> None:
        """End all jobs, then the daemons by their pid files."""
        self.ask("scancel", "--user=root")
        self.settled()
        pids = [int(file.read_text()) for file in (self.place / "run").glob("*.pid")]
        for signum in (signal.SIGTERM, signal.SIGKILL):
            for pid in pids:
                if _alive(pid):
                    os.kill(pid, signum)
            until = time.monotonic() + 10
            while any(map(_alive, pids)) and time.monotonic() < until:
                time.sleep(0.05)
        self._guard.close()


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def start(place: Path) -> Cluster:
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        pytest.skip(f"needs SLURM: {', '.join(missing)} not on PATH (apt-get install slurmctld slurmd slurm-client)")
    if os.geteuid() != 0:
        pytest.skip("a private SLURM needs root")
    return Cluster(place)
