"""The installed wheel: hashing, token inputs and errors."""

import array
import re

import pytest

import kvlane

TOKENS = list(range(100, 140))  # two blocks of 16 and a tail of 8


def test_version_is_that_of_the_wheel():
    from importlib.metadata import version

    assert kvlane.__version__ == version("kvlane")
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", kvlane.__version__)


def test_only_complete_blocks_are_hashed():
    local, sequence = kvlane.block_hashes(TOKENS)
    assert len(local) == len(sequence) == 2  # 40 tokens // 16
    assert local[0] != sequence[0]
    assert local[1] != sequence[1]
    assert all(0 <= value < 2**64 for value in local + sequence)
    assert kvlane.block_hashes([]) == ([], [])


def test_every_kind_of_input_gives_the_same_hashes():
    expected = kvlane.block_hashes(TOKENS)
    for code in "Iiql":
        assert kvlane.block_hashes(array.array(code, TOKENS)) == expected, code
    assert kvlane.block_hashes(memoryview(array.array("I", TOKENS))) == expected
    assert kvlane.block_hashes(tuple(TOKENS)) == expected


def test_block_size_lora_and_salt_count():
    plain = kvlane.block_hashes(TOKENS)
    assert len(kvlane.block_hashes(TOKENS, block_size=8)[0]) == 5
    salted = kvlane.block_hashes(TOKENS, salt="tenant")
    assert salted[0][0] != plain[0][0]
    assert salted[0][1] == plain[0][1]  # the salt stands in the first block, the chain carries it on
    assert salted[1][1] != plain[1][1]
    assert kvlane.block_hashes(TOKENS, lora="tenant")[0][0] not in (plain[0][0], salted[0][0])
    assert kvlane.block_hashes(TOKENS, lora="", salt="") == plain


def test_the_hash_is_the_documented_one():
    # XXH3-64 with seed `kvl/tok1` over the tokens as little-endian u32; the same value as in the core's tests.
    xxhash = pytest.importorskip("xxhash")
    seed = int.from_bytes(b"kvl/tok1", "big")
    data = b"".join(token.to_bytes(4, "little") for token in TOKENS[:16])
    assert kvlane.block_hashes(TOKENS)[0][0] == xxhash.xxh3_64_intdigest(data, seed)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([-1], r"tokens\[0\] is -1"),
        ([0, 2**32], r"tokens\[1\] is 4294967296"),
        (array.array("i", [-5]), "is -5"),
        (memoryview(array.array("I", range(8)))[::2], "strides"),
        (memoryview(array.array("I", range(8)).tobytes()).cast("I", [2, 4]), "2 dimensions"),
    ],
)
def test_tokens_out_of_range_or_shape_are_invalid(tokens, message):
    with pytest.raises(kvlane.InvalidRequest, match=message) as caught:
        kvlane.block_hashes(tokens)
    assert isinstance(caught.value, ValueError)
    assert caught.value.code == "invalid_request"


@pytest.mark.parametrize("tokens", ["text", b"bytes", [1.5], [None], [2**70], 7, object(), array.array("d", [1.0]), array.array("H", [1])])
def test_other_types_are_invalid(tokens):
    with pytest.raises(kvlane.InvalidRequest, match="tokens"):
        kvlane.block_hashes(tokens)


@pytest.mark.parametrize("size", [0, 65_537])
def test_block_size_out_of_range_is_a_config_error(size):
    with pytest.raises(kvlane.ConfigError, match="1 to 65536") as caught:
        kvlane.block_hashes(TOKENS, block_size=size)
    assert caught.value.code == "config_error"


def test_one_base_class_catches_every_error():
    classes = {
        kvlane.ConfigError: ("config_error", ValueError),
        kvlane.InvalidRequest: ("invalid_request", ValueError),
        kvlane.UnknownWorker: ("unknown_worker", KeyError),
        kvlane.Overloaded: ("overloaded", Exception),
        kvlane.Closed: ("closed", Exception),
    }
    for cls, (code, builtin) in classes.items():
        assert issubclass(cls, kvlane.Error) and issubclass(cls, builtin)
        assert cls.code == code
    assert str(kvlane.UnknownWorker("worker 'x'")) == "worker 'x'"
    import kvlane._native as native

    assert not hasattr(native, "UnnamedError")  # a kind of the core without a class here
