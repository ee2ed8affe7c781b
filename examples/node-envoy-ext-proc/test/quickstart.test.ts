import assert from 'node:assert/strict'
import test from 'node:test'

import { answerOf, quickstart, startEnvoy } from 'kvlane-example-testing'

import { configuration } from './setup.js'

test('what the README shows works', async (t) => {
  const picker = await quickstart(t, new URL('../../', import.meta.url), new URL('../src/main.js', import.meta.url))
  const envoy = await startEnvoy(t, await configuration(), { 'port_value: 9002': `port_value: ${picker.port}` })
  const chat = { model: 'sim', messages: [{ role: 'user', content: 'hello' }], max_tokens: 2 }
  assert.equal((await answerOf(`${envoy.url}/v1/chat/completions`, chat)).status, 200)
  assert.equal(await picker.stop(), 0) // ends by itself
  assert.match(picker.output(), /^picking for Envoy on port \d+ among 2 workers\n$/)
})
