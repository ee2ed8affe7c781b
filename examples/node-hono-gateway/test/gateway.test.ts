// What the gateway does when engines fail, refuse, or answer in odd ways.

import assert from 'node:assert/strict'
import { createServer, type IncomingMessage, type ServerResponse } from 'node:http'
import type { AddressInfo } from 'node:net'
import test, { type TestContext } from 'node:test'

import { answerOf, openAnswer, testAudit, testEndings, until } from 'kvlane-example-testing'

import { gateway, start } from './setup.js'

testEndings(start)

testAudit(async (t, url) => {
  const server = await gateway(t, { workers: [{ id: 'w1', url }] })
  return { url: `http://127.0.0.1:${server.port}`, router: server.gateway.router }
})

const CHAT = { model: 'sim', messages: [{ role: 'user', content: 'one two three' }], max_tokens: 4 }

type Answer = (request: IncomingMessage, response: ServerResponse) => void

/** A gateway before workers that answer as they are told; `null` is one that is not there. */
async function before(t: TestContext, answers: Array<Answer | null>, options: { attempts?: number; maxBody?: number; debugHeaders?: boolean } = {}) {
  let leases = () => 0
  t.after(() => until(() => leases() === 0)) // before the gateway is stopped
  const asked = answers.map(() => 0)
  const urls = await Promise.all(
    answers.map(async (answer, index) => {
      const server = createServer((request, response) => {
        asked[index]!++
        answer?.(request, response)
      })
      await new Promise<void>((resolve) => server.listen(0, '127.0.0.1', resolve))
      const { port } = server.address() as AddressInfo
      if (answer) t.after(() => new Promise((resolve) => server.close(resolve).closeAllConnections()))
      else await new Promise((resolve) => server.close(resolve))
      return `http://127.0.0.1:${port}`
    }),
  )
  const workers = urls.map((url, index) => ({ id: `w${index + 1}`, url }))
  const server = await gateway(t, { workers, ...options })
  const { router } = server.gateway
  leases = () => router.stats().activeLeases
  return { url: `http://127.0.0.1:${server.port}`, asked, router, leases }
}

const answer = (status: number, body = '{}', headers: Record<string, string> = { 'content-type': 'application/json' }): Answer => (_, response) => {
  response.writeHead(status, headers)
  response.end(body)
}

test('an engine that is not there is tried once, then rests', async (t) => {
  const { url, asked, router, leases } = await before(t, [null, answer(200)])
  // Whoever holds the prompt is asked first.
  for (let sent = 0; sent < 4; sent++) assert.equal((await answerOf(`${url}/v1/chat/completions`, CHAT)).status, 200)
  assert.deepEqual(asked, [0, 4])
  assert.ok(router.stats().decisions <= 5)
  assert.equal(leases(), 0)
})

test('nobody is there', async (t) => {
  const { url, router } = await before(t, [null, null])
  const { status, text, headers } = await answerOf(`${url}/v1/chat/completions`, CHAT)
  assert.equal(status, 502)
  assert.equal(headers.get('content-type'), 'application/json')
  assert.match(JSON.parse(text).error.message, /ECONNREFUSED/)
  router.drainWorker('w1')
  router.drainWorker('w2')
  const drained = await answerOf(`${url}/v1/chat/completions`, CHAT)
  assert.deepEqual([drained.status, JSON.parse(drained.text).error.code], [503, 'no_worker'])
  assert.equal((await fetch(`${url}/other`)).status, 404)
})

test('a refusal that another engine may take back is offered on', async (t) => {
  for (const status of [429, 500, 502, 503, 504]) {
    const { url, asked } = await before(t, [answer(status, 'busy'), answer(status, 'busy'), answer(200)])
    const { status: seen, text } = await answerOf(`${url}/v1/chat/completions`, CHAT)
    // Two attempts: either the third was among them, or the last refusal is the answer.
    assert.equal(asked.reduce((sum, count) => sum + count), asked[2] && asked[0]! + asked[1]! === 0 ? 1 : 2)
    assert.deepEqual([seen, text], asked[2] ? [200, '{}'] : [status, 'busy'])
  }
})

test('a refusal of the request itself is passed on as it is', async (t) => {
  const { url, asked } = await before(t, [answer(400, '{"error": "no"}', { 'x-reason': 'because' }), answer(400, '{"error": "no"}', { 'x-reason': 'because' })])
  const { status, text, headers } = await answerOf(`${url}/v1/chat/completions`, CHAT)
  assert.deepEqual([status, text, headers.get('x-reason')], [400, '{"error": "no"}', 'because'])
  assert.equal(asked[0]! + asked[1]!, 1)
})

test('an engine that hangs up before its answer begins is one that failed', async (t) => {
  const hangUp: Answer = (request) => request.socket.destroy()
  const noBody: Answer = (_, response) => {
    response.writeHead(200, { 'content-type': 'text/event-stream' })
    response.flushHeaders()
    setTimeout(() => response.destroy(), 10)
  }
  for (const failing of [hangUp, noBody]) {
    const { url, router } = await before(t, [failing, answer(200)])
    router.record('w1', { messages: CHAT.messages }, { salt: JSON.stringify(['sim', '']) })
    assert.equal((await answerOf(`${url}/v1/chat/completions`, CHAT)).status, 200)
  }
})

test('a stream that breaks ends with an error event, a whole answer that breaks with the connection', async (t) => {
  const piece = 'data: {"choices": []}\n\n'
  const breaking = (type: string): Answer => (_, response) => {
    response.writeHead(200, { 'content-type': type })
    response.write(piece)
    setTimeout(() => response.destroy(), 20)
  }
  const stream = await before(t, [breaking('text/event-stream')])
  const events = await answerOf(`${stream.url}/v1/chat/completions`, CHAT)
  assert.ok(events.text.startsWith(piece))
  assert.match(events.text, /data: \{"error":\{.*"code":"upstream_failed"\}\}\n\n$/)
  const whole = await before(t, [breaking('application/json')])
  const open = await openAnswer(`${whole.url}/v1/chat/completions`, CHAT)
  assert.equal(await open.ended, false)
  await until(() => whole.leases() === 0)
})

test('what is passed on, and what is not', async (t) => {
  const seen: IncomingMessage[] = []
  const { url } = await before(t, [(request, response) => {
    seen.push(request)
    response.writeHead(200, { 'content-type': 'text/plain', 'keep-alive': 'timeout=1', 'x-other': '1' })
    request.pipe(response)
  }], { debugHeaders: true })
  const body = '{"prompt": "a text", "model": "sim"}'
  const { text, headers } = await answerOf(`${url}/v1/completions?a=b`, body, { authorization: 'Bearer key', 'accept-encoding': 'gzip', te: 'trailers' })
  assert.equal(text, body)
  assert.deepEqual([headers.get('x-other'), headers.get('x-kvlane-worker'), headers.get('x-kvlane-overlap-blocks')], ['1', 'w1', '0'])
  assert.equal(seen[0]?.url, '/v1/completions?a=b')
  assert.equal(seen[0]?.headers.authorization, 'Bearer key')
  assert.equal(seen[0]?.headers['accept-encoding'], 'identity')
  assert.equal(seen[0]?.headers.te, undefined)
})

test('bodies of any size up to the limit', async (t) => {
  const { url, asked } = await before(t, [(request, response) => request.pipe(response)], { maxBody: 2 ** 20 })
  for (const size of [1, 65_537, 2 ** 20]) assert.equal((await answerOf(`${url}/v1/completions`, 'x'.repeat(size))).text.length, size)
  const { status, text } = await answerOf(`${url}/v1/completions`, 'x'.repeat(2 ** 20 + 1))
  assert.deepEqual([status, JSON.parse(text).error.code], [413, 'body_too_large'])
  const chunked = await fetch(`${url}/v1/completions`, {
    method: 'POST',
    duplex: 'half',
    body: new ReadableStream({
      start(controller) {
        for (let piece = 0; piece < 33; piece++) controller.enqueue(new Uint8Array(32_768))
        controller.close()
      },
    }),
  } as RequestInit)
  assert.equal(chunked.status, 413)
  assert.equal(asked[0], 3)
})

test('the router chooses the rank, not the client', async (t) => {
  const ranks: unknown[] = []
  const engine = createServer((request, response) => {
    ranks.push(request.headers['x-data-parallel-rank'])
    answer(200)(request, response)
  })
  await new Promise<void>((resolve) => engine.listen(0, '127.0.0.1', resolve))
  t.after(() => engine.close().closeAllConnections())
  const url = `http://127.0.0.1:${(engine.address() as AddressInfo).port}`
  for (const dpRanks of [1, 2]) {
    const { port } = await gateway(t, { workers: [{ id: 'w1', url, dpRanks }] })
    const headers = { 'content-type': 'application/json', 'x-data-parallel-rank': '7' }
    const body = JSON.stringify(CHAT)
    assert.equal((await fetch(`http://127.0.0.1:${port}/v1/chat/completions`, { method: 'POST', headers, body })).status, 200)
  }
  assert.equal(ranks[0], undefined)
  assert.match(String(ranks[1]), /^[01]$/)
})

test('a worker without a URL is named', async (t) => {
  for (const url of ['', '10.0.0.1:8000', 'localhost:8000']) {
    await assert.rejects(gateway(t, { workers: [{ id: 'w1', url }] }), /worker w1: the URL .* is not http/)
  }
})
