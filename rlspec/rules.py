"""The lint rules by code: what each refuses, why it exists, and an example. `rlspec explain RL203` prints one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rule:
    """Text only; the rules themselves are checked in `document`, `schema` and `checks`."""

    title: str
    why: str
    bad: str
    good: str


RULES: dict[str, Rule] = {
    "RL001": Rule(
        "the file is readable, UTF-8 and valid YAML",
        "A spec that cannot be read says nothing; the place is the first one that the parser could not get past.",
        "arms: [{name: base0, role: base]",
        "arms: [{name: base0, role: base}]",
    ),
    "RL002": Rule(
        "a key stands once in a mapping",
        "Most YAML loaders keep the last of two equal keys in silence, so half of what was written would not hold.",
        "model: a\nmodel: b",
        "model: b",
    ),
    "RL003": Rule(
        "no anchors, aliases or tags",
        "A spec is data that a reader takes in from top to bottom; nothing in it refers elsewhere or runs.",
        "arms: [&b {name: base0, role: base}, *b]",
        "arms: [{name: base0, role: base}, {name: base1, role: base}]",
    ),
    "RL004": Rule(
        "numbers are finite",
        "An infinite limit is a gate that cannot fail.",
        "settings: {learning_rate: .inf}",
        "settings: {learning_rate: 1e-5}",
    ),
    "RL005": Rule(
        "no leftover <placeholder>",
        "A placeholder that nobody filled in surfaces hours later, as a path or a branch that does not exist.",
        "revision: <feature-branch>",
        "revision: fused-router",
    ),
    "RL006": Rule(
        "no text holds a NUL byte",
        "The operating system ends a word at it, so that no process could be given the command, variable or path.",
        'environment: {MODE: "a\\0b"}',
        'environment: {MODE: "a b"}',
    ),
    "RL101": Rule(
        "keys are known",
        "A misspelt key would otherwise be ignored, and its default would be judged instead.",
        "sequence_lenght: 4096",
        "sequence_length: 4096",
    ),
    "RL102": Rule(
        "required keys are there",
        "Nothing about the model, the mesh or the arms is guessed.",
        "kind: correctness\nmodel: qwen3-30b-a3b",
        "kind: correctness\nmodel: qwen3-30b-a3b\nmesh: {pp: 2, ep: 8}",
    ),
    "RL103": Rule(
        "values have the type of their key",
        "One key has one type: a number in quotes is text, and text is never taken for a number.",
        'sequence_length: "2048"',
        "sequence_length: 2048",
    ),
    "RL104": Rule(
        "values from a fixed list are on it",
        "A judgment or status that does not exist cannot be evaluated.",
        "judgments: [aprox_kl]",
        "judgments: [approx_kl]",
    ),
    "RL105": Rule(
        "values lie in their range and have their form",
        "A zero degree, an empty list or a time without unit has no meaning that could be run.",
        "time_limit: 30 minutes",
        "time_limit: 30m",
    ),
    "RL106": Rule(
        "the kind exists in this version",
        "The kind picks the schema, so nothing else can be checked without it.",
        "kind: corectness",
        "kind: correctness",
    ),
    "RL201": Rule(
        "models, workloads, contracts, pins and readers that a spec names exist",
        "Names are looked up in the nearest folder above with models/, workloads/ or contracts/, then in the shipped.",
        "model: qwen3-30b-a3",
        "model: qwen3-30b-a3b",
    ),
    "RL202": Rule(
        "arm names are unique",
        "An arm's files carry its name; two arms of one name would share them.",
        "arms: [{name: base, role: base}, {name: base, role: base}]",
        "arms: [{name: base0, role: base}, {name: base1, role: base}]",
    ),
    "RL203": Rule(
        "the mesh fits the world size",
        "world size = nodes × processes per node; pp divides it, and cp and ep each divide world / pp.",
        "mesh: {pp: 8}\nlaunch: {name: slurm, nodes: 1, gpus_per_node: 12}",
        "mesh: {pp: 4}\nlaunch: {name: slurm, nodes: 1, gpus_per_node: 12}",
    ),
    "RL204": Rule(
        "a given dp is the inferred one",
        "dp = world / (pp·cp) follows from the launcher; a spec that says otherwise means another job.",
        "mesh: {pp: 2, dp: 4}\nlaunch: {name: slurm, nodes: 2, gpus_per_node: 8}",
        "mesh: {pp: 2}\nlaunch: {name: slurm, nodes: 2, gpus_per_node: 8}",
    ),
    "RL205": Rule(
        "2·cp divides the sequence length",
        "Context parallelism in zigzag order gives each rank two of 2·cp equal pieces of a sequence.",
        "mesh: {cp: 3}\nsequence_length: 2048",
        "mesh: {cp: 4}\nsequence_length: 2048",
    ),
    "RL206": Rule(
        "the pipeline has enough micro-batches",
        "pithtrain's pipeline needs at least 2·pp sequences a step and replica: global_batch / dp ≥ 2·pp.",
        "mesh: {pp: 4}\nsettings: {global_batch_size: 8}",
        "mesh: {pp: 4}\nsettings: {global_batch_size: 64}",
    ),
    "RL207": Rule(
        "micro-batches divide the global batch evenly",
        "global_batch must be a multiple of micro_batch·dp, or ranks would do unequal work or drop sequences.",
        "settings: {global_batch_size: 10, micro_batch_size: 4}",
        "settings: {global_batch_size: 12, micro_batch_size: 4}",
    ),
    "RL208": Rule(
        "ep divides the experts",
        "Expert parallelism lays the same number of experts on each rank.",
        "model: gpt-oss-20b  # 32 experts\nmesh: {ep: 6}",
        "model: gpt-oss-20b\nmesh: {ep: 8}",
    ),
    "RL209": Rule(
        "the corpus has enough samples",
        "max_steps · global_batch samples are read once each; past the end the arms would see data again or stop.",
        "settings: {global_batch_size: 1024, max_steps: 32, corpus_samples: 18000}",
        "settings: {global_batch_size: 512, max_steps: 32, corpus_samples: 18000}",
    ),
    "RL210": Rule(
        "drift has at least two base arms and a feature arm",
        "The difference of two runs of the same code is the floor that the feature is read against; one run has none.",
        "arms: [{name: base0, role: base}, {name: feat0, role: feature}]",
        "arms: [{name: base0, role: base}, {name: base1, role: base}, {name: feat0, role: feature}]",
    ),
    "RL211": Rule(
        "a judged metric is one that the reader produces",
        "A metric that is never printed would end in ERROR after all the arms have run.",
        "trainer: {name: pithtrain}\njudgments: [{check: drift, metric: loss}]",
        "judgments: [{check: drift, metric: cross-entropy-loss}]",
    ),
    "RL212": Rule(
        "no force-balanced routing in a correctness spec",
        "It pins the load-balance loss at 1.0 and takes the router out of the model: a gate that cannot fail.",
        "kind: correctness\nsettings: {force_balanced_routing: true}",
        "kind: correctness\nsettings: {force_balanced_routing: false}",
    ),
    "RL213": Rule(
        "performance of a mixture of experts is measured force-balanced (warning)",
        "Expert imbalance is the largest source of step-time variance and differs from run to run.",
        "kind: performance\nsettings: {force_balanced_routing: false}",
        "kind: performance\nsettings: {force_balanced_routing: true}",
    ),
    "RL214": Rule(
        "the Hugging Face trainer logs NaN as NaN (warning)",
        "logging_nan_inf_filter prints the mean of earlier losses where the loss was NaN. rlspec leaves it off.",
        "trainer: {name: huggingface, settings: {global_batch_size: 8, logging_nan_inf_filter: true}}",
        "trainer: {name: huggingface, settings: {global_batch_size: 8}}",
    ),
    "RL215": Rule(
        "fp8 only where it is in scope",
        "Only pithtrain has an fp8 mode that a run file can switch on; elsewhere the key would change nothing.",
        "dtype: fp8\ntrainer: {name: huggingface}",
        "dtype: fp8\ntrainer: {name: pithtrain}",
    ),
    "RL216": Rule(
        "revisions are well formed",
        "git gets the revision, and one that begins with - would be an option. plan and run check that it exists.",
        "revision: --upload-pack=x",
        "revision: fused-router",
    ),
    "RL217": Rule(
        "either all arms name a revision, or none",
        "An arm without one would run whatever the working tree holds at that moment, next to arms at fixed commits.",
        "arms: [{name: base0, role: base, revision: main}, {name: feat0, role: feature}]",
        "arms: [{name: base0, role: base, revision: main}, {name: feat0, role: feature, revision: HEAD}]",
    ),
    "RL218": Rule(
        "base and feature differ in something (warning)",
        "If a feature arm says the same as the base arms, the run compares a thing with itself.",
        "arms: [{name: base0, role: base}, {name: base1, role: base}, {name: feat0, role: feature}]",
        "arms: [..., {name: feat0, role: feature, environment: {ATTENTION: fused}}]",
    ),
    "RL219": Rule(
        "specs of one model agree between meshes (warning)",
        "Runs at different sequence lengths or global batches cannot be compared across meshes.",
        "a.yaml: sequence_length: 2048\nb.yaml: sequence_length: 4096",
        "the same in both",
    ),
    "RL220": Rule(
        "the calibrated judge has three base runs to go by",
        "Its limits are simulated for three and more base runs; with two it has next to no power.",
        "arms: two base arms\njudgments: [{check: drift, judge: calibrated, max_base_runs: 2}]",
        "judgments: [{check: drift, judge: calibrated}]  # and three base arms",
    ),
    "RL221": Rule(
        "both roles are there",
        "Without a base there is nothing to compare with, without a feature nothing to judge.",
        "arms: [{name: a, role: base}, {name: b, role: base}]",
        "arms: [{name: a, role: base}, {name: b, role: feature}]",
    ),
    "RL222": Rule(
        "files that a spec names exist",
        "Templates, records and model files are looked up relative to the spec's folder.",
        "template: run.py.j2  # not beside the spec",
        "template: templates/run.py.j2",
    ),
    "RL223": Rule(
        "the reader fits its pattern",
        "regex needs a pattern with the named groups step and one a metric; the other readers take none.",
        "reader: {name: regex}",
        "reader: {name: regex, pattern: 'step (?P<step>\\d+) loss (?P<loss>\\S+)'}",
    ),
    "RL224": Rule(
        "the contract has a row for each judgment",
        "A judgment without a row would need a limit from nowhere.",
        "kind: parity\ncontract: training",
        "kind: parity\ncontract: ws1",
    ),
    "RL225": Rule(
        "a perturbed arm is a base arm of a trainer that can perturb",
        "The perturbed run is base code from weights moved by one unit in the last place: it measures a floor.",
        "{name: feat0, role: feature, perturb: {weights: 1ulp}}",
        "{name: base1, role: base, perturb: {weights: 1ulp, seed: 1}}",
    ),
    "RL226": Rule(
        "the launcher fits its keys and the trainer's command",
        "local starts one process; torchrun and slurm need a number of processes; torchrun starts a Python command.",
        "launch: {name: local, nodes: 2}",
        "launch: {name: torchrun, processes_per_node: 2}",
    ),
    "RL227": Rule(
        "implementation stands only where the trainer reads it",
        "`implementation` and `perturb` reach trainers that read them; the command trainer has only the environment.",
        "trainer: {name: command}\narms: [{name: feat0, role: feature, implementation: triton}]",
        "arms: [{name: feat0, role: feature, environment: {IMPLEMENTATION: triton}}]",
    ),
    "RL228": Rule(
        "a question is asked (warning)",
        "The question stands at the top of every report; without it nobody knows what a PASS answers.",
        "kind: correctness",
        "kind: correctness\nquestion: Does the fused router train like main?",
    ),
    "RL229": Rule(
        "trainer and model can be cut as the mesh says",
        "A trainer needs the axis, a stage a layer, ep experts; and embedding and head cannot part if they are tied.",
        "model: tiny-dense  # 4 layers\nmesh: {pp: 8}\nlaunch: {name: torchrun, processes_per_node: 8}",
        "model: tiny-dense\nmesh: {pp: 4}\nlaunch: {name: torchrun, processes_per_node: 4}",
    ),
    "RL230": Rule(
        "a planted fault stands only where an outcome is expected",
        "A fault breaks an arm on purpose, to show that a judgment can fail; no normal spec has one.",
        "settings: {fault: mean_of_means}",
        "settings: {fault: mean_of_means}\nexpect: FAIL",
    ),
    "RL231": Rule(
        "revisions of the embedded trainer are revisions of rlspec",
        "The embedded trainer is part of rlspec; a revision of another repository would not be what trains.",
        "trainer: {name: embedded}  # in a repository without rlspec/device\narms: [{…, revision: main}]",
        "arms: [{name: feat0, role: feature, implementation: {attention: reference}}]",
    ),
    "RL232": Rule(
        "base arms have the same seeds (warning)",
        "Two seeds part by far more than two runs of one seed, so a floor between them would pass almost any change.",
        'arms: [{name: base0, …, environment: {SEED: "1"}}, {name: base1, …, environment: {SEED: "2"}}, …]',
        'arms: [{name: base0, …, environment: {SEED: "1"}}, {name: base1, …, environment: {SEED: "1"}}, …]',
    ),
    "RL301": Rule(
        "a parity spec has one rollout arm and one train arm",
        "d = train − rollout; sides are chosen by role, since only this direction makes the estimator a KL.",
        "arms: [{name: a, role: train, …}, {name: b, role: train, …}]",
        "arms: [{name: a, role: rollout, …}, {name: b, role: train, …}]",
    ),
    "RL302": Rule(
        "a parity arm has records, a command that writes them, or an engine",
        "Log-probs come from a file that is there, from a command with {records} in its arguments, or from an engine.",
        "{name: train, role: train}",
        "{name: train, role: train, command: [python, dump.py, --out, '{records}']}",
    ),
    "RL303": Rule(
        "the two sides are different files",
        "A file compared with itself agrees to the bit and proves nothing.",
        "records: a.jsonl  # in both arms",
        "records: rollout.jsonl / records: train.jsonl",
    ),
    "RL304": Rule(
        "engines have a file of tokens",
        "Both engines score one token stream: samples with a prompt and a response, or a length where one generates.",
        "arms: [{…, engine: vllm}, …]  # and no tokens",
        'tokens: tokens.jsonl  # {"sample": "s0", "prompt": [5, 17], "response": [9, 4]}',
    ),
    "RL305": Rule(
        "engines have weights that they can load",
        "Seeded weights have the shapes of the spec's model and are made in the arm; vLLM and SGLang load files alone. "
        "The config.json beside files is of the model that the spec names, and of one model where there are two.",
        "weights: {source: seeded, seed: 1}  # and engine: vllm",
        "weights: {source: huggingface, path: models/Qwen3-8B}",
    ),
    "RL306": Rule(
        "settings of an engine go together",
        "A setting that an execution does not use, or that another decides, would say something that did not happen; "
        "rows of another dtype than that of both arms would allow what theirs does not round.",
        "settings: {execution: decode, padding: right}",
        "settings: {execution: decode}",
    ),
    "RL311": Rule(
        "operators that are named exist",
        "An operator that is left out by a misspelling is an operator that nobody judged.",
        "operators: [det_gem, rms_norm]",
        "operators: [det_gemm, rms_norm]",
    ),
    "RL312": Rule(
        "an implementation is one of the catalogue, or module:table",
        "What is judged must be found before anything runs; a name without a colon is one that rlspec ships. A table "
        "that is written out must name the operators.",
        "arms: [{name: mine, implementation: my_kernels}]",
        "arms: [{name: mine, implementation: 'my_kernels:table'}]",
    ),
    "RL313": Rule(
        "the model is one that our decoder runs",
        "Sizes are those of the model entry, nothing about them is guessed; a key that changes the model, and that the "
        "decoder does not implement, is refused by its name.",
        "model: gpt-oss-20b",
        "model: qwen3-8b",
    ),
    "RL314": Rule(
        "the workload's layouts can differ from the canonical one",
        "A layout that is the canonical one under another name compares a thing with itself and is always green. "
        "Decode cases must read from the cache, behind its first page.",
        "{name: primary, samples: [s0], layouts: [permuted]}",
        "{name: primary, samples: [s0, s1], permutation: [1, 0], layouts: [permuted]}",
    ),
    "RL315": Rule(
        "the model has the operators",
        "A dense model routes to no experts, so there is nothing to judge.",
        "model: qwen3-8b\noperators: [router]",
        "model: qwen3-30b-a3b\noperators: [router]",
    ),
    "RL316": Rule(
        "a judgment across arms has a second arm, and gradients to compare",
        "An arm that is held against the first one would otherwise be held against nothing, and pass; gradients that "
        "no judgment asks for are not measured, and none would be compared. Arms that differ by name alone are one "
        "thing compared with itself (warning).",
        "judgments: [gradient_accuracy, cross_arm_invariance]\narms: [{name: triton, implementation: triton}]",
        "judgments: [gradient_accuracy, cross_arm_invariance]\narms: [{name: triton, …}, {name: cuda, …}]",
    ),
    "RL401": Rule(
        "a contract has one row for one key",
        "Two rows for the same judgment, subject and dtype leave the limit open.",
        "two rows {judgment: drift, subject: '*'}",
        "one",
    ),
}
