import { Agent, fetch } from 'undici'

/** An answer whose first bytes are there. */
export interface Answer {
  status: number
  headers: Headers
  /** The rest; nothing when it has no body. */
  body: BodyReader | undefined
  first: Piece | undefined
  eventStream: boolean
}

type BodyReader = ReadableStreamDefaultReader<Uint8Array>
type Piece = Awaited<ReturnType<BodyReader['read']>>

/** The engine, or the way to it, failed before an answer began. */
export class UpstreamError extends Error {
  /** It may have got the request. */
  readonly sent: boolean

  constructor(cause: unknown) {
    const reason = (cause instanceof Error && cause.cause) || cause
    const code = String((reason as { code?: unknown } | undefined)?.code ?? '')
    super(code || String(reason), { cause })
    this.sent = !NOT_SENT.has(code)
  }
}

/** What is asked of an engine. */
interface Request {
  method: string
  headers: Headers
  body: Uint8Array<ArrayBuffer> | undefined
  signal: AbortSignal
  /** For an engine that has several. */
  dpRank: number | undefined
}

/** Sends requests to engines over kept connections. */
export class Upstream {
  // An answer may take as long as it takes; only connecting may not.
  #agent = new Agent({ headersTimeout: 0, bodyTimeout: 0, connect: { timeout: 2_000 } })

  /** Sends a request and waits for the first bytes of the answer: until then another engine may be asked. */
  async send(url: string, { method, headers, body, signal, dpRank }: Request): Promise<Answer> {
    try {
      const response = await fetch(url, {
        method,
        headers: [...passedOn(headers, dpRank)],
        body: body ?? null,
        signal,
        dispatcher: this.#agent,
        redirect: 'manual',
      })
      const reader = (response.body as ReadableStream<Uint8Array> | null)?.getReader()
      return {
        status: response.status,
        headers: passedBack(response.headers),
        body: reader,
        first: await reader?.read(),
        eventStream: response.headers.get('content-type')?.startsWith('text/event-stream') ?? false,
      }
    } catch (error) {
      throw signal.aborted ? error : new UpstreamError(error)
    }
  }

  async close(): Promise<void> {
    await this.#agent.destroy()
  }
}

/** Headers of one connection, which are not passed on. */
const OF_A_CONNECTION = ['connection', 'keep-alive', 'proxy-authenticate', 'proxy-authorization', 'te', 'trailer', 'transfer-encoding', 'upgrade']

/** Which of its data-parallel ranks an engine is to use. */
const DP_RANK = 'x-data-parallel-rank'

/** Codes of failures before a byte of the request was sent. */
const NOT_SENT = new Set(['ECONNREFUSED', 'EHOSTUNREACH', 'ENETUNREACH', 'ENOTFOUND', 'EAI_AGAIN', 'UND_ERR_CONNECT_TIMEOUT'])

function passedOn(headers: Headers, dpRank: number | undefined): Headers {
  // The rank is the router's to choose, not the client's.
  const passed = without(headers, ...OF_A_CONNECTION, 'host', 'content-length', 'expect', DP_RANK)
  if (dpRank !== undefined) passed.set(DP_RANK, String(dpRank))
  // The usage is read on the way.
  passed.set('accept-encoding', 'identity')
  return passed
}

function passedBack(headers: Iterable<[string, string]> & { get(name: string): string | null }): Headers {
  const encoded = headers.get('content-encoding') !== null
  return without(headers, ...OF_A_CONNECTION, ...(encoded ? ['content-encoding', 'content-length'] : []))
}

function without(headers: Iterable<[string, string]>, ...names: string[]): Headers {
  const kept = new Headers([...headers])
  for (const name of [...names, ...(kept.get('connection') ?? '').split(',').map((name) => name.trim())]) if (name) kept.delete(name)
  return kept
}
