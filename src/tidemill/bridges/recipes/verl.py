"""verl's settings (a YAML file, or the key=value words of a launch script) as a recipe."""

from __future__ import annotations

from typing import Any

from tidemill.bridges.recipes.given import Given
from tidemill.bridges.recipes.table import DROP, Converted, Draft, by_name, every, finish, leave_out, loggers, whole
from tidemill.recipe.config import Train

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
ESTIMATORS = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
ALGORITHMS = {
    "gae": "ppo", "grpo": "grpo", "reinforce_plus_plus": "reinforce_pp", "rloo": "rloo", "remax": "remax",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
}  # fmt: skip
AVERAGES = {
    "token-mean": "token_mean", "seq-mean-token-mean": "sample_mean", "seq-mean-token-sum-norm": "constant",
}  # fmt: skip
NAMES: dict[str, Any] = {
    "data.max_prompt_length": "data.max_prompt_tokens",
    "data.max_response_length": "rollout.max_new_tokens",
    "data.train_batch_size": ("train.prompts_per_step", lambda n: n or DROP),
    "data.shuffle": "data.shuffle",
    "data.filter_overlong_prompts": ("data.on_bad_row", lambda on: "skip" if on else DROP),
    "data.reward_fn_key": ("", lambda _: DROP),
    f"{MODEL}.path": "model.path",
    f"{MODEL}.trust_remote_code": "model.trust_remote_code",
    f"{MODEL}.enable_gradient_checkpointing": ("learn.recompute", lambda on: "full" if on else "none"),
    f"{MODEL}.lora_rank": "learn.lora_rank",
    f"{MODEL}.lora_alpha": ("learn.lora_alpha", float),
    f"{MODEL}.target_modules": ("learn.lora_modules", lambda m: DROP if m == "all-linear" else m),
    f"{ACTOR}.optim.lr": "learn.lr",
    f"{ACTOR}.optim.weight_decay": "learn.weight_decay",
    f"{ACTOR}.optim.betas": "learn.betas",
    f"{ACTOR}.optim.lr_warmup_steps": ("learn.warmup_steps", lambda n: max(0, n)),
    f"{ACTOR}.optim.min_lr_ratio": "learn.min_lr_share",
    f"{ACTOR}.optim.warmup_style": ("learn.schedule", lambda s: s if s in ("constant", "cosine", "linear") else DROP),
    f"{ACTOR}.optim.lr_scheduler_type": (
        "learn.schedule", lambda s: s if s in ("constant", "cosine", "linear") else DROP,
    ),
    f"{ACTOR}.grad_clip": "learn.clip_norm",
    f"{ACTOR}.optim.clip_grad": "learn.clip_norm",
    f"{ACTOR}.ppo_epochs": "train.passes_per_step",
    f"{ACTOR}.clip_ratio_c": "algorithm.dual_clip",
    f"{ACTOR}.entropy_coeff": "algorithm.entropy_coef",
    f"{ACTOR}.fsdp_config.optimizer_offload": "learn.optimizer_on_host",
    f"{ACTOR}.megatron.optimizer_offload": "learn.optimizer_on_host",
    f"{ROLLOUT}.n": "train.samples_per_prompt",
    f"{ROLLOUT}.temperature": "rollout.temperature",
    f"{ROLLOUT}.top_p": "rollout.top_p",
    f"{ROLLOUT}.top_k": ("rollout.top_k", lambda k: max(0, k)),
    f"{ROLLOUT}.max_num_seqs": "rollout.concurrent",
    f"{ROLLOUT}.tensor_model_parallel_size": "rollout.tp",
    f"{ROLLOUT}.val_kwargs.n": "eval.samples",
    f"{ROLLOUT}.val_kwargs.temperature": "eval.temperature",
    "algorithm.gamma": "algorithm.critic.gamma",
    "algorithm.lam": "algorithm.critic.lam",
    "algorithm.filter_groups.enable": "algorithm.dynamic_sampling",
    "algorithm.filter_groups.max_num_gen_batches": (
        "algorithm.dynamic_sampling_rounds", lambda n: n if n and n > 0 else DROP,
    ),
    "critic.optim.lr": "algorithm.critic.lr",
    "critic.cliprange_value": "algorithm.critic.value_clip",
    "critic.ppo_epochs": "algorithm.critic.passes",
    "trainer.critic_warmup": "algorithm.critic.warmup_steps",
    "trainer.save_freq": ("checkpoint.every", every),
    "trainer.test_freq": ("eval.every", every),
    "trainer.val_before_train": "eval.before",
    "trainer.max_actor_ckpt_to_keep": "checkpoint.keep",
    "trainer.project_name": "observe.project",
    "trainer.default_local_dir": ("folder", lambda path: DROP if "$" in str(path) else path),
    "trainer.device": ("device", lambda d: DROP if d == "cuda" else d),
}  # fmt: skip
OWN_SIZE = "memory and batch are found by the estimate and by train.tokens_per_microbatch"
REASONS = {
    rf"{ROLLOUT}\.(gpu_memory_utilization|max_num_batched_tokens|max_model_len)": OWN_SIZE,
    rf"{ROLLOUT}\.(enforce_eager|free_cache_engine)": OWN_SIZE,
    r".*(log_prob_)?(ppo_)?micro_batch_size(_per_gpu)?|.*max_token_len_per_gpu|.*use_dynamic_bsz": OWN_SIZE,
    r".*(param|grad)_offload": "flow.hand_over decides from the memory estimate what leaves the device",
    r".*use_remove_padding|.*use_rmpad|.*use_fused_kernels|.*use_liger|.*use_torch_compile": "always so, or by itself",
    rf"{ROLLOUT}\.(name|mode|load_format|dtype|layered_summon|enable_chunked_prefill|calculate_log_probs)": (
        "the native engine reads the learner's weights; rollout.engine: vllm is there too"
    ),
    rf"{ROLLOUT}\.(multi_turn|agent)\..*": "conversations are an environment: docs/environments.md",
    r".*engine_kwargs\..*|.*override_(transformer_)?config\..*|.*use_mbridge|.*use_shm": "belongs to another engine",
    r"actor_rollout_ref\.ref\..*|critic\.(model|megatron|strategy|ulysses).*": "as the policy's",
    r"critic\..*": "the critic follows the policy's settings",
    r"reward_model\..*|reward\..*": "rewards are functions, models and judges: docs/rewards.md",
    r"trainer\.(total_epochs|resume_mode|resume_from_path)": "`tidemill resume` goes on with a run",
    r"trainer\.(log_val_generations|balance_batch)": "always so, or by itself",
    r"data\.(truncation|return_raw_chat|val_batch_size|gen_batch_size|image_key|tokenizer|filter_\w+_workers)": (
        "prompts are never cut, and come through the chat template"
    ),
    r"ray_.*|transfer_queue.*|global_profiler.*": "",
}


def convert(given: Given, about: str) -> Converted:
    draft = Draft(given)
    by_name(draft, NAMES)
    _data(draft)
    _algorithm(draft)
    _loss(draft)
    _updates(draft)
    _ranks(draft)
    _trainer(draft)
    draft.made.pop("", None)
    leave_out(draft, REASONS)
    return finish(draft, about)


def _data(draft: Draft) -> None:
    for theirs, ours in (("data.train_files", "data.source"), ("data.val_files", "data.eval_source")):
        files = draft.take(theirs)
        if isinstance(files, list):
            if len(files) > 1:
                draft.notes.append(f"{theirs} names {len(files)} files; {ours} has the first: join them")
            files = files[0] if files else None
        draft.put(ours, files)
    key = draft.take("data.prompt_key")
    draft.put("data.columns", {"prompt": key} if key not in (None, "prompt") else None)
    draft.put("seed", draft.take("data.seed"))
    if "data.source" in draft.made:
        draft.notes.append(
            "verl's rows keep the answer in reward_model.ground_truth: write it into a column `answer`, "
            "or name yours in data.columns"
        )


def _algorithm(draft: Draft) -> None:
    estimator = draft.take("algorithm.adv_estimator", "gae")
    name = ALGORITHMS.get(str(estimator))
    if name is None:
        draft.dropped["algorithm.adv_estimator"] = "no such algorithm here: docs/algorithms.md"
        name = "grpo"
    mode = draft.take(f"{ACTOR}.policy_loss.loss_mode", "vanilla")
    if mode in ("gspo", "cispo"):
        name = mode
    elif mode in ("clip_cov", "kl_cov"):
        draft.put("algorithm.covariance.mode", mode.removesuffix("_cov"))
        draft.put("algorithm.covariance.share", draft.take(f"{ACTOR}.policy_loss.{mode}_ratio"))
        draft.put("algorithm.covariance.kl_coef", draft.take(f"{ACTOR}.policy_loss.ppo_kl_coef"))
    elif mode != "vanilla":
        draft.dropped[f"{ACTOR}.policy_loss.loss_mode"] = "no such loss here: docs/algorithms.md"
    if draft.take("algorithm.norm_adv_by_std_in_grpo", True) is False:
        draft.put("algorithm.advantage_scale", "none")
    if name != "ppo":
        for key in [k for k in draft.made if k.startswith("algorithm.critic")]:
            del draft.made[key]
        for key in [k for k in draft.given if k.startswith("critic.") or k in ("algorithm.lam", "algorithm.gamma")]:
            draft.taken.add(key)  # settings of a critic that is not there
    draft.put("algorithm.name", name)


def _loss(draft: Draft) -> None:
    clip = draft.take(f"{ACTOR}.clip_ratio")
    draft.put("algorithm.clip_low", draft.take(f"{ACTOR}.clip_ratio_low", clip))
    draft.put("algorithm.clip_high", draft.take(f"{ACTOR}.clip_ratio_high", clip))
    average = draft.take(f"{ACTOR}.loss_agg_mode")
    if average is not None and average not in AVERAGES:
        draft.dropped[f"{ACTOR}.loss_agg_mode"] = f"no such average; there are {', '.join(AVERAGES)}"
    draft.put("algorithm.aggregation", AVERAGES.get(str(average)))
    in_loss, in_reward = draft.take(f"{ACTOR}.use_kl_loss"), draft.take("algorithm.use_kl_in_reward")
    coef, kind = draft.take(f"{ACTOR}.kl_loss_coef"), draft.take(f"{ACTOR}.kl_loss_type")
    reward_coef, reward_kind = draft.take("algorithm.kl_ctrl.kl_coef"), draft.take("algorithm.kl_penalty")
    target, horizon = draft.take("algorithm.kl_ctrl.target_kl"), draft.take("algorithm.kl_ctrl.horizon")
    adapts = draft.take("algorithm.kl_ctrl.type", "fixed") == "adaptive"
    if in_loss:
        draft.put("algorithm.kl.coef", 0.001 if coef is None else coef)
        draft.put("algorithm.kl.estimator", ESTIMATORS.get(str(kind or "low_var_kl")))
    elif in_reward:
        draft.put("algorithm.kl.coef", 0.001 if reward_coef is None else reward_coef)
        draft.put("algorithm.kl.estimator", ESTIMATORS.get(str(reward_kind or "kl")))
        draft.put("algorithm.kl.place", "reward")
        if adapts:
            draft.put("algorithm.kl.target", target)
            draft.put("algorithm.kl.horizon", horizon)
    if in_loss and in_reward:
        draft.notes.append("verl has a KL both in the loss and in the reward here; the recipe has the loss's alone")
    if draft.take("reward_model.overlong_buffer.enable"):
        draft.put("algorithm.overlong.buffer", draft.take("reward_model.overlong_buffer.len"))
        draft.put("algorithm.overlong.penalty", draft.take("reward_model.overlong_buffer.penalty_factor"))
    path, function = draft.take("custom_reward_function.path"), draft.take("custom_reward_function.name")
    if path:
        draft.put("rewards.functions", [{"function": f"{path}:{function or 'compute_score'}"}])
        draft.notes.append("the reward's signature differs: def reward(sample) -> float; docs/rewards.md")
    elif draft.take("reward_model.enable") and draft.given.get("reward_model.model.path"):
        draft.put("rewards.functions", [{"function": "model", "args": {"path": draft.take("reward_model.model.path")}}])
        draft.notes.append("the reward model must be one that Tidemill trained, or a folder with one output per token")
    else:
        draft.put("rewards.functions", [{"function": "math"}])
        draft.notes.append("verl chooses the reward by the rows' data_source; `math` stands here: docs/rewards.md")


def _updates(draft: Draft) -> None:
    prompts, mini = draft.made.get("train.prompts_per_step"), draft.take(f"{ACTOR}.ppo_mini_batch_size")
    if prompts and mini:
        draft.put("train.updates_per_step", whole(max(1.0, prompts / mini), "train.updates_per_step", draft))
    longest = draft.made.get("data.max_prompt_tokens", 512) + draft.made.get("rollout.max_new_tokens", 512)
    micro = draft.given.get(f"{ACTOR}.ppo_micro_batch_size_per_gpu")
    tokens = draft.given.get(f"{ACTOR}.ppo_max_token_len_per_gpu")
    if draft.given.get(f"{ACTOR}.use_dynamic_bsz") and isinstance(tokens, int):
        draft.put("train.tokens_per_microbatch", tokens)
        draft.taken.add(f"{ACTOR}.ppo_max_token_len_per_gpu")
    elif isinstance(micro, int):
        draft.put("train.tokens_per_microbatch", micro * longest)
        draft.taken.add(f"{ACTOR}.ppo_micro_batch_size_per_gpu")
    elif longest > Train.model_fields["tokens_per_microbatch"].default:
        draft.put("train.tokens_per_microbatch", longest)


def _ranks(draft: Draft) -> None:
    devices = int(draft.take("trainer.n_gpus_per_node", 8) or 8) * int(draft.take("trainer.nnodes", 1) or 1)
    is_megatron = draft.take(f"{ACTOR}.strategy") == "megatron" or any(f"{ACTOR}.megatron." in k for k in draft.given)
    sizes = {
        "tp": int(draft.take(f"{ACTOR}.megatron.tensor_model_parallel_size", 1) or 1),
        "pp": int(draft.take(f"{ACTOR}.megatron.pipeline_model_parallel_size", 1) or 1),
        "cp": int(draft.take(f"{ACTOR}.megatron.context_parallel_size", 1) or 1),
        "ep": int(draft.take(f"{ACTOR}.megatron.expert_model_parallel_size", 1) or 1),
    }
    sequence = draft.take(f"{ACTOR}.ulysses_sequence_parallel_size")
    if not is_megatron:
        sizes["cp"] = int(sequence or 1)
    shards, rest = divmod(devices, sizes["tp"] * sizes["pp"] * sizes["cp"])
    if rest:
        draft.notes.append(f"{devices} devices are not a multiple of the parallel sizes: set learn.parallel by hand")
    group = draft.take(f"{ACTOR}.fsdp_config.fsdp_size")
    shards = max(1, shards)
    if isinstance(group, int) and 0 < group < shards and shards % group == 0:
        draft.put("learn.parallel.replicate", shards // group)
        shards = group
    for name, size in (sizes | {"fsdp": shards}).items():
        if size > 1:
            draft.put(f"learn.parallel.{name}", size)
    if devices > 1:
        several = int(draft.given.get("trainer.nnodes", 1) or 1) > 1
        draft.put("cluster.executor", "ray" if several else "processes")
        draft.put("cluster.placement.rollout", "colocated")
    draft.put("model.dtype", "bfloat16")


def _trainer(draft: Draft) -> None:
    steps, epochs = draft.take("trainer.total_training_steps"), draft.take("trainer.total_epochs")
    if steps:
        draft.put("train.steps", steps)
    else:
        draft.put("train.epochs", float(epochs) if epochs else None)
    name = draft.take("trainer.experiment_name")
    draft.put("name", str(name).replace("/", "-") if name and "$" not in str(name) else None)
    board, others = loggers(draft.take("trainer.logger"))
    draft.put("observe.tensorboard", board or None)
    draft.put("observe.loggers", others or None)
    ratio = draft.take(f"{ACTOR}.optim.lr_warmup_steps_ratio")
    if ratio and steps:
        updates = steps * draft.made.get("train.updates_per_step", 1)
        draft.put("learn.warmup_steps", whole(ratio * updates, "learn.warmup_steps", draft))
    elif ratio:
        draft.notes.append(
            f"learn.warmup_steps: verl warms up over {ratio:g} of all updates, whose number depends on the data"
        )
