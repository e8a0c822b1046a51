"""The nouns of rlspec: frozen dataclasses, no behaviour beyond properties."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Status = Literal["PASS", "INVESTIGATE", "FAIL", "MEASURED", "ERROR", "BLOCKED", "N/A"]
Severity = Literal["error", "warning"]
RowStatus = Literal["applicable", "measured", "optional", "out_of_scope", "not_applicable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A YAML file as plain data; `keys` and `values` map a JSON pointer to (line, column), both from 1."""

    path: Path
    data: Any
    keys: Mapping[str, tuple[int, int]]
    values: Mapping[str, tuple[int, int]]
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One finding of lint."""

    rule: str
    path: Path
    line: int
    column: int
    message: str
    pointer: str = ""
    hint: str = ""
    severity: Severity = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Parallel degrees. Attention is replicated dp = world / (pp·cp) times, experts world / (pp·ep) times."""

    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.cp

    @property
    def expert_dp(self) -> int:
        return self.world_size // (self.pp * self.ep)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How the processes of a step start; the last three fields are slurm's, the limit is in seconds.

    `gpus` says that each process gets a GPU, `options` are words for srun or sbatch.
    """

    name: str = "local"
    nodes: int = 1
    processes_per_node: int = 1
    gpus: bool = False
    options: tuple[str, ...] = ()
    queue_limit: float = 14400.0

    @property
    def world_size(self) -> int:
        return self.nodes * self.processes_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """The program that trains; `template`, `command`, `reader` and `steps` are the user's for trainer `command`.

    `suffix` names what a run leaves beside its records for the reader; without it the log is read.
    """

    name: str
    settings: Mapping[str, Any]
    template: Path | None = None
    command: tuple[str, ...] = ()
    reader: str = ""
    pattern: str | None = None
    suffix: str | None = None
    steps: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One run of the plan. Whatever differs between arms is in here and nowhere else.

    `template`: of its run file, where each arm has one of its own; `engine`, `settings` and `weights` fill it in.
    """

    name: str
    role: str
    revision: str | None = None
    implementation: str | Mapping[str, str] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    perturb: Mapping[str, Any] | None = None
    fault: str | None = None
    command: tuple[str, ...] = ()
    records: str | None = None
    engine: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    weights: Mapping[str, Any] = field(default_factory=dict)
    template: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgment:
    """One question asked of the arms; the last four fields belong to `drift`."""

    check: str
    metric: str | None = None
    judge: Literal["ratio", "calibrated"] = "ratio"
    confirm_fail: bool = False
    max_base_runs: int = 4
    zero_envelope: Literal["investigate", "fail"] = "investigate"


@dataclass(frozen=True, slots=True, kw_only=True)
class Expect:
    """What a control must come out as."""

    status: Status
    judgments: Mapping[str, Status] = field(default_factory=dict)
    category: str | None = None
    at: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """A spec after lint: names resolved, defaults filled in. `template`: of the run files, where no trainer has one."""

    kind: str
    name: str
    path: Path
    digest: str
    question: str
    arms: tuple[Arm, ...]
    judgments: tuple[Judgment, ...]
    contract: str
    data: Mapping[str, Any]
    model: str = ""
    mesh: Mesh = Mesh()
    sequence_length: int = 2048
    dtype: str = "bf16"
    trainer: Trainer | None = None
    launch: Launch = Launch()
    repository: Path | None = None
    template: Path | None = None
    workload: Mapping[str, Any] = field(default_factory=dict)
    chain: Mapping[str, Any] = field(default_factory=dict)
    isolation: Literal["worktree", "checkout"] = "worktree"
    build: tuple[tuple[str, ...], ...] = ()
    time_limit: float | None = None
    requires: Mapping[str, Any] = field(default_factory=dict)
    expect: Expect | None = None

    @property
    def run_template(self) -> Path | None:
        return self.trainer.template if self.trainer else self.template


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One child process: an arm of a plan, with the files it reads and writes. Times in seconds."""

    tag: str
    arm: Arm
    argv: tuple[str, ...]
    run_file: Path | None
    log: Path
    records: Path
    provenance: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    time_limit: float | None = None
    commit: str | None = None

    @property
    def stem(self) -> str:
        return f"{self.tag}-{self.arm.name}" if self.tag else self.arm.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One metric of one arm, in ascending steps without repeats; values are doubles.

    `resolution` is half a unit of the last printed digit (the coarsest seen), 0 if values are exact. `counted`: steps
    are numbers of lines, of which the first may be the mean of several steps.
    """

    arm: str
    metric: str
    steps: array[int]
    values: array[float]
    resolution: float = 0.0
    counted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one arm left behind, read into memory.

    `faults` maps a metric to why its series cannot be judged (a step twice with different values, …), `"*"` to
    why none can. `data` maps a step to the fingerprint of its batch. `machine` is the fingerprint of where it ran.
    """

    arm: Arm
    series: Mapping[str, Series]
    steps_expected: int | None = None
    faults: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    data: Mapping[int, str] = field(default_factory=dict)
    machine: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How one arm ended: its Run (training kinds), its file (parity) or what it measured (operators), or why not."""

    arm: Arm
    records: Path
    run: Run | None = None
    measured: Mapping[str, Any] | None = None
    failure: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of a tolerance contract."""

    contract: str
    judgment: str
    subject: str
    dtype: str
    status: RowStatus
    limits: Mapping[str, float]
    source: str
    date: str
    reason: str
    published_id: str | None = None

    @property
    def id(self) -> str:
        return f"{self.contract}/{self.judgment}/{self.subject}/{self.dtype}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The answer to one judgment. `reason` is one sentence; `evidence` holds plain numbers, texts, lists and dicts."""

    judgment: str
    subject: str
    status: Status
    reason: str
    statistic: float | None = None
    row: Row | None = None
    evidence: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
