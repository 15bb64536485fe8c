# Settings of verl's GRPO example for DeepSeek-V3 on 256 devices.
NODES=32
PP=16
EP=16
INFER_TP=32
n_resp_per_prompt=4
max_prompt_length=2048
max_response_length=4096
actor_ppo_max_token_len=$(((max_prompt_length + max_response_length) * 1))
OFFLOAD=${OFFLOAD:-True}

python3 -m verl.trainer.main_ppo --config-path=./config --config-name='ppo_megatron_trainer'\
    algorithm.adv_estimator=grpo \
    data.train_batch_size=512 \
    data.max_prompt_length=$max_prompt_length \
    data.max_response_length=$max_response_length \
    actor_rollout_ref.model.path=deepseek-ai/DeepSeek-V3 \
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.rollout.n=${n_resp_per_prompt} \
    actor_rollout_ref.rollout.top_k=-1 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=$INFER_TP \
    trainer.logger='["console","tensorboard"]' \
    trainer.n_gpus_per_node=8 \
    trainer.nnodes=$NODES \
    trainer.save_freq=-1 \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=${actor_ppo_max_token_len} \
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=$PP \
    actor_rollout_ref.actor.megatron.expert_model_parallel_size=$EP \
    actor_rollout_ref.actor.megatron.optimizer_offload=${OFFLOAD} \
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full \
    trainer.val_before_train=False \
    trainer.total_epochs=100 $@
