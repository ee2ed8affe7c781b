// Bodies of every size and shape, and Envoys that are configured otherwise.

import assert from 'node:assert/strict'
import { createHash, randomBytes } from 'node:crypto'
import { createServer, request, type IncomingMessage, type RequestOptions } from 'node:http'
import type { AddressInfo } from 'node:net'
import test, { type TestContext } from 'node:test'

import { answerOf, play, startEnvoy, tokenWorkload, until, type Envoy } from 'kvlane-example-testing'

import { configuration, gateway, picker } from './setup.js'

test('more at once than Envoy takes by itself', async (t) => {
  const COUNT = 1_100
  const waiting: Array<() => void> = []
  const upstream = createServer((request, response) => {
    request.resume()
    waiting.push(() => response.end('{}'))
    if (waiting.length === COUNT) for (const answer of waiting) answer()
  })
  await new Promise<void>((resolve) => upstream.listen(0, '127.0.0.1', 2_048, resolve))
  t.after(() => new Promise((resolve) => upstream.close(resolve).closeAllConnections()))
  const server = await picker(t, [{ id: 'w1', endpoint: `127.0.0.1:${(upstream.address() as AddressInfo).port}` }])
  const envoy = await startEnvoy(t, await configuration(), { 'port_value: 9002': `port_value: ${server.port}` })
  const answers = await Promise.all(Array.from({ length: COUNT }, () => send(envoy, [Buffer.from('{}')], { agent: false })))
  assert.deepEqual([...new Set(answers.map(({ status }) => status))], [200])
  await until(() => server.picker.router.stats().activeLeases === 0)
})

/** An upstream that answers what it got. */
async function echo(t: TestContext, edit: (yaml: string, endpoint: string) => string = (yaml) => yaml) {
  const seen: IncomingMessage[] = []
  const upstream = createServer((request, response) => {
    seen.push(request)
    const trailers = () => Object.entries(request.trailers).map(([name, value]): [string, string] => [`${name}-echo`, String(value)])
    response.writeHead(200, { 'content-type': 'application/json', trailer: 'x-checksum-echo' })
    request.on('data', (piece: Buffer) => response.write(piece))
    request.on('end', () => response.addTrailers(trailers()) ?? response.end())
  })
  await new Promise<void>((resolve) => upstream.listen(0, '127.0.0.1', resolve))
  t.after(() => new Promise((resolve) => upstream.close(resolve).closeAllConnections()))
  const endpoint = `127.0.0.1:${(upstream.address() as AddressInfo).port}`
  const server = await picker(t, [{ id: 'echo', endpoint }], { maxBody: 10 * 2 ** 20 })
  const envoy = await startEnvoy(t, edit(await configuration(), endpoint), { 'port_value: 9002': `port_value: ${server.port}` })
  return { envoy, seen, endpoint, leases: () => server.picker.router.stats().activeLeases }
}

/** Sends pieces of a body, and reads the answer to its end. */
async function send(envoy: Envoy, pieces: Buffer[], options: RequestOptions = {}, trailers: Array<[string, string]> = []) {
  const sent = request(envoy.url, { method: 'POST', ...options })
  const answered = new Promise<IncomingMessage>((resolve, reject) => sent.once('response', resolve).once('error', reject))
  for (const piece of pieces) {
    sent.write(piece)
    if (pieces.length > 1) await new Promise((resolve) => setTimeout(resolve, 1))
  }
  if (trailers.length > 0) sent.addTrailers(trailers)
  sent.end()
  const response = await answered
  const body: Buffer[] = []
  for await (const piece of response) body.push(piece as Buffer)
  return { status: response.statusCode, headers: response.headers, trailers: response.trailers, body: Buffer.concat(body) }
}

const sum = (bytes: Buffer) => createHash('sha256').update(bytes).digest('hex')

test('bodies arrive as they were sent, there and back', async (t) => {
  const { envoy, leases } = await echo(t)
  for (const size of [0, 1, 62_000, 62_001, 2 ** 15 + 1, 2 ** 17 + 1, 2 ** 20, 8 * 2 ** 20]) {
    const body = randomBytes(size)
    const answer = await send(envoy, [body], { headers: { 'content-length': size } })
    assert.deepEqual([answer.status, answer.body.length, sum(answer.body)], [200, size, sum(body)])
    const chunked = await send(envoy, [body], { headers: { 'transfer-encoding': 'chunked' } })
    assert.deepEqual([chunked.status, chunked.body.length, sum(chunked.body)], [200, size, sum(body)])
  }
  await until(() => leases() === 0)
})

test('chunks of one byte, and trailers after them', async (t) => {
  const { envoy, leases } = await echo(t)
  const body = Buffer.from('{"prompt": [1, 2, 3]}')
  const bytes = [...body].map((byte) => Buffer.of(byte))
  const answer = await send(envoy, bytes, { headers: { te: 'trailers' } })
  assert.deepEqual([answer.status, answer.body.toString()], [200, body.toString()])
  // Trailers end the body in place of a last chunk.
  for (const pieces of [bytes, [body], [randomBytes(200_000)]]) {
    const trailed = await send(envoy, pieces, { headers: { trailer: 'x-checksum' } }, [['x-checksum', '1234']])
    assert.deepEqual([trailed.status, sum(trailed.body)], [200, sum(Buffer.concat(pieces))])
  }
  await until(() => leases() === 0)
})

test('a body over the limit is refused, with and without its length', async (t) => {
  const { envoy, seen, leases } = await echo(t)
  const body = randomBytes(10 * 2 ** 20 + 1)
  for (const headers of [{ 'content-length': body.length }, { 'transfer-encoding': 'chunked' }]) {
    const answer = await send(envoy, [body], { headers, agent: false }).catch((error: NodeJS.ErrnoException) => error)
    // Envoy may cut the connection of a client that goes on sending.
    if (answer instanceof Error) assert.match(String(answer.code), /EPIPE|ECONNRESET/)
    else assert.deepEqual([answer.status, JSON.parse(answer.body.toString()).error.code], [413, 'body_too_large'])
  }
  assert.equal(seen.length, 0)
  const most = body.subarray(1)
  assert.equal(sum((await send(envoy, [most])).body), sum(most))
  await until(() => leases() === 0)
})

test('a client cannot choose the host', async (t) => {
  const { envoy, seen, endpoint } = await echo(t)
  const header = 'x-gateway-destination-endpoint'
  for (const forged of ['10.255.255.1:80', [endpoint, '10.255.255.1:80'], '']) {
    const answer = await send(envoy, [Buffer.from('{}')], { headers: { [header]: forged, [`${header}-served`]: '10.255.255.1:80' } })
    assert.equal(answer.status, 200)
  }
  assert.equal(seen.length, 3)
  for (const { headers } of seen) {
    assert.equal(headers[header], endpoint)
    assert.equal(headers[`${header}-served`], undefined)
  }
})

test('buffered bodies', async (t) => {
  const edit = (yaml: string) => yaml.replace('request_body_mode: FULL_DUPLEX_STREAMED', 'request_body_mode: BUFFERED').replace('response_body_mode: FULL_DUPLEX_STREAMED', 'response_body_mode: STREAMED')
  const { envoy, leases } = await echo(t, edit)
  for (const size of [0, 1, 500_000]) {
    const body = randomBytes(size)
    const answer = await send(envoy, [body], { headers: { 'content-length': size } })
    assert.deepEqual([answer.status, sum(answer.body)], [200, sum(body)])
  }
  await until(() => leases() === 0)
})

test('streamed bodies, and none at all', async (t) => {
  const edits = [
    (yaml: string) => yaml.replaceAll('_body_mode: FULL_DUPLEX_STREAMED', '_body_mode: STREAMED'),
    (yaml: string) => yaml.replaceAll('_body_mode: FULL_DUPLEX_STREAMED', '_body_mode: NONE').replaceAll('trailer_mode: SEND', 'trailer_mode: SKIP'),
  ]
  for (const edit of edits) {
    const { envoy, leases } = await echo(t, edit)
    const body = randomBytes(300_000)
    const answer = await send(envoy, [body])
    assert.deepEqual([answer.status, sum(answer.body)], [200, sum(body)])
    await until(() => leases() === 0)
  }
})

test('buffered bodies find their prefix', async (t) => {
  const edit = (yaml: string) => yaml.replace('request_body_mode: FULL_DUPLEX_STREAMED', 'request_body_mode: BUFFERED')
  const { envoy } = await gateway(t, { edit })
  const { hits } = await play(tokenWorkload(2), '/v1/completions', () => envoy.url)
  assert.ok(hits >= 58, `${hits} of 60`)
})

test('the endpoints that the gateway allows', async (t) => {
  const { envoy, seen, endpoint } = await echo(t, (yaml) => withSubset(yaml, 'ENDPOINT'))
  assert.equal((await send(envoy, [Buffer.from('{}')])).status, 503)
  assert.equal(seen.length, 0)
  const allowing = await echo(t, (yaml, known) => withSubset(yaml, known))
  assert.equal((await send(allowing.envoy, [Buffer.from('{}')])).status, 200)
  assert.notEqual(allowing.endpoint, endpoint)
})

/** Envoy tells the picker which endpoints it allows. */
function withSubset(yaml: string, endpoint: string): string {
  const filter = `          - name: envoy.filters.http.set_metadata
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.set_metadata.v3.Config
              metadata:
              - metadata_namespace: envoy.lb.subset_hint
                value: { x-gateway-destination-endpoint-subset: ["10.9.9.9:1", "${endpoint}"] }
`
  return yaml.replace('          - name: envoy.filters.http.ext_proc\n', `${filter}$&`)
}

test('known hosts: the next choice answers when the first is gone, and bears the load', async (t) => {
  const { envoy, engines, server, leases } = await gateway(t, { bootstrap: 'envoy-override-host.yaml', fallbacks: 1, speed: 1 })
  const { hits } = await play(tokenWorkload(3).slice(0, 24), '/v1/completions', () => envoy.url)
  assert.ok(hits > 0)
  const tokens = Array.from({ length: 160 }, (_, index) => index + 7)
  const body = { model: 'sim', prompt: tokens, max_tokens: 2, stream: false }
  await answerOf(`${envoy.url}/v1/completions`, body)
  const [warm] = server.picker.router.rank(tokens)
  assert.ok(warm)
  await engines.find(({ id }) => id === warm.worker)?.stop('SIGKILL')
  const before = server.picker.router.stats().decisions
  const { status } = await answerOf(`${envoy.url}/v1/completions`, body)
  assert.equal(status, 200)
  assert.equal(server.picker.router.stats().decisions, before + 2) // chosen, then booked where it was served
  await until(() => leases() === 0)
  // The one that is gone rests, so the next request goes to the other at once.
  assert.equal((await answerOf(`${envoy.url}/v1/completions`, body)).status, 200)
  assert.equal(server.picker.router.stats().decisions, before + 3)
})
