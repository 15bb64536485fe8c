"""Stable-Baselines3 on one task with one seed, at the settings of rl-zoo3: what `bench control` starts in a process of
its own, with the peer's own Python. The last line of standard output is one JSON object.

    python _control_sb3.py '{"task": "CartPole-v1", "algorithm": "ppo", "seed": 0, …}'

The clock runs while it learns: it stands still in evaluations, and starts once everything is made.
"""

import json
import sys
import time

import gymnasium as gym
import numpy as np
import torch
from stable_baselines3 import PPO, SAC
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecNormalize

WIDE = {
    "log_std_init": -2,
    "ortho_init": False,
    "activation_fn": torch.nn.ReLU,
    "net_arch": {"pi": [256, 256], "vf": [256, 256]},
}
# rl-baselines3-zoo, hyperparameters/ppo.yml and sac.yml, commit 22e3ff2 (23 April 2026). Of InvertedPendulum and
# HalfCheetah the zoo's latest settings are those of v2 and v4.
ZOO = {
    ("CartPole-v1", "ppo"): {
        "n_envs": 8, "n_timesteps": 1e5,
        "settings": {"n_steps": 32, "batch_size": 256, "gae_lambda": 0.8, "gamma": 0.98, "n_epochs": 20,
                     "ent_coef": 0.0, "learning_rate": "lin_0.001", "clip_range": "lin_0.2"},
    },
    ("Pendulum-v1", "ppo"): {
        "n_envs": 4, "n_timesteps": 1e5,
        "settings": {"n_steps": 1024, "gae_lambda": 0.95, "gamma": 0.9, "n_epochs": 10, "ent_coef": 0.0,
                     "learning_rate": 1e-3, "clip_range": 0.2, "use_sde": True, "sde_sample_freq": 4},
    },
    ("Pendulum-v1", "sac"): {"n_envs": 1, "n_timesteps": 2e4, "settings": {"learning_rate": 1e-3}},
    ("InvertedPendulum-v5", "ppo"): {
        "n_envs": 1, "n_timesteps": 1e6, "normalize": True,
        "settings": {"batch_size": 64, "n_steps": 32, "gamma": 0.999, "learning_rate": 0.000222425,
                     "ent_coef": 1.37976e-07, "clip_range": 0.4, "n_epochs": 5, "gae_lambda": 0.9,
                     "max_grad_norm": 0.3, "vf_coef": 0.19816},
    },
    ("InvertedPendulum-v5", "sac"): {"n_envs": 1, "n_timesteps": 1e6, "settings": {"learning_starts": 10000}},
    ("HalfCheetah-v5", "ppo"): {
        "n_envs": 1, "n_timesteps": 1e6, "normalize": True,
        "settings": {"batch_size": 64, "n_steps": 512, "gamma": 0.98, "learning_rate": 2.0633e-05,
                     "ent_coef": 0.000401762, "clip_range": 0.1, "n_epochs": 20, "gae_lambda": 0.92,
                     "max_grad_norm": 0.8, "vf_coef": 0.58096, "policy_kwargs": WIDE},
    },
    ("HalfCheetah-v5", "sac"): {"n_envs": 1, "n_timesteps": 1e6, "settings": {"learning_starts": 10000}},
}  # fmt: skip


def scheduled(value):
    if isinstance(value, str) and value.startswith("lin_"):
        first = float(value.removeprefix("lin_"))
        return lambda left: left * first
    return value


def settings_of(task, algorithm):
    own = ZOO[task, algorithm]["settings"]
    return {name: scheduled(value) for name, value in own.items()}


def make(task, algorithm, seed, envs, gamma, processes):
    kind = SubprocVecEnv if processes else DummyVecEnv
    made = make_vec_env(task, n_envs=envs, seed=seed, vec_env_cls=kind)
    if ZOO[task, algorithm].get("normalize"):
        made = VecNormalize(made, gamma=gamma)
    return made


class Until(BaseCallback):
    """Ends the run once the mean return of deterministic episodes reaches the goal. Its own time is not counted."""

    def __init__(self, task, goal, every, episodes, most_s, seed):
        super().__init__()
        self.goal, self.every, self.most_s, self.next = goal, every, most_s, every
        self.envs = [gym.make(task) for _ in range(episodes)]
        self.seed, self.curve, self.is_solved, self.spent = seed, [], False, 0.0

    def _on_training_start(self):
        self.began = time.perf_counter()

    def seconds(self):
        return time.perf_counter() - self.began - self.spent

    def _on_step(self):
        if self.num_timesteps < self.next:
            return True
        self.next += self.every
        at = self.seconds()
        before = time.perf_counter()
        reached = float(np.mean(self.returns()))
        self.spent += time.perf_counter() - before
        self.curve.append([self.num_timesteps, round(at, 3), round(reached, 2)])
        self.is_solved = reached >= self.goal
        return not self.is_solved and at < self.most_s

    def returns(self):
        """All episodes at once, so that a long evaluation costs one network call a step."""
        looks = np.stack([env.reset(seed=self.seed + i)[0] for i, env in enumerate(self.envs)])
        total, alive = np.zeros(len(self.envs)), np.ones(len(self.envs), bool)
        norm = self.model.get_vec_normalize_env()
        while alive.any():
            seen = norm.normalize_obs(looks) if norm is not None else looks
            actions, _ = self.model.predict(seen, deterministic=True)
            for i in np.flatnonzero(alive):
                looks[i], reward, ended, cut, _ = self.envs[i].step(actions[i])
                total[i] += reward
                alive[i] = not (ended or cut)
        return total


def learn(task, algorithm, seed, goal, every, episodes, most_s, processes=False, envs=None, **_):
    own = settings_of(task, algorithm)
    zoo = ZOO[task, algorithm]
    made = make(task, algorithm, seed, envs or zoo["n_envs"], own.get("gamma", 0.99), processes)
    model = {"ppo": PPO, "sac": SAC}[algorithm]("MlpPolicy", made, seed=seed, device="cpu", **own)
    watch = Until(task, goal, every, episodes, most_s, 10_000 + 100 * seed)
    model.learn(int(zoo["n_timesteps"]), callback=watch)
    last = watch.curve[-1]
    return {"solved": watch.is_solved, "steps": last[0], "seconds": last[1], "return": last[2], "curve": watch.curve}


def rate(task, algorithm, seed, envs, seconds, work, processes=False, learns=True, **_):
    """Environment steps per second with so many environments; without `learns` of rollout alone. `work`: how much is
    learned from them, by which network, in place of the zoo's."""
    own = {**settings_of(task, algorithm), **work}
    made = make(task, algorithm, seed, envs, own.get("gamma", 0.99), processes)
    model = PPO("MlpPolicy", made, seed=seed, device="cpu", **own)
    if not learns:
        model.train = lambda: model.rollout_buffer.reset()

    class Stop(BaseCallback):
        def _on_rollout_start(self):
            now = time.perf_counter()
            self.marks = [*getattr(self, "marks", []), (now, self.num_timesteps)]

        def _on_step(self):
            marks = getattr(self, "marks", [])
            return len(marks) < 3 or time.perf_counter() - marks[1][0] < seconds

    watch = Stop()
    model.learn(int(1e9), callback=watch)
    (first, before), (last, after) = watch.marks[1], watch.marks[-1]  # the first iteration warms up
    return {"env_steps_per_s": (after - before) / (last - first), "steps": after - before, "seconds": last - first}


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    torch.set_num_threads(asked.get("threads", 1))
    found = rate(**asked) if asked.get("what") == "rate" else learn(**asked)
    print(json.dumps({**found, "version": __import__("stable_baselines3").__version__}))
