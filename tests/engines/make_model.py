"""Writes a tiny Llama model folder: config, word tokenizer with chat template, random weights.

usage: make_model.py FOLDER

The vocabulary has 1,024 words (`w32` .. `w1023`, role names, markers and pieces of JSON), so a test can build a prompt
of an exact number of tokens. Like a real chat model it adds `<s>` to plain text, and its template writes special
tokens, tools and tool calls.
"""

import json
import sys

import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
ROLES = ["system", "user", "assistant", "tool"]
# What a tool definition and a call look like once they are split at spaces and punctuation.
JSON_PIECES = ['{"', '":', '"', '",', '"}', "}}", "{}", "type", "function", "name", "description", "parameters", "null"]
VOCABULARY_SIZE = 1024
FIRST_WORD = 32

# Whitespace between words does not make tokens here; the newlines only keep the shape of a usual template.
CHAT_TEMPLATE = (
    "{{- bos_token }}"
    "{%- if tools %}"
    "{{- '<|im_start|>system\n' }}"
    "{%- for tool in tools %}{{- tool | tojson }}{{- '\n' }}{%- endfor %}"
    "{{- '<|im_end|>\n' }}"
    "{%- endif %}"
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\n' + message['content'] }}"
    "{%- for call in message.tool_calls or [] %}"
    "{{- '\n' + call.function.name + ' ' }}{{- call.function.arguments | tojson }}"
    "{%- endfor %}"
    "{{- '<|im_end|>' + '\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)


def write_tokenizer(folder: str) -> None:
    words = SPECIAL + ROLES + JSON_PIECES
    words += [f"<reserved_{i}>" for i in range(len(words), FIRST_WORD)]
    words += [f"w{i}" for i in range(FIRST_WORD, VOCABULARY_SIZE)]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([AddedToken(w, special=True, normalized=False) for w in SPECIAL])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def write_weights(folder: str) -> None:
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=VOCABULARY_SIZE,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        # With the usual 0.02 the output hardly depends on the KV cache, and a wrong cache would go unseen.
        initializer_range=0.25,
    )
    torch.manual_seed(7)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder, safe_serialization=True)


def main() -> None:
    folder = sys.argv[1]
    write_tokenizer(folder)
    write_weights(folder)
    with open(f"{folder}/config.json", encoding="utf-8") as file:
        print("model:", json.load(file)["architectures"][0], "in", folder)


if __name__ == "__main__":
    main()
