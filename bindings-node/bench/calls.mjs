// Measures what calls cost, for the table of docs/node.md: 64 workers that hold 2,048,000 blocks between them.
//
//   npm run build && node --expose-gc bench/calls.mjs [--json FILE]      measure
//   node bench/calls.mjs --docs FILE                                     write the table of a result into docs/node.md
//
// Medians of rounds that alternate between the calls, so that a busy moment meets all of them alike.
import { readFileSync, writeFileSync } from 'node:fs'
import { cpus } from 'node:os'
import { execFileSync } from 'node:child_process'
import { parseArgs } from 'node:util'

import { Router, blockHashes, version } from '../index.mjs'

const WORKERS = 64
const PROMPTS = 125
const BLOCKS = 256 // prompts of 4,096 tokens each
const ROUNDS = 15
const GUIDE = new URL('../../docs/node.md', import.meta.url)

const { values } = parseArgs({ options: { json: { type: 'string' }, docs: { type: 'string' } } })
if (values.docs) document(JSON.parse(readFileSync(values.docs, 'utf8')))
else measure()

function measure() {
  const router = filled()
  const results = rounds(calls(router))
  console.log(table(results))
  if (values.json) {
    const commit = execFileSync('git', ['rev-parse', '--short=10', 'HEAD'], { encoding: 'utf8' }).trim()
    const machine = { cpu: cpus()[0]?.model, cores: cpus().length, node: process.version, kvlane: version(), commit }
    writeFileSync(values.json, `${JSON.stringify({ machine, workers: WORKERS, blocks: WORKERS * PROMPTS * BLOCKS, rounds: ROUNDS, results }, null, 2)}\n`)
  }
}

/** What is measured: a name, how often a round calls it, the call, given a number that goes on or what is prepared of that. */
function calls(router) {
  const some = Array.from({ length: 500 }, (_, number) => tokens(number % WORKERS, number % PROMPTS))
  const of = (prompts, call) => (number) => call(prompts[number % prompts.length])
  const decide = (prompt) => router.select(prompt).release()
  const names = router.workers().map(({ id }) => id)
  const report = (prompt) => {
    const lease = router.select(prompt)
    // As a true engine would: one that found less would be believed less, and its prompts would go elsewhere.
    lease.release({ ok: true, cachedTokens: lease.predictedCachedTokens, promptTokens: prompt.length })
  }
  const long = Array.from({ length: 8 }, (_, number) => Uint32Array.from({ length: 100_000 }, (_, index) => index + number * 7))
  const chats = Array.from({ length: 50 }, (_, number) => ({ messages: [{ role: 'user', content: `${'word '.repeat(3_000)}${number}` }] }))
  const small = new Router()
  small.addWorker('w1')
  const none = new Uint32Array(0)
  const extra = new Router()
  extra.addWorker('w1')
  let seq = 0
  const batches = Array.from({ length: 64 }, (_, number) => batch(WORKERS, number))
  return [
    ['a call that does nothing', 20_000, () => version()],
    ['`select` + `release`, `Uint32Array`', 2_000, of(some, decide)],
    ['the same without tokens, one worker: what a call costs beside its work', 5_000, () => small.select(none).release()],
    ['the same of 4,096 tokens with `cachedTokens`, `promptTokens`', 2_000, of(some, report)],
    ['`select` + `release`, `Buffer`', 1_000, of(some.map((prompt) => Buffer.from(prompt.buffer)), decide)],
    ['`select` + `release`, `BigInt64Array`', 1_000, of(some.map((prompt) => BigInt64Array.from(prompt, BigInt)), decide)],
    ['`select` + `release`, `number[]`', 100, of(some.slice(0, 50).map((prompt) => [...prompt]), decide)],
    ['`select` + `release` with `requestId`, `allowed` (8) and `salt`', 1_000, of(some, (prompt) => router.select(prompt, { requestId: 'r', allowed: ['w0', 'w1', 'w2', 'w3', 'w4', 'w5', 'w6', 'w7'], salt: 's' }).release())],
    ['`select` + `release` with `allowed` (64)', 1_000, of(some, (prompt) => router.select(prompt, { allowed: names }).release())],
    ['`select` + `release` of a chat of 15 KB', 300, of(chats, decide)],
    ['`select` + `release` of 100,000 tokens', 200, of(long, decide)],
    ['`release` alone', 1_000, (lease) => lease.release(), (number) => router.select(some[number % some.length])],
    ['`overlap`', 2_000, of(some, (prompt) => router.overlap(prompt))],
    ['`rank`: 64 candidates with every cost term', 200, of(some, (prompt) => router.rank(prompt))],
    ['`blockHashes`', 1_000, of(some, (prompt) => blockHashes(prompt))],
    ['`ingest` of 256 blocks (and their removal)', 300, (number) => {
      extra.ingest('w1', batches[number % batches.length], { seq: seq++ })
      if (number % batches.length === batches.length - 1) extra.clear('w1')
    }],
  ].map(([call, count, run, prepare = (number) => number]) => ({ call, count, run, prepare }))
}

function rounds(measured) {
  const samples = measured.map(() => [])
  let number = 0
  for (let round = 0; round < ROUNDS + 2; round++) {
    measured.forEach(({ count, run, prepare }, index) => {
      globalThis.gc?.()
      const taken = new Float64Array(count)
      for (let call = 0; call < count; call++) {
        const given = prepare(number++)
        const started = process.hrtime.bigint()
        run(given)
        taken[call] = Number(process.hrtime.bigint() - started) / 1_000
      }
      taken.sort()
      // The first rounds are compiled by the engine.
      if (round >= 2) samples[index].push({ p50: taken[count >> 1], p99: taken[Math.floor(count * 0.99)] })
    })
  }
  const median = (numbers) => numbers.sort((one, other) => one - other)[numbers.length >> 1]
  return measured.map(({ call }, index) => ({
    call,
    p50: Number(median(samples[index].map(({ p50 }) => p50)).toFixed(2)),
    p99: Number(median(samples[index].map(({ p99 }) => p99)).toFixed(2)),
  }))
}

function filled() {
  const router = new Router()
  for (let worker = 0; worker < WORKERS; worker++) {
    router.addWorker(`w${worker}`)
    for (let prompt = 0; prompt < PROMPTS; prompt++) router.ingest(`w${worker}`, batch(worker, prompt), { seq: prompt })
  }
  const { blocks } = router.stats().index
  if (blocks !== WORKERS * PROMPTS * BLOCKS) throw new Error(`${blocks} blocks`)
  return router
}

function tokens(worker, prompt) {
  const first = (worker * PROMPTS + prompt) * 10_000
  return Uint32Array.from({ length: BLOCKS * 16 }, (_, index) => first + index)
}

/** A batch as vLLM publishes it, in msgpack: one event that stores a prompt's blocks. */
function batch(worker, prompt) {
  const hashes = Uint32Array.from({ length: BLOCKS }, (_, index) => (worker * PROMPTS + prompt) * BLOCKS + index + 1)
  const text = (value) => Buffer.concat([Buffer.of(0xa0 | value.length), Buffer.from(value)])
  const numbers = (values) => {
    const bytes = Buffer.alloc(3 + 5 * values.length, 0xce)
    bytes.writeUInt8(0xdc, 0)
    bytes.writeUInt16BE(values.length, 1)
    values.forEach((value, index) => bytes.writeUInt32BE(value, 4 + 5 * index))
    return bytes
  }
  const event = [Buffer.of(0x97), text('BlockStored'), numbers(hashes), Buffer.of(0xc0), numbers(tokens(worker, prompt)), Buffer.of(16, 0xc0), text('GPU')]
  return Buffer.concat([Buffer.of(0x93, 1, 0x91), ...event, Buffer.of(0)])
}

function table(results) {
  const rows = results.map(({ call, p50, p99 }) => `| ${call} | ${p50.toFixed(1)} | ${p99.toFixed(1)} |`)
  return ['| call, 4,096 tokens unless said otherwise | p50 µs | p99 µs |', '|---|---|---|', ...rows].join('\n')
}

function document({ results }) {
  const guide = readFileSync(GUIDE, 'utf8')
  const [begin, end] = ['<!-- calls -->\n', '<!-- /calls -->']
  const [from, to] = [guide.indexOf(begin) + begin.length, guide.indexOf(end)]
  if (from < begin.length || to < from) throw new Error('docs/node.md has no place for the table')
  writeFileSync(GUIDE, `${guide.slice(0, from)}${table(results)}\n${guide.slice(to)}`)
}
