// However a request ends, its booking ends with it.

import assert from 'node:assert/strict'
import { request } from 'node:http'
import { connect } from 'node:net'
import test from 'node:test'

import { answerOf, openAnswer, startEngine, until } from 'kvlane-example-testing'

import { gateway } from './setup.js'

const CHAT = { model: 'sim', messages: [{ role: 'user', content: 'one two three' }], max_tokens: 4 }
/** Ten seconds of answer. */
const LONG = { ...CHAT, stream: true, max_tokens: 8_000 }

test('an answer that was read to its end', async (t) => {
  const { envoy, leases, server } = await gateway(t)
  for (const stream of [false, true]) {
    const { status, text } = await answerOf(`${envoy.url}/v1/chat/completions`, { ...CHAT, stream })
    assert.equal(status, 200)
    assert.match(text, stream ? /\n\ndata: \[DONE\]\n\n$/ : /"finish_reason":"length"/)
    await until(() => leases() === 0)
  }
  assert.equal(server.picker.router.stats().decisions, 2)
})

test('a request without a body, and one whose body nobody understands', async (t) => {
  const { envoy, leases } = await gateway(t)
  const models = await fetch(`${envoy.url}/v1/models`)
  assert.equal(models.status, 200)
  assert.match(await models.text(), /"id":"sim"/)
  for (const body of ['', 'no JSON', '[1]', '{"messages": 7}', { ...CHAT, messages: [{ role: 7 }] }, { model: 'sim', prompt: [1, -5], max_tokens: 1 }]) {
    const { status, text } = await answerOf(`${envoy.url}/v1/chat/completions`, body)
    assert.equal(status, 400, text)
    assert.match(text, /"error":/) // the engine's own words
  }
  await until(() => leases() === 0)
})

test('a request that the engine refuses', async (t) => {
  const { envoy, leases } = await gateway(t)
  const { status, text } = await answerOf(`${envoy.url}/v1/chat/completions`, { ...CHAT, model: 'other' })
  assert.equal(status, 404)
  assert.match(text, /The model `other` does not exist/)
  await until(() => leases() === 0)
})

test('an engine that is not there any more is tried once, then rests', async (t) => {
  const { envoy, leases, engines, server } = await gateway(t)
  await engines[0]?.stop('SIGKILL')
  const statuses: number[] = []
  for (let sent = 0; sent < 6; sent++) statuses.push((await answerOf(`${envoy.url}/v1/chat/completions`, { ...CHAT, messages: [{ role: 'user', content: `${sent}` }] })).status)
  // It is tried once, and rests.
  assert.ok(statuses.filter((status) => status === 503).length <= 1, statuses.join())
  assert.ok(statuses.filter((status) => status === 200).length >= 5, statuses.join())
  await until(() => leases() === 0)
  assert.equal(server.picker.router.workers().every(({ activeBlocks }) => activeBlocks === 0), true)
})

test('an engine that dies in the middle of its answer', async (t) => {
  const { envoy, leases, engines, server } = await gateway(t, { speed: 1 })
  const answer = await openAnswer(`${envoy.url}/v1/chat/completions`, LONG)
  assert.equal(leases(), 1)
  const [busy] = server.picker.router.workers().filter(({ activeRequests }) => activeRequests > 0)
  await engines.find(({ id }) => id === busy?.id)?.stop('SIGKILL')
  assert.equal(await answer.ended, false) // the client sees that it is not whole
  assert.doesNotMatch(answer.text(), /\[DONE\]/)
  await until(() => leases() === 0)
})

test('a client that leaves in the middle of its answer', async (t) => {
  const { envoy, leases, engines } = await gateway(t, { speed: 1 })
  const answer = await openAnswer(`${envoy.url}/v1/chat/completions`, LONG)
  assert.equal(leases(), 1)
  answer.request.destroy()
  await until(() => leases() === 0)
  await until(async () => {
    const running = await Promise.all(engines.map((engine) => engine.gauge('vllm:num_requests_running')))
    return running.every((count) => count === 0)
  })
})

test('a client that leaves before its answer begins', async (t) => {
  const { envoy, leases } = await gateway(t, { speed: 0.01 })
  const sent = request(`${envoy.url}/v1/chat/completions`, { method: 'POST' }).on('error', () => {})
  sent.end(JSON.stringify(LONG))
  await until(() => leases() === 1)
  sent.destroy()
  await until(() => leases() === 0)
})

test('a client that leaves while it sends', async (t) => {
  const { envoy, leases, server } = await gateway(t)
  const sent = connect(Number(new URL(envoy.url).port), '127.0.0.1')
  sent.write('POST /v1/chat/completions HTTP/1.1\r\nhost: kvlane\r\ncontent-length: 1000\r\n\r\n{"model": "sim"')
  await until(async () => (await envoy.stat('http.gateway.ext_proc.stream_msgs_sent')) >= 2)
  sent.destroy()
  await until(async () => (await envoy.stat('http.gateway.downstream_rq_active')) === 0)
  assert.equal(leases(), 0)
  assert.equal(server.picker.router.stats().decisions, 0)
})

test('many at once, half of which leave', async (t) => {
  const { envoy, leases, server } = await gateway(t, { speed: 1 })
  const answers = await Promise.all(Array.from({ length: 32 }, () => openAnswer(`${envoy.url}/v1/chat/completions`, { ...LONG, max_tokens: 100 })))
  const busy = server.picker.router.workers().map(({ activeRequests }) => activeRequests)
  assert.ok(Math.min(...busy) > 0, busy.join())
  answers.forEach((answer, index) => index % 2 && answer.request.destroy())
  const ends = await Promise.all(answers.map((answer) => answer.ended))
  assert.deepEqual(ends, answers.map((_, index) => index % 2 === 0))
  await until(() => leases() === 0)
})

test('nobody is there', async (t) => {
  const { envoy, leases, server } = await gateway(t)
  for (const id of ['w1', 'w2']) server.picker.router.drainWorker(id)
  const { status, text, headers } = await answerOf(`${envoy.url}/v1/chat/completions`, CHAT)
  assert.equal(status, 503)
  assert.equal(headers.get('content-type'), 'application/json')
  assert.deepEqual(JSON.parse(text).error.code, 'no_worker')
  assert.equal(leases(), 0)
  // An endpoint picker that stopped is an error as well: no request goes anywhere by chance.
  await server.stop()
  assert.equal((await answerOf(`${envoy.url}/v1/chat/completions`, CHAT)).status, 500)
})

test('the endpoint picker is stopped while an answer is on its way', async (t) => {
  const { envoy, server } = await gateway(t, { speed: 1 })
  const answer = await openAnswer(`${envoy.url}/v1/chat/completions`, { ...LONG, max_tokens: 100 })
  const stopped = server.stop(10_000)
  assert.equal(await answer.ended, true)
  assert.match(answer.text(), /\[DONE\]/)
  await stopped
})

test('an engine that was started again', async (t) => {
  const { envoy, engines, leases } = await gateway(t)
  const [first] = engines
  assert.ok(first)
  await first.stop('SIGKILL')
  const again = await startEngine(t, 'w1', { listen: first.endpoint })
  assert.equal(again.endpoint, first.endpoint)
  const { status } = await answerOf(`${envoy.url}/v1/chat/completions`, CHAT)
  assert.equal(status, 200)
  await until(() => leases() === 0)
})
