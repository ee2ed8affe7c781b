'use strict'

const assert = require('node:assert/strict')
const test = require('node:test')

const kvlane = require('..')

const TOKENS = Uint32Array.from({ length: 40 }, (_, index) => 100 + index) // two blocks of 16 and a tail of 8

test('the version is that of the package', () => {
  assert.equal(kvlane.version(), require('../package.json').version)
})

test('only complete blocks are hashed', () => {
  const { local, sequence } = kvlane.blockHashes(TOKENS)
  assert.ok(local instanceof BigUint64Array && sequence instanceof BigUint64Array)
  assert.equal(local.length, 2) // 40 tokens / 16, rounded down
  assert.equal(sequence.length, 2)
  assert.notEqual(sequence[1], kvlane.blockHashes(TOKENS.subarray(16)).sequence[0]) // the same block after another
  assert.equal(kvlane.blockHashes(new Uint32Array()).local.length, 0)
})

test('hashes are the same numbers as in the other languages', () => {
  // XXH3-64 with seed `kvl/tok1` over tokens 100 to 115 as little-endian u32, by an independent implementation.
  assert.equal(kvlane.blockHashes(TOKENS).local[0], 17929236807194370402n)
})

test('block size, adapter and salt count', () => {
  const plain = kvlane.blockHashes(TOKENS)
  assert.equal(kvlane.blockHashes(TOKENS, { blockSize: 8 }).local.length, 5)
  const salted = kvlane.blockHashes(TOKENS, { salt: 'tenant' })
  assert.notEqual(salted.local[0], plain.local[0])
  assert.equal(salted.local[1], plain.local[1]) // the salt stands in the first block, the chain carries it on
  assert.notEqual(salted.sequence[1], plain.sequence[1])
  assert.notEqual(kvlane.blockHashes(TOKENS, { lora: 'tenant' }).local[0], salted.local[0])
  assert.deepEqual(kvlane.blockHashes(TOKENS, { lora: '', salt: '' }), plain)
})

test('a part of an array is taken as it is', () => {
  assert.deepEqual(kvlane.blockHashes(TOKENS.subarray(16)).local[0], kvlane.blockHashes(TOKENS).local[1])
})

test('a block size out of range has the code of the core', () => {
  for (const size of [0, 65537]) {
    assert.throws(() => kvlane.blockHashes(TOKENS, { blockSize: size }), { code: 'config_error', message: /1 to 65536/ })
  }
})

test('the forms of tokens hash alike', () => {
  const expected = kvlane.blockHashes(TOKENS)
  const forms = [
    Buffer.from(TOKENS.buffer),
    new Uint8Array(TOKENS.buffer),
    Int32Array.from(TOKENS),
    BigInt64Array.from(TOKENS, BigInt),
    [...TOKENS],
  ]
  for (const tokens of forms) assert.deepEqual(kvlane.blockHashes(tokens), expected)
})

test('a Buffer need not be aligned', () => {
  const bytes = Buffer.concat([Buffer.alloc(1), Buffer.from(TOKENS.buffer)])
  assert.deepEqual(kvlane.blockHashes(bytes.subarray(1)), kvlane.blockHashes(TOKENS))
})

test('media counts in the blocks that it touches', () => {
  const media = [{ offset: 20, length: 4, digest: Buffer.from('dog') }]
  const plain = kvlane.blockHashes(TOKENS)
  const hashes = kvlane.blockHashes(TOKENS, { media })
  assert.equal(hashes.local[0], plain.local[0]) // tokens 0 to 15
  assert.notEqual(hashes.local[1], plain.local[1])
})
