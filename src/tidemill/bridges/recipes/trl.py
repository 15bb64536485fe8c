"""TRL's settings (a YAML file, a command's --flags, or a script's Config calls) as a recipe."""

from __future__ import annotations

from typing import Any

from tidemill.bridges.recipes.given import KIND, Given
from tidemill.bridges.recipes.table import (
    DROP,
    Converted,
    Draft,
    by_name,
    every,
    finish,
    leave_out,
    listed,
    loggers,
    whole,
)

SCHEDULES = {
    "linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant",
    "cosine_with_min_lr": "cosine",
}  # fmt: skip
TRAINERS = {
    "GRPO": "grpo", "RLOO": "rloo", "DPO": "dpo", "SFT": "sft", "KTO": "kto", "ORPO": "orpo", "CPO": "simpo",
    "Reward": "reward_model", "PPO": "ppo", "AsyncGRPO": "grpo",
}  # fmt: skip
PAIRWISE = ("dpo", "ipo", "kto", "orpo", "simpo", "reward_model")
OFFLINE = (*PAIRWISE, "sft")
GRPO_LOSSES = {
    "grpo": ("grpo", "sample_mean"), "bnpo": ("grpo", "token_mean"), "dapo": ("grpo", "token_mean"),
    "dr_grpo": ("dr_grpo", None), "cispo": ("cispo", None),
}  # fmt: skip
NAMES: dict[str, Any] = {
    "model_name_or_path": "model.path",
    "model": "model.path",
    "trust_remote_code": "model.trust_remote_code",
    "dataset_name": "data.source",
    "dataset_train_split": ("data.split", lambda s: DROP if s == "train" else s),
    "dataset_test_split": "data.eval_split",
    "max_prompt_length": ("data.max_prompt_tokens", lambda n: n or DROP),
    "max_completion_length": "rollout.max_new_tokens",
    "response_length": "rollout.max_new_tokens",
    "max_length": "rollout.max_new_tokens",
    "max_seq_length": "rollout.max_new_tokens",
    "num_generations": "train.samples_per_prompt",
    "rloo_k": "train.samples_per_prompt",
    "num_iterations": "train.passes_per_step",
    "num_ppo_epochs": "train.passes_per_step",
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
    "top_k": ("rollout.top_k", lambda k: max(0, k or 0)),
    "min_p": ("rollout.min_p", lambda p: p or DROP),
    "learning_rate": "learn.lr",
    "weight_decay": "learn.weight_decay",
    "adam_epsilon": "learn.eps",
    "max_grad_norm": ("learn.clip_norm", lambda n: n or DROP),
    "warmup_steps": "learn.warmup_steps",
    "lr_scheduler_type": ("learn.schedule", lambda s: SCHEDULES.get(s, DROP)),
    "gradient_checkpointing": ("learn.recompute", lambda on: "full" if on else "none"),
    "bf16": ("model.dtype", lambda on: "bfloat16" if on else DROP),
    "torch_dtype": ("model.dtype", lambda d: d if d in ("bfloat16", "float32") else DROP),
    "dtype": ("model.dtype", lambda d: d if d in ("bfloat16", "float32") else DROP),
    "epsilon": "algorithm.clip_low",
    "epsilon_high": "algorithm.clip_high",
    "delta": ("algorithm.ratio_cap", lambda d: d or DROP),
    "mask_truncated_completions": "algorithm.overlong.drop_truncated",
    "max_steps": ("train.steps", lambda n: n if n > 0 else DROP),
    "num_train_epochs": ("train.epochs", float),
    "save_steps": ("checkpoint.every", every),
    "save_total_limit": ("checkpoint.keep", lambda n: n or DROP),
    "eval_steps": ("eval.every", lambda n: every(n) if isinstance(n, int) else DROP),
    "seed": "seed",
    "run_name": ("name", lambda n: str(n).replace("/", "-")),
    "lora_r": "learn.lora_rank",
    "lora_alpha": ("learn.lora_alpha", float),
    "lora_target_modules": ("learn.lora_modules", lambda m: DROP if m == "all-linear" else listed(m)),
    "use_dora": "learn.dora",
    "chat_template_kwargs": "data.chat_args",
    "shuffle_dataset": "data.shuffle",
    "label_smoothing": "algorithm.preference.label_smoothing",
    "cpo_alpha": "algorithm.preference.sft_coef",
    "rpo_alpha": "algorithm.preference.sft_coef",
    "simpo_gamma": "algorithm.preference.margin",
    "desirable_weight": "algorithm.preference.good_weight",
    "undesirable_weight": "algorithm.preference.bad_weight",
    "center_rewards_coefficient": "algorithm.preference.centre_coef",
    "gamma": "algorithm.critic.gamma",
    "lam": "algorithm.critic.lam",
    "cliprange_value": "algorithm.critic.value_clip",
}  # fmt: skip
REASONS = {
    r"use_vllm|vllm_.*|use_transformers_paged|cache_implementation|generation_kwargs|ds3_gather.*": (
        "the native engine reads the learner's weights"
    ),
    r"log_level|logging_.*|log_completions|num_completions_to_print|disable_tqdm|push_to_hub|hub_.*|output_dir": "",
    r"(no_)?remove_unused_columns|dataloader_.*|ddp_.*|optim|do_eval|do_train|overwrite_output_dir|report_to": "",
    r"attn_implementation|use_liger_.*|packing.*|padding_free|tf32|torch_compile|fp16": (
        "always packed, by kernels of its own"
    ),
    r"eval_strategy|save_strategy|evaluation_strategy": "eval.every and checkpoint.every count steps",
    r"load_in_[48]bit|use_bnb.*|bnb_.*": "weights are not quantised while they learn: docs/learner.md",
    r"lora_(bias|task_type|dropout|inference_mode)|use_peft|use_rslora": "adapters have neither dropout nor biases",
    r"dataset_config|dataset_num_proc|dataset_text_field|dataset_streaming": "see data.columns and docs/data.md",
    r"fsdp.*|deepspeed|accelerator_config|zero_stage": "learn.parallel: docs/parallelism.md",
    r"per_device_eval_batch_size|eval_accumulation_steps": "evaluations are batched by the engine",
    r"gradient_checkpointing_kwargs|model_init_kwargs|model_revision": "by itself",
}


def convert(given: Given, about: str) -> Converted:
    draft = Draft(given)
    algorithm = _algorithm(draft)
    by_name(draft, NAMES)
    _beta(draft, algorithm)
    _batches(draft, algorithm)
    _rest(draft, algorithm)
    leave_out(draft, REASONS)
    return finish(draft, about)


def _algorithm(draft: Draft) -> str:
    kind = str(draft.take(KIND, "") or _guessed(draft.given))
    name = TRAINERS.get(kind)
    if name is None:
        draft.dropped[KIND] = f"there is no {kind or 'such'} trainer here; grpo stands in its place"
        name = "grpo"
    loss = draft.take("loss_type")
    loss = loss[0] if isinstance(loss, list) else loss
    if name == "grpo" and loss is not None:
        name, average = GRPO_LOSSES.get(str(loss), ("grpo", None))
        draft.put("algorithm.aggregation", average)
        if loss not in GRPO_LOSSES:
            draft.dropped["loss_type"] = f"no such loss here; there are {', '.join(GRPO_LOSSES)}"
    elif name == "dpo" and loss in ("ipo",):
        name = "ipo"
    elif name == "simpo" and loss not in (None, "simpo"):
        draft.dropped["loss_type"] = "of TRL's CPO losses SimPO's is here"
    elif name in ("dpo", "kto") and loss not in (None, "sigmoid", "kto"):
        draft.dropped["loss_type"] = f"no such loss here: {name} is learned"
    if name == "grpo" and draft.take("importance_sampling_level") == "sequence":
        name = "gspo"
        draft.made.pop("algorithm.aggregation", None)
    scale = draft.take("scale_rewards", "group")
    if name in ("grpo", "gspo", "rloo") and scale in (False, "none", "batch"):
        draft.put("algorithm.advantage_scale", "batch_std" if scale == "batch" else "none")
    draft.put("algorithm.name", name)
    return name


def _guessed(given: Given) -> str:
    """The trainer, by settings that only one of them has."""
    for kind, keys in {
        "GRPO": ("num_generations", "max_completion_length"), "KTO": ("desirable_weight",), "CPO": ("simpo_gamma",),
        "PPO": ("num_ppo_epochs",), "Reward": ("center_rewards_coefficient",), "DPO": ("beta", "loss_type"),
    }.items():  # fmt: skip
        if any(key in given for key in keys):
            return kind
    return "SFT"


def _beta(draft: Draft, algorithm: str) -> None:
    beta = draft.take("beta", draft.take("kl_coef"))
    if beta is not None:
        draft.put("algorithm.preference.beta" if algorithm in PAIRWISE else "algorithm.kl.coef", beta)
    if draft.take("sync_ref_model"):
        draft.put("algorithm.kl.reset_every", draft.take("ref_model_sync_steps", 512))
        draft.notes.append("TRL mixes the reference with the policy; here the reference becomes the policy")


def _batches(draft: Draft, algorithm: str) -> None:
    """Rows of one optimizer step over all devices, and how many such steps a batch of answers is cut into."""
    rows = int(draft.take("per_device_train_batch_size", 8) or 8)
    steps = int(draft.take("gradient_accumulation_steps", 1) or 1)
    devices = int(draft.take("num_processes", draft.take("world_size", 1)) or 1)
    update, group = rows * steps * devices, draft.made.get("train.samples_per_prompt", 8)
    if algorithm in OFFLINE:
        draft.put("train.prompts_per_step", update)
        draft.made.pop("train.samples_per_prompt", None)
    else:
        draft.put("train.samples_per_prompt", group)
        generated = draft.take("generation_batch_size") or rows * devices * int(
            draft.take("steps_per_generation") or steps
        )
        draft.put("train.prompts_per_step", whole(generated / group, "train.prompts_per_step", draft))
        draft.put("train.updates_per_step", whole(max(1.0, generated / update), "train.updates_per_step", draft))
    if "num_processes" not in draft.given:
        draft.notes.append(
            "batches are those of one process; with N of them, train.prompts_per_step is N times as large"
        )


def _rest(draft: Draft, algorithm: str) -> None:
    betas = (draft.take("adam_beta1"), draft.take("adam_beta2"))
    if any(b is not None for b in betas):
        draft.put("learn.betas", [b if b is not None else usual for b, usual in zip(betas, (0.9, 0.999))])
    if "train.steps" in draft.made:  # TRL's max_steps counts updates
        updates = draft.made["train.steps"] / draft.made.get("train.updates_per_step", 1)
        draft.put("train.steps", whole(updates, "train.steps", draft))
        draft.made.pop("train.epochs", None)
    ratio = draft.take("warmup_ratio")
    if ratio and "train.steps" in draft.made:
        draft.put("learn.warmup_steps", whole(ratio * draft.made["train.steps"], "learn.warmup_steps", draft))
    elif ratio:
        draft.notes.append(
            f"learn.warmup_steps: TRL warms up over {ratio:g} of all updates, whose number depends on the data"
        )
    board, others = loggers(draft.take("report_to"))
    draft.put("observe.tensorboard", board or None)
    draft.put("observe.loggers", others or None)
    if draft.take("use_peft") and "learn.lora_rank" not in draft.made:
        draft.put("learn.lora_rank", 16)  # TRL's default
    rewards, weights = draft.take("reward_funcs"), draft.take("reward_weights")
    if algorithm not in OFFLINE:
        names = [rewards] if isinstance(rewards, str) else list(rewards or ())
        if names:
            draft.notes.append(
                f"rewards of the script: {', '.join(names)}. Name them in rewards.functions as FILE.py:FUNCTION"
            )
        else:
            draft.notes.append("rewards.functions: name the reward (docs/rewards.md)")
        if weights:
            draft.notes.append(f"their weights are {weights}")
    if draft.take("reward_model_path") or draft.take("reward_model_name_or_path"):
        draft.notes.append("rewards with a model: rewards: [{function: model, args: {path: …}}]")
