/* The types that Rust has no words for, then those generated from it. Make changes in types.d.ts and src. */

/** What `error.code` is on every error of this package. */
export type ErrorCode = 'config_error' | 'invalid_request' | 'unknown_worker' | 'overloaded' | 'closed'

/** An error of this package. */
export interface KvlaneError extends Error {
  code: ErrorCode
}

/** What part a worker takes in serving a request. */
export type Role = 'prefill' | 'decode' | 'both'

/** How far the events of a rank are believed. */
export type TrustState = 'unproven' | 'exact' | 'converging' | 'approximate' | 'unreachable'

/**
 * Token ids. A `Uint32Array` is read in place; a `Buffer` or `Uint8Array` holds little-endian u32; the signed arrays are
 * checked; a plain array is checked and copied.
 */
export type Tokens = Uint32Array | Uint8Array | Int32Array | BigInt64Array | number[]

/** A prompt without a tokenizer, matched with other texts alone. */
export interface TextPrompt {
  text: string
}

/** A chat without a tokenizer, as the request has it; matched with other chats alone. */
export interface ChatPrompt {
  messages: ReadonlyArray<object> | string
  tools?: ReadonlyArray<object> | null
}

/** A prompt; a string is a text. */
export type Prompt = Tokens | string | TextPrompt | ChatPrompt

/** What to wait for, and how long. */
export interface WaitOptions {
  /** Workers that must be ready (default 1). */
  workers?: number
  /** Milliseconds after which the answer is false (default: as long as it takes). */
  timeoutMs?: number
  /** Ends the wait with the signal's reason. */
  signal?: AbortSignal
}

declare global {
  interface SymbolConstructor {
    readonly dispose: unique symbol
  }
}

export interface Router {
  /**
   * Waits until so many workers are ready as `readyWorkers` counts them: true; or false when `timeoutMs` is over. The only
   * method that waits.
   */
  waitReady(options?: WaitOptions): Promise<boolean>
  /** Closes the router, at the end of a `using` block. */
  [Symbol.dispose](): void
}

/**
 * A booked request. It ends with `release`, with `Router.finish`, or when it was idle for its `ttl`; that the object is
 * collected ends nothing, so the id alone may be kept.
 */
export declare class Lease {
  private constructor()
  /** The booking's name, for `Router.finish`. */
  get id(): string
  /** The chosen worker. */
  get worker(): string
  /** The chosen rank. */
  get dpRank(): number
  /** Leading blocks that the decision counts on, confirmed by events or predicted from placements. */
  get overlapBlocks(): number
  /** Prompt tokens that the engine is expected to report as cached. */
  get predictedCachedTokens(): number
  /** Returns every candidate of the decision with every cost term, by worker and rank. */
  explain(): Array<Candidate>
  /** Says that the first token came: the prompt no longer waits for prefill. Extends the lease. */
  prefillDone(): void
  /** Says how many tokens were produced so far. Extends the lease. */
  outputTokens(tokens: number): void
  /** Releases the booking and learns from how it ended. Returns false when it had ended before: a no-op. */
  release(outcome?: FinishOptions): boolean
  /** Releases the booking if nobody has, as of a request that failed, at the end of a `using` block. */
  [Symbol.dispose](): void
}

/** One target and what placing a request there costs. */
export interface Candidate {
  /** The worker. */
  worker: string
  /** Its data-parallel rank. */
  dpRank: number
  /** Leading blocks that its events confirm. */
  overlap: Overlap
  /** Leading blocks beyond those that own placements predict. */
  predictedBlocks: number
  /** Share of predicted cached tokens that its engine confirms. */
  fidelity: number
  /** How far its events are believed. */
  trust: TrustState
  /** The cost with its terms. */
  cost: Cost
}

/** Leading blocks of a prompt that one target holds, each counted once at its best tier; those of own placements are device blocks. */
export interface TargetOverlap extends Overlap {
  /** The worker. */
  worker: string
  /** Its data-parallel rank. */
  dpRank: number
}

/** Leading blocks by tier. */
export interface Overlap {
  /** Blocks in accelerator memory. */
  device: number
  /** Blocks in host memory only. */
  host: number
  /** Blocks on local disk only. */
  disk: number
  /** Blocks in shared storage only. */
  external: number
}

/** What a placement costs, in blocks; lower is better. */
export interface Cost {
  /** `preference × (prefillWeight × (uncached + booked) + decodeBlocks + requestWeight × activeRequests)`. */
  total: number
  /** Request blocks less credited overlap. */
  uncachedPrefillBlocks: number
  /** Prefill already booked on the target, less what is of this request's own prefix. */
  bookedPrefillBlocks: number
  /** Distinct blocks active after the placement. */
  decodeBlocks: number
  /** Active requests before the placement. */
  activeRequests: number
  /** The weight of both prefill terms. */
  prefillWeight: number
  /** The weight of active requests. */
  requestWeight: number
  /** The multiplier. */
  preference: number
}

/**
 * Which binding artifact the generated loader actually loaded: `'native'` for
 * a native addon, otherwise the `platformArchABI` of the WASI flavor. Every
 * flavor napi-rs can build is listed, because `NAPI_RS_NATIVE_LIBRARY_PATH`
 * can point the loader at a WASI artifact this package does not build itself.
 */
export declare const __napiBindingTarget: 'native' | 'wasm32-wasi' | 'wasm32-wasip1'

/**
 * Decides which worker serves a request. Every method is synchronous; only `waitReady` waits. See `kvlane::Router` in the
 * Rust documentation.
 */
export declare class Router {
  /** Creates a router without workers. */
  constructor(options?: RouterOptions)
  /** Registers a worker. With `events`, a thread follows its event streams; it does not keep the process alive. */
  addWorker(id: string, options?: WorkerOptions): void
  /** Removes a worker. When this returns, nothing of its life is left. Its open bookings stay releasable. */
  removeWorker(id: string): void
  /** Gives a worker nothing new; what it has goes on. */
  drainWorker(id: string): void
  /** Takes back `drainWorker`: the worker is given requests again, and has kept its cache. */
  undrainWorker(id: string): void
  /** Changes what a worker does; it keeps its cache, and finishes what it has. */
  setRole(id: string, role: Role): void
  /** Replaces the labels that `workers` reports of a worker. */
  setLabels(id: string, labels: Record<string, string>): void
  /** Lists the workers by id. */
  workers(): Array<WorkerInfo>
  /**
   * Applies one batch of events as an engine published it. One that cannot be decoded changes no entry and comes back
   * with the reason.
   */
  ingest(worker: string, payload: Uint8Array, options?: IngestOptions): IngestReport
  /** Forgets what a worker's cache holds: one rank, or all of them. */
  clear(worker: string, dpRank?: number): void
  /** Records a placement that was decided elsewhere. */
  record(worker: string, prompt: Prompt, options?: RecordOptions): void
  /** Returns the leading blocks that each target holds, by worker and rank; targets with none are absent. */
  overlap(prompt: Prompt, options?: PromptOptions): Array<TargetOverlap>
  /** Returns every eligible target, cheapest first. Nothing is booked. */
  rank(prompt: Prompt, options?: SelectOptions): Array<Candidate>
  /** Chooses a target and books the request on it. `null` when no worker is eligible. */
  select(prompt: Prompt, options?: SelectOptions): Lease | null
  /** Books a request on a target that was chosen elsewhere. */
  book(requestId: string, worker: string, prompt: Prompt, options?: SelectOptions): Lease
  /** Releases a booking by its id. False when it is not known (any more): a no-op. */
  finish(leaseId: string, outcome?: FinishOptions): boolean
  /** Takes in what an engine reports of its load. */
  reportLoad(worker: string, load?: LoadOptions): void
  /** Returns how far the events of one rank are believed (rank 0 when `dpRank` is absent). */
  trust(worker: string, dpRank?: number): Trust
  /** Returns sizes and counts. */
  stats(): RouterStats
  /**
   * Counts the workers that may be chosen and need no more waiting: on every rank, events are heard, or it is settled that
   * none will be.
   */
  readyWorkers(): number
  /** Ends the threads, and refuses every further call but `finish` and `Lease.release`. */
  close(): void
}

/**
 * Hashes the complete blocks of a prompt, or chunks of a text. See `kvlane::block_hashes` in the Rust documentation for the
 * rule.
 */
export declare function blockHashes(prompt: Prompt, options?: HashOptions): BlockHashes

/** The hashes of a prompt's complete blocks. */
export interface BlockHashes {
  /** Local hash of each complete block. */
  local: BigUint64Array
  /** Sequence hash of each complete block. */
  sequence: BigUint64Array
}

/** Every `code` that an error may have. */
export declare function errorCodes(): Array<ErrorCode>

/** How a request ended. */
export interface FinishOptions {
  /** The worker answered it (default true). */
  ok?: boolean
  /** What the engine reported as cached (`usage.prompt_tokens_details.cached_tokens`). */
  cachedTokens?: number
  /** What the engine counted (`usage.prompt_tokens`). */
  promptTokens?: number
  /** False when the request never reached the worker: the note of where its prompt went is taken back. */
  dispatched?: boolean
}

/** What the hashes of a prompt depend on beside its tokens. */
export interface HashOptions {
  /** Tokens per block (default 16). */
  blockSize?: number
  /** Adapter (LoRA) name; empty or absent is the base model. */
  lora?: string
  /** Cache salt; empty or absent is none. */
  salt?: string
  /** Media items, in any order. */
  media?: Array<MediaItem>
}

/** Size of the index of confirmed blocks. */
export interface IndexStats {
  /** Distinct blocks held by anybody. */
  blocks: number
  /** Nodes of the tree. */
  nodes: number
  /** Pending engine blocks whose parent is unknown. */
  orphans: number
  /** Memory in bytes. */
  bytes: number
}

/** Where a batch of events comes from. */
export interface IngestOptions {
  /** Its sequence number; absent, it is applied without order checks. */
  seq?: number | bigint
  /** The publishing rank (default 0). */
  dpRank?: number
}

/** What was done with one batch of events. */
export interface IngestReport {
  /** Events that were applied. */
  applied: number
  /** What was not applied, by reason. */
  skipped: Record<string, number>
  /** Batches were lost before this one and have not been repaired. */
  gap: boolean
  /** The engine restarted: its old entries were cleared first. */
  restarted: boolean
}

/** What an engine reports of its load. */
export interface LoadOptions {
  /** Requests that it runs. */
  running?: number
  /** Requests that wait there. */
  waiting?: number
  /** Share of its KV cache in use, 0 to 1. */
  kvUsage?: number
  /** The reporting rank; absent, the counts are spread over all ranks. */
  dpRank?: number
}

/** An image, sound or video within a prompt. */
export interface MediaItem {
  /** Position of its first placeholder token. */
  offset: number
  /** Number of placeholder tokens. */
  length: number
  /** What identifies its content; must equal the engine's identifier. */
  digest: Uint8Array
}

/** Size of what own placements are believed to hold. */
export interface PlacementStats {
  /** Blocks, counted once per target that holds them. */
  heldBlocks: number
  /** Blocks, counted once. */
  blocks: number
  /** Nodes of the tree. */
  nodes: number
  /** Placements that were the last to touch some block. */
  placements: number
}

/** What a prompt is salted with. */
export interface PromptOptions {
  /** Adapter (LoRA) name; empty or absent is the base model. */
  lora?: string
  /** Cache salt; empty or absent is none. */
  salt?: string
  /** Media items, in any order. */
  media?: Array<MediaItem>
}

/** Trust in one rank, as listed. */
export interface RankTrust {
  /** The rank. */
  dpRank: number
  /** The state. */
  state: TrustState
  /** Share of predicted cached tokens that the engine confirms, 0 to 1. */
  fidelity: number
  /** Why it is not exact. */
  cause: string | null
  /** Since when it is in this state: seconds of the router's clock, or since 1970 as `Date.now() / 1000`. */
  since: number
  /** Event batches applied. */
  batches: number
  /** Events applied. */
  events: number
  /** Gaps in the sequence that were not repaired. */
  gaps: number
  /** What was not applied, by reason. */
  skipped: Record<string, number>
}

/** A placement that was decided elsewhere. */
export interface RecordOptions {
  /** Rank of the worker (default 0). */
  dpRank?: number
  /** Seconds that it is believed (default the configured `ttlSeconds`). */
  ttl?: number
  /** Adapter (LoRA) name; empty or absent is the base model. */
  lora?: string
  /** Cache salt; empty or absent is none. */
  salt?: string
  /** Media items, in any order. */
  media?: Array<MediaItem>
}

/**
 * Configuration of a router; everything is optional. Unknown keys are refused by name. The Rust documentation of
 * `kvlane::RouterConfig` says what turning each of them up costs.
 */
export interface RouterOptions {
  /** Tokens per index block (default 16). Must divide the engines' block size. */
  blockSize?: number
  /** Where knowledge of caches comes from: engine events (default), or own placements alone. */
  index?: 'events' | 'approximate'
  /** Seconds that an approximate entry is believed after its last use (default 120). */
  ttlSeconds?: number
  /** Seconds that a placement is believed before its engine's events confirm it (default 2). */
  predictionTtlSeconds?: number
  /** Weight of uncached prefill blocks (default 1). */
  prefillWeight?: number
  /** Weight of active requests, in blocks per request (default 0). */
  requestWeight?: number
  /** Share of a block's prefill saved by a hit in device memory (default 1). */
  deviceHitCredit?: number
  /** Share saved by a hit in host memory (default 0.75). */
  hostHitCredit?: number
  /** Share saved by a hit on disk (default 0.25). */
  diskHitCredit?: number
  /** Share saved by a hit in shared storage (default 0.5). */
  externalHitCredit?: number
  /** 0 takes the cheapest target (default); above, targets are sampled. */
  temperature?: number
  /** Seconds without activity after which a booking is released (default 300). */
  leaseSeconds?: number
  /** Hard bound of index memory. Not available yet: any value is refused. */
  maxIndexBytes?: number
  /** Pending engine blocks with unknown parents kept for each rank (default 65,536). */
  maxOrphanBlocks?: number
  /** Seconds in which a worker must have published an event, or it is approximate (default 30). */
  silentWorkerSeconds?: number
  /** Prompts that a worker may serve without an event before it is approximate (default 16). */
  silentWorkerRequests?: number
  /** Seed of tie-breaking and sampling; drawn at start when absent. */
  seed?: number | bigint
  /** Returns seconds from any beginning; for tests and simulation. It is called in every call that depends on time. */
  clock?: () => number
}

/** Size and history of a router. */
export interface RouterStats {
  /** The index of confirmed blocks. */
  index: IndexStats
  /** Own placements of token prompts. */
  tokenPlacements: PlacementStats
  /** Own placements of text prompts. */
  textPlacements: PlacementStats
  /** Registered workers. */
  workers: number
  /** Bookings not yet released. */
  activeLeases: number
  /** Decisions since the start. */
  decisions: number
  /** Decisions without an eligible worker. */
  noWorker: number
  /** Bookings that were released because their lease ran out. */
  expiredLeases: number
  /** Blocks that were forgotten to keep within `maxIndexBytes`. */
  forgottenBlocks: number
  /** What was not applied of all event streams, by reason. */
  skipped: Record<string, number>
}

/** A request to place; everything is optional. */
export interface SelectOptions {
  /** The caller's name of the request. Selecting again under a live name supersedes the earlier booking (a retry). */
  requestId?: string
  /** Only these workers may be chosen; all when absent. */
  allowed?: Array<string>
  /** Adapter (LoRA) name; empty or absent is the base model. */
  lora?: string
  /** Cache salt; empty or absent is none. */
  salt?: string
  /** Media items, in any order. */
  media?: Array<MediaItem>
  /** Requests of one session prefer the target of the one before, by a tenth of the cost. */
  session?: string
  /** Only workers that do this part; any when absent. */
  role?: Role
  /** Only this rank of a worker; any when absent. For `book`: the rank (default 0). */
  dpRank?: number
  /** Accepted for an admission queue; without one it has no effect. */
  priority?: number
  /** Output tokens to expect; their blocks are booked from the start. */
  expectedOutputTokens?: number
  /** Seconds without activity after which the booking is released (default the configured `leaseSeconds`). */
  ttl?: number
  /** Settings changed for this request. */
  overrides?: SelectOverrides
}

/** Settings changed for one request, each within the range of its namesake in `RouterOptions`. */
export interface SelectOverrides {
  /** Replaces `prefillWeight`. */
  prefillWeight?: number
  /** Replaces `requestWeight`. */
  requestWeight?: number
  /** Replaces `deviceHitCredit`. */
  deviceHitCredit?: number
  /** Replaces `hostHitCredit`. */
  hostHitCredit?: number
  /** Replaces `diskHitCredit`. */
  diskHitCredit?: number
  /** Replaces `externalHitCredit`. */
  externalHitCredit?: number
  /** Replaces `temperature`. */
  temperature?: number
}

/** Blocks by tier. */
export interface TierBlocks {
  /** In accelerator memory. */
  device: number
  /** In host memory. */
  host: number
  /** On local disk. */
  disk: number
  /** In shared storage. */
  external: number
}

/** How far the events of one rank are believed. */
export interface Trust {
  /** The state. */
  state: TrustState
  /** Share of predicted cached tokens that the engine confirms, 0 to 1. */
  fidelity: number
  /** Why it is not exact. */
  cause: string | null
  /** Since when it is in this state: seconds of the router's clock, or since 1970 as `Date.now() / 1000`. */
  since: number
}

/** The version of this package. */
export declare function version(): string

/** What is known of one worker. Counts are sums over its ranks. */
export interface WorkerInfo {
  /** The caller's name. */
  id: string
  /** Its data-parallel ranks. */
  dpRanks: number
  /** What it does. */
  role: Role
  /** It finishes what it has and gets nothing new. */
  draining: boolean
  /** It may be chosen, as far as its health is known. */
  available: boolean
  /** Requests booked and not released. */
  activeRequests: number
  /** Distinct blocks of those requests. */
  activeBlocks: number
  /** Blocks still to be prefilled for those requests. */
  prefillBlocks: number
  /** Blocks that events have confirmed, by tier. */
  indexBlocks: TierBlocks
  /** Blocks believed from own placements. */
  predictedBlocks: number
  /** KV capacity of one rank in blocks, when known. */
  kvCapacityBlocks: number | null
  /** Free-form labels. */
  labels: Record<string, string>
  /** Trust in each rank's event stream. */
  trust: Array<RankTrust>
}

/** A worker; everything is optional. */
export interface WorkerOptions {
  /** Data-parallel ranks that share the worker's address (default 1). Each is a target of its own. */
  dpRanks?: number
  /** What the worker does (default both). */
  role?: Role
  /** Blocks of the router's block size that the KV cache of one rank holds, when known. */
  kvCapacityBlocks?: number
  /** ZeroMQ endpoint of rank 0's events, which are then followed by a thread; further ranks are on the following ports. */
  events?: string
  /** ZeroMQ endpoint of rank 0's replay socket; further ranks are on the following ports. */
  replay?: string
  /** The engine's block size when known; must be a multiple of the router's. */
  blockSize?: number
  /** Free-form labels, reported back. */
  labels?: Record<string, string>
}
