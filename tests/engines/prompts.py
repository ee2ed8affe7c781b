"""Prompts of an exact number of tokens for the tiny model: token ids, or words that are one token each."""

from __future__ import annotations

import random

from harness import BLOCK_TOKENS, MODEL

FIRST_WORD, END_WORD = 32, 1024


class Prompts:
    """A seeded source of prompts; two seeds never share a first block (with 992 ** 32 to 1)."""

    def __init__(self, seed: str) -> None:
        self.random = random.Random(seed)

    def tokens(self, count: int) -> list[int]:
        return [self.random.randrange(FIRST_WORD, END_WORD) for _ in range(count)]

    def prefix(self, blocks: int) -> list[int]:
        return self.tokens(blocks * BLOCK_TOKENS)

    def words(self, count: int) -> str:
        return as_words(self.tokens(count))

    def shuffled(self, keys: int, sends: int) -> list[int]:
        """Each of `keys` numbers `sends` times, in any order."""
        order = [key for key in range(keys) for _ in range(sends)]
        self.random.shuffle(order)
        return order


def as_words(tokens: list[int]) -> str:
    return " ".join(f"w{token}" for token in tokens)


def chat_body(messages: list[dict], **fields: object) -> dict:
    return {"model": MODEL, "messages": messages, "max_tokens": 2, "temperature": 0, "ignore_eos": True, **fields}
