// However a request ends, its booking ends with it; and what happens when nobody is there.

import assert from 'node:assert/strict'
import test from 'node:test'

import { answerOf, startEngine, startEnvoy, testAudit, testEndings, until } from 'kvlane-example-testing'

import { configuration, gateway, picker, start } from './setup.js'

const CHAT = { model: 'sim', messages: [{ role: 'user', content: 'one two three' }], max_tokens: 4 }

testEndings(start)

testAudit(async (t, url) => {
  const server = await picker(t, [{ id: 'w1', endpoint: new URL(url).host }])
  const envoy = await startEnvoy(t, await configuration(), { 'port_value: 9002': `port_value: ${server.port}` })
  return { url: envoy.url, router: server.picker.router }
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
