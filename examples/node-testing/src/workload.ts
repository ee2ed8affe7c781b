/** A request body. */
export type Body = Record<string, unknown> & { stream: boolean }

/** How often the workload found its prefix in a cache. */
export interface Play {
  repeats: number
  hits: number
}

interface Send {
  body: Body
  /** The prefix was sent before. */
  repeat: boolean
}

const PREFIXES = 12
const SENDS = 6
const PROMPT_TOKENS = 1_500
const FRESH_TOKENS = 24
/** Tokens in the complete blocks of what is shared: 92 blocks of 16, of 1,476 tokens. */
const SHARED_BLOCK_TOKENS = 1_472

/** The shared-prefix workload as completions of token ids. */
export function tokenWorkload(seed: number): Send[] {
  return workload(seed).map(({ tokens, repeat }) => ({ repeat, body: { ...BODY, prompt: tokens } }))
}

/** The same as chats, whose words are those tokens for a simulated engine. */
export function chatWorkload(seed: number): Send[] {
  return workload(seed).map(({ tokens, repeat }) => {
    const content = tokens.map((token) => `w${token}`).join(' ')
    return { repeat, body: { ...BODY, messages: [{ role: 'user', content }] } }
  })
}

/** Sends one request after the other and counts the repeats whose shared blocks were all cached. */
export async function play(sends: Send[], path: string, urlOf: (index: number) => string): Promise<Play> {
  const played = { repeats: 0, hits: 0 }
  for (const [index, { body, repeat }] of sends.entries()) {
    const { status, text, cachedTokens } = await answerOf(`${urlOf(index)}${path}`, body)
    if (status !== 200 || cachedTokens === undefined) throw new Error(`request ${index} was answered ${status}: ${text}`)
    if (!repeat) continue
    played.repeats++
    if (cachedTokens >= SHARED_BLOCK_TOKENS) played.hits++
  }
  return played
}

/** Sends one request and reads the answer to its end. */
export async function answerOf(url: string, body: unknown, headers: Record<string, string> = {}) {
  const response = await fetch(url, {
    method: 'POST',
    headers: { 'content-type': 'application/json', ...headers },
    body: typeof body === 'string' ? body : JSON.stringify(body),
  })
  const text = await response.text()
  const cached = text.match(/"cached_tokens": ?(\d+)/)?.[1]
  const cachedTokens = cached === undefined ? undefined : Number(cached)
  return { status: response.status, headers: response.headers, text, cachedTokens }
}

const BODY = { model: 'sim', max_tokens: 2, stream: true, stream_options: { include_usage: true } }

function workload(seed: number) {
  const random = generator(seed)
  const words = (count: number) => Array.from({ length: count }, () => 1_000 + Math.floor(random() * 99_000))
  const prefixes = Array.from({ length: PREFIXES }, () => words(PROMPT_TOKENS - FRESH_TOKENS))
  const order = Array.from({ length: PREFIXES * SENDS }, (_, send) => ({ prefix: send % PREFIXES, key: random() }))
  order.sort((one, other) => one.key - other.key)
  const seen = new Set<number>()
  return order.map(({ prefix }) => {
    const repeat = seen.has(prefix)
    seen.add(prefix)
    return { tokens: [...(prefixes[prefix] ?? []), ...words(FRESH_TOKENS)], repeat }
  })
}

/** Numbers from 0 to 1, the same for the same seed (mulberry32). */
function generator(seed: number): () => number {
  let state = seed
  return () => {
    state = (state + 0x6d2b79f5) | 0
    let mixed = Math.imul(state ^ (state >>> 15), state | 1)
    mixed ^= mixed + Math.imul(mixed ^ (mixed >>> 7), mixed | 61)
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 4_294_967_296
  }
}
