"""Chat requests that a router must tokenize as the engine does; each kind has its trap near the beginning."""

from __future__ import annotations

from harness import BLOCK_TOKENS
from prompts import Prompts, chat_body


def plain(p: Prompts) -> dict:
    return chat_body(
        [
            {"role": "system", "content": p.words(40)},
            {"role": "user", "content": p.words(30)},
            {"role": "assistant", "content": p.words(25)},
            {"role": "user", "content": p.words(20)},
        ]
    )


def content_parts(p: Prompts) -> dict:
    """Text parts are joined by a newline for a template that wants a string."""
    parts = [{"type": "text", "text": p.words(20)}, {"type": "text", "text": p.words(20)}]
    return chat_body([{"role": "user", "content": parts}, *plain(p)["messages"][2:]])


def unknown_words(p: Prompts) -> dict:
    return chat_body([{"role": "user", "content": f"Grüße, 世界! a\tb\n\n{p.words(90)} \u200d🦀"}])


def special_tokens_in_text(p: Prompts) -> dict:
    """Markers inside of content become special tokens, as in the engine."""
    return chat_body([{"role": "user", "content": f"<|im_end|><|im_start|>system {p.words(95)}</s>"}])


def developer_role(p: Prompts) -> dict:
    """A template that does not know the role gets `system`, merged into one message at the front."""
    messages = [
        {"role": "system", "content": p.words(20)},
        {"role": "user", "content": p.words(40)},
        {"role": "developer", "content": p.words(20)},
        {"role": "user", "content": p.words(20)},
    ]
    return chat_body(messages)


def tools(p: Prompts) -> dict:
    """The engine renders tools in its own key order, with `null` for what is not given, and nothing unknown."""
    parameters = {"type": "object", "properties": {"w50": {"type": "string", "description": "Straße"}}}
    return chat_body(
        plain(p)["messages"],
        tools=[
            {"function": {"parameters": parameters, "name": "w40", "made_up": 1}, "type": "function"},
            {"type": "function", "function": {"name": "w41", "description": "w42 w43", "strict": True}},
        ],
        tool_choice="none",
    )


def tool_calls(p: Prompts) -> dict:
    """Arguments arrive as a string of JSON and are rendered as an object; a missing content is an empty string."""
    call = {"id": "call_1", "type": "function", "function": {"name": "w40", "arguments": '{"w50":"w51",  "w52": null}'}}
    messages = [
        {"role": "user", "content": p.words(20)},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": p.words(20)}]},
        {"role": "assistant", "content": p.words(30), "tool_calls": []},
        {"role": "user", "content": p.words(40)},
    ]
    return chat_body(messages)


def no_generation_prompt(p: Prompts) -> dict:
    # <s> <|im_start|> user ... <|im_end|> is 4 * 32 + 1 tokens; with a generation prompt it would be 2 more.
    return chat_body([{"role": "user", "content": p.words(4 * BLOCK_TOKENS - 3)}], add_generation_prompt=False)


def continued_message(p: Prompts) -> dict:
    messages = [{"role": "user", "content": p.words(60)}, {"role": "assistant", "content": p.words(37)}]
    return chat_body(messages, add_generation_prompt=False, continue_final_message=True)


def added_special_tokens(p: Prompts) -> dict:
    return chat_body(plain(p)["messages"], add_special_tokens=True)


KINDS = [
    plain,
    content_parts,
    unknown_words,
    special_tokens_in_text,
    developer_role,
    tools,
    tool_calls,
    no_generation_prompt,
    continued_message,
    added_special_tokens,
]
