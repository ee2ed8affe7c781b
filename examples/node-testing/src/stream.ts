import { request, type ClientRequest, type IncomingMessage } from 'node:http'

/** An answer that is being read. */
export interface OpenAnswer {
  request: ClientRequest
  response: IncomingMessage
  text(): string
  /** Resolves at its end: true when it was whole. */
  ended: Promise<boolean>
}

/** Sends a request and returns when the first bytes of its answer are there. */
export async function openAnswer(url: string, body: unknown): Promise<OpenAnswer> {
  const sent = request(url, { method: 'POST', headers: { 'content-type': 'application/json' } })
  sent.end(JSON.stringify(body))
  const response = await new Promise<IncomingMessage>((resolve, reject) => sent.once('response', resolve).once('error', reject))
  sent.on('error', () => {})
  let text = ''
  response.setEncoding('utf8').on('data', (piece: string) => (text += piece))
  response.on('error', () => {})
  const ended = new Promise<boolean>((resolve) => response.once('close', () => resolve(response.complete)))
  await new Promise<void>((resolve) => response.once('data', () => resolve()).once('close', () => resolve()))
  return { request: sent, response, text: () => text, ended }
}
