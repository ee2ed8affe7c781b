import { readFile } from 'node:fs/promises'
import type { TestContext } from 'node:test'

import { startEngine, startEnvoy, type Engine, type Envoy, type Start } from 'kvlane-example-testing'

import type { Worker } from '../src/picker.js'
import { serve, type PickerServer, type ServerOptions } from '../src/server.js'

export interface Gateway {
  engines: Engine[]
  server: PickerServer
  envoy: Envoy
  /** Bookings that have not ended. */
  leases(): number
}

export interface GatewayOptions {
  speed?: number
  model?: string
  /** Envoy's configuration, and what is to be changed in it. */
  bootstrap?: string
  edit?: (yaml: string) => string
}

/** Two engines, the endpoint picker, and Envoy before them. */
export async function gateway(t: TestContext, options: Partial<ServerOptions> & GatewayOptions = {}): Promise<Gateway> {
  const { speed = 4, model = 'sim', bootstrap = 'envoy.yaml', edit = (yaml) => yaml, ...given } = options
  const engines = await Promise.all(['w1', 'w2'].map((id) => startEngine(t, id, { speed, model })))
  const server = await picker(t, engines.map(workerOf), given)
  const yaml = edit(await configuration(bootstrap))
  const ports: Record<string, string> = { 'port_value: 9002': `port_value: ${server.port}` }
  if (bootstrap === 'envoy-override-host.yaml') engines.forEach(({ endpoint }, index) => (ports[`port_value: ${8001 + index}`] = `port_value: ${endpoint.split(':')[1]}`))
  const envoy = await startEnvoy(t, yaml, ports)
  return { engines, server, envoy, leases: () => server.picker.router.stats().activeLeases }
}

/** The same, as the tests of every gateway see it. */
export const start: Start = async (t, options) => {
  const { engines, server, envoy } = await gateway(t, options)
  return { engines, url: envoy.url, router: server.picker.router, stop: server.stop }
}

/** The endpoint picker alone. */
export async function picker(t: TestContext, workers: Worker[], options: Partial<ServerOptions> = {}): Promise<PickerServer> {
  const server = await serve({ listen: '127.0.0.1:0', workers, router: { seed: 1 }, ...options })
  t.after(() => server.stop())
  return server
}

/** A configuration of Envoy beside this example. */
export function configuration(name = 'envoy.yaml'): Promise<string> {
  return readFile(new URL(`../../${name}`, import.meta.url), 'utf8')
}

export function workerOf({ id, endpoint, events, replay, kvBlocks }: Engine): Worker {
  return { id, endpoint, events, replay, kvCapacityBlocks: kvBlocks }
}
