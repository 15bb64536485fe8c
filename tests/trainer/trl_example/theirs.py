from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

dataset = Dataset.from_list([{"prompt": f"{n}="} for n in range(10, 90)])


def reward_odd(completions, **kwargs):
    return [sum(letter in "13579" for letter in text) / 8 for text in completions]


args = GRPOConfig(output_dir="runs", learning_rate=1e-2, max_steps=30, num_generations=8, max_completion_length=8)
trainer = GRPOTrainer(
    model="my-model",
    args=args,
    reward_funcs=reward_odd,
    train_dataset=dataset,
)
trainer.train()
