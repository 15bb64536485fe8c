from datasets import Dataset

from tidemill import Trainer

dataset = Dataset.from_list([{"prompt": f"{n}="} for n in range(10, 90)])


def reward_odd(completions, **kwargs):
    return [sum(letter in "13579" for letter in text) / 8 for text in completions]


args = {"folder": "runs", "lr": 1e-2, "steps": 30, "samples_per_prompt": 8, "max_new_tokens": 8}
trainer = Trainer(
    model="my-model",
    **args,
    rewards=reward_odd,
    data=dataset,
)
trainer.train()
