"""Settings of TRL's GRPO example on TL;DR with adapters."""

training_args = GRPOConfig(  # noqa: F821
    output_dir="test", use_vllm=True, vllm_mode="server", bf16=True, gradient_checkpointing=True,
    per_device_train_batch_size=2, gradient_accumulation_steps=8, num_generations=2, logging_steps=1, beta=0.1,
)  # fmt: skip
peft_config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")  # noqa: F821
dataset = load_dataset("trl-lib/tldr", split="train")  # noqa: F821
trainer = GRPOTrainer(  # noqa: F821
    model="Qwen/Qwen3-14B", args=training_args, reward_funcs=unique_characters, train_dataset=dataset,  # noqa: F821
    peft_config=peft_config,
)  # fmt: skip
