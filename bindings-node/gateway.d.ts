import type { Lease, Prompt, Router, SelectOptions } from './index.js'

/** Parses a request's body; nothing when it is no JSON: the engine says what is wrong with it. */
export declare function bodyOf(bytes: Uint8Array): unknown

/** The body of a gateway's own answer, in the shape of OpenAI's errors. */
export declare function errorBody(status: number, code: string, message: string): string

/** A prompt, and what `select` is to know beside it. */
export interface RequestPrompt {
  prompt: Prompt
  options: { salt?: string }
}

/**
 * Finds the prompt in the parsed body of an OpenAI-style request: `messages`, `prompt`, `input`, `input_ids` or `token_ids`,
 * of several the first. A body without any gives an empty prompt, which is routed by load alone. Never throws.
 *
 * `tokens` are the prompt's token ids when something tokenized it. Texts are kept apart by `model`; token ids are not, since
 * engines do not: use one router for each model that is served under one address.
 */
export declare function promptOf(body: unknown, tokens?: Uint32Array): RequestPrompt

/**
 * Selects a worker for the parsed body of a request. What the router cannot read is routed by load alone; that `options` are
 * wrong is an error. `null` when no worker is eligible.
 */
export declare function selectFor(
  router: Router,
  body: unknown,
  options?: SelectOptions & { tokens?: Uint32Array | undefined },
): Lease | null

/** Lets engines tokenize: the exact ids, templates included, for one round trip to `/tokenize` of vLLM. */
export declare class EngineTokenizer {
  /** `urls` of the engines, asked in turn; `timeoutMs` is the longest wait for one of them (default 2,000). */
  constructor(urls: Iterable<string>, options?: { timeoutMs?: number })
  /**
   * Returns the prompt's token ids, or nothing when two engines did not tell: the first time with a warning of the process.
   * Rejects when `signal` is aborted.
   */
  tokens(body: unknown, options?: { signal?: AbortSignal }): Promise<Uint32Array | undefined>
}

/** What an engine reported of a request. */
export interface Usage {
  promptTokens?: number
  cachedTokens?: number
  completionTokens?: number
}

/**
 * Reads the usage in an answer, JSON or server-sent events, cut anywhere. Holds at most 4 KiB of it. Text that a model wrote
 * cannot fake a usage: inside a JSON string quotes are escaped.
 */
export declare class UsageReader {
  /** The last that was reported. */
  readonly usage: Usage | undefined
  /** Server-sent events so far. */
  readonly events: number
  /** Looks at the next bytes. */
  push(bytes: Uint8Array): void
}

/**
 * A lease that follows the answer. Exactly one of `complete`, `abandon` and `withdraw` counts, the first that is called; so a
 * `finally` may call `abandon` whatever happened.
 */
export declare class Booking {
  constructor(lease: Lease)
  readonly lease: Lease
  /** It has ended. */
  readonly ended: boolean
  /** What the answer told so far. */
  readonly usage: Usage | undefined
  /** The answer begins, with this status. */
  started(status: number): void
  /** The next bytes of the answer pass: ends the prefill, extends the lease. */
  push(bytes: Uint8Array): void
  /** The whole answer has passed. */
  complete(): void
  /** The client left, the worker failed, or nobody knows. */
  abandon(): void
  /** The request never reached the worker. */
  withdraw(): void
}

/** Workers that failed lately, to be left out for a while. */
export declare class Cooldown {
  /** `seconds` of rest after a failure (default 5); `clock` returns seconds. */
  constructor(options?: { seconds?: number; clock?: () => number })
  /** It could not be reached. */
  failed(worker: string): void
  /** It answered: with 502, 503 or 504 it is as if it could not be reached, otherwise it is well again. */
  answered(worker: string, status: number): void
  /** Those of `workers` that may be chosen: all when all are resting. */
  allowed(workers: Iterable<string>): string[]
}
