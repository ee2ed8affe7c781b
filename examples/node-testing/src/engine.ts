import { existsSync } from 'node:fs'
import type { TestContext } from 'node:test'
import { fileURLToPath } from 'node:url'

import { launch, type Launched } from './process.js'

/** A simulated vLLM. */
export interface Engine extends Launched {
  id: string
  /** `http://127.0.0.1:PORT`. */
  url: string
  /** `127.0.0.1:PORT`. */
  endpoint: string
  /** ZeroMQ endpoints of its events. */
  events: string
  replay: string
  /** Blocks that its cache holds. */
  kvBlocks: number
  /** A gauge of its `/metrics`. */
  gauge(name: string): Promise<number>
}

/**
 * Starts an engine with 14,800 tokens of KV cache, on a port that the system chooses unless `listen` names one. `speed` 1 is
 * that of a 0.6B model; the default is four times that. `model` is its name, which every event repeats.
 */
export async function startEngine(t: TestContext, id: string, { speed = 4, listen = '127.0.0.1:0', model = 'sim' } = {}): Promise<Engine> {
  const kvBlocks = 926
  const args = ['engine', '--listen', listen, '--events', 'tcp://127.0.0.1:0', '--replay', 'tcp://127.0.0.1:0']
  args.push('--kv-blocks', String(kvBlocks), '--speed', String(speed), '--model-name', model)
  const { found, ...launched } = await launch(t, binary(), args, (output) => {
    const [url, events, replay] = ['url', 'events', 'replay'].map((field) => output.match(new RegExp(` ${field}="([^"]+)"`))?.[1])
    return url && events && replay ? { url, events, replay } : undefined
  })
  return {
    ...launched,
    ...found,
    id,
    endpoint: new URL(found.url).host,
    kvBlocks,
    async gauge(name) {
      const page = await (await fetch(`${found.url}/metrics`)).text()
      const value = page.match(new RegExp(`^${name}(?:\\{[^}]*\\})? (\\S+)$`, 'm'))?.[1]
      if (value === undefined) throw new Error(`no ${name} in:\n${page}`)
      return Number(value)
    },
  }
}

/** The `kvlane` command: `KVLANE_BIN`, or what was built last in this checkout. */
function binary(): string {
  const built = ['debug', 'release'].map((profile) => fileURLToPath(new URL(`../../../../target/${profile}/kvlane`, import.meta.url)))
  const found = process.env['KVLANE_BIN'] ?? built.find((path) => existsSync(path))
  if (!found) throw new Error('no kvlane command: set KVLANE_BIN, or run cargo build -p kvlane-sidecar')
  return found
}
