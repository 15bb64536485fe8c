"""Chat models' tokenizers in small: templates with the marks of each family, and a byte-level vocabulary that merges
across them (`>` and the line's end are one token), some marks being special tokens."""

from __future__ import annotations

from functools import lru_cache

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CALL = (
    "{{ '<tool_call>\n' }}{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}"
    "{{ '\n</tool_call>' }}"
)

# As Qwen2.5 and Hermes: results of tools stand in the user's message, framed by the template.
QWEN = (
    "{%- if tools %}{{ '<|im_start|>system\n' }}{% if messages[0].role == 'system' %}{{ messages[0].content + '\n' }}"
    "{% endif %}{{ 'Tools:\n<tools>' }}{% for tool in tools %}{{ '\n' }}{{ tool | tojson }}{% endfor %}"
    "{{ '\n</tools>\nCall one by <tool_call>JSON</tool_call>.<|im_end|>\n' }}"
    "{% elif messages[0].role == 'system' %}{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}"
    "{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'user' or (m.role == 'system' and not loop.first) or "
    "(m.role == 'assistant' and not m.tool_calls) %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% elif m.role == 'assistant' %}{{ '<|im_start|>assistant' }}{% if m.content %}{{ '\n' + m.content }}{% endif %}"
    "{% for call in m.tool_calls %}{{ '\n' }}" + CALL + "{% endfor %}{{ '<|im_end|>\n' }}"
    "{% elif m.role == 'tool' %}{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}"
    "{% endif %}{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As Qwen3: thoughts of turns before the latest question are left out, and an empty one closes the conversation.
QWEN3 = QWEN.replace(
    "(m.role == 'assistant' and not m.tool_calls) %}",
    "false %}",
).replace(
    "{% elif m.role == 'assistant' %}{{ '<|im_start|>assistant' }}{% if m.content %}{{ '\n' + m.content }}{% endif %}",
    "{% elif m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}{% if loop.last %}{{ '<think>\n\n</think>\n\n' }}"
    "{% endif %}{{ m.content.split('</think>')[-1].lstrip('\n') }}",
)
# As Llama 3.1: an answer is either words or a call, and results have a role of their own.
LLAMA = (
    "{{ '<|begin_of_text|>' }}{% if tools %}{{ '<|start_header_id|>system<|end_header_id|>\n\n' }}"
    '{% for t in tools %}{{ t | tojson }}{% endfor %}{{ \'{"name": NAME, "parameters": {}}<|eot_id|>\' }}{% endif %}'
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{{ '<|start_header_id|>ipython<|end_header_id|>\n\n' + m.content + '<|eot_id|>' }}"
    "{% elif m.tool_calls %}{% if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    "{% set f = m.tool_calls[0].function %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{{ '{\"name\": \"' + f.name + '\", \"parameters\": ' }}{{ f.arguments | tojson }}{{ '}<|eot_id|>' }}"
    "{% else %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content + '<|eot_id|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
# As Mistral: roles take turns, tools stand before the last question.
MISTRAL = (
    "{{ '<s>' }}{% set own = namespace(turn=0) %}{% for m in messages %}{% if m.role in ('user', 'assistant') and not "
    "m.tool_calls %}{% if (m.role == 'user') != (own.turn % 2 == 0) %}{{ raise_exception('roles must alternate') }}"
    "{% endif %}{% set own.turn = own.turn + 1 %}{% endif %}"
    "{% if m.role == 'user' %}{% if tools and loop.first %}{{ '[AVAILABLE_TOOLS]' }}{{ tools | tojson }}"
    "{{ '[/AVAILABLE_TOOLS]' }}{% endif %}{{ '[INST]' + m.content + '[/INST]' }}"
    "{% elif m.tool_calls %}{{ '[TOOL_CALLS]' }}{{ '[' }}{% for c in m.tool_calls %}"
    "{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}"
    "{% if not loop.last %}{{ ', ' }}{% endif %}"
    "{% endfor %}{{ ']</s>' }}{% elif m.role == 'assistant' %}{{ m.content + '</s>' }}"
    "{% elif m.role == 'tool' %}{{ '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}"
    "{% else %}{{ raise_exception('no such role') }}{% endif %}{% endfor %}"
)
# As Gemma: two roles that take turns, and nothing of tools.
GEMMA = (
    "{{ '<bos>' }}{% for m in messages %}{% if m.role not in ('user', 'assistant') %}"
    "{{ raise_exception('no such role') }}{% elif (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else 'user') + '\n' + m.content + '<end_of_turn>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
# As GPT-OSS: messages in channels.
HARMONY = (
    "{% if tools %}{{ '<|start|>developer<|message|>' }}{% for t in tools %}{{ t.function.name }} {% endfor %}"
    "{{ '<|end|>' }}{% endif %}{% for m in messages %}{% if m.role == 'tool' %}"
    "{{ '<|start|>functions.' + m.name + ' to=assistant<|channel|>commentary<|message|>' + m.content + '<|end|>' }}"
    "{% elif m.role == 'assistant' %}{% if m.tool_calls %}{% if m.content %}"
    "{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.content + '<|end|>' }}{% endif %}"
    "{% set f = m.tool_calls[0].function %}{{ '<|start|>assistant<|channel|>commentary to=functions.' + f.name }}"
    "{{ '<|message|>' }}{{ f.arguments | tojson }}{{ '<|call|>' }}"
    "{% else %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}{% endif %}"
    "{% else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
# As DeepSeek V3.1.
DEEPSEEK = (
    "{{ '<｜begin▁of▁sentence｜>' }}{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<｜User｜>' + m.content }}"
    "{% elif m.role == 'tool' %}{{ '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}"
    "{% elif m.role == 'assistant' %}{{ '<｜Assistant｜>' if messages[loop.index0 - 1].role == 'user' else '' }}"
    "{{ m.content }}{% if m.tool_calls %}{{ '<｜tool▁calls▁begin｜>' }}{% for c in m.tool_calls %}"
    "{{ '<｜tool▁call▁begin｜>' + c.function.name + '<｜tool▁sep｜>' }}{{ c.function.arguments | tojson }}"
    "{{ '<｜tool▁call▁end｜>' }}{% endfor %}{{ '<｜tool▁calls▁end｜>' }}{% endif %}{{ '<｜end▁of▁sentence｜>' }}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role == 'user' %}{{ '<｜Assistant｜>' }}{% endif %}"
)

TEMPLATES = {
    "qwen": QWEN, "qwen3": QWEN3, "llama": LLAMA, "mistral": MISTRAL, "gemma": GEMMA, "harmony": HARMONY,
    "deepseek": DEEPSEEK,
}  # fmt: skip
ENDS = {
    "qwen": "<|im_end|>", "qwen3": "<|im_end|>", "llama": "<|eot_id|>", "mistral": "</s>", "gemma": "<end_of_turn>",
    "harmony": "<|return|>", "deepseek": "<｜end▁of▁sentence｜>",
}  # fmt: skip
SPECIAL = {
    "qwen": ["<|im_start|>", "<|im_end|>", "<|endoftext|>"],
    "qwen3": ["<|im_start|>", "<|im_end|>", "<|endoftext|>"],
    "llama": ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>",
              "<|python_tag|>"],
    "mistral": ["<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
                "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[ARGS]"],
    "gemma": ["<bos>", "<start_of_turn>", "<end_of_turn>"],
    "harmony": ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>", "<|constrain|>"],
    "deepseek": ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"],
}  # fmt: skip
CORPUS = [
    '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>\n</tool_call>\n',
    "what is the sum of these two numbers? the answer is forty two. think about it first, then say it.\n",
    "<tool_response>\n42\n</tool_response>\n<tools>\n</tools>\nYou may use these tools, given as JSON:\n",
] * 4


@lru_cache
def tokenizer(family: str, *more_special: str) -> PreTrainedTokenizerFast:
    """`more_special`: words that are special tokens too, such as a call's marks."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    words = [*SPECIAL[family], *more_special]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    made.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in words])
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=ENDS[family])
    fast.chat_template = TEMPLATES[family]
    return fast
