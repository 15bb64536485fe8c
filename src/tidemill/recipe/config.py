"""Every setting of a recipe, with its default and one line of help. Cross-checks that need no model live here too."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from tidemill.recipe.algorithm import KL, AlgorithmSettings, Covariance, Critic, Overlong, Preference
from tidemill.recipe.data import CurriculumSettings, Data, DataSource, RewardSpec, in_long_form
from tidemill.recipe.environment import EnvironmentSettings, LeagueSettings
from tidemill.recipe.images import ImageSettings
from tidemill.recipe.model import ModelSettings, TinyModel, TinyVision
from tidemill.recipe.section import ParallelSettings, Places, Rate, Rows, Section, Temperature

__all__ = [
    "KL", "VLLM", "AlgorithmSettings", "Checkpoint", "Cluster", "Config", "Covariance", "Critic",
    "CurriculumSettings", "Data", "DataSource", "EnvironmentSettings", "Eval", "Flow", "ImageSettings",
    "LeagueSettings", "Learn", "Mixture", "ModelSettings", "Observe", "Overlong", "ParallelSettings",
    "PlacementSettings", "Preference", "Reshard", "RewardSpec", "Rewards", "Rollout", "Section", "TinyModel",
    "TinyVision", "Train",
]  # fmt: skip


class Train(Section):
    steps: int = Field(100, ge=1, description="steps of the whole run")
    epochs: float | None = Field(
        None, gt=0, description="passes over a file's rows, instead of steps; none: train.steps decides"
    )
    prompts_per_step: Rows = Field(16, description="prompts per step")
    samples_per_prompt: Rows = Field(8, description="responses per prompt (a group)")
    updates_per_step: Rows = Field(1, description="optimizer updates per step")
    tokens_per_microbatch: Places = Field(16384, description="token limit of one forward and backward pass")
    passes_per_step: Rows = Field(1, description="how often each sample is learned from (inner epochs)")
    stop_at_accuracy: float | None = Field(
        None, ge=0, le=1, description="end early once held-out accuracy reaches this"
    )
    stop_at_reward: float | None = Field(None, description="end early once the mean held-out reward reaches this")
    profile: tuple[int, ...] = Field((), description="steps to profile, as Chrome traces")


class VLLM(Section):
    memory_share: float = Field(
        0.5, gt=0, le=1, description="share of the device's memory for vLLM; the learner has the rest"
    )
    sleep_level: Literal[1, 2] = Field(
        1, description="while asleep, vLLM keeps its weights in host memory (1) or drops them until the next update (2)"
    )
    python: str = Field(
        "", description="a Python interpreter that has vLLM, where vLLM is to run in a process of that; empty: this one"
    )
    args: dict[str, Any] = Field(
        {}, description="further arguments of vllm.LLM, such as quantization or tensor_parallel_size"
    )


class EngineExperts(Section):
    """Where the experts of an engine over several ranks lie: busy ones get copies, and all are packed by their load."""

    spare: int = Field(0, ge=0, le=64, description="places on each rank for copies of busy experts")
    every: int = Field(10, ge=0, description="steps after which experts are placed again by their load; 0: never")


class Rollout(Section):
    engine: Literal["native", "hf", "vllm"] = Field("native", description="what generates the tokens")
    max_new_tokens: Places = Field(256, description="longest response")
    temperature: Temperature = Field(1.0, description="of sampling; 0 is greedy")
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus of sampling")
    top_k: int = Field(0, ge=0, description="most likely tokens kept; 0: all")
    min_p: float = Field(0.0, ge=0, le=1, description="smallest probability kept, relative to the most likely token's")
    stop: tuple[str, ...] = Field((), description="strings that end a response")
    tp: int = Field(1, ge=1, description="ranks of an engine, one device each, that share each layer (tensor parallel)")
    dp: int = Field(1, ge=1, description="replicas inside an engine, each with requests of its own, that share experts")
    pp: int = Field(1, ge=1, description="stages of an engine, each with a run of layers (pipeline parallel)")
    ep: int | None = Field(None, ge=1, description="ranks of a stage that experts are spread over; none: all, dp × tp")
    experts: EngineExperts = EngineExperts()
    concurrent: Rows = Field(256, description="most sequences that an engine decodes at once")
    page_size: int | None = Field(
        None, ge=1, description="tokens per page of the key/value cache; none: what the engine measured best"
    )
    cache_tokens: int | None = Field(
        None, ge=1, description="size of the key/value cache; none: what concurrent sequences need"
    )
    cache_on_host_gb: float = Field(
        0.0,
        ge=0,
        le=1e6,
        description="host memory, in GB, that an engine keeps the caches of evicted samples in; they are recomputed "
        "where it is full. 0: always (native engine)",
    )
    cache_dtype: Literal["auto", "int8", "fp8"] = Field(
        "auto", description="type of the key/value cache: the model's own, or one byte with scales"
    )
    weights: Literal["same", "int8", "fp8"] = Field(
        "same", description="rollout's weights and inputs of attention and dense MLPs: the model's dtype, or 8 bits"
    )
    speculate: Literal["auto", "on", "off"] = Field(
        "auto",
        description="speculative decoding by lookup (native engine); auto: on a CPU, where it pays",
    )
    batch_invariant: bool = Field(
        False, description="native engine on a CPU: rollout and learner agree bit for bit, at a third of the speed"
    )
    vllm: VLLM = VLLM()

    @property
    def ranks(self) -> int:
        """Of one engine."""
        return self.pp * self.dp * self.tp


class Rewards(Section):
    functions: tuple[RewardSpec, ...] = Field(
        (RewardSpec(function="exact"),), min_length=1, description="rewards, added with their weights"
    )
    timeout_s: float = Field(10.0, gt=0, description="time limit of one sample's reward")
    on_error: Literal["zero", "drop", "fail"] = Field(
        "zero",
        description="a reward that raises, hangs or is not finite: counts as 0, drops its group, or ends the run",
    )
    correct_above: float = Field(0.5, description="a sample counts as correct when its first reward exceeds this")
    images: bool = Field(False, description="give the prompt's images to rewards that run in this process")
    workers: int | Literal["auto"] = Field(
        "auto", description="processes for rewards that do not run in this one; auto: one per core, at most 32"
    )

    @model_validator(mode="before")
    @classmethod
    def _short_forms(cls, value: Any) -> Any:
        """`rewards: exact` and `rewards: [exact, {function: …}]` are short for the long form."""
        if isinstance(value, str):
            value = [value]
        if isinstance(value, list | tuple):
            value = {"functions": value}
        if isinstance(value, dict) and "functions" in value:
            value = {**value, "functions": in_long_form(value["functions"])}
        return value

    @field_validator("workers", mode="plain")
    @classmethod
    def _auto_or_some(cls, value: Any) -> Any:
        if value == "auto" or (type(value) is int and 1 <= value <= 1024):
            return value
        raise ValueError("auto, or a number of processes from 1 to 1,024")

    @property
    def models(self) -> tuple[str, ...]:
        """Folders of trained reward models."""
        return tuple(str(spec.args.get("path")) for spec in self.functions if spec.function == "model")


class Mixture(Section):
    """Mixtures of experts."""

    balance: Literal["none", "aux_loss", "bias"] = Field(
        "none", description="balance the experts' load: by a loss, or by a bias on the router"
    )
    coef: float = Field(1e-3, ge=0, description="with balance aux_loss: its factor")
    bias_rate: float = Field(1e-3, ge=0, description="with balance bias: how far the bias moves after each update")
    replay: bool = Field(False, description="route tokens in learning as in rollout (native engine)")


class MindSpore(Section):
    python: str = Field("", description="interpreter that has MindSpore, or its environment; empty: .venv-mindspore")
    processes: int = Field(1, ge=1, le=64, description="processes that share out a step's samples")


class Learn(Section):
    backend: Literal["torch", "mindspore"] = Field("torch", description="what the policy's learner computes with")
    mindspore: MindSpore = MindSpore()
    lr: Rate = Field(1e-6, description="learning rate")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="learning-rate schedule after warm-up"
    )
    warmup_steps: int = Field(0, ge=0, description="updates over which the learning rate rises from 0")
    min_lr_share: float = Field(0.0, ge=0, le=1, description="share of lr that linear and cosine end at")
    optimizer: Literal["adamw", "muon"] = Field(
        "adamw", description="muon: orthogonal steps for the layers' matrices, AdamW for the rest"
    )
    betas: tuple[float, float] = Field((0.9, 0.95), description="AdamW's two decays")
    eps: float = Field(1e-8, gt=0, description="AdamW's epsilon")
    weight_decay: float = Field(0.0, ge=0, description="AdamW's weight decay")
    epochs: Rows = Field(1, description="of a network policy: passes over a step's decisions, all within one update")
    minibatch: Rows | None = Field(
        None, description="of a network policy: decisions of one gradient step; none: all of the step"
    )
    clip_norm: float | None = Field(1.0, gt=0, description="largest gradient norm; none: no clipping")
    recompute: Literal["none", "selective", "mlp", "full"] = Field(
        "none",
        description="activation checkpointing: recompute the MLPs' activations, the MLPs, or all",
    )
    recompute_every: int = Field(1, ge=1, description="with recompute: recompute one layer of this many")
    offload: Literal["none", "activations"] = Field(
        "none", description="keep activations in host memory until the backward pass"
    )
    share_prompts: bool = Field(True, description="compute a group's prompt once and let its responses attend to it")
    logprob_chunk: int = Field(4096, ge=1, description="logits held at once, in tokens × vocabulary")
    attention: Literal["auto", "blocks", "short", "flash", "fusion", "flex"] = Field(
        "auto", description="attention over packed samples; auto: what suits device, dtype and model"
    )
    compile: Literal["auto", "on", "off"] = Field(
        "auto", description="compile the decoder's layers; auto: on accelerators. The first step takes longer"
    )
    master: Literal["none", "float32", "stochastic"] = Field(
        "none", description="for bfloat16 weights: none, a float32 copy with float32 gradients, or stochastic rounding"
    )
    moments: Literal["same", "float32", "int8"] = Field(
        "same", description="AdamW's moments: the weights' dtype, float32, or 8 bits with a scale per block"
    )
    lora_rank: int = Field(0, ge=0, description="LoRA rank; 0: train all weights")
    lora_modules: tuple[str, ...] = Field(
        (), description="with lora_rank: names or patterns of the modules adapted, such as q_proj or *.mlp.*; none: all"
    )
    lora_experts: bool = Field(True, description="with lora_rank: adapters for each of a mixture's experts, too")
    lora_alpha: float = Field(32.0, gt=0, description="with lora_rank: adapters are scaled by alpha / rank")
    ema: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="evaluate and export a running mean of the weights that keeps this share each update; 0: none",
    )
    dora: bool = Field(False, description="with lora_rank: learn each row's magnitude separately (DoRA)")
    fp8: Literal["none", "tensorwise", "rowwise"] = Field(
        "none", description="matrix products in 8-bit floating point, with a scale per tensor or per row"
    )
    optimizer_on_host: bool = Field(False, description="keep the optimizer's state in host memory")
    reduce_dtype: Literal["same", "float32", "bfloat16"] = Field(
        "float32", description="type in which gradients are summed over ranks; same: the weights'"
    )
    parallel: ParallelSettings = ParallelSettings()
    moe: Mixture = Mixture()


class Flow(Section):
    schedule: Literal["sync", "streamed", "async"] = Field(
        "sync",
        description="stages one after the other, each on what is ready, or rollout ahead of learning as well",
    )
    max_staleness: int = Field(
        1,
        ge=0,
        description="async and carry_over: how many steps the oldest token of a sample may lag behind the learner",
    )
    placement: Literal["auto", "colocated", "separated"] = Field(
        "auto",
        description="separated: rollout runs beside the others with its own weights; auto: separated for async",
    )
    unfinished_samples: Literal["recompute_kv", "keep_kv"] = Field(
        "recompute_kv",
        description="unfinished samples when new weights arrive: recompute their KV cache, or keep it",
    )
    carry_over: float = Field(
        0.0,
        ge=0,
        le=64,
        description="sync: prompts in rollout beside a step's, as a share of prompts_per_step; a step takes those that "
        "finish first, the others go on in the next, at most max_staleness steps",
    )
    hand_over: Literal["auto", "never", "cache", "all"] = Field(
        "auto",
        description="colocated and sync, what leaves the device in turns: nothing, rollout's cache, or also "
        "optimizer, critic and reference; auto: what the memory estimate requires",
    )
    lease_s: float = Field(600.0, gt=0, description="how long a stage may hold samples before others get them")

    @property
    def is_separated(self) -> bool:
        return self.placement == "separated" or (self.placement == "auto" and self.schedule == "async")


class Reshard(Section):
    """How weights travel from the learner to rollout."""

    verify: Literal["off", "sample", "all"] = Field(
        "sample", description="checksums of what arrived: of no block, of one in sixteen, of all"
    )


class Eval(Section):
    every: int = Field(0, ge=0, description="steps between evaluations; 0: only before and after")
    size: int = Field(200, ge=0, description="held-out problems used; 0: no evaluation")
    samples: int = Field(1, ge=1, le=10**4, description="sampled answers per problem, for pass@k")
    temperature: Temperature = Field(1.0, description="temperature of the sampled answers")
    before: bool = Field(True, description="evaluate before the first step")
    after: bool = Field(True, description="evaluate after the last step")


class Checkpoint(Section):
    every: int = Field(10, ge=0, description="steps between checkpoints; 0: only at the end")
    keep: int = Field(2, ge=1, description="checkpoints kept: the newest, and the best")


class Observe(Section):
    dump: tuple[int, ...] = Field((), description="steps whose columns, gradients and weights `tidemill diff` compares")
    tensorboard: bool = Field(True, description="write TensorBoard events")
    loggers: tuple[Literal["csv", "wandb", "mlflow", "trackio", "swanlab", "webhook", "prometheus"], ...] = Field(
        (), description="where metrics go too; offline unless a package's own environment variables say otherwise"
    )
    project: str = Field("tidemill", min_length=1, description="project name for loggers")
    webhook: str = Field("", description="URL that gets start, finish, failure and health warnings")
    prometheus_port: int = Field(9464, ge=0, le=65535, description="port of the logger prometheus; 0: any free one")
    price_per_device_hour: float | None = Field(None, ge=0, description="price of a device, for the run's cost so far")
    samples_per_step: int = Field(8, ge=0, description="samples written to samples.jsonl each step")
    timeline: Literal["off", "stages", "work"] = Field(
        "stages", description="what each worker did when, in timeline/: by stage, or every piece of work"
    )
    progress: Literal["auto", "rich", "plain", "off"] = Field(
        "auto", description="what the terminal shows during the run"
    )


class PlacementSettings(Section):
    """Which roles share processes with the learner (`colocated`), and which have processes of their own."""

    rollout: Literal["separated", "colocated"] = Field("separated", description="colocated: as many as learners")
    reward: Literal["separated", "colocated"] = Field("separated", description="feed, rewards and advantages")
    reference: Literal["separated", "colocated"] = Field("colocated", description="the frozen policy, if any")
    reward_model: Literal["separated", "colocated"] = Field(
        "separated",
        description="rewards with a trained model: on devices of their own, or the learners'",
    )

    @model_validator(mode="before")
    @classmethod
    def _one_for_all(cls, value: Any) -> Any:
        """Expand `placement: colocated` to every role."""
        return dict.fromkeys(cls.model_fields, value) if isinstance(value, str) else value


class Cluster(Section):
    """Where the roles run. Not used while executor is local."""

    executor: Literal["local", "processes", "ray"] = Field(
        "local", description="this process, processes of this machine, or a Ray cluster"
    )
    address: str = Field(
        "local",
        description="Ray's: local starts one for this run; auto, host:port or ray://… join a running one",
    )
    learners: int = Field(
        1, ge=1, description="ranks that learn together, each with a whole model; learn.parallel sets its own number"
    )
    rollouts: int = Field(1, ge=1, description="rollout engines, where they are separated")
    rewards: int = Field(1, ge=1, description="reward workers, where they are separated")
    reward_models: int = Field(1, ge=1, description="workers with a trained reward model, where they are separated")
    placement: PlacementSettings = PlacementSettings()
    spread: bool = Field(False, description="put rollout workers on different nodes where there are several")
    cpus: float = Field(1.0, gt=0, description="CPUs that each worker requests from Ray")
    memory_mb: int | None = Field(None, ge=1, description="shared memory of each node's warehouse; none: half of it")
    replicas: int = Field(0, ge=0, description="number of other nodes that keep a copy of each sample's bytes")
    lease_s: float = Field(10.0, gt=0, description="silence after which a worker's samples go to another")
    start_s: float = Field(180.0, gt=0, description="time limit for a worker to start")
    stall_s: float = Field(300.0, gt=0, description="time without progress after which the run says who waits for whom")
    collective_s: float = Field(120.0, gt=0, description="time limit of ranks waiting for one another in one operation")
    restarts: int = Field(20, ge=0, description="how many lost workers are replaced within one step")


class Config(Section):
    """A whole run."""

    name: str = Field("run", min_length=1, description="the run's name, its subfolder of folder")
    about: str = Field("", description="one line: what this recipe is for")
    folder: str = Field("runs", description="folder of all runs")
    seed: int = Field(0, ge=0, le=2**63 - 1, description="seed of data order, sampling and initial weights")
    device: str = Field("auto", description="auto, cpu, or an accelerator's name")
    deterministic: bool = Field(False, description="equal runs give equal bits on one device; slower")
    threads: int | None = Field(None, ge=1, le=4096, description="CPU threads; none: all cores")
    model: ModelSettings = ModelSettings()
    data: Data = Data()
    train: Train = Train()
    rollout: Rollout = Rollout()
    environment: EnvironmentSettings | None = Field(None, description="what the model talks to; none: one turn")
    rewards: Rewards = Rewards()
    algorithm: AlgorithmSettings = Field(default_factory=AlgorithmSettings)
    learn: Learn = Learn()
    flow: Flow = Flow()
    reshard: Reshard = Reshard()
    cluster: Cluster = Cluster()
    eval: Eval = Eval()
    checkpoint: Checkpoint = Checkpoint()
    observe: Observe = Observe()

    @property
    def shares_prompts(self) -> bool:
        """Whether a group's prompt is computed once: each sample of a program, and each seat of a game, has
        prompts of its own."""
        own = self.environment
        return self.learn.share_prompts and (own is None or (own.program is None and own.players == 1))
