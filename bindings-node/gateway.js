'use strict'

// What an OpenAI-compatible gateway needs beside the router: the prompt in a request's body, the usage in an answer, and a
// booking that ends in every ending. See gateway.d.ts.

const { performance } = require('node:perf_hooks')

const { compact } = require('./lib/prompt.js')

const NO_TOKENS = new Uint32Array(0)

/** What a tokenizer of an engine understands of a request. */
const TOKENIZE_KEYS = [
  'model',
  'messages',
  'tools',
  'prompt',
  'add_generation_prompt',
  'continue_final_message',
  'add_special_tokens',
  'chat_template',
  'chat_template_kwargs',
]

function promptOf(body, tokens) {
  if (body === null || typeof body !== 'object') return { prompt: NO_TOKENS, options: {} }
  const prompt = tokens ?? chatOf(body) ?? plain(body.prompt ?? body.input_ids ?? body.token_ids ?? body.input)
  if (prompt === undefined) return { prompt: NO_TOKENS, options: {} }
  const cacheSalt = typeof body.cache_salt === 'string' ? body.cache_salt : ''
  // Tokens are salted as the engine salts them. Texts are compared with own placements alone, which know no model.
  const salt = prompt instanceof Uint32Array ? cacheSalt : JSON.stringify([body.model ?? null, cacheSalt])
  return { prompt, options: salt ? { salt } : {} }
}

function selectFor(router, body, { tokens, ...options } = {}) {
  const read = promptOf(body, tokens)
  try {
    return router.select(read.prompt, { ...read.options, ...options })
  } catch (error) {
    // Messages of a shape that nobody knows: the engine decides what they are. What else is wrong is wrong again.
    if (error.code !== 'invalid_request' || read.prompt === NO_TOKENS) throw error
    return router.select(NO_TOKENS, options)
  }
}

/** A chat, the input of responses, or the messages of the messages API. */
function chatOf({ messages, input, system, instructions, tools }) {
  const turns = messages ?? (typeof input === 'string' || isListOf(input, 'object') ? input : undefined)
  if (turns === undefined || (typeof turns !== 'string' && !Array.isArray(turns))) return undefined
  const leading = system ?? instructions
  const first = leading ? [{ role: 'system', content: leading }] : []
  const rest = typeof turns === 'string' ? [{ role: 'user', content: turns }] : turns
  return { messages: [...first, ...rest], tools: Array.isArray(tools) ? tools : null }
}

/** A text, token ids, or the first of several: they share one answer, so one worker. */
function plain(value) {
  if (typeof value === 'string') return value
  if (!Array.isArray(value)) return undefined
  if (typeof value[0] !== 'number') return value.length > 0 ? plain(value[0]) : undefined
  const ids = compact(value)
  return ids instanceof Uint32Array ? ids : undefined
}

function isListOf(value, type) {
  return Array.isArray(value) && typeof value[0] === type && !Array.isArray(value[0])
}

const NOT_TOKENIZED = 'engines did not tokenize a request: it is matched as text, not with their events'

class EngineTokenizer {
  #urls
  #timeoutMs
  #next = 0
  #warned = false

  constructor(urls, { timeoutMs = 2_000 } = {}) {
    this.#urls = [...urls]
    this.#timeoutMs = timeoutMs
  }

  async tokens(body, { signal } = {}) {
    if (body === null || typeof body !== 'object') return undefined
    const { prompt } = promptOf(body)
    if (prompt instanceof Uint32Array) return prompt
    const asked = JSON.stringify(Object.fromEntries(TOKENIZE_KEYS.filter((key) => key in body).map((key) => [key, body[key]])))
    // One more engine is asked when the first does not answer.
    for (let attempt = 0; attempt < Math.min(2, this.#urls.length); attempt++) {
      const url = this.#urls[this.#next++ % this.#urls.length]
      const answer = await this.#ask(url, asked, signal)
      if (answer) return answer
      signal?.throwIfAborted()
    }
    // Once: with texts the engines' events are of no use, and nothing else would say why.
    if (!this.#warned) process.emitWarning(NOT_TOKENIZED, { type: 'KvlaneWarning' })
    this.#warned = true
    return undefined
  }

  async #ask(url, body, signal) {
    const timeout = AbortSignal.timeout(this.#timeoutMs)
    try {
      const response = await fetch(new URL('/tokenize', url), {
        method: 'POST',
        headers: { 'content-type': 'application/json' },
        body,
        signal: signal ? AbortSignal.any([signal, timeout]) : timeout,
      })
      const tokens = plain((await response.json())?.tokens)
      return tokens instanceof Uint32Array ? tokens : undefined
    } catch {
      return undefined // not there, too slow, or no JSON
    }
  }
}

const WORD = Buffer.from('"usage"')
const EVENT = Buffer.from('\ndata:')
/** Longest usage object that is looked at; those of engines are below 500 bytes. */
const MAX_OBJECT = 4_096

class UsageReader {
  /** The end of what came before, in which a word may be cut; while an object is read, what came of it. */
  #kept = Buffer.alloc(0)
  #reading = false
  /** The same for the beginning of an event. */
  #seam = Buffer.from('\n')

  constructor() {
    this.usage = undefined
    this.events = 0
  }

  push(bytes) {
    const piece = Buffer.from(bytes.buffer, bytes.byteOffset, bytes.byteLength)
    this.#count(Buffer.concat([this.#seam, piece]))
    this.#scan(Buffer.concat([this.#kept, piece]))
  }

  #count(piece) {
    for (let at = piece.indexOf(EVENT); at >= 0; at = piece.indexOf(EVENT, at + EVENT.length)) this.events++
    this.#seam = end(piece, EVENT.length - 1)
  }

  #scan(whole) {
    let piece = whole
    for (;;) {
      if (!this.#reading) {
        const at = piece.indexOf(WORD)
        if (at < 0) break
        piece = piece.subarray(at + WORD.length)
        this.#reading = true
      }
      const length = objectLength(piece)
      if (length === undefined && piece.length <= MAX_OBJECT) break
      this.#reading = false
      if (length) this.#take(piece.subarray(piece.indexOf('{'), length))
      piece = piece.subarray(length ?? 0)
    }
    this.#kept = end(piece, this.#reading ? piece.length : WORD.length - 1)
  }

  #take(json) {
    let object
    try {
      object = JSON.parse(json)
    } catch {
      return
    }
    const count = (value) => (Number.isInteger(value) && value >= 0 && value < 2 ** 32 ? value : undefined)
    const details = object.prompt_tokens_details ?? object.input_tokens_details
    const read = count(object.cache_read_input_tokens)
    // The messages API counts what was read from the cache apart from the input.
    const input = count(object.input_tokens)
    const apart = read === undefined || input === undefined ? input : input + read + (count(object.cache_creation_input_tokens) ?? 0)
    const seen = {
      promptTokens: count(object.prompt_tokens) ?? apart,
      cachedTokens: count(details?.cached_tokens) ?? read,
      completionTokens: count(object.completion_tokens) ?? count(object.output_tokens),
    }
    // Later reports may leave out what earlier ones told.
    this.usage ??= {}
    for (const [key, value] of Object.entries(seen)) if (value !== undefined) this.usage[key] = value
  }
}

/** A copy of the last bytes, so that a small rest does not hold a large piece. */
function end(piece, length) {
  return Buffer.from(piece.subarray(Math.max(0, piece.length - length)))
}

/** Bytes to the end of the object after `"usage":`; 0 when none follows, nothing when it is not all there. */
function objectLength(piece) {
  let depth = 0
  let quoted = false
  for (let at = 0; at < Math.min(piece.length, MAX_OBJECT); at++) {
    const char = piece[at]
    if (quoted) {
      if (char === 0x5c) at++
      else if (char === 0x22) quoted = false
    } else if (depth > 0 && char === 0x22) quoted = true
    else if (char === 0x7b) depth++
    else if (char === 0x7d) {
      depth--
      if (depth <= 0) return depth < 0 ? 0 : at + 1
    } else if (depth === 0 && !SPACE_OR_COLON.has(char)) return 0
  }
  return undefined
}

const SPACE_OR_COLON = new Set([0x20, 0x09, 0x0a, 0x0d, 0x3a])

class Booking {
  #reader = new UsageReader()
  #status
  #begun = false
  #ended = false

  constructor(lease) {
    this.lease = lease
  }

  get ended() {
    return this.#ended
  }

  get usage() {
    return this.#reader.usage
  }

  started(status) {
    this.#status = status
  }

  push(bytes) {
    if (this.#ended || bytes.byteLength === 0) return
    this.#reader.push(bytes)
    if (!this.#begun) this.lease.prefillDone()
    this.#begun = true
    if (this.#reader.events > 0) this.lease.outputTokens(this.#reader.events)
  }

  complete() {
    // A refused request put nothing into the cache.
    this.#end({ ok: this.#status === undefined || this.#status < 400, ...reported(this.#reader.usage) })
  }

  abandon() {
    this.#end({ ok: false })
  }

  withdraw() {
    this.#end({ ok: false, dispatched: false })
  }

  #end(outcome) {
    if (this.#ended) return
    this.#ended = true
    this.lease.release(outcome)
  }
}

function reported(usage) {
  const outcome = {}
  if (usage?.cachedTokens !== undefined) outcome.cachedTokens = usage.cachedTokens
  if (usage?.promptTokens !== undefined) outcome.promptTokens = usage.promptTokens
  return outcome
}

/** Statuses that say that an engine, or the way to it, is not there. */
const UNAVAILABLE = new Set([502, 503, 504])

class Cooldown {
  #seconds
  #clock
  #until = new Map()

  constructor({ seconds = 5, clock = () => performance.now() / 1_000 } = {}) {
    this.#seconds = seconds
    this.#clock = clock
  }

  failed(worker) {
    this.#until.set(worker, this.#clock() + this.#seconds)
  }

  answered(worker, status) {
    if (UNAVAILABLE.has(status)) this.failed(worker)
    else this.#until.delete(worker)
  }

  allowed(workers) {
    const all = [...workers]
    if (this.#until.size === 0) return all
    const now = this.#clock()
    const ready = all.filter((worker) => !(this.#until.get(worker) > now))
    return ready.length > 0 ? ready : all
  }
}

function bodyOf(bytes) {
  try {
    return JSON.parse(Buffer.from(bytes.buffer, bytes.byteOffset, bytes.byteLength).toString('utf8'))
  } catch {
    return undefined
  }
}

function errorBody(status, code, message) {
  return JSON.stringify({ error: { message, type: status < 500 ? 'invalid_request_error' : 'server_error', code } })
}

module.exports.bodyOf = bodyOf
module.exports.errorBody = errorBody
module.exports.promptOf = promptOf
module.exports.selectFor = selectFor
module.exports.EngineTokenizer = EngineTokenizer
module.exports.UsageReader = UsageReader
module.exports.Booking = Booking
module.exports.Cooldown = Cooldown
