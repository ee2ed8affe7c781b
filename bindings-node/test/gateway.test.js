'use strict'

// What gateways use beside the router: prompts of bodies, the usage in answers, bookings, engines that rest.

const assert = require('node:assert/strict')
const { createServer } = require('node:http')
const test = require('node:test')

const { Router } = require('..')
const { Booking, Cooldown, EngineTokenizer, UsageReader, bodyOf, errorBody, promptOf, selectFor } = require('../gateway.js')

const NONE = { prompt: new Uint32Array(0), options: {} }

test('a prompt is found wherever a request has it', () => {
  const messages = [{ role: 'user', content: 'hello' }]
  const salt = (model) => ({ salt: JSON.stringify([model, '']) })
  const chat = (...turns) => ({ messages: turns, tools: null })
  const system = { role: 'system', content: 'be brief' }
  const user = { role: 'user', content: 'hello' }
  for (const [body, prompt, options] of [
    [{ prompt: [1, 2, 3] }, Uint32Array.of(1, 2, 3), {}],
    [{ prompt: [[4, 5], [6]] }, Uint32Array.of(4, 5), {}],
    [{ input_ids: [1] }, Uint32Array.of(1), {}],
    [{ token_ids: [1], cache_salt: 's' }, Uint32Array.of(1), { salt: 's' }],
    [{ model: 'm', prompt: 'hello' }, 'hello', salt('m')],
    [{ prompt: ['hello', 'you'] }, 'hello', salt(null)],
    [{ model: 'm', input: ['hello'] }, 'hello', salt('m')],
    [{ model: 'm', messages }, chat(user), salt('m')],
    [{ model: 'm', messages, tools: [{ a: 1 }] }, { messages, tools: [{ a: 1 }] }, salt('m')],
    [{ model: 'm', messages, system: 'be brief' }, chat(system, user), salt('m')],
    [{ model: 'm', input: 'hello', instructions: 'be brief' }, chat(system, user), salt('m')],
    [{ model: 'm', input: messages }, chat(user), salt('m')],
  ]) assert.deepEqual(promptOf(body), { prompt, options }, JSON.stringify(body))
  assert.deepEqual(promptOf({ messages }, Uint32Array.of(9)), { prompt: Uint32Array.of(9), options: {} })
  for (const body of [undefined, null, 7, 'text', [], {}, { prompt: [] }, { prompt: [-1] }, { prompt: [1, 2 ** 32] }, { prompt: [1, 'x'] }, { prompt: [1.5] }, { messages: 7 }, { prompt: {} }]) {
    assert.deepEqual(promptOf(body), NONE, JSON.stringify(body))
  }
})

test('what the router cannot read is routed by load alone', () => {
  const kv = new Router()
  kv.addWorker('w1')
  for (const body of [undefined, {}, { messages: [{ role: 7 }] }, { messages: [null] }, { messages: [{ content: [{ type: 'x' }] }] }, { prompt: 'x'.repeat(1_000_000) }]) {
    assert.equal(selectFor(kv, body).worker, 'w1')
  }
  assert.equal(selectFor(kv, { prompt: [1] }, { allowed: ['w2'] }), null)
  assert.throws(() => selectFor(kv, { prompt: [1] }, { alowed: [] }), { code: 'invalid_request', message: /alowed/ })
  assert.throws(() => selectFor(kv, {}, { ttl: -1 }), { code: 'invalid_request' })
  const tokens = Uint32Array.from({ length: 32 }, (_, index) => index)
  selectFor(kv, { messages: [], cache_salt: 's' }, { tokens }).release()
  assert.equal(kv.overlap(tokens, { salt: 's' })[0].device, 2)
  assert.deepEqual(kv.overlap(tokens), [])
})

const USAGE = { promptTokens: 12, cachedTokens: 8, completionTokens: 3 }
const CHUNKS = ['{"choices":[{"delta":{"content":"漢字 🙂 \\"usage\\": {\\"prompt_tokens\\": 666}"}}],"usage":null}', '{"usage": {"prompt_tokens":12,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":8,"note":"a } \\" b"}}}', '[DONE]']

test('usage is found however a stream is cut', () => {
  for (const [end, space] of [['\n', ' '], ['\r\n', ' '], ['\n', '']]) {
    const stream = Buffer.from(CHUNKS.map((chunk) => `data:${space}${chunk}${end}${end}`).join(''))
    const cuts = [...Array.from({ length: stream.length + 1 }, (_, at) => [stream.subarray(0, at), stream.subarray(at)]), [...stream].map((byte) => Buffer.of(byte))]
    for (const pieces of cuts) {
      const reader = new UsageReader()
      for (const piece of pieces) reader.push(piece)
      assert.deepEqual([reader.usage, reader.events], [USAGE, 3])
    }
  }
})

test('usage is found in every shape', () => {
  for (const [text, usage] of [
    ['{"usage":{"prompt_tokens":12,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":8}}}', USAGE],
    ['{\n  "usage" : \n {"prompt_tokens": 12, "prompt_tokens_details": null}}', { promptTokens: 12 }],
    ['{"response":{"usage":{"input_tokens":12,"output_tokens":3,"input_tokens_details":{"cached_tokens":8}}}}', USAGE],
    ['{"message":{"usage":{"input_tokens":4,"cache_read_input_tokens":8}}}{"usage":{"output_tokens":3}}', USAGE],
    ['{"usage":{"prompt_tokens":1}}{"usage":{"prompt_tokens":12}}', { promptTokens: 12 }],
    ['{"usage":{"prompt_tokens":-1,"completion_tokens":"x"}}', {}],
    ['{"usage":null}', undefined],
    ['{"usage":[{"prompt_tokens":1}]}', undefined],
    ['{"usage":}}}', undefined],
    ['{"usage":{"prompt_tokens"', undefined],
    ['{"usage":{nonsense}}', undefined],
    ['nothing', undefined],
    ['', undefined],
  ]) {
    const reader = new UsageReader()
    reader.push(Buffer.from(text))
    assert.deepEqual(reader.usage, usage, text)
  }
})

test('an object without an end is not kept', () => {
  const reader = new UsageReader()
  reader.push(Buffer.from('{"usage":{"x":"'))
  const before = process.memoryUsage().arrayBuffers
  const piece = Buffer.alloc(65_536, 0x61)
  for (let piece_ = 0; piece_ < 160; piece_++) reader.push(piece)
  assert.ok(process.memoryUsage().arrayBuffers - before < 64 * 2 ** 20)
  reader.push(Buffer.from('"}, "usage":{"prompt_tokens":12}}'))
  assert.deepEqual(reader.usage, { promptTokens: 12 })
})

test('a booking ends once, and tells what the engine told', () => {
  const told = []
  const lease = { prefillDone: () => told.push('first'), outputTokens: (count) => told.push(count), release: (outcome) => told.push(outcome) }
  const run = (steps) => {
    told.length = 0
    const booking = new Booking(lease)
    steps(booking)
    booking.abandon()
    assert.equal(booking.ended, true)
    return [...told]
  }
  assert.deepEqual(run(() => {}), [{ ok: false }])
  assert.deepEqual(run((booking) => booking.withdraw()), [{ ok: false, dispatched: false }])
  assert.deepEqual(run((booking) => booking.complete()), [{ ok: true }])
  const answer = (status) => (booking) => {
    booking.started(status)
    booking.push(Buffer.from('data: {}\n\ndata: {"usage":{"prompt_tokens":12,"prompt_tokens_details":{"cached_tokens":0}}}\n\n'))
    booking.push(Buffer.alloc(0))
    booking.push(Buffer.from('data: [DONE]\n\n'))
    booking.complete()
    booking.push(Buffer.from('data: late'))
  }
  assert.deepEqual(run(answer(200)), ['first', 2, 3, { ok: true, cachedTokens: 0, promptTokens: 12 }])
  assert.equal(run(answer(400)).at(-1).ok, false)
})

test('an engine that failed rests, unless all do', () => {
  let now = 0
  const cooldown = new Cooldown({ seconds: 5, clock: () => now })
  assert.deepEqual(cooldown.allowed(['a', 'b']), ['a', 'b'])
  cooldown.failed('a')
  assert.deepEqual(cooldown.allowed(['a', 'b']), ['b'])
  assert.deepEqual(cooldown.allowed(['a']), ['a'])
  assert.deepEqual(cooldown.allowed([]), [])
  now = 5
  assert.deepEqual(cooldown.allowed(['a', 'b']), ['a', 'b'])
  cooldown.failed('a')
  cooldown.answered('a', 200)
  assert.deepEqual(cooldown.allowed(new Set(['a', 'b'])), ['a', 'b'])
  for (const [status, allowed] of [[429, 2], [500, 2], [502, 1], [503, 1], [504, 1], [200, 2]]) {
    cooldown.answered('a', status)
    assert.equal(cooldown.allowed(['a', 'b']).length, allowed, `${status}`)
  }
})

test('bodies are parsed, and refusals written', () => {
  assert.deepEqual(bodyOf(Buffer.from('{"prompt": "ü"}')), { prompt: 'ü' })
  for (const text of ['', '{', 'no']) assert.equal(bodyOf(Buffer.from(text)), undefined)
  assert.deepEqual(JSON.parse(errorBody(413, 'body_too_large', 'no')), { error: { message: 'no', type: 'invalid_request_error', code: 'body_too_large' } })
  assert.equal(JSON.parse(errorBody(503, 'no_worker', 'no')).error.type, 'server_error')
})

test('engines tokenize, in turn, and one that cannot is passed over', async (t) => {
  const asked = []
  const start = (answer) =>
    new Promise((resolve) => {
      const server = createServer(async (request, response) => {
        const pieces = await request.toArray()
        asked.push([request.url, JSON.parse(Buffer.concat(pieces))])
        answer(response)
      })
      t.after(() => (server.close(), server.closeAllConnections()))
      server.listen(0, '127.0.0.1', () => resolve(`http://127.0.0.1:${server.address().port}`))
    })
  const well = await start((response) => response.end('{"tokens": [5, 6]}'))
  const ill = await start((response) => (response.writeHead(500), response.end('oops')))
  const silent = await start(() => {})
  const body = { model: 'm', messages: [], stream: true, max_tokens: 1 }
  assert.deepEqual(await new EngineTokenizer([well]).tokens(body), Uint32Array.of(5, 6))
  assert.deepEqual(asked, [['/tokenize', { model: 'm', messages: [] }]])
  assert.deepEqual(await new EngineTokenizer([ill, well]).tokens(body), Uint32Array.of(5, 6))
  const warnings = []
  process.on('warning', ({ name, message }) => name === 'KvlaneWarning' && warnings.push(message))
  const without = new EngineTokenizer([ill, ill, ill, ill, well])
  assert.equal(await without.tokens(body), undefined)
  assert.equal(await without.tokens(body), undefined)
  await new Promise(setImmediate)
  assert.deepEqual(warnings, ['engines did not tokenize a request: it is matched as text, not with their events'])
  assert.deepEqual(await new EngineTokenizer([silent, well], { timeoutMs: 1_000 }).tokens(body), Uint32Array.of(5, 6))
  await assert.rejects(new EngineTokenizer([silent]).tokens(body, { signal: AbortSignal.timeout(20) }), { name: 'TimeoutError' })
  // What is tokens already asks nobody.
  assert.deepEqual(await new EngineTokenizer([]).tokens({ prompt: [1] }), Uint32Array.of(1))
  assert.equal(await new EngineTokenizer([well]).tokens(undefined), undefined)
})
