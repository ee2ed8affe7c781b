import { spawn } from 'node:child_process'
import { once } from 'node:events'
import type { TestContext } from 'node:test'

/** A process that a test started. */
export interface Launched {
  /** What it printed so far. */
  readonly output: () => string
  /** Ends it before the test does, waits for that, and returns the exit code: `null` when the signal ended it. */
  stop(signal?: NodeJS.Signals): Promise<number | null>
}

/** Starts a process that ends with the test, and waits for what `ready` finds in its output. */
export async function launch<Found>(
  t: TestContext,
  command: string,
  args: string[],
  ready: (output: string) => Found | undefined | Promise<Found | undefined>,
): Promise<Launched & { found: Found }> {
  const child = spawn(command, args, { stdio: ['ignore', 'pipe', 'pipe'], env: { ...process.env, NO_COLOR: '1', RUST_LOG: 'info' } })
  const exited = once(child, 'exit').catch((error: unknown) => [error])
  let output = ''
  for (const stream of [child.stdout, child.stderr]) {
    stream.setEncoding('utf8').on('data', (text: string) => (output += text))
  }
  const stop = async (signal: NodeJS.Signals = 'SIGTERM') => {
    const impatient = setTimeout(() => child.kill('SIGKILL'), 5_000)
    child.kill(signal)
    await exited
    clearTimeout(impatient)
    return child.exitCode
  }
  t.after(() => stop())
  const end = performance.now() + 20_000
  for (;;) {
    const found = await ready(output)
    if (found !== undefined) return { found, stop, output: () => output }
    if (child.exitCode !== null || child.signalCode !== null || child.pid === undefined || performance.now() > end) {
      throw new Error(`${command} ${args.join(' ')} did not become ready:\n${output}`)
    }
    await new Promise((resolve) => setTimeout(resolve, 10))
  }
}
