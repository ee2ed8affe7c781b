'use strict'

/** Encodes JSON as msgpack: whole numbers as integers, others as float64; Buffers and BigInts are taken as well. */
function encode(value) {
  const parts = []
  write(value, parts)
  return Buffer.concat(parts)
}

function write(value, parts) {
  if (value === null || value === undefined) parts.push(Buffer.of(0xc0))
  else if (typeof value === 'boolean') parts.push(Buffer.of(value ? 0xc3 : 0xc2))
  else if (typeof value === 'bigint' || Number.isSafeInteger(value)) integer(BigInt(value), parts)
  else if (typeof value === 'number') {
    const bytes = Buffer.alloc(9, 0xcb)
    bytes.writeDoubleBE(value, 1)
    parts.push(bytes)
  } else if (typeof value === 'string') sized(0xdb, Buffer.byteLength(value), parts).push(Buffer.from(value))
  else if (Buffer.isBuffer(value)) sized(0xc6, value.length, parts).push(value)
  else if (Array.isArray(value)) {
    sized(0xdd, value.length, parts)
    for (const item of value) write(item, parts)
  } else {
    const entries = Object.entries(value)
    sized(0xdf, entries.length, parts)
    for (const entry of entries) for (const item of entry) write(item, parts)
  }
}

function integer(value, parts) {
  const bytes = Buffer.alloc(9, value < 0n ? 0xd3 : 0xcf)
  if (value < 0n) bytes.writeBigInt64BE(value, 1)
  else bytes.writeBigUInt64BE(value, 1)
  parts.push(bytes)
}

function sized(tag, length, parts) {
  const bytes = Buffer.alloc(5, tag)
  bytes.writeUInt32BE(length, 1)
  parts.push(bytes)
  return parts
}

/** A batch of one event, as vLLM publishes it: blocks of 16 tokens from `tokens` on, named by `hashes`. */
function stored(hashes, tokens, parent = null) {
  const ids = Array.from({ length: hashes.length * 16 }, (_, index) => tokens + index)
  return encode([1.5, [['BlockStored', hashes, parent, ids, 16, null, 'GPU']], 0])
}

module.exports = { encode, stored }
