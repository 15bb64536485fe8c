"""Bad inputs, as a table: the words after `tidemill`, and what the message must name. Files are made by `prepare`."""

from __future__ import annotations

import json
from pathlib import Path

Case = tuple[str, str]  # words (split at blanks, ~ stands for a blank inside one), what is named

# A recipe that would run at once: whatever fails, fails because of the case.
BASE = """
name: x
device: cpu
model: {tiny: {hidden: 32, layers: 1, heads: 2, kv_heads: 1, intermediate: 32, window: 64}}
data: {source: chain, args: {terms: 3, max_total: 9}, max_prompt_tokens: 16}
rollout: {max_new_tokens: 8}
rewards: last_number
train: {steps: 1, prompts_per_step: 4, samples_per_prompt: 4}
eval: {size: 4}
observe: {tensorboard: false}
"""

# Settings over the recipe above.
SETTINGS: tuple[Case, ...] = (
    # Keys that do not exist, and what is meant
    ("train.stepz=3", "train.steps"),
    ("learning_rate=1", "learn.lr"),
    ("train.batch_size=8", "train.prompts_per_step"),
    ("num_generations=8", "train.samples_per_prompt"),
    ("train.num_train_epochs=2", "train.epochs"),
    ("epochs=3", "train.epochs"),
    ("ppo_epochs=3", "train.passes_per_step"),
    ("max_completion_length=10", "rollout.max_new_tokens"),
    ("max_prompt_length=10", "data.max_prompt_tokens"),
    ("beta=0.1", "algorithm.kl.coef"),
    ("gradient_checkpointing=true", "learn.recompute"),
    ("output_dir=x", "folder"),
    ("save_steps=3", "checkpoint.every"),
    ("eval_steps=3", "eval.every"),
    ("model_name=x", "model.path"),
    ("dataset=x", "data.source"),
    ("lora_r=8", "learn.lora_rank"),
    ("target_modules=[q_proj]", "learn.lora_modules"),
    ("data.chat_template_kwargs={a:~1}", "data.chat_args"),
    ("rollout.temprature=1", "rollout.temperature"),
    ("algorithm.klcoef=1", "algorithm.kl"),
    ("lr=1e-3", "learn.lr"),
    ("zzz=1", "zzz"),
    ("train.=1", "train."),
    # Not overrides
    ("nonsense", "nonsense"),
    ("=3", "=3"),
    ("train.steps", "train.steps"),
    ("train.steps=[", "train.steps"),
    ("rewards.functions=[{functoin:~exact}]", "functoin"),
    # Wrong kinds
    ("train.steps=many", "train.steps"),
    ("train.steps=3.5", "train.steps"),
    ("train.steps=[1,~2]", "train.steps"),
    ("train.steps=none", "train.steps"),
    ("train.steps=true", "train.steps"),
    ("learn.lr=fast", "learn.lr"),
    ("learn.lr=[1]", "learn.lr"),
    ("learn.betas=0.9", "learn.betas"),
    ("learn.betas=[0.9]", "learn.betas"),
    ("rollout.stop=3", "rollout.stop"),
    ("data.columns=answer", "data.columns"),
    ("data.args=[1]", "data.args"),
    ("data.shuffle=perhaps", "data.shuffle"),
    ("model.tiny=small", "model.tiny"),
    ("learn=fast", "learn"),
    ("train.profile=first", "train.profile"),
    ("eval.before=3", "eval.before"),
    # Out of bounds
    ("train.steps=0", "train.steps"),
    ("train.steps=-1", "train.steps"),
    ("train.epochs=0", "train.epochs"),
    ("train.prompts_per_step=0", "train.prompts_per_step"),
    ("train.samples_per_prompt=0", "train.samples_per_prompt"),
    ("rollout.max_new_tokens=0", "rollout.max_new_tokens"),
    ("rollout.temperature=-1", "rollout.temperature"),
    ("rollout.top_p=0", "rollout.top_p"),
    ("rollout.top_p=1.5", "rollout.top_p"),
    ("rollout.min_p=2", "rollout.min_p"),
    ("learn.lr=-1", "learn.lr"),
    ("learn.clip_norm=0", "learn.clip_norm"),
    ("learn.ema=1", "learn.ema"),
    ("learn.lora_rank=-2", "learn.lora_rank"),
    ("eval.size=-1", "eval.size"),
    ("checkpoint.keep=0", "checkpoint.keep"),
    ("data.held_out=-1", "data.held_out"),
    ("data.max_prompt_tokens=0", "data.max_prompt_tokens"),
    ("rewards.timeout_s=0", "rewards.timeout_s"),
    ("seed=-1", "seed"),
    ("threads=0", "threads"),
    ("train.stop_at_accuracy=2", "train.stop_at_accuracy"),
    ("algorithm.preference.label_smoothing=0.5", "label_smoothing"),
    ("algorithm.dual_clip=0.5", "dual_clip"),
    ("flow.max_staleness=-1", "flow.max_staleness"),
    # Numbers that no setting can mean
    ("rewards.timeout_s=2e9", "rewards.timeout_s"),
    ("algorithm.kl.coef=1e308", "algorithm.kl.coef"),
    ("learn.weight_decay=1e12", "learn.weight_decay"),
    ("train.steps=1000000000000", "train.steps"),
    ("eval.samples=2000000000", "eval.samples"),
    ("threads=1000000000", "threads"),
    ("seed=9223372036854775808", "seed"),
    ("rewards.workers=1000000", "rewards.workers"),
    ("rewards.functions=[{function:~exact,~weight:~1e308}]", "rewards.functions[0].weight"),
    # Choices
    ("algorithm.aggregation=mean", "algorithm.aggregation"),
    ("learn.optimizer=adam", "adamw"),
    ("learn.schedule=cosin", "cosine"),
    ("rollout.engine=vlm", "vllm"),
    ("flow.schedule=asynch", "async"),
    ("data.chat=yes", "data.chat"),
    ("data.on_bad_row=ignore", "data.on_bad_row"),
    ("rewards.on_error=skip", "rewards.on_error"),
    ("model.dtype=fp16", "model.dtype"),
    ("learn.attention=flashh", "flash"),
    ("observe.progress=on", "observe.progress"),
    ("cluster.executor=slurm", "cluster.executor"),
    ("device=gpu", "device"),
    ("device=cuda:x", "device"),
    # Combinations that cannot work
    ("train.updates_per_step=3", "train.updates_per_step"),
    ("train.samples_per_prompt=1", "samples_per_prompt"),
    ("train.tokens_per_microbatch=4", "tokens_per_microbatch"),
    ("rollout.max_new_tokens=500", "window"),
    ("rollout.cache_tokens=4", "rollout.cache_tokens"),
    ("model.tiny.kv_heads=3", "kv_heads"),
    ("train.profile=[9]", "train.profile"),
    ("observe.dump=[9]", "observe.dump"),
    ("algorithm.kl.target=0.1", "target"),
    ("algorithm.rollout_correction=token", "algorithm.old_logprobs"),
    ("flow.schedule=async flow.placement=colocated", "flow.placement"),
    ("learn.dora=true", "learn.lora_rank"),
    ("rollout.tp=2", "rollout.tp"),
    ("learn.lora_rank=2 learn.lora_modules=[q_projj]", "q_proj"),
    ("rewards=environment", "environment"),
    ("train.epochs=1", "train.epochs"),
    ("name=a/b", "name"),
    ("name=..", "name"),
    ("folder=file.txt", "folder"),
    ("folder=file.txt/inside", "folder"),
    # Names of things
    ("algorithm=grpoo", "grpo"),
    ("algorithm=my.module:thing", "my.module"),
    ("rewards=exakt", "exact"),
    ("rewards=nowhere.module:f", "nowhere.module"),
    ("rewards=broken_module.py:f", "broken_module.py"),
    ("rewards=own.py:missing", "missing"),
    ("rewards=own.py:constant", "constant"),
    ("rewards=gone.py:f", "gone.py"),
    ("rewards.functions=[]", "rewards"),
    ("rewards.functions=[{function:~exact,~args:~{strictt:~1}}]", "strictt"),
    ("rewards.functions=[{function:~regex}]", "pattern"),
    ("rewards=own.py:raises", "own.py:5"),
    ("environment=nimm", "nim"),
    ("model.warm_start=nothing model.tiny=none", "nothing"),
    # Data
    ("data.source=chian", "chain"),
    ("data.source=absent.jsonl", "absent.jsonl"),
    ("data.source=[a,~b]", "[a, b]"),
    ("data.source=[/]", "[/]"),
    ("data.source=empty.jsonl", "empty.jsonl"),
    ("data.source=folder", "folder"),
    ("data.source=rows.xml", "rows.xml"),
    ("data.args.termz=3", "termz"),
    ("data.source=broken.jsonl data.args={}", "broken.jsonl:2"),
    ("data.source=numbers.jsonl data.args={}", "numbers.jsonl:1"),
    ("data.source=latin.jsonl data.args={}", "latin.jsonl:1"),
    ("data.source=broken.json data.args={}", "broken.json:1"),
    ("data.source=object.json data.args={}", "object.json"),
    ("data.source=ragged.csv data.args={}", "ragged.csv:3"),
    ("data.source=rows.parquet data.args={}", "rows.parquet"),
    ("data.source=nothing.jsonl data.args={}", "nothing.jsonl:1"),
    ("data.source=question.jsonl data.args={}", "question.jsonl:1"),
    ("data.source=good.jsonl data.args={} data.columns.prompt=promt", "promt"),
    ("data.source=good.jsonl data.args={} data.template={quest}", "quest"),
    ("data.source=good.jsonl data.args={} data.template={", "data.template"),
    ("data.source=good.jsonl data.args={} data.answer_pattern=(", "data.answer_pattern"),
    ("data.source=good.jsonl data.args={} data.answer_pattern=abc", "data.answer_pattern"),
    ("data.source=good.jsonl data.args={} data.answer_pattern=(zz)", "good.jsonl:1"),
    ("data.source=good.jsonl data.args={} data.held_out=50", "data.held_out"),
    ("data.source=good.jsonl data.args={} data.held_out=2 data.max_prompt_tokens=2", "data.max_prompt_tokens"),
    ("data.source=good.jsonl data.args={} data.held_out=2 data.system=hello", "data.system"),
    ("data.source=good.jsonl data.args={} data.held_out=2 data.chat=on", "data.chat"),
    ("data.source=answerless.jsonl data.args={} data.held_out=2", "data.columns.answer"),
    ("data.source=patchy.jsonl data.args={} data.held_out=2", "patchy.jsonl:4"),
    ("data.source=good.jsonl data.args={} data.held_out=2 rewards=json_schema", "schema"),
    ("data.source=good.jsonl data.args={} data.held_out=2 rewards=countdown", "numbers"),
    ("data.source=good.jsonl data.args={} data.held_out=2 algorithm=sft", "response"),
    ("data.source=good.jsonl data.args={} data.held_out=2 algorithm=dpo", "response"),
    ("data.source=good.jsonl data.args={} data.eval_source=good.jsonl", "good.jsonl"),
    ("data.source=good.jsonl data.args={} data.eval_source=absent.jsonl", "absent.jsonl"),
    ("data.source=dataset data.args={} data.split=tests", "test"),
    # Models
    ("model.path=absent", "absent"),
    ("model.path=file.txt", "file.txt"),
    ("model.path=folder", "config.json"),
    ("model.path=broken_model", "config.json"),
    ("model.path=weightless", "safetensors"),
    ("model.path=pickled", "safetensors"),
    ("model.path=runless@best", "runless"),
)
# Whole commands.
COMMANDS: tuple[Case, ...] = (
    ("train quickstrat", "quickstart"),
    ("train absent.yaml", "absent.yaml"),
    ("train broken.yaml", "broken.yaml:2"),
    ("train list.yaml", "list.yaml"),
    ("train twice.yaml", "train.steps"),
    ("train ring.yaml", "ring.yaml"),
    ("train orphan.yaml", "nowhere"),
    ("train unknown.yaml", "unknown.yaml:2"),
    ("train wrong.yaml", "wrong.yaml:1"),
    ("train variable.yaml", "variable.yaml:1"),
    ("train folder", "folder"),
    ("train own", "model.path"),
    ("train own model.path=broken_model", "data.source"),
    ("train own model.path=absent data.source=good.jsonl", "absent"),
    ("train own data.source=good.jsonl", "model.path"),
    ("sft quickstart-sft train.steps=0", "train.steps"),
    ("resume nowhere", "nowhere"),
    ("resume file.txt", "file.txt"),
    ("resume folder", "folder"),
    ("eval nowhere", "nowhere"),
    ("eval folder", "folder"),
    ("eval nowhere --recipe quickstrat", "quickstart"),
    ("generate nowhere 1+1=", "nowhere"),
    ("generate folder 1+1=", "folder"),
    ("export nowhere --to out", "nowhere"),
    ("export nowhere --to out --dtype int3", "int3"),
    ("export nowhere --to out --adapter", "nowhere"),
    ("plot nowhere", "nowhere"),
    ("plot folder", "folder"),
    ("config quickstrat", "quickstart"),
    ("config quickstart train.stepz=1", "train.steps"),
    ("doctor --recipe quickstrat", "quickstart"),
    ("diff nowhere nowhere", "nowhere"),
    ("bench nothing", "nothing"),
    ("dock nowhere", "nowhere"),
    ("status nowhere", "nowhere"),
    ("stacks nowhere", "nowhere"),
    ("scale nowhere --rollouts 2", "nowhere"),
    ("reshard plan", "recipe"),
    ("reshard plan --model nothing --from tp2 --to tp1", "nothing"),
    ("reshard plan --model qwen2.5-7b --from tpx --to tp1", "tpx"),
    ("models show absent", "absent"),
    ("models get absent", "absent"),
    ("models import absent.gguf --to out", "absent.gguf"),
)
# Words that the command line itself refuses, with usage and exit code 2.
USAGE: tuple[Case, ...] = (
    ("trian", "train"),
    ("train", "recipe"),
    ("resume", "run"),
    ("eval", "where"),
    ("plot", "runs"),
    ("diff one", "other"),
    ("train quickstart --steps 3", "--steps"),
    ("eval x -k 0", "--samples"),
    ("eval x -k many", "--samples"),
    ("generate x --temperature hot", "--temperature"),
    ("generate x -n 0", "-n"),
    ("export x --step -1", "--step"),
    ("scale x", "--rollouts"),
    ("scale x --rollouts 0", "--rollouts"),
    ("--nope", "--nope"),
)


def prepare(folder: Path) -> None:
    """The files that cases name."""
    good = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(9)]
    texts = {
        "base.yaml": BASE,
        "file.txt": "text\n",
        "own.py": "constant = 3\n\n\ndef raises(sample):\n    return 1 / 0\n",
        "broken_module.py": "def f(:\n",
        "empty.jsonl": "",
        "rows.xml": "<a/>\n",
        "good.jsonl": _lines(good),
        "answerless.jsonl": _lines([{"prompt": row["prompt"], "solution": row["answer"]} for row in good]),
        "question.jsonl": _lines([{"question": row["prompt"], "answer": row["answer"]} for row in good]),
        "broken.jsonl": f"{json.dumps(good[0])}\n{{not json\n",
        "numbers.jsonl": "1\n2\n",
        "nothing.jsonl": '{"prompt": "", "answer": "1"}\n',
        "broken.json": "[1, 2",
        "object.json": '{"a": 1}',
        "ragged.csv": "prompt,answer\n1+1=,2\n2+2=\n",
        "rows.parquet": "no parquet",
        "broken.yaml": "name: a\n  train: [\n",
        "list.yaml": "- a\n- b\n",
        "twice.yaml": "train:\n  steps: 1\n  steps: 2\n",
        "ring.yaml": "extends: ring.yaml\n",
        "orphan.yaml": "extends: nowhere\n",
        "unknown.yaml": "name: a\nlearnig: {lr: 1}\n",
        "wrong.yaml": "train: {steps: many}\n",
        "variable.yaml": "name: ${NOT_SET_ANYWHERE}\n",
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "latin.jsonl").write_bytes('{"prompt": "é"}\n'.encode("latin-1"))
    patchy = [row if i != 3 else {"prompt": row["prompt"]} for i, row in enumerate(good)]
    (folder / "patchy.jsonl").write_text(_lines(patchy))
    for name in ("folder", "broken_model", "weightless", "pickled", "dataset"):
        (folder / name).mkdir()
    (folder / "broken_model" / "config.json").write_text("{")
    (folder / "weightless" / "config.json").write_text('{"model_type": "llama"}')
    (folder / "pickled" / "config.json").write_text('{"model_type": "llama"}')
    (folder / "pickled" / "pytorch_model.bin").write_bytes(b"x")
    for split in ("train", "test"):
        (folder / "dataset" / f"{split}.jsonl").write_text(_lines(good))


def _lines(rows: list[dict[str, str]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)
