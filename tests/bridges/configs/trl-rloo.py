"""Settings of a script with TRL's RLOO trainer."""

args = RLOOConfig(  # noqa: F821
    output_dir="rloo", learning_rate=1e-5, per_device_train_batch_size=16, gradient_accumulation_steps=4,
    num_generations=8, max_completion_length=512, beta=0.05, temperature=0.9, num_iterations=2, max_steps=200,
    report_to="wandb",
)  # fmt: skip
trainer = RLOOTrainer("Qwen/Qwen2.5-0.5B-Instruct", args=args, reward_funcs=[accuracy], train_dataset=rows)  # noqa: F821
