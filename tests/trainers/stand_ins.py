"""Packages in the place of trainers: they record what a run file asks of them and leave what the trainer leaves."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]
TORCH = """
class cuda:
    is_available = staticmethod(lambda: False)
"""
# What both generations of torchtitan do here: keep what they were told, print steps, leave an event file.
TITAN_RUN = """
import json, logging, os, pathlib, sys
from tests.recorded import write_events

def run(told, dump, steps):
    rank = os.environ.get("RANK", "0")
    pathlib.Path(dump).mkdir(parents=True, exist_ok=True)
    pathlib.Path(dump, f"told-{rank}.json").write_text(json.dumps(told))
    logging.basicConfig(level=logging.INFO, format="[titan] %(asctime)s - %(name)s - %(levelname)s - %(message)s",
                        stream=sys.stdout)
    offset = float(os.environ.get("OFFSET", "0"))
    for step in range(1, steps + 1):
        logging.getLogger().info(f"step: {step:2}  loss:  8.{step:05}  grad_norm:  1.5000  memory: 1.00GiB(1.00%)  "
                                 f"tps: 12,345  tflops: 1.00  mfu: 1.00%")
    if rank == os.environ["LOG_RANK"]:
        rows = [(step, (8 / step + (step > 1) * offset * step, 1.5 / step, 0.25)) for step in range(1, steps + 1)]
        write_events(pathlib.Path(dump, "tb", "20261129-1403", "events.out.tfevents.1"), rows,
                     ("loss_metrics/global_avg_loss", "grad_norm", "time_metrics/end_to_end(s)"))
"""
TITAN_02 = """
import sys
from torchtitan.config import ARGUMENTS
from torchtitan.run import run

if __name__ == "__main__":
    import tomllib
    assert ARGUMENTS[:1] == ["--job.config_file"], ARGUMENTS
    with open(ARGUMENTS[1], "rb") as file:
        told = tomllib.load(file)
    run(told, told["job"]["dump_folder"], told["training"]["steps"])
"""
TITAN_03 = """
import dataclasses, importlib, sys
from torchtitan.run import run

if __name__ == "__main__":
    _, module, _, function = sys.argv[1:]
    told = getattr(importlib.import_module(module), function)()
    run({"module": module, **dataclasses.asdict(told)}, told.dump_folder, told.training.steps)
"""
TITAN_03_CONFIG = """
from dataclasses import dataclass, field

@dataclass(slots=True)
class Training:
    local_batch_size: int = 8
    global_batch_size: int = -1
    seq_len: int = 2048
    max_norm: float = 1.0
    steps: int = 10000
    dtype: str = "float32"
    mixed_precision_param: str = "bfloat16"
    disable_cuda_graphs: bool = False

@dataclass(slots=True)
class Parallelism:
    data_parallel_shard_degree: int = -1
    pipeline_parallel_degree: int = 1
    pipeline_parallel_microbatch_size: int = 1
    context_parallel_degree: int = 1
    expert_parallel_degree: int = 1

@dataclass(slots=True)
class Debug:
    seed: int | None = None
    deterministic: bool = False
    moe_force_load_balance: bool = False

@dataclass(slots=True)
class Metrics:
    log_freq: int = 10
    enable_tensorboard: bool = False
    save_tb_folder: str = "tb"
    disable_color_printing: bool = False

@dataclass(slots=True)
class Scheduler:
    warmup_steps: int = 2
    decay_ratio: float | None = 0.8

@dataclass(slots=True)
class Enabled:
    enable: bool = True

@dataclass(slots=True)
class Data:
    dataset: str = "c4"
    dataset_path: str | None = None

@dataclass(slots=True)
class Config:
    hf_assets_path: str = "./tests/assets/tokenizer"
    dump_folder: str = "./outputs"
    optimizer: object = None
    training: Training = field(default_factory=Training)
    parallelism: Parallelism = field(default_factory=Parallelism)
    debug: Debug = field(default_factory=Debug)
    metrics: Metrics = field(default_factory=Metrics)
    lr_scheduler: Scheduler = field(default_factory=Scheduler)
    checkpoint: Enabled = field(default_factory=Enabled)
    validator: Enabled = field(default_factory=Enabled)
    dataloader: Data = field(default_factory=Data)

def llama3_debugmodel():
    return Config()
"""
TITAN_03_OPTIMIZER = """
from dataclasses import dataclass

@dataclass(slots=True)
class Config:
    lr: float
    name: str = "AdamW"
    implementation: str = "fused"

def default_adamw(lr):
    return Config(lr)
"""


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(textwrap.dedent(text))


def torchtitan(folder: Path, generation: str) -> str:
    """PYTHONPATH with torchtitan of a generation, `0.2` or `0.3`."""
    files = {"torch.py": TORCH, "torchtitan/__init__.py": "", "torchtitan/run.py": TITAN_RUN}
    if generation == "0.2":  # the arguments are those at the first import of the package's configuration
        files["torchtitan/config/__init__.py"] = "import sys\nARGUMENTS = sys.argv[1:]\n"
        files |= {"torchtitan/config/job_config.py": "", "torchtitan/train.py": TITAN_02}
    else:
        files |= {
            "torchtitan/train.py": TITAN_03,
            "torchtitan/config/__init__.py": "",
            "torchtitan/components/__init__.py": "",
            "torchtitan/components/optimizer.py": TITAN_03_OPTIMIZER,
            "torchtitan/models/__init__.py": "",
            "torchtitan/models/llama3/__init__.py": "",
            "torchtitan/models/llama3/config_registry.py": TITAN_03_CONFIG,
        }
    write(folder, files)
    return f"{folder}:{ROOT}"


def told(run_folder: Path, arm: str = "base0", rank: int = 0) -> dict:
    (path,) = run_folder.glob(f"*-{arm}.tensorboard/told-{rank}.json")
    return json.loads(path.read_text())
