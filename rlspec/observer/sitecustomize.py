"""Writes down what a Python process ran and imported, when it ends, into the folder that RLSPEC_OBSERVE names.

The interpreter imports this module at its start wherever this folder is first on PYTHONPATH; then the next
`sitecustomize` on the path, the user's own, is imported in its place. It stands alone, for any Python from 3.7 on, and
looks only at what the process has loaded. Nothing that goes wrong in here may disturb somebody's training run, hence
the broad `except Exception`: the record is then missing, which the host never takes for agreement. A process that ends
by `os._exit` or by a signal leaves none either.
"""

import atexit
import os
import sys

HERE = os.path.dirname(os.path.realpath(__file__))
STDLIB = (os.path.dirname(os.__file__) + os.sep, os.path.dirname(os.path.realpath(os.__file__)) + os.sep)
INSTALLED = ("/site-packages/", "/dist-packages/")
MAIN = ("__main__", "__mp_main__")

ENVIRONMENT = (
    *("CUDA_", "CUDNN_", "CUBLAS", "NCCL_", "NVTE_", "NVIDIA_TF32", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_"),
    *("TORCH_", "TORCHINDUCTOR_", "TORCHDYNAMO_", "PYTORCH_", "ATEN_", "TRITON_", "XLA_", "JAX_", "TF_DETERM", "GLOO_"),
    *("HIP_", "HSA_", "ROCR_", "MIOPEN_", "FLASH_ATTENTION_", "VLLM_", "SGLANG_", "PYTHONHASHSEED"),
)
SECRET = ("TOKEN", "KEY", "SECRET", "PASSW", "CREDENTIAL", "AUTH", "COOKIE")
IMAGES = ("APPTAINER_CONTAINER", "SINGULARITY_CONTAINER", "SLURM_CONTAINER", "CONTAINER_IMAGE", "DOCKER_IMAGE")
VERSIONS = (
    *("torch", "triton", "numpy", "transformers", "datasets", "accelerate", "deepspeed", "torchtitan", "torchao"),
    *("flash_attn", "xformers", "transformer_engine", "apex", "deep_gemm", "tilelang", "cutlass", "vllm", "sglang"),
    *("jax", "jaxlib", "tensorflow"),
)
FLAGS = {
    "deterministic_algorithms": lambda torch: torch.are_deterministic_algorithms_enabled(),
    "matmul_allow_tf32": lambda torch: torch.backends.cuda.matmul.allow_tf32,
    "matmul_reduced_precision_bf16": lambda torch: torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
    "matmul_reduced_precision_fp16": lambda torch: torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
    "matmul_fp32_precision": lambda torch: torch.backends.cuda.matmul.fp32_precision,
    "fp32_precision": lambda torch: torch.backends.fp32_precision,
    "float32_matmul_precision": lambda torch: torch.get_float32_matmul_precision(),
    "cudnn_allow_tf32": lambda torch: torch.backends.cudnn.allow_tf32,
    "cudnn_benchmark": lambda torch: torch.backends.cudnn.benchmark,
    "cudnn_deterministic": lambda torch: torch.backends.cudnn.deterministic,
    "default_dtype": lambda torch: str(torch.get_default_dtype()),
    "num_threads": lambda torch: torch.get_num_threads(),
}


def _write(folder):
    try:
        import json
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a deprecated flag must not write into the log of the arm
            record = {name: _tried(look) for name, look in LOOKS.items()}
        name = os.path.join(folder, f"{os.getpid()}-{os.urandom(4).hex()}")
        with open(name + ".tmp", "x", encoding="utf-8") as stream:
            json.dump(record, stream)
        os.replace(name + ".tmp", name + ".json")
    except Exception:
        return


def _tried(look, *arguments):
    try:
        return look(*arguments)
    except Exception:
        return None


def _command():
    """The first three words, cut off where code or a secret might begin."""
    words = list(getattr(sys, "orig_argv", None) or [sys.executable, *sys.argv])[:3]
    for place, word in enumerate(words):
        if word == "-c":
            return words[: place + 1]
        if (word.startswith("-") or "=" in word) and any(part in word.upper() for part in SECRET):
            return words[:place]
    return words


def _modules():
    """(name, file or folder) of what is loaded. `__dict__` is read, since `getattr` would wake lazy modules."""
    for name, module in list(sys.modules.items()):
        place = _tried(_place, module)
        if place is not None and not (name == "sitecustomize" and os.path.dirname(os.path.realpath(place)) == HERE):
            yield name, place


def _place(module):
    place = module.__dict__.get("__file__") or next(iter(module.__dict__["__path__"]))
    return place if os.path.isabs(place) else None


def _installed(file):
    return any(part in file for part in INSTALLED)


def _standard(file):
    return not _installed(file) and (file.startswith(STDLIB) or "/lib-dynload/" in file)


def _main():
    """The script; its `__file__` is gone by the time that exit handlers run, its loader is not."""
    modules = [sys.modules[name].__dict__ for name in MAIN if name in sys.modules]
    files = {main.get("__file__") or getattr(main.get("__loader__"), "path", None) for main in modules}
    return sorted(os.path.realpath(file) for file in files if file)


def _imported():
    """Top-level name -> file, without the standard library."""
    found = {name: file for name, file in _modules() if "." not in name and name not in MAIN}
    return {name: os.path.realpath(file) for name, file in sorted(found.items()) if not _standard(file)}


def _files():
    """Imported files that are neither the standard library's nor installed."""
    found = {file for name, file in _modules() if name not in MAIN}
    return sorted({os.path.realpath(file) for file in found if not _installed(file) and not _standard(file)})


def _versions():
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in VERSIONS:
        version = _tried(lambda name=name: sys.modules[name].__dict__["__version__"])
        if version is None:  # a lazy module, such as transformers, keeps its objects apart
            version = _tried(lambda name=name: sys.modules[name].__dict__["_objects"]["__version__"])
        if version is not None:
            found[name] = str(version)
    version = sys.modules.get("torch.version")
    for name in ("cuda", "hip", "git_version"):
        if getattr(version, name, None):
            found["torch_" + name] = str(getattr(version, name))
    return found


def _device():
    torch = sys.modules["torch"]
    if not torch.cuda.is_initialized():
        return None
    current = torch.cuda.current_device()
    return {
        "name": torch.cuda.get_device_name(current),
        "capability": ".".join(map(str, torch.cuda.get_device_capability(current))),
        "visible": torch.cuda.device_count(),
        "cudnn": _tried(torch.backends.cudnn.version),
        "nccl": _tried(lambda: ".".join(map(str, torch.cuda.nccl.version()))),
    }


def _flags():
    return {name: _tried(look, sys.modules["torch"]) for name, look in FLAGS.items()}


def _environment():
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(ENVIRONMENT) and not any(part in name.upper() for part in SECRET) and "://" not in value
    }


def _ranks():
    return {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE") if name in os.environ}


def _machine():
    system = os.uname()
    return {
        "host": system.nodename,
        "arch": system.machine,
        "os": _tried(_os_release),
        "image": next((os.environ[name] for name in IMAGES if os.environ.get(name)), None),
        "cpu": _tried(_cpu),
        "driver": _tried(_driver),
    }


def _os_release():
    lines = _head("/etc/os-release").splitlines()
    fields = {line.partition("=")[0]: line.partition("=")[2].strip("\"'") for line in lines}
    return (fields["ID"] + " " + fields.get("VERSION_ID", "")).strip()


def _cpu():
    return next(line.partition(":")[2].strip() for line in _head("/proc/cpuinfo").splitlines() if "model name" in line)


def _driver():
    words = _head("/proc/driver/nvidia/version").split()
    return next(word for word in words if "." in word and word.replace(".", "").isdigit())


def _head(path):
    with open(path, encoding="utf-8", errors="replace") as stream:
        return stream.read(4096)


LOOKS = {
    "pid": os.getpid,
    "executable": lambda: sys.executable,
    "command": _command,
    "main": _main,
    "imported": _imported,
    "files": _files,
    "versions": _versions,
    "device": _device,
    "flags": _flags,
    "environment": _environment,
    "ranks": _ranks,
    "machine": _machine,
}


def _run_the_next():
    """Import the user's own sitecustomize in the place of this one. What it raises is the user's, as ever."""
    mine, path = sys.modules.pop("sitecustomize"), list(sys.path)
    sys.path[:] = [entry for entry in path if os.path.realpath(entry) != HERE]
    try:
        import sitecustomize  # noqa: F401
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        sys.path[:0] = [entry for entry in path if os.path.realpath(entry) == HERE]
        sys.modules.setdefault("sitecustomize", mine)


if os.environ.get("RLSPEC_OBSERVE"):
    atexit.register(_write, os.environ["RLSPEC_OBSERVE"])
_run_the_next()
