"""The engines that an arm of a parity spec can name, as one literal dict."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """`package`: the distribution that must be installed. `template`: the run file below `templates/parity/`.

    `executions`: how it can come to log-probs, the usual one of a trainer first, that of a rollout second.
    `seeded`: it can be given weights that come from a seed, and not from files alone. `keys`: arguments of the engine
    that its settings decide, so that `options` must not. `pads`: on which side prompts are padded for decoding.
    """

    about: str
    package: str
    template: str
    executions: tuple[str, ...]
    devices: tuple[str, ...] = ("cpu", "cuda")
    seeded: bool = False
    pads: str = "right"
    keys: tuple[str, ...] = ()


EXECUTIONS = {
    "full": "one forward over prompt and response: a trainer's teacher forcing, or an engine's prefill",
    "decode": "the prompt, then the response token by token through a KV cache; the tokens are those of the file",
    "generate": "as decode, but the engine draws the tokens, at temperature 1, and the train arm scores what it drew",
}

ENGINES: dict[str, Engine] = {
    "transformers": Engine(
        about="Hugging Face transformers",
        package="transformers",
        template="transformers.py.j2",
        executions=("full", "decode", "generate"),
        seeded=True,
        pads="left",
        keys=(
            *("dtype", "torch_dtype", "attn_implementation", "local_files_only"),
            *("output_loading_info", "ignore_mismatched_sizes"),
            *("state_dict", "subfolder", "variant", "gguf_file", "use_safetensors"),  # other weights than were hashed
        ),
    ),
    "vllm": Engine(
        about="vLLM, its offline class LLM",
        package="vllm",
        template="vllm.py.j2",
        executions=("full", "decode", "generate"),
        devices=("cuda",),
        keys=(
            *("model", "dtype", "seed", "logprobs_mode", "max_num_seqs", "attention_backend", "enable_trace_replay"),
            "load_format",  # dummy would draw the weights at random
        ),
    ),
    "sglang": Engine(
        about="SGLang, its offline Engine",
        package="sglang",
        template="sglang.py.j2",
        executions=("full", "generate"),
        devices=("cuda",),
        keys=("model_path", "dtype", "random_seed", "max_running_requests", "attention_backend", "load_format"),
    ),
    "rlspec": Engine(
        about="rlspec's own decoder of the Qwen3 family, with the operators of an implementation",
        package="torch",
        template="rlspec.py.j2",
        executions=("full", "decode"),
        seeded=True,
    ),
}


def execution(name: str, role: str, settings: dict[str, object]) -> str:
    """What the settings ask for, else what is usual for the role."""
    usual = ENGINES[name].executions[:2]
    return str(settings.get("execution") or usual[role == "rollout"])
